"""Clocks that a recording reads: the host's, or one that knows when kernels ran.

On CUDA a read costs an event, which is looked at when everything is over, so that
nothing waits while steps are measured. Not yet run on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch

Mark = Any  # what reading a clock gives: nanoseconds, or an event


class Clock(Protocol):
    """Read now, resolved later."""

    params_every: int  # steps, of which one takes the times of parameters

    def read(self) -> Mark:
        """Now."""

    def settle(self) -> None:
        """Wait until all marks can be resolved; outside of what is measured."""

    def resolve(self, mark: Mark, anchor: Mark) -> int:
        """Nanoseconds of `time.perf_counter_ns`.

        Args:
            mark: what `read` gave.
            anchor: what it gave not long before: from it the distance is taken.
        """


class HostClock:
    """What the CPU does."""

    params_every = 4  # 0.3 us per parameter

    read = staticmethod(time.perf_counter_ns)

    def settle(self) -> None:
        """There is nothing to wait for."""

    def resolve(self, mark: Mark, anchor: Mark) -> int:
        """The mark itself."""
        return int(mark)


class CudaClock:
    """What one CUDA device does: events, each on the stream that is current.

    Where a mark is made, that is the stream that matters: in a grad hook the one that
    wrote the gradient, in the callback of a work's future one that is ordered after
    the collective.
    """

    params_every = 8  # an event per parameter costs more than a clock read

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin = self.read()
        self._origin.synchronize()
        self._origin_ns = time.perf_counter_ns()

    def read(self) -> Mark:
        """An event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def resolve(self, mark: Mark, anchor: Mark) -> int:
        """See `Clock`. Milliseconds of 24 bits would be too coarse from the origin."""
        until_anchor: float = self._origin.elapsed_time(anchor)
        from_anchor: float = anchor.elapsed_time(mark)
        return self._origin_ns + round(until_anchor * 1e6) + round(from_anchor * 1e6)


def clock_for(devices: Iterable[torch.device]) -> Clock:
    """For gradients on these devices; the host's, if they are on several GPUs."""
    first, *others = set(devices)
    is_one_gpu = first.type == "cuda" and not others
    return CudaClock(first) if is_one_gpu else HostClock()
