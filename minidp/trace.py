"""Trace the events of a backward.

With a recorder, each gradient takes the slower of the two hook paths, and each event
costs one clock read. A listener (`Stopwatch` of `overlap/`) gets only the events of
buckets and phases, without FIRST_GRADIENT; grad hooks are timed separately, which is
cheaper. Without both, `Tracer.is_on` is False, and no event is sent::

    FIRST_GRADIENT --- FULL --- LAUNCHED --- DONE --- COPIED_OUT
        |                |          |          |          '- reduced values are in .grad
        |                |          |          '- the collective is complete
        |                |          '- the all-reduce is about to be enqueued
        |                '- no slot is pending
        '- the first slot is ready
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

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


class Listener(Protocol):
    """Receive the events of buckets (`note`) and of phases (`enter`)."""

    def note(self, moment: Moment, bucket: int) -> None:
        """Receive an event of a bucket, on any thread."""

    def enter(self, phase: StepEvent) -> None:
        """Receive the begin or end of a phase of a step, on the thread that runs it."""


class Tracer:
    """Receive the events of one reducer, and pass them to its recorder and listeners.

    Hot code reads `is_on` first: a call for nobody costs, too.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None  # of all events; set by `record_into`
        self.listeners: tuple[Listener, ...] = ()  # changed by `add`, `remove`
        self.is_on = False  # there is a recorder or a listener
        self.backward = 0  # number of the synchronised backward

    def record_into(self, recorder: Recorder | None) -> None:
        """Record all further events in ``recorder``; None stops recording."""
        self.recorder = recorder
        self.is_on = recorder is not None or bool(self.listeners)

    def add(self, listener: Listener) -> None:
        """Send events to ``listener``, too; a no-op if it gets them already."""
        if listener not in self.listeners:
            self.listeners = (*self.listeners, listener)
            self.is_on = True

    def remove(self, listener: Listener) -> None:
        """Send no more events to ``listener``; a no-op if it gets none."""
        if listener in self.listeners:
            rest = [each for each in self.listeners if each is not listener]
            self.listeners = tuple(rest)
            self.is_on = self.recorder is not None or bool(rest)

    def note(self, moment: Moment, index: int, *_future: object) -> None:
        """Record an event of a gradient or bucket; pass a bucket's to the listeners.

        May be a callback of a future, which adds an argument: it is ignored.
        """
        if self.recorder is not None:
            self.recorder.record(moment, index, self.backward)
        if moment is not Moment.PARAM_READY:
            for listener in self.listeners:
                listener.note(moment, index)

    def enter(self, phase: StepEvent) -> None:
        """Tell the listeners, not the recorder, that a phase begins or ends."""
        for listener in self.listeners:
            listener.enter(phase)


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
