"""What happened when, in one backward: events in a ring, and nothing else.

A reducer without a recorder pays nothing. With one, each gradient takes the slower of
the two hook paths, and each moment of a bucket's life costs one clock read. A listener
(`_stopwatch`) is told of buckets and phases only: it times the gradients in the hooks
themselves, which is cheaper::

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
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Moment(Enum):
    """A point in the life of a parameter's gradient or of a bucket."""

    PARAM_READY = "param ready"  # index = parameter index
    FIRST_GRADIENT = "first gradient"  # index = bucket index, from here on
    FULL = "full"
    LAUNCHED = "launched"
    DONE = "done"
    COPIED_OUT = "copied out"


class StepPhase(Enum):
    """A point in a step, which is of no bucket."""

    FORWARD_BEGIN = "forward begins"
    FORWARD_END = "forward ended"
    LOCAL_FORWARD_END = "forward ended, and its backward will average nothing"
    LOCAL_BACKWARD_BEGIN = "a backward that averages nothing begins"
    LOCAL_BACKWARD_END = "... and ended"
    BACKWARD_BEGIN = "backward reached the outputs"
    BACKWARD_BYPASSED = "... which reached no gradient: torch.autograd.grad"
    FINALIZE_BEGIN = "every gradient is computed"
    FINALIZE_END = "everything is reduced"


@dataclass(frozen=True)
class Event:
    """One moment: ``time_ns`` is on the recorder's clock."""

    moment: Moment
    index: int  # parameter index for PARAM_READY, else bucket index
    backward: int  # number of the synchronised backward, from 0
    time_ns: int


class Recorder:
    """Keeps the last ``capacity`` events; appending is thread-safe.

    Args:
        capacity: number of events kept; older ones are dropped.
        clock: nanoseconds, monotonic.
    """

    def __init__(
        self,
        capacity: int = 65536,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._clock = clock

    def record(self, moment: Moment, index: int, backward: int) -> None:
        """Note that ``moment`` happened now."""
        self._events.append(Event(moment, index, backward, self._clock()))

    def events(self) -> tuple[Event, ...]:
        """What is kept, oldest first."""
        return tuple(self._events)

    def clear(self) -> None:
        """Forget everything."""
        self._events.clear()

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events())

    def __len__(self) -> int:
        return len(self._events)


class Listener(Protocol):
    """Is told of buckets and phases, while it is there."""

    def note(self, moment: Moment, bucket: int) -> None:
        """A moment of a bucket is now; on any thread."""

    def enter(self, phase: StepPhase) -> None:
        """A phase begins or ends now."""


class Tracer:
    """What the pipeline holds: tells who listens, if anybody does."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None  # of everything
        self.bucket_recorder: Recorder | None = None  # of all but PARAM_READY
        self.listeners: list[Listener] = []
        self.backward = 0  # number of the synchronised backward

    @property
    def is_on(self) -> bool:
        """Whether somebody listens."""
        recorders = (self.recorder, self.bucket_recorder)
        return bool(self.listeners) or any(one is not None for one in recorders)

    def note(self, moment: Moment, index: int, *_future: object) -> None:
        """Pass a moment on (the last argument is for futures' callbacks)."""
        if self.recorder is not None:
            self.recorder.record(moment, index, self.backward)
        if self.bucket_recorder is not None and moment is not Moment.PARAM_READY:
            self.bucket_recorder.record(moment, index, self.backward)
        if self.listeners and moment is not Moment.PARAM_READY:
            for listener in tuple(self.listeners):
                listener.note(moment, index)

    def enter(self, phase: StepPhase) -> None:
        """Pass a phase on."""
        for listener in tuple(self.listeners):
            listener.enter(phase)
