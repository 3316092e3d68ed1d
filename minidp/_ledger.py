"""Whose gradients are whose: what was announced, reduced, or only added locally.

Let F be the grad-enabled forwards since the last synchronised backward. A backward is
synchronised exactly when one of F was (torch's rule: the *forward* decides).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

import torch


class Origin(Enum):
    """Where a local gradient came from; told by its grad hook."""

    QUIET = "a forward inside no_sync()"
    AGAIN = "outputs of a forward whose reduction is over"
    NESTED = "a backward inside a synchronised one: a reentrant checkpoint"
    OUTSIDE = "a graph without outputs of ours"


class Ledger:
    """Counts and sets that the reducer writes and the optimizer guard reads."""

    def __init__(self) -> None:
        self.sync_enabled = True  # False inside no_sync()
        self.forwards = 0  # size of F
        self.armed = 0  # synchronising forwards, ever
        self.finalized = 0  # synchronised backwards, ever
        self.steps = 0  # of optimizers, since the last one
        self.unsynced: set[int] = set()  # parameters whose .grad holds a local part
        self.origins: dict[int, Origin] = {}  # of the last part; of these at least
        self.used_locally: set[int] = set()  # by local backwards since the last one
        # Versions that parameters had when their .grad became local: who changes them
        # after that, and is no optimizer that may, applies local gradients by hand.
        self.versions: dict[int, int] = {}
        self.meant: set[int] = set()  # of these, local as no_sync() says
        self.bypassed: list[int] | None = None  # all versions, when a backward ended
        # that went through our outputs without any grad hook
        # Why replicas may differ, since they were compared last.
        self.was_local = False  # parameters changed inside no_sync()
        self.was_excused = False  # a complaint did not become an error
        self.was_told = False  # of the first, ever
        self._versions_before: tuple[int, int] | None = None  # no_sync()

    def note_forward(self, *, synchronising: bool) -> None:
        """A forward ran with grad mode enabled."""
        self.forwards += 1
        self.armed += synchronising

    def note_local(
        self, i: int, version: int = 0, origin: Origin = Origin.OUTSIDE
    ) -> None:
        """A local backward added to the ``.grad`` of parameter ``i``.

        Args:
            i: which parameter.
            version: how often it was changed in place until now.
            origin: where the gradient came from, if no forward was inside no_sync().
        """
        self.used_locally.add(i)
        # Inside no_sync() with F empty it is meant so (a penalty equal on all ranks).
        if self.sync_enabled or self.forwards:
            self.unsynced.add(i)
            self.origins[i] = Origin.QUIET if self.forwards else origin
            if self.forwards and i not in self.versions:
                self.meant.add(i)  # its forward ran inside no_sync()
            elif not self.forwards:
                self.meant.discard(i)
            self.versions.setdefault(i, version)

    def note_bypass(self, params: Sequence[torch.Tensor]) -> None:
        """A backward went through our outputs, and reached no grad hook.

        Nothing is missing if all are frozen: a GAN's critic in the generator's turn.
        """
        if self.bypassed is None and any(param.requires_grad for param in params):
            self.bypassed = [param._version for param in params]

    def drop(self, i: int) -> None:
        """The local part of a gradient was thrown away, or zeroed."""
        self.unsynced.discard(i)
        self.versions.pop(i, None)
        self.meant.discard(i)

    def excuse(self) -> None:
        """What changed parameters up to now was allowed to."""
        self.versions.clear()
        self.meant.clear()
        self.bypassed = None

    def enable_sync(self, enabled: object, params: Sequence[torch.Tensor]) -> None:
        """Enter or leave no_sync(), inside of which parameters may change."""
        sample = (params[0]._version, params[-1]._version)
        if enabled and not self.sync_enabled:
            self.versions = {i: params[i]._version for i in self.versions}
            self.bypassed = None
            self.was_local |= sample != self._versions_before
        elif not enabled and self.sync_enabled:
            self._versions_before = sample
        self.sync_enabled = bool(enabled)

    def settle(self, untouched: Collection[int]) -> None:
        """A synchronised backward wrote every ``.grad`` but the untouched ones."""
        self.unsynced.intersection_update(untouched)
        self.used_locally.clear()
        self.excuse()
        self.forwards = 0
        self.steps = 0  # before it counts on: another thread reads both
        self.finalized += 1

    def forget(self) -> None:
        """Start afresh after `reset`: nothing is announced, nothing is local."""
        self.unsynced.clear()
        self.used_locally.clear()
        self.excuse()
        self.forwards = 0
        self.steps = 0
        self.armed = self.finalized

    def agree_on(self, finalized: int) -> None:
        """All ranks count from the same number of synchronised backwards."""
        self.armed = self.finalized = finalized
