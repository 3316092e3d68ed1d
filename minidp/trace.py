"""Name the events of a step; record those of its backward; label them for a profiler.

Who wants to know them is an `Observer` of the core. A `Recorder` gets all events of
gradients and buckets: each gradient then takes the slower of the two hook paths, and
each event costs one clock read. The `Stopwatch` of `overlap/` gets no gradients, and
times grad hooks separately, which is cheaper::

    FIRST_GRADIENT --- FULL --- LAUNCHED --- DONE --- COPIED_OUT
        |                |          |          |          '- reduced values are in .grad
        |                |          |          '- the collective is complete
        |                |          '- the all-reduce is about to be enqueued
        |                '- no slot is pending
        '- the first slot is ready (only while there is a recorder)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

import torch
from torch.profiler import record_function


class Moment(Enum):
    """Name an event of one parameter's gradient or of one bucket."""

    PARAM_READY = "param ready"  # index = parameter index
    FIRST_GRADIENT = "first gradient"  # index = bucket index, from here on
    FULL = "full"
    LAUNCHED = "launched"
    DONE = "done"
    COPIED_OUT = "copied out"


class StepEvent(Enum):
    """Name an event of a step that belongs to no bucket."""

    FORWARD_BEGIN = "forward begins"
    MODULE_BEGIN = "collectives before the module's forward are done"
    FORWARD_END = "forward ended"
    LOCAL_FORWARD_END = "forward ended whose backward averages nothing"
    LOCAL_BACKWARD_BEGIN = "backward that averages nothing begins"
    LOCAL_BACKWARD_END = "backward that averages nothing ended"
    BACKWARD_BEGIN = "backward reached the outputs"
    BACKWARD_BYPASSED = "backward reached no gradient: torch.autograd.grad"
    FINALIZE_BEGIN = "every gradient is computed"
    FINALIZE_END = "every bucket is reduced"
    OPTIMIZER_BEGIN = "step of an optimizer that holds a parameter begins"
    OPTIMIZER_END = "step of an optimizer that holds a parameter ended"


@dataclass(frozen=True)
class Event:
    """Hold a recorded event; ``time_ns`` is by the recorder's clock."""

    moment: Moment
    index: int  # parameter index for PARAM_READY, else bucket index
    backward: int  # number of the synchronised backward, from 0
    time_ns: int


class Recorder:
    """Keep the last ``capacity`` events; ``clock`` returns nanoseconds. Thread-safe."""

    def __init__(
        self, capacity: int = 65536, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._clock = clock

    def record(self, moment: Moment, index: int, backward: int) -> None:
        """Append an event with the present time; drop the oldest if full."""
        self._events.append(Event(moment, index, backward, self._clock()))

    def events(self) -> tuple[Event, ...]:
        """Return the kept events, oldest first."""
        return tuple(self._events)

    def clear(self) -> None:
        """Drop all events."""
        self._events.clear()

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events())

    def __len__(self) -> int:
        return len(self._events)


_NOTHING: AbstractContextManager[object] = nullcontext()
# Whether torch.profiler runs; a C function.
is_profiling: Callable[[], bool]
is_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def label(doing: str, bucket: int) -> AbstractContextManager[object]:
    """Label the block "minidp::doing bucket=3" for torch.profiler; else do nothing."""
    if not is_profiling():
        return _NOTHING
    return record_function(f"minidp::{doing} bucket={bucket}")


def label_forward() -> AbstractContextManager[object]:
    """Label the block as torch's DDP labels a forward; nothing without a profiler.

    Tools that read traces, such as TensorBoard's, find a distributed run by this name.
    """
    if not is_profiling():
        return _NOTHING
    return record_function("DistributedDataParallel.forward")
