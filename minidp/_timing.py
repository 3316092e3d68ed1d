"""When each grad hook was last called, at the price of a clock read.

The hooks of all parameters change places with timed ones, which read the clock before
they do anything else. They stay where they were among the other hooks of their nodes.
Native hooks do the same by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Protocol

from ._untraced import untraced

SharedHook = Callable[[int, Any, Any], None]  # index, grad_inputs, grad_outputs


class Timing(Protocol):
    """Hooks that can be timed; they are not until `switch`."""

    def switch(self, *, on: bool) -> None:
        """Time the hooks from now on, or no more. Not during a backward."""

    def take(self) -> list[Any]:
        """What the clock said last, by parameter index; None where no hook ran."""


class HookTiming:
    """Of hooks in Python.

    Args:
        places: the dict of all hooks of each node, and our key in it.
        hooks: of each parameter.
        clock: gives what is kept as the time.
    """

    def __init__(
        self,
        places: Sequence[tuple[dict[int, Any] | None, int]],
        hooks: Sequence[SharedHook],
        clock: Callable[[], Any],
    ) -> None:
        self._places = places
        self._stamps: list[Any] = [None] * len(hooks)
        timed = {hook: _timed(hook, clock, self._stamps) for hook in hooks}
        self._plain = [MethodType(hook, i) for i, hook in enumerate(hooks)]
        self._timed = [MethodType(timed[hook], i) for i, hook in enumerate(hooks)]

    def switch(self, *, on: bool) -> None:
        """See `Timing`."""
        hooks = self._timed if on else self._plain
        for (on_node, key), hook in zip(self._places, hooks, strict=True):
            if on_node is not None and key in on_node:
                on_node[key] = hook

    def take(self) -> list[Any]:
        """See `Timing`."""
        taken = list(self._stamps)
        self._stamps[:] = [None] * len(taken)
        return taken


def _timed(hook: SharedHook, clock: Callable[[], Any], stamps: list[Any]) -> SharedHook:
    @untraced
    def grad_hook(i: int, grad_inputs: Any, grad_outputs: Any) -> None:
        stamps[i] = clock()
        hook(i, grad_inputs, grad_outputs)

    return grad_hook


class NativeTiming:
    """Of native hooks.

    Args:
        arrivals: the native twin of `Arrivals`.
        clock: `time.perf_counter_ns`, which they read themselves, or another one, for
            which they call us.
    """

    def __init__(self, arrivals: Any, clock: Callable[[], Any]) -> None:
        self._arrivals = arrivals
        self._is_host_clock = clock is time.perf_counter_ns
        self._clock = clock
        self._stamps: list[Any] = [None] * len(arrivals.bucket_of)

    def switch(self, *, on: bool) -> None:
        """See `Timing`."""
        self._arrivals.stamp_by(self._stamp if on and not self._is_host_clock else None)
        self._arrivals.is_timed = on

    def _stamp(self, i: int) -> None:
        self._stamps[i] = self._clock()

    def take(self) -> list[Any]:
        """See `Timing`."""
        if self._is_host_clock:
            return [stamp or None for stamp in self._arrivals.take_stamps()]
        taken = list(self._stamps)
        self._stamps[:] = [None] * len(taken)
        return taken
