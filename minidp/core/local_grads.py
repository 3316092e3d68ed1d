"""Record which gradients are local, not averaged; trace local backwards.

A *local* backward (under ``no_sync``, or with nothing armed) leaves the reducer's phase
alone. The guard, the comparison of replicas and ``reset()`` read most of the ledger;
of the core only the modes that share a used-map do (``used_locally``).

Let F be the grad-enabled forwards since the last synchronised backward. A backward is
synchronised exactly if a forward of F was (torch's rule: the *forward* decides).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from enum import Enum

from torch import Tensor

from minidp.trace import StepEvent

from . import autograd
from .observer import Observers
from .phase import PhaseMachine


class Origin(Enum):
    """Name where a local gradient came from, for the optimizer guard's error."""

    QUIET = "a forward inside no_sync()"
    AGAIN = "outputs of a forward whose reduction is over"
    NESTED = "a backward inside a synchronised one: a reentrant checkpoint"
    OUTSIDE = "a graph without outputs of ours"


def origin_now(through_outputs: Collection[int]) -> Origin:
    """Return OUTSIDE, AGAIN or NESTED for the gradient whose hook runs (not QUIET).

    ``through_outputs``: running graph tasks that reached our outputs. OUTSIDE if there
    are none, AGAIN if the current task is one of them, else NESTED.
    """
    if not through_outputs:
        return Origin.OUTSIDE
    return Origin.AGAIN if autograd.current_task() in through_outputs else Origin.NESTED


class Ledger:
    """Record forwards, backwards and local gradients, for guard, drift and reset."""

    def __init__(self) -> None:
        self.sync_enabled = True  # False inside no_sync()
        self.forwards = 0  # number of forwards in F (see the module's docstring)
        # Synchronising forwards, synchronised backwards; set anew by reset and join.
        self.armed = self.finalized = 0
        self.steps = 0  # optimizer steps since the last synchronised backward
        self.used_locally: set[int] = set()  # since that; and in static graph's first
        # Only the guard reads these.
        self.unsynced: set[int] = set()  # parameters whose .grad holds a local part
        self.origins: dict[int, Origin] = {}  # where each one's last local part is from
        # Versions of parameters when their .grad became local. A later change without
        # an allowed optimizer step may mean that local gradients were applied by hand.
        self.versions: dict[int, int] = {}
        # Versions, by index, of parameters whose gradients a backward made without any
        # grad hook, after a forward that announced averages; None: no such backward.
        self.bypassed: dict[int, int] | None = None
        self.lent: list[weakref.ref[Tensor]] = []  # to the module, for its last forward
        self.has_lost_hooks = False  # the reason of `bypassed`; else autograd.grad
        # For the comparison: why replicas may differ since the last one.
        self.was_local = False  # parameters changed inside no_sync()
        # In join(), the ranks that still make steps; None: all.
        self.ranks_with_inputs: Collection[int] | None = None
        self.was_excused = False  # a complaint did not become an error
        # For `was_local`: versions of two parameters, when no_sync() began.
        self._versions_before: tuple[int, int] | None = None

    def note_forward(self, *, synchronising: bool) -> None:
        """Count a forward in grad mode; a ``synchronising`` one in `armed`, too."""
        self.forwards += 1
        self.armed += synchronising

    def note_local(
        self, i: int, version: int = 0, origin: Origin = Origin.OUTSIDE
    ) -> None:
        """Record that a local backward added to the ``.grad`` of parameter ``i``.

        ======================  ===================  =================================
        forwards in F           inside no_sync()     what is recorded
        ======================  ===================  =================================
        some (all in no_sync,   yes or no            local, QUIET
        or it would be
        synchronised)
        none                    no                   local, ``origin``
        none                    yes                  `used_locally` alone: it is to
                                                     stay local (a penalty that is
                                                     equal on all ranks)
        ======================  ===================  =================================

        ``version``: the parameter's version counter, kept when it becomes local.
        """
        self.used_locally.add(i)
        if self.forwards:
            origin = Origin.QUIET
        elif not self.sync_enabled:
            return
        self.unsynced.add(i)
        self.origins[i] = origin
        self.versions.setdefault(i, version)

    def note_bypass(
        self, params: Sequence[Tensor], captured: Sequence[int], lost: Sequence[int]
    ) -> None:
        """Note gradients that a backward made, and that no grad hook has seen.

        ``captured``: indices of parameters whose gradients went to the caller of
        `torch.autograd.grad`, or to parameters that stood in for them; ``lost``: of
        those whose hooks are gone. If both are empty, this was a backward for something
        else, and nothing is noted.
        """
        if captured or lost:
            versions = {i: params[i]._version for i in (*captured, *lost)}
            self.bypassed = versions | (self.bypassed or {})
            self.has_lost_hooks |= bool(lost)

    def drop(self, i: int) -> None:
        """Record that parameter ``i``'s gradient has no local part any more."""
        self.unsynced.discard(i)
        self.versions.pop(i, None)

    def enable_sync(self, enabled: object, params: Sequence[Tensor]) -> None:
        """Leave no_sync() if ``enabled``, else enter; no-op if that is so already.

        Leaving sets `was_local` if the first or last parameter changed inside, sets
        noted versions to the present ones, and clears `bypassed`.
        """
        sample = (params[0]._version, params[-1]._version)
        if enabled and not self.sync_enabled:
            self.versions = {i: params[i]._version for i in self.versions}
            self.bypassed, self.has_lost_hooks = None, False
            self.was_local |= sample != self._versions_before
        elif not enabled and self.sync_enabled:
            self._versions_before = sample
        self.sync_enabled = bool(enabled)

    def settle(self, untouched: Collection[int]) -> None:
        """Count a synchronised backward in `finalized`, and set `forwards` to 0.

        Forgets all local gradients, except that those of ``untouched`` stay local.
        """
        self._clear(untouched)
        self.finalized += 1

    def reset(self) -> None:
        """Forget local gradients and unreduced forwards: set `armed` = `finalized`."""
        self._clear(())
        self.armed = self.finalized

    def _clear(self, still_local: Collection[int]) -> None:
        self.unsynced.intersection_update(still_local)
        self.used_locally.clear()
        self.versions.clear()
        self.bypassed, self.has_lost_hooks = None, False
        self.forwards = 0
        self.steps = 0  # before `finalized` grows: another thread reads both

    def agree_on(self, finalized: int) -> None:
        """Set `armed` and `finalized` to the count that all ranks agreed on."""
        self.armed = self.finalized = finalized


class LocalBackwards:
    """Tell observers when local backwards begin and end."""

    def __init__(self, observers: Observers, phase: PhaseMachine) -> None:
        self._observers = observers
        self._phase = phase
        self._task = autograd.NO_TASK  # the graph task whose end is awaited

    def forward_ended(self, output: object, *, will_reduce: bool) -> None:
        """Tell observers that a forward ended; if local, hook `begin` to ``output``."""
        if will_reduce:
            self._observers.enter(StepEvent.FORWARD_END)
        elif self._observers.is_timed:
            self._observers.enter(StepEvent.LOCAL_FORWARD_END)
            autograd.probe_outputs(output, self.begin)

    @autograd.untraced
    def begin(self, _grads: object = None) -> None:
        """Tell observers that a local backward begins, once per task; later its end.

        Called at a local forward's outputs, or by the first grad hook. No-op in a
        synchronised backward, or if nobody `sees_times`.
        """
        is_new = self._observers.is_timed and autograd.current_task() != self._task
        if is_new and self._phase.is_idle:
            self._task = autograd.current_task()
            self._observers.enter(StepEvent.LOCAL_BACKWARD_BEGIN)
            autograd.queue_final_callback(self._end)

    @autograd.untraced
    def _end(self) -> None:
        self._observers.enter(StepEvent.LOCAL_BACKWARD_END)
