"""Say when a local backward begins and ends: one that reduces nothing.

Such a backward, under ``no_sync`` or with nothing armed, leaves the reducer's phase
alone, so whoever records times (`Observer.sees_times`) hears of it from here.
"""

from __future__ import annotations

from minidp.trace import StepEvent

from . import autograd
from .observer import Observers
from .phase import PhaseMachine


class LocalBackwards:
    """Tell observers when local backwards begin and end."""

    def __init__(self, observers: Observers, phase: PhaseMachine) -> None:
        self._observers = observers
        self._phase = phase
        self._task = autograd.NO_TASK  # the graph task whose end is awaited

    def forward_ended(self, output: object, *, will_reduce: bool) -> None:
        """Tell observers that a forward has ended.

        If its backward will be local, its output is hooked, to see that start.
        """
        if will_reduce:
            self._observers.on_step_event(StepEvent.FORWARD_END)
        elif self._observers.is_timed:
            self._observers.on_step_event(StepEvent.LOCAL_FORWARD_END)
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
            self._observers.on_step_event(StepEvent.LOCAL_BACKWARD_BEGIN)
            autograd.queue_final_callback(self._end)

    @autograd.untraced
    def _end(self) -> None:
        self._observers.on_step_event(StepEvent.LOCAL_BACKWARD_END)
