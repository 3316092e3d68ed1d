"""Time the grad hooks of a reducer, without a cost while nobody records."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

from minidp.core import GradHook, GradHooks, untraced


class HookTiming:
    """Record when each grad hook of ``hooks`` runs, while switched on.

    `switch` swaps Python hooks on the nodes for ones that read ``clock`` first, and
    back. C++ hooks read ``time.perf_counter_ns`` without Python; for any other
    ``clock`` they call `_stamp`.
    """

    def __init__(self, hooks: GradHooks, clock: Callable[[], Any]) -> None:
        self.is_on = False
        self._hooks = hooks
        self._clock = clock
        self._is_in_cpp = hooks.table is not None and clock is time.perf_counter_ns
        self._stamps: list[Any] = [None] * len(hooks.nodes)
        plain = {hook for _, _, hook in hooks.places}
        self._timed = {hook: _timed(hook, clock, self._stamps) for hook in plain}

    def switch(self, *, on: bool) -> None:
        """Start or stop recording hook times; do not call during a backward."""
        if on is self.is_on:
            return
        self.is_on, table = on, self._hooks.table
        if table is not None:
            table.stamp_by(self._stamp if on and not self._is_in_cpp else None)
            table.is_timed = on
        for i, (on_node, key, hook) in enumerate(self._hooks.places):
            on_node[key] = MethodType(self._timed[hook] if on else hook, i)

    def _stamp(self, i: int) -> None:
        """Store the time of parameter ``i``; called by its C++ hook."""
        self._stamps[i] = self._clock()

    def take(self) -> list[Any]:
        """Return and clear each parameter's last time; None if its hook did not run."""
        if self._is_in_cpp:
            stamps = cast("Any", self._hooks.table).take_stamps()
            return [stamp or None for stamp in stamps]
        taken, self._stamps[:] = list(self._stamps), [None] * len(self._stamps)
        return taken


def _timed(hook: GradHook, clock: Callable[[], Any], stamps: list[Any]) -> GradHook:
    """Return ``hook`` with a clock read before it, stored in ``stamps``."""

    @untraced
    def grad_hook(i: int, grad_inputs: Any, grad_outputs: Any) -> None:
        stamps[i] = clock()
        hook(i, grad_inputs, grad_outputs)

    return grad_hook
