"""Record the times of a reducer's steps.

What a `Stopwatch` is told, and by whom::

    note     an event of a bucket                      any thread
    enter    a phase of the step begins or ends        data_parallel, core, guard
    take     the times of grad hooks, in some steps    core

While steps run, only a few clock marks per bucket are kept; `Stopwatch.steps` converts
them. The auto search uses a plain `Stopwatch`, `minidp.record` a `ModelStopwatch`.
"""

from __future__ import annotations

import platform
import sys
import time
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minidp._version import __version__
from minidp.trace import Moment, StepEvent

from .hook_timing import HookTiming
from .timeline import BucketTimes, ClockOffset, Param, Span, Step, Timeline, Where

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from minidp.core import BucketQueue, GradHooks, Reducer
    from minidp.layout import Layout

KEEP_STEPS = 200
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Mark = Any  # one read of a clock: nanoseconds, or a CUDA event
Pairs = list[list[Mark]]  # begin and end; the end is None until it happens


class Clock:
    """Read the CPU's clock: a mark is the nanoseconds of `time.perf_counter_ns`."""

    params_every = 4  # grad hooks are timed in one of 4 steps: 0.3 us per parameter
    read: Any = staticmethod(time.perf_counter_ns)  # the extension knows this function

    def settle(self) -> None:
        """Do nothing: the CPU's times are known at once; see `CudaClock.settle`."""

    def resolve(self, mark: Mark, anchor: Mark) -> int:
        """Return ``mark``, which is in nanoseconds already; ignore ``anchor``."""
        return int(mark)


class CudaClock(Clock):
    """Time one CUDA device by events on the current stream, in ns of the CPU clock.

    In a grad hook that stream wrote the gradient; in a future's callback it is ordered
    after the collective. `read` does not wait; `settle` waits for the device; `resolve`
    converts. Not yet run on a GPU.
    """

    params_every = 8  # an event per parameter costs more than a clock read

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin = self.read()
        self._origin.synchronize()
        self._origin_ns = time.perf_counter_ns()

    def read(self) -> Mark:
        """Record an event on the current stream and return it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait until the device has finished all work, so that events have times."""
        torch.cuda.synchronize(self._device)

    def resolve(self, mark: Mark, anchor: Mark) -> int:
        """Convert an event to CPU clock ns; a near event ``anchor`` limits rounding."""
        until_anchor: float = self._origin.elapsed_time(anchor)
        from_anchor: float = anchor.elapsed_time(mark)
        return self._origin_ns + round(until_anchor * 1e6) + round(from_anchor * 1e6)


@dataclass
class StepMarks:
    """Hold the raw times (clock marks) that a `Stopwatch` collects during one step."""

    number: int
    begin: Mark
    end: Mark | None = None
    forwards: Pairs = field(default_factory=list)
    local_forwards: Pairs = field(default_factory=list)
    local_backwards: Pairs = field(default_factory=list)
    optimizers: Pairs = field(default_factory=list)
    # In order: of the backward, of finalize, its end.
    phases: dict[StepEvent, Mark] = field(default_factory=dict)
    moments: dict[int, dict[Moment, Mark]] = field(default_factory=dict)  # by bucket
    stamps: Sequence[Mark | None] = ()  # of the grad hooks, by parameter index
    layout: Layout | None = None  # set when all buckets are reduced and copied out


class Stopwatch:
    """Record a reducer's last ``keep`` steps; in `timed_steps` each gradient's time."""

    def __init__(
        self,
        queue: BucketQueue,
        hooks: GradHooks,
        *,
        keep: int = KEEP_STEPS,
        clock: Clock | None = None,
    ) -> None:
        self._queue, self._hooks = queue, hooks
        first, *others = {spec.device for spec in queue.specs}
        is_one_gpu = first.type == "cuda" and not others
        self._clock = clock or (CudaClock(first) if is_one_gpu else Clock())
        every = self._clock.params_every
        self.timed_steps: Container[int] = range(0, sys.maxsize, every)
        self._marks: StepMarks | None = None  # of the step that runs now
        self._finished: deque[StepMarks] = deque(maxlen=keep)
        self._num_begun = 0

    def start(self) -> None:
        """Start recording: receive bucket and phase events; prepare to time hooks."""
        self._timing = HookTiming(self._hooks, self._clock.read)
        self._queue.tracer.add(self)

    def stop(self) -> ProcessGroup:
        """Stop recording; keep the step under way if reduced. Return the group."""
        self._queue.tracer.remove(self)
        self._timing.switch(on=False)
        del self._timing
        self._close(None)
        return self._queue.communicator.group

    def clear(self) -> None:
        """Drop finished steps; count anew, from the current one on, which are timed.

        The current step's hooks are no longer timed; its number stays.
        """
        self._finished.clear()
        self._num_begun = int(self._marks is not None)
        self._timing.switch(on=False)

    # -- events, see `trace.Listener` --------------------------------------------------

    def note(self, moment: Moment, bucket: int) -> None:
        """Store when a bucket first reached ``moment``; ignore it before a backward."""
        marks = self._marks
        if marks is not None and StepEvent.BACKWARD_BEGIN in marks.phases:
            marks.moments.setdefault(bucket, {}).setdefault(moment, self._clock.read())

    def enter(self, phase: StepEvent) -> None:
        """Store when a phase began or ended; ignore it before the first forward.

        A forward after a backward ends that step, kept if reduced, and begins another.
        """
        now, marks = self._clock.read(), self._marks
        if phase is StepEvent.FORWARD_BEGIN:
            # A backward that was begun and not finished has failed.
            if marks is None or StepEvent.BACKWARD_BEGIN in marks.phases:
                self._close(now)
                marks = self._open(now)
            marks.forwards.append([now, None])
        elif marks is None:
            pass  # recording began in the middle of a step
        elif phase is StepEvent.OPTIMIZER_BEGIN:
            marks.optimizers.append([now, None])
        elif phase is StepEvent.OPTIMIZER_END and marks.optimizers:
            marks.optimizers[-1][1] = now
        else:
            self._enter(phase, now, marks)

    def _enter(self, phase: StepEvent, now: Mark, marks: StepMarks) -> None:
        """Store an event of a step; once it was reduced, only those of local work."""
        match phase:
            case StepEvent.FORWARD_END:
                marks.forwards[-1][1] = now
            case StepEvent.LOCAL_FORWARD_END:
                marks.local_forwards.append([marks.forwards.pop()[0], now])
            case StepEvent.LOCAL_BACKWARD_BEGIN:
                marks.local_backwards.append([now, None])
            case StepEvent.LOCAL_BACKWARD_END:  # of nested backwards, the last begun
                open_ones = [pair for pair in marks.local_backwards if pair[1] is None]
                for pair in open_ones[-1:]:
                    pair[1] = now
            case _ if marks.layout is not None:
                pass  # a backward without a forward is not synchronised
            case StepEvent.BACKWARD_BYPASSED:
                begin = marks.phases.pop(StepEvent.BACKWARD_BEGIN, now)
                marks.local_backwards.append([begin, now])
                marks.moments.clear()
            case StepEvent.BACKWARD_BEGIN | StepEvent.FINALIZE_BEGIN:
                marks.phases[phase] = now
            case StepEvent.FINALIZE_END:
                marks.phases[phase] = now
                marks.layout = self._queue.layout
                marks.stamps = self._timing.take() if self._timing.is_on else ()

    def _open(self, now: Mark) -> StepMarks:
        self._marks = StepMarks(self._queue.tracer.backward, now)
        self._timing.switch(on=self._num_begun in self.timed_steps)
        self._num_begun += 1
        return self._marks

    def _close(self, now: Mark | None) -> None:
        if self._marks is not None and self._marks.layout is not None:
            self._marks.end = now
            self._finished.append(self._marks)
        self._marks = None

    # -- result ------------------------------------------------------------------------

    def steps(self) -> tuple[list[Step], list[tuple[tuple[int, ...], ...]]]:
        """Return kept steps, and the layouts by `Step.layout`; wait for the device."""
        self._clock.settle()
        layouts: dict[tuple[tuple[int, ...], ...], int] = {}
        steps = []
        for marks in list(self._finished):
            assert marks.layout is not None
            layout = layouts.setdefault(marks.layout.assignment, len(layouts))
            steps.append(_read(self._clock, marks, layout))
        return [step for step in steps if step is not None], list(layouts)


def _read(clock: Clock, marks: StepMarks, layout: int) -> Step | None:
    """Convert marks to a `Step`; None unless a forward, backward and finalize ended.

    Leaves out buckets that were not launched, and gradients outside the backward.
    """

    def ns(mark: Mark) -> int:
        return clock.resolve(mark, marks.begin)

    def spans(pairs: Pairs) -> tuple[Span, ...]:
        """Convert pairs (begin, end) to spans; leave out pairs without an end."""
        return tuple(Span(ns(a), ns(b)) for a, b in pairs if b is not None)

    forwards = spans(marks.forwards)
    if not forwards or len(marks.phases) < 3:
        return None
    begin, end, finalized = map(ns, marks.phases.values())
    optimizers, locals_ = spans(marks.optimizers), spans(marks.local_backwards)
    last = max([finalized, *(span.end_ns for span in (*optimizers, *locals_))])
    stamps = [None if stamp is None else ns(stamp) for stamp in marks.stamps]
    moments = {
        number: {moment: ns(mark) for moment, mark in marked.items()}
        for number, marked in sorted(marks.moments.items())
    }
    return Step(
        number=marks.number,
        layout=layout,
        forwards=forwards,
        backward=Span(begin, end),
        finalize_end_ns=finalized,
        end_ns=last if marks.end is None else ns(marks.end),
        buckets=tuple(
            _bucket(number, times)
            for number, times in moments.items()
            if {Moment.FULL, Moment.LAUNCHED, Moment.COPIED_OUT} <= times.keys()
        ),
        optimizers=optimizers,
        # A hook may have run in another backward than this one.
        ready_ns=tuple(t if t and begin <= t <= end else None for t in stamps),
        local_forwards=spans(marks.local_forwards),
        local_backwards=locals_,
    )


def _bucket(number: int, times: Mapping[Moment, int]) -> BucketTimes:
    """Return a bucket's times (full, launched, done, copied), each >= the one before.

    Marks of several streams differ by a tick. DONE, which a callback may mark late or
    not at all, is at most COPIED_OUT.
    """
    copied = times[Moment.COPIED_OUT]
    done = min(times.get(Moment.DONE, copied), copied)
    order = (times[Moment.FULL], times[Moment.LAUNCHED], done, copied)
    return BucketTimes(number, *accumulate(order, max))


class ModelStopwatch(Stopwatch):
    """Record a reducer's steps for a `Timeline`; only one of them may run at a time."""

    def __init__(
        self, reducer: Reducer, *, keep: int = KEEP_STEPS, clock: Clock | None = None
    ) -> None:
        super().__init__(reducer.queue, reducer.hooks, keep=keep, clock=clock)
        self._reducer: Reducer | None = reducer
        specs = reducer.queue.specs
        kinds = [f"{'sparse ' * s.sparse}{s.dtype} on {s.device}" for s in specs]
        self._params = tuple(
            Param(spec.name, spec.nbytes, kind.replace("torch.", ""))
            for spec, kind in zip(specs, kinds, strict=True)
        )
        self._where = where_of(reducer)

    def start(self) -> None:
        """Start recording.

        Raises RuntimeError after `stop`, or while another one records this reducer.
        """
        if self._reducer is None:
            raise RuntimeError(
                "This recording is over and no longer holds its model: call "
                "minidp.record(model) again for another one."
            )
        listeners = self._queue.tracer.listeners
        if any(isinstance(other, ModelStopwatch) for other in listeners):
            raise RuntimeError(
                "This model is being recorded already: use the Recording of the "
                "minidp.record() block around, or leave that block first."
            )
        super().start()

    def stop(self) -> ProcessGroup:
        """Stop recording, drop the reducer; return its group."""
        group = super().stop()
        assert self._reducer is not None
        self._where = where_of(self._reducer)  # reset() may have changed the group
        self._reducer = None
        del self._queue, self._hooks
        return group

    def timeline(self, clock: ClockOffset | None = None) -> Timeline:
        """Return a `Timeline` of the kept steps; wait for the device.

        Times are on this rank's own clock: the offset ``clock`` is only stored with
        them.
        """
        steps, layouts = self.steps()
        num_dropped = self._num_begun - (self._marks is not None) - len(steps)
        return Timeline(
            self._where, self._params, tuple(layouts), tuple(steps), num_dropped, clock
        )


def where_of(reducer: Reducer) -> Where:
    """Return a reducer's `Where`; ``host`` is the boot id, or the host's name."""
    group, device = reducer.communicator.group, reducer.queue.specs[0].device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    averaging = reducer.queue.averaging
    (rank, size), hook = averaging.seat, averaging.comm_hook
    # Equal in all containers of a host, which share its clock.
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    versions = {"minidp": __version__, "torch": str(torch.__version__)}
    versions["python"] = platform.python_version()
    return Where(
        rank=rank,
        world_size=size,
        backend=str(group.name()),
        device=f"{device} {name}".strip(),
        host=boot or platform.node(),
        versions=versions,
        comm_hook="" if hook is None else hook.name,
        layout_by=reducer.rebuild_policy.layout_by,
        no_shared_memory=averaging.no_shared_memory if size > 1 else None,
    )
