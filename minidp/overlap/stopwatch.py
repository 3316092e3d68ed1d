"""Record the times of a reducer's steps.

What a `Stopwatch` is told, and by whom::

    happened  an event of a bucket                     any thread
    enter     a phase of the step begins or ends       data_parallel, core, guard

In some steps a `HookTiming` also stores when each grad hook ran. While steps run, only
clock marks are kept; `Stopwatch.steps` converts them.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MethodType
from typing import Any, cast

import torch

from minidp.core import BucketQueue, GradHook, GradHooks, Observer, untraced
from minidp.layout import Layout
from minidp.trace import Moment, StepEvent

from .timeline import BucketTimes, Span, Step

Mark = Any  # one read of a clock: nanoseconds, or a CUDA event
# Events that begin and end a span, and the field of `Step` that holds such spans.
_BEGINS = {
    StepEvent.FORWARD_BEGIN: "forwards",
    StepEvent.LOCAL_BACKWARD_BEGIN: "local_backwards",
    StepEvent.OPTIMIZER_BEGIN: "optimizers",
}
_ENDS = {
    StepEvent.FORWARD_END: "forwards",
    StepEvent.LOCAL_BACKWARD_END: "local_backwards",
    StepEvent.OPTIMIZER_END: "optimizers",
}


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

    In a grad hook the current stream wrote the gradient; in a future's callback that
    stream is ordered after the collective. `read` does not wait; the constructor and
    `settle` wait for the device. Not yet run on a GPU.
    """

    params_every = 8  # an event per parameter costs more than a clock read

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin = self.read()
        self._origin.synchronize()
        self._origin_ns = time.perf_counter_ns()

    def read(self) -> Mark:
        """Record an event on the device's current stream and return it; do not wait."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait until the device has finished all work, so that events have times."""
        torch.cuda.synchronize(self._device)

    def resolve(self, mark: Mark, anchor: Mark) -> int:
        """Convert an event to ns of the CPU clock; call `settle` first.

        ``anchor``: an event near it, because long intervals between events are rounded.
        """
        until_anchor: float = self._origin.elapsed_time(anchor)
        from_anchor: float = anchor.elapsed_time(mark)
        return self._origin_ns + round(until_anchor * 1e6) + round(from_anchor * 1e6)


class HookTiming:
    """Record when each grad hook of ``hooks`` runs, while switched on (at first: off).

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
        """Start or stop recording hook times; do not call during a backward.

        No-op if ``on`` is no change. Keeps the times that `take` has not returned yet.
        """
        if on is self.is_on:
            return
        self.is_on, table = on, self._hooks.table
        if table is not None:
            table.stamp_by(self._stamp if on and not self._is_in_cpp else None)
            table.is_timed = on
        for i, (on_node, key, hook) in enumerate(self._hooks.places):
            on_node[key] = MethodType(self._timed[hook] if on else hook, i)

    def _stamp(self, i: int) -> None:
        """Store the present time for parameter ``i``; its C++ hook calls this.

        Only while switched on, with a clock that C++ does not read itself.
        """
        self._stamps[i] = self._clock()

    def take(self) -> list[Any]:
        """Return, and clear, when each parameter's hook ran last, as a clock mark.

        By parameter index; None if it has not run, switched on, since the last `take`.
        """
        if self._is_in_cpp:
            stamps = cast("Any", self._hooks.table).take_stamps()
            return [stamp or None for stamp in stamps]
        taken, self._stamps[:] = list(self._stamps), [None] * len(self._stamps)
        return taken


def _timed(hook: GradHook, clock: Callable[[], Any], stamps: list[Any]) -> GradHook:
    """Return a hook that sets ``stamps[i]`` to ``clock()``, then calls ``hook``."""

    @untraced
    def grad_hook(i: int, grad_inputs: Any, grad_outputs: Any) -> None:
        stamps[i] = clock()
        hook(i, grad_inputs, grad_outputs)

    return grad_hook


@dataclass
class StepMarks:
    """Hold the raw times (clock marks) that a `Stopwatch` collects during one step."""

    number: int
    begin: Mark
    end: Mark | None = None
    # By field of `Step`: (begin, end) of spans; an end is None until it happens.
    spans: defaultdict[str, list[list[Mark]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    # In order: of the backward, of finalize, its end.
    phases: dict[StepEvent, Mark] = field(default_factory=dict)
    moments: dict[int, dict[Moment, Mark]] = field(default_factory=dict)  # by bucket
    stamps: Sequence[Mark | None] = ()  # of the grad hooks, by parameter index
    layout: Layout | None = None  # set when all buckets are reduced and copied out


class Stopwatch(Observer):
    """Record a reducer's steps between `start` and `stop`; keep the last ``keep``.

    The constructor records nothing yet. Keeps only steps whose buckets were reduced. In
    the steps ``timed_steps`` (counted from 0 at `start`; None: one in
    `Clock.params_every`), each gradient is timed, too.
    ``clock`` None: a `CudaClock` if all parameters are on one GPU, else a `Clock`.
    """

    sees_times = True

    def __init__(
        self,
        queue: BucketQueue,
        hooks: GradHooks,
        *,
        keep: int,
        clock: Clock | None = None,
        timed_steps: Container[int] | None = None,
    ) -> None:
        self._queue, self._hooks = queue, hooks
        first, *others = {spec.device for spec in queue.specs}
        is_one_gpu = first.type == "cuda" and not others
        self._clock = clock or (CudaClock(first) if is_one_gpu else Clock())
        every = range(0, sys.maxsize, self._clock.params_every)
        self._timed_steps = every if timed_steps is None else timed_steps
        self._marks: StepMarks | None = None  # of the step that runs now
        self._finished: deque[StepMarks] = deque(maxlen=keep)
        self._num_begun = 0

    def start(self) -> None:
        """Observe the queue; record from the next forward on. Call once."""
        self._timing = HookTiming(self._hooks, self._clock.read)
        self._queue.observers.append(self)

    def stop(self) -> None:
        """Stop recording for good; keep the step under way if its buckets are reduced.

        `steps` goes on to work; the references to the queue and its hooks are dropped.
        """
        self._queue.observers.remove(self)
        self._timing.switch(on=False)
        self._close(None)
        del self._timing, self._queue, self._hooks

    # -- events, see `Observer` --------------------------------------------------

    def happened(self, moment: Moment, bucket: int) -> None:
        """Store when ``bucket`` first reached ``moment`` in this step.

        Ignored until the step's synchronised backward has begun.
        """
        marks = self._marks
        if marks is not None and StepEvent.BACKWARD_BEGIN in marks.phases:
            marks.moments.setdefault(bucket, {}).setdefault(moment, self._clock.read())

    def enter(self, phase: StepEvent) -> None:
        """Store when a phase began or ended; ignore events before the first forward.

        A forward after a synchronised backward has begun ends that step (kept only if
        its buckets were reduced) and begins another. A second synchronised backward in
        a step whose buckets were reduced is ignored.
        """
        now, marks = self._clock.read(), self._marks
        if phase is StepEvent.FORWARD_BEGIN and (
            # A backward that was begun and not finished has failed.
            marks is None or StepEvent.BACKWARD_BEGIN in marks.phases
        ):
            self._close(now)
            marks = self._open(now)
        if marks is None:
            pass  # recording began in the middle of a step
        elif phase in _BEGINS:
            marks.spans[_BEGINS[phase]].append([now, None])
        elif phase in _ENDS:  # of nested spans, the one that began last
            pairs = [pair for pair in marks.spans[_ENDS[phase]] if pair[1] is None]
            for pair in pairs[-1:]:
                pair[1] = now
        elif phase is StepEvent.LOCAL_FORWARD_END:
            begin, _ = marks.spans["forwards"].pop()
            marks.spans["local_forwards"].append([begin, now])
        elif marks.layout is None:  # else a backward without a forward of its own
            self._enter_backward(phase, now, marks)

    def _enter_backward(self, phase: StepEvent, now: Mark, marks: StepMarks) -> None:
        """Store an event of the synchronised backward; MODULE_BEGIN is ignored.

        BACKWARD_BYPASSED makes it a local one, and drops the times of its buckets.
        FINALIZE_END also stores the layout and the times of the grad hooks.
        """
        if phase is StepEvent.BACKWARD_BYPASSED:
            begin = marks.phases.pop(StepEvent.BACKWARD_BEGIN, now)
            marks.spans["local_backwards"].append([begin, now])
            marks.moments.clear()
        elif phase is not StepEvent.MODULE_BEGIN:
            marks.phases[phase] = now
        if phase is StepEvent.FINALIZE_END:
            marks.layout = self._queue.layout
            marks.stamps = self._timing.take() if self._timing.is_on else ()

    def _open(self, now: Mark) -> StepMarks:
        self._marks = StepMarks(self._queue.observers.backward, now)
        self._timing.switch(on=self._num_begun in self._timed_steps)
        self._num_begun += 1
        return self._marks

    def _close(self, now: Mark | None) -> None:
        if self._marks is not None and self._marks.layout is not None:
            self._marks.end = now
            self._finished.append(self._marks)
        self._marks = None

    # -- result ------------------------------------------------------------------------

    @property
    def num_ended(self) -> int:
        """Number of recorded steps that are over, also those that are not kept."""
        return self._num_begun - (self._marks is not None)

    def steps(self) -> tuple[list[Step], list[tuple[tuple[int, ...], ...]]]:
        """Return the kept steps that are complete, and the layouts that they index.

        Oldest first; not the step under way. A layout holds each bucket's parameter
        indices. Waits for the GPU, if a `CudaClock` times it.
        """
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

    Local ones do not count. Leaves out buckets that lack FULL, LAUNCHED or COPIED_OUT;
    a gradient that came outside this backward gets None.
    """

    def ns(mark: Mark) -> int:
        return clock.resolve(mark, marks.begin)

    spans = {
        name: tuple(Span(ns(a), ns(b)) for a, b in pairs if b is not None)
        for name, pairs in marks.spans.items()
    }
    if not spans["forwards"] or len(marks.phases) < 3:
        return None
    begin, end, finalized = map(ns, marks.phases.values())
    last = max([finalized, *(each.end_ns for all_ in spans.values() for each in all_)])
    stamps = [None if stamp is None else ns(stamp) for stamp in marks.stamps]
    moments = {
        number: {moment: ns(mark) for moment, mark in marked.items()}
        for number, marked in sorted(marks.moments.items())
    }
    return Step(
        number=marks.number,
        layout=layout,
        backward=Span(begin, end),
        finalize_end_ns=finalized,
        end_ns=last if marks.end is None else ns(marks.end),
        buckets=tuple(
            _bucket(number, times)
            for number, times in moments.items()
            if {Moment.FULL, Moment.LAUNCHED, Moment.COPIED_OUT} <= times.keys()
        ),
        # A hook may have run in another backward than this one.
        ready_ns=tuple(t if t and begin <= t <= end else None for t in stamps),
        **spans,
    )


def _bucket(number: int, times: Mapping[Moment, int]) -> BucketTimes:
    """Return a bucket's times (full, launched, done, copied), each >= the one before.

    A smaller one is raised: marks of several streams differ by a tick. DONE, which a
    callback may mark late or not at all, becomes COPIED_OUT if later or missing.
    """
    copied = times[Moment.COPIED_OUT]
    done = min(times.get(Moment.DONE, copied), copied)
    order = (times[Moment.FULL], times[Moment.LAUNCHED], done, copied)
    return BucketTimes(number, *accumulate(order, max))
