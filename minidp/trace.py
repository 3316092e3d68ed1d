"""The events of a step, a `Recorder` of them, and labels for torch.profiler.

To know when things happen, one has to be told by the code that does them. This file has
the names of these events, so that who tells and who listens need not know each other.
Whoever wants to be told is an `Observer` of the core. A bucket goes through these::

    FIRST_GRADIENT --- FULL --- LAUNCHED --- DONE --- COPIED_OUT
        |                |          |          |          '- the averages are in .grad
        |                |          |          '- the collective is complete
        |                |          '- the all-reduce is about to be enqueued
        |                '- its last gradient is here
        '- its first gradient is here (reliably only while there is a recorder)

If ranks divide the optimizer's step (`sharded_step`), the new values of a bucket's
parameters come back from their owners after it, and these events follow::

    VALUES_STARTED --- VALUES_SENT - - - VALUES_AWAITED --- VALUES_BACK
        |                  |                   |                '- in the parameters
        |                  |                   '- this rank waits for them
        |                  '- this rank does other things
        '- this rank begins to send its share of them

On a device the host tells of an event when it has queued the work. The times are those
at which the device gets there, which are known, at the latest, when somebody asks.

A `Recorder` is told of every gradient, too. Then each gradient takes the slower of the
two paths of the grad hooks, and each event costs one read of the clock. Recordings of
training (`minidp.record`) are made by the stopwatch of `overlap/`, which is not told of
gradients, and so is cheaper.
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
    """An event of one parameter's gradient, or of one bucket."""

    PARAM_READY = "param ready"  # its index is that of the parameter
    FIRST_GRADIENT = "first gradient"  # from here on it is the number of the bucket
    FULL = "full"
    LAUNCHED = "launched"
    DONE = "done"
    COPIED_OUT = "copied out"
    # Of divided steps only. Of one bucket they come again for each optimizer.
    VALUES_STARTED = "values started"
    VALUES_SENT = "values sent"
    VALUES_AWAITED = "values awaited"
    VALUES_BACK = "values back"


class StepEvent(Enum):
    """An event of a step that belongs to no bucket.

    The events of loops and turns come with logical ranks only, and those of turns with
    the number of the logical rank.
    """

    LOOP_BEGIN = "loop over the logical ranks of this rank begins"
    TURN_BEGIN = "turn of a logical rank begins"
    TURN_END = "turn of a logical rank ended"
    FORWARD_BEGIN = "forward begins"
    MODULE_BEGIN = "collectives before the module's forward, or a loop, are done"
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
    """What a `Recorder` was told, and when."""

    moment: Moment
    index: int  # of the parameter for PARAM_READY, else of the bucket
    backward: int  # the number of the synchronised backward, from 0
    time_ns: int  # by the recorder's clock


class Recorder:
    """Keep the newest events of the backwards to which it is attached.

    Several threads may record at once.

    Args:
        capacity: How many events to keep; older ones are dropped.
        clock: Returns the present time in nanoseconds. By default it is the one of
            `time.perf_counter_ns`, also for what a device does.
    """

    def __init__(
        self, capacity: int = 65536, clock: Callable[[], int] | None = None
    ) -> None:
        self._noted: deque[tuple[Moment, int, int, int | Callable[[], int]]]
        self._noted = deque(maxlen=capacity)
        self._clock = clock or time.perf_counter_ns
        self.has_own_clock = clock is not None

    def record(
        self,
        moment: Moment,
        index: int,
        backward: int,
        when: Callable[[], int] | None = None,
    ) -> None:
        """Note an event, at the present time, or at one that ``when`` will tell."""
        self._noted.append((moment, index, backward, when or self._clock()))

    def events(self) -> tuple[Event, ...]:
        """Return the events that were kept, the oldest first.

        This waits for a device that has not come to all of them.
        """
        noted = tuple(self._noted)
        return tuple(
            Event(moment, index, backward, when() if callable(when) else when)
            for moment, index, backward, when in noted
        )

    def clear(self) -> None:
        """Drop all events."""
        self._noted.clear()

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events())

    def __len__(self) -> int:
        return len(self._noted)


_NOTHING: AbstractContextManager[object] = nullcontext()
# Says whether torch.profiler runs. It is a C function, and so costs next to nothing.
is_profiling: Callable[[], bool]
is_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def label(doing: str, bucket: int) -> AbstractContextManager[object]:
    """Label the block "minidp::DOING bucket=3" while torch.profiler runs."""
    if not is_profiling():
        return _NOTHING
    return record_function(f"minidp::{doing} bucket={bucket}")


def label_forward() -> AbstractContextManager[object]:
    """Label the block as torch's DDP labels a forward, while torch.profiler runs.

    Tools that read traces, such as TensorBoard's, find a distributed run by this name.
    """
    if not is_profiling():
        return _NOTHING
    return record_function("DistributedDataParallel.forward")
