"""Whose gradients are whose: what was announced, reduced, or only added locally.

Let F be the grad-enabled forwards since the last synchronised backward. A backward is
synchronised exactly when one of F was (torch's rule: the *forward* decides).
"""

from __future__ import annotations

from collections.abc import Collection


class Ledger:
    """Counts and sets that the reducer writes and the optimizer guard reads."""

    def __init__(self) -> None:
        self.sync_enabled = True  # False inside no_sync()
        self.forwards = 0  # size of F
        self.armed = 0  # synchronising forwards, ever
        self.finalized = 0  # synchronised backwards, ever
        self.unsynced: set[int] = set()  # parameters whose .grad holds a local part
        self.used_locally: set[int] = set()  # by local backwards since the last one

    def note_forward(self, *, synchronising: bool) -> None:
        """A forward ran with grad mode enabled."""
        self.forwards += 1
        self.armed += synchronising

    def note_local(self, i: int) -> None:
        """A local backward added to the ``.grad`` of parameter ``i``."""
        self.used_locally.add(i)
        # Inside no_sync() with F empty it is meant so (a penalty equal on all ranks).
        if self.sync_enabled or self.forwards:
            self.unsynced.add(i)

    def settle(self, untouched: Collection[int]) -> None:
        """A synchronised backward wrote every ``.grad`` but the untouched ones."""
        self.unsynced.intersection_update(untouched)
        self.used_locally.clear()
        self.forwards = 0
        self.finalized += 1

    def forget(self) -> None:
        """Start afresh after `reset`: nothing is announced, nothing is local."""
        self.unsynced.clear()
        self.used_locally.clear()
        self.forwards = 0
        self.armed = self.finalized
