"""Count forwards, backwards and optimizer steps, the same way on all ranks.

`Ledger.finalized` is the number of the synchronised backward in every text and record
of minidp: errors, hang reports, recordings. Ranks are compared by it, so there is no
second counter, and `reset()` sets it to the same number on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable


class Ledger:
    """The counts of one reducer, and the parameters that local backwards have used."""

    def __init__(self) -> None:
        self.sync_enabled = True  # False inside no_sync(), or set by hand
        self.open_no_syncs = 0  # blocks of no_sync() that this rank is in
        self.forwards = 0  # in grad mode, since the last synchronised backward
        # Synchronising forwards, and synchronised backwards that are over, which is
        # also the number of the present one, from 0. After reset() of the wrapper both
        # are the same on all ranks (`agree_on`).
        self.armed = self.finalized = 0
        # Optimizer steps since the last synchronised backward. The guard counts them;
        # other ranks are told of both numbers together.
        self.steps = 0
        # Parameters to which local backwards have brought a gradient since the last
        # synchronised one. The first backward of a static graph adds its own.
        self.used_locally: set[int] = set()

    def note_forward(self, *, synchronising: bool) -> None:
        """Count a forward in grad mode, as `armed` if its backward will reduce."""
        self.forwards += 1
        self.armed += synchronising

    def count_backward(self) -> None:
        """Count a synchronised backward, after which no gradient is local any more."""
        self.used_locally.clear()
        self.forwards = 0
        self.steps = 0  # before `finalized` grows: another thread reads both
        self.finalized += 1

    def set_aside(self) -> Callable[[], None]:
        """Return a function that forgets the forwards and local gradients until then.

        In between no backward may reduce.
        """
        mine = self.forwards, self.armed, set(self.used_locally)

        def put_back() -> None:
            self.forwards, self.armed, used = mine
            self.used_locally.intersection_update(used)

        return put_back

    def reset(self) -> None:
        """Forget local gradients, and forwards whose backward has not reduced."""
        self.used_locally.clear()
        self.forwards = self.steps = 0
        self.armed = self.finalized

    def agree_on(self, finalized: int) -> None:
        """Set the counts of synchronised forwards and backwards to a common number.

        The optimizer steps after the last one are forgotten, because some ranks may
        have made more of them.
        """
        self.armed = self.finalized = finalized
        self.steps = 0
