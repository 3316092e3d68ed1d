"""Count forwards and backwards, and say when local backwards begin and end.

A *local* backward (under ``no_sync``, or with nothing armed) leaves the reducer's phase
alone. What it has added to ``.grad`` travels with the next reduction. Whether that is
a mistake is a question for the guard (`minidp.guard`), which keeps its own notes.
"""

from __future__ import annotations

from minidp.trace import StepEvent

from . import autograd
from .observer import Observers
from .phase import PhaseMachine


class Ledger:
    """The counts of forwards, backwards and steps, and which gradients are local."""

    def __init__(self) -> None:
        self.sync_enabled = True  # False inside no_sync()
        self.forwards = 0  # in grad mode, since the last synchronised backward
        # Synchronising forwards, synchronised backwards; set anew by reset and join.
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

    def settle(self) -> None:
        """Count a synchronised backward, after which no gradient is local any more."""
        self.used_locally.clear()
        self.forwards = 0
        self.steps = 0  # before `finalized` grows: another thread reads both
        self.finalized += 1

    def reset(self) -> None:
        """Forget local gradients, and forwards whose backward has not reduced."""
        self.used_locally.clear()
        self.forwards = self.steps = 0
        self.armed = self.finalized

    def agree_on(self, finalized: int) -> None:
        """Set the counts of synchronised forwards and backwards to a common number."""
        self.armed = self.finalized = finalized


class LocalBackwards:
    """Tell observers when local backwards begin and end."""

    def __init__(self, observers: Observers, phase: PhaseMachine) -> None:
        self._observers = observers
        self._phase = phase
        self._task = autograd.NO_TASK  # the graph task whose end is awaited

    def forward_ended(self, output: object, *, will_reduce: bool) -> None:
        """Tell observers that a forward has ended.

        If its backward will be local, its output is hooked, to see that begin.
        """
        if will_reduce:
            self._observers.enter(StepEvent.FORWARD_END)
        elif self._observers.is_timed:
            self._observers.enter(StepEvent.LOCAL_FORWARD_END)
            autograd.probe_outputs(output, self.begin)

    @autograd.untraced
    def begin(self, _grads: object = None) -> None:
        """Tell observers that a local backward begins, once, and later that it ends.

        It is called where a backward reaches the outputs of a local forward, and in its
        grad hooks. In a synchronised backward, or if nobody `sees_times`, it does
        nothing.
        """
        is_new = self._observers.is_timed and autograd.current_task() != self._task
        if is_new and self._phase.is_idle:
            self._task = autograd.current_task()
            self._observers.enter(StepEvent.LOCAL_BACKWARD_BEGIN)
            autograd.queue_final_callback(self._end)

    @autograd.untraced
    def _end(self) -> None:
        self._observers.enter(StepEvent.LOCAL_BACKWARD_END)
