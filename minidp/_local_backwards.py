"""Tell a recording when backwards begin and end that average nothing.

Those of forwards under ``no_sync()``, and of forwards that went around the wrapper
(``model.module(x)``). While nobody records, this costs a question per forward.
"""

from __future__ import annotations

from ._autograd import NO_TASK, current_task, probe_outputs, queue_final_callback
from ._compiled_backward import is_compiled_backward
from ._phase import Phase, PhaseBox
from ._untraced import untraced
from .trace import StepPhase, Tracer


class LocalBackwards:
    """Notice the local backwards of one reducer.

    Args:
        tracer: whose listeners are told.
        phase: of the reducer; a backward is local while it is IDLE.
    """

    def __init__(self, tracer: Tracer, phase: PhaseBox) -> None:
        self._tracer = tracer
        self._phase = phase
        self._task = NO_TASK  # the graph task whose end is awaited

    def forward_ended(self, output: object, *, will_reduce: bool) -> None:
        """Pass it on; let the backward of a local forward tell when it begins."""
        if will_reduce:
            self._tracer.enter(StepPhase.FORWARD_END)
        elif self._tracer.listeners:
            self._tracer.enter(StepPhase.LOCAL_FORWARD_END)
            probe_outputs(output, self.begin)

    @untraced
    def begin(self, _grads: object = None) -> None:
        """Note that a local backward runs, unless that is known.

        Called from inside the backward: at the outputs of a local forward, or by the
        first grad hook where the forward went around the wrapper. Of a compiled
        backward nobody hears the end, so it is left out.
        """
        task = current_task()
        if (
            not self._tracer.listeners
            or task == self._task
            or self._phase.now is not Phase.IDLE  # it brings what others wait for
            or is_compiled_backward()
        ):
            return
        self._task = task
        self._tracer.enter(StepPhase.LOCAL_BACKWARD_BEGIN)
        queue_final_callback(self._end)

    @untraced
    def _end(self) -> None:
        self._tracer.enter(StepPhase.LOCAL_BACKWARD_END)
