"""Record the times of a reducer's steps.

A `Stopwatch` is an observer of the reducer (`core/observer.py`). It is told two kinds
of events::

    on_bucket_event   a moment of a bucket               on any thread
    on_step_event     a phase of the step begins or ends by data_parallel, core, guard

In some steps a `HookTiming` also stores when each grad hook ran. Recording must not
slow down what it measures. So while steps run, only marks of the clock are kept, and
`Stopwatch.steps` makes `Step` objects of them when somebody asks.
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

from minidp import world
from minidp.accelerator import Timer, has_streams
from minidp.core import BucketQueue, GradHook, GradHooks, Observer, untraced
from minidp.layout import Layout
from minidp.trace import Moment, StepEvent

from .timeline import BucketTimes, Span, Step, Turn, ValueTimes

Mark = Any  # one read of a clock: nanoseconds, or an event of a device
# The events that begin and end a span, and the field of `Step` that holds such spans.
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
# In this order, for each bucket.
_OF_VALUES = (
    Moment.VALUES_STARTED,
    Moment.VALUES_SENT,
    Moment.VALUES_AWAITED,
    Moment.VALUES_BACK,
)
_OF_LOOPS = {StepEvent.LOOP_BEGIN, StepEvent.TURN_BEGIN, StepEvent.TURN_END}


class Clock:
    """The CPU's clock. A mark is the nanoseconds of `time.perf_counter_ns`.

    In a simulated world the clock is that world's (`minidp.world`).
    """

    # Grad hooks are timed in one of so many steps, because it costs 0.3 us for each.
    params_every = 4
    read: Any

    def __init__(self) -> None:
        self.read = world.timer()  # the extension knows `time.perf_counter_ns`

    def settle(self) -> None:
        """Do nothing, because the times of the CPU are known at once."""

    def resolve(self, mark: Mark, anchor: Mark) -> int:
        """Return the mark, which is in nanoseconds already."""
        return int(mark)


class DeviceClock(Clock):
    """The clock of one device. A mark is an event on the current stream.

    In a grad hook that is the stream which wrote the gradient. In the callback of a
    future it is one that comes after the collective. `read` does not wait for the
    device, but the constructor and `settle` do.
    """

    params_every = 8  # an event per parameter costs more than a clock read

    def __init__(self, device: torch.device) -> None:
        self._timer = Timer(device)
        self._origin_ns = time.perf_counter_ns()
        self.read = self._timer.mark

    def settle(self) -> None:
        """Wait until the device has finished all work, so that events have times."""
        self._timer.settle()

    def resolve(self, mark: Mark, anchor: Mark) -> int:
        """Convert an event to nanoseconds of the CPU's clock, once it is settled.

        The ``anchor`` is an event near it (`Timer.nanoseconds`).
        """
        return self._origin_ns + self._timer.nanoseconds(mark, anchor)


class HookTiming:
    """Record when each grad hook runs, while it is switched on.

    A switched-on hook costs time, a switched-off one nothing: `switch` replaces Python
    hooks on the nodes by ones that read the clock first, and puts the plain ones back.
    C++ hooks read ``time.perf_counter_ns`` themselves; for another clock they call
    `_stamp`.
    """

    def __init__(self, hooks: GradHooks, clock: Callable[[], Any]) -> None:
        self.is_on = False
        self._hooks = hooks
        self._clock = clock
        self._is_in_cpp = (
            hooks.native_table is not None and clock is time.perf_counter_ns
        )
        self._stamps: list[Any] = [None] * len(hooks.nodes)
        plain = {hook for _, _, hook in hooks.places}
        self._timed = {hook: _timed(hook, clock, self._stamps) for hook in plain}

    def switch(self, *, on: bool) -> None:
        """Start or stop recording the times of hooks, but not during a backward."""
        if on is self.is_on:
            return
        self.is_on, table = on, self._hooks.native_table
        if table is not None:
            table.stamp_by(self._stamp if on and not self._is_in_cpp else None)
            table.is_timed = on
        for i, (on_node, key, hook) in enumerate(self._hooks.places):
            on_node[key] = MethodType(self._timed[hook] if on else hook, i)

    def _stamp(self, i: int) -> None:
        # C++ hooks call this if they do not read the clock themselves.
        self._stamps[i] = self._clock()

    def take(self) -> list[Any]:
        """Return when the hook of each parameter has run since the last `take`.

        The result is a mark of the clock for each parameter, None if its hook has not
        run.
        """
        if self._is_in_cpp:
            stamps = cast("Any", self._hooks.native_table).take_stamps()
            return [stamp or None for stamp in stamps]
        taken, self._stamps[:] = list(self._stamps), [None] * len(self._stamps)
        return taken


def _timed(hook: GradHook, clock: Callable[[], Any], stamps: list[Any]) -> GradHook:
    @untraced
    def grad_hook(i: int, grad_inputs: Any, grad_outputs: Any) -> None:
        stamps[i] = clock()
        hook(i, grad_inputs, grad_outputs)

    return grad_hook


@dataclass
class StepMarks:
    """The marks of the clock that a `Stopwatch` collects during one step."""

    number: int
    begin: Mark
    end: Mark | None = None
    # Begin and end of spans, by field of `Step`. An end is None until it happens.
    spans: defaultdict[str, list[list[Mark]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    # Three in this order: of the backward, of finalize, and of its end.
    phases: dict[StepEvent, Mark] = field(default_factory=dict)
    moments: dict[int, dict[Moment, Mark]] = field(default_factory=dict)  # by bucket
    loop: Mark | None = None  # when the loop over logical ranks began, if there is one
    # The number, begin and end of each turn in it. An end is None until it happens.
    turns: list[list[Any]] = field(default_factory=list)
    # Of values that come back: the number of the bucket, and the four marks so far.
    values: list[tuple[int, list[Mark]]] = field(default_factory=list)
    stamps: Sequence[Mark | None] = ()  # of the grad hooks, by parameter index
    layout: Layout | None = None  # set when all buckets are reduced and copied out

    @property
    def has_all_gradients(self) -> bool:
        """Whether the synchronised backward has computed all gradients."""
        return StepEvent.FINALIZE_BEGIN in self.phases

    def note_loop(self, event: StepEvent, leaf: int | None, now: Mark) -> None:
        """Store when the loop over logical ranks began, or one of its turns."""
        if event is StepEvent.LOOP_BEGIN:
            self.loop = now
        elif event is StepEvent.TURN_BEGIN:
            self.turns.append([leaf, now, None])
        elif self.turns:  # else recording began in this turn
            self.turns[-1][-1] = now


class Stopwatch(Observer):
    """Record a reducer's steps between `start` and `stop`.

    Steps whose buckets were not reduced are dropped.

    Args:
        queue: The queue of buckets whose events are recorded.
        hooks: The grad hooks, which are timed in some steps.
        keep: How many steps to keep; the oldest ones are dropped.
        clock: The clock to read. By default it is a `DeviceClock` if all parameters are
            on one device with streams, else a `Clock`.
        timed_steps: The steps in which each gradient is timed, too, counted from 0 at
            `start`. By default it is one in `Clock.params_every`.
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
        is_one_device = has_streams(first) and not others
        self._clock = clock or (DeviceClock(first) if is_one_device else Clock())
        every = range(0, sys.maxsize, self._clock.params_every)
        self._timed_steps = every if timed_steps is None else timed_steps
        self._marks: StepMarks | None = None  # those of the step that runs now
        self._finished: deque[StepMarks] = deque(maxlen=keep)
        self._num_begun = 0
        # Values on their way, which may come back in another step: as in `StepMarks`.
        self._values: list[tuple[int, list[Mark]]] = []
        # Otherwise a step begins with a forward.
        self._begins_with_loop = queue.averaging.leaves is not None

    def start(self) -> None:
        """Observe the queue, and record from the next forward on. Call this once."""
        self._timing = HookTiming(self._hooks, self._clock.read)
        self._queue.observers.append(self)

    def stop(self) -> None:
        """Stop recording for good, and let go of the reducer.

        The step under way is kept if its buckets are reduced. `steps` works afterwards,
        too.
        """
        self._queue.observers.remove(self)
        self._timing.switch(on=False)
        self._close(None)
        del self._timing, self._queue, self._hooks

    # -- events, see `Observer` --------------------------------------------------

    def on_bucket_event(self, moment: Moment, bucket: int) -> None:
        """Store when a bucket first reached a moment in this step's backward.

        Its values come back later, and perhaps not before the next step.
        """
        marks = self._marks
        if moment in _OF_VALUES:
            self._note_values(moment, bucket, self._clock.read())
        elif marks is not None and StepEvent.BACKWARD_BEGIN in marks.phases:
            marks.moments.setdefault(bucket, {}).setdefault(moment, self._clock.read())

    def _note_values(self, moment: Moment, bucket: int, now: Mark) -> None:
        if moment is Moment.VALUES_STARTED:
            # Not before: a step inside the backward sends values amid the buckets.
            if self._marks is not None and self._marks.has_all_gradients:
                self._values.append((bucket, [now]))
                self._marks.values.append(self._values[-1])
            return
        place = _OF_VALUES.index(moment)
        for each in self._values:
            number, times = each
            if number == bucket and len(times) == place:
                times.append(now)
                if moment is Moment.VALUES_BACK:
                    self._values.remove(each)
                return

    def on_step_event(self, phase: StepEvent, leaf: int | None = None) -> None:
        """Store when a phase began or ended.

        A step begins with a forward. It ends with the first forward after its
        synchronised backward has begun, so a second forward before that belongs to it.
        A second synchronised backward without a forward of its own is ignored. With
        logical ranks a step begins with their loop, and ends with the next one.
        """
        now = self._clock.read()
        if self._begins_step(phase):
            self.begin_step(now)
        marks = self._marks
        if marks is None:
            pass  # recording began in the middle of a step
        elif phase in _OF_LOOPS:
            marks.note_loop(phase, leaf, now)
        elif phase in _BEGINS:
            marks.spans[_BEGINS[phase]].append([now, None])
        elif phase in _ENDS:  # spans may be nested: this ends the one that began last
            pairs = [pair for pair in marks.spans[_ENDS[phase]] if pair[1] is None]
            for pair in pairs[-1:]:
                pair[1] = now
        elif phase is StepEvent.LOCAL_FORWARD_END:
            begin, _ = marks.spans["forwards"].pop()
            marks.spans["local_forwards"].append([begin, now])
        elif marks.layout is None:  # else it is a backward without a forward of its own
            self._enter_backward(phase, now, marks)

    def _begins_step(self, phase: StepEvent) -> bool:
        if self._begins_with_loop or phase is not StepEvent.FORWARD_BEGIN:
            return phase is StepEvent.LOOP_BEGIN
        # A backward that was begun and not finished has failed.
        return self._marks is None or StepEvent.BACKWARD_BEGIN in self._marks.phases

    def begin_step(self, now: Mark | None = None) -> None:
        """End the step that runs, if any, and begin one, at a mark or at this moment.

        Events do this by themselves. A call is for who starts a stopwatch in a step.
        """
        now = self._clock.read() if now is None else now
        self._close(now)
        self._marks = StepMarks(self._queue.ledger.finalized, now)
        self._marks.values += self._values
        self._timing.switch(on=self._num_begun in self._timed_steps)
        self._num_begun += 1

    def _enter_backward(self, phase: StepEvent, now: Mark, marks: StepMarks) -> None:
        """Store an event of the synchronised backward.

        If the backward reached no gradient after all (BACKWARD_BYPASSED), it counts as
        a local one.
        """
        if phase is StepEvent.BACKWARD_BYPASSED:
            begin = marks.phases.pop(StepEvent.BACKWARD_BEGIN, now)
            marks.spans["local_backwards"].append([begin, now])
            marks.moments.clear()
        elif phase is not StepEvent.MODULE_BEGIN:
            marks.phases[phase] = now
        if phase is StepEvent.FINALIZE_END:
            marks.layout = self._queue.layout
            self._values.clear()  # if any is left, it was dropped after an error
            marks.stamps = self._timing.take() if self._timing.is_on else ()

    def _close(self, now: Mark | None) -> None:
        if self._marks is not None and self._marks.layout is not None:
            self._marks.end = now
            self._finished.append(self._marks)
        self._marks = None

    # -- result ------------------------------------------------------------------------

    @property
    def num_ended(self) -> int:
        """How many recorded steps are over, including those that were not kept."""
        return self._num_begun - (self._marks is not None)

    def steps(self) -> tuple[list[Step], list[tuple[tuple[int, ...], ...]]]:
        """Return the kept steps, oldest first, and the layouts that they refer to.

        A layout holds the parameter indices of each bucket. This waits for the device
        if a `DeviceClock` times it.
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
    """Convert marks to a `Step`, or to None if forward or backward did not end.

    Buckets that were not reduced are left out.
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
    turns = [Turn(ns(a), ns(b), n) for n, a, b in marks.turns if b is not None]
    values = [
        ValueTimes(number, *map(ns, times))
        for number, times in marks.values
        if len(times) == len(_OF_VALUES)
    ]
    ends = [each.end_ns for each in turns] + [each.back_ns for each in values]
    last = max([last, *ends])
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
        loop_begin_ns=None if marks.loop is None else ns(marks.loop),
        turns=tuple(turns),
        values=tuple(values),
        **spans,
    )


def _bucket(number: int, times: Mapping[Moment, int]) -> BucketTimes:
    copied = times[Moment.COPIED_OUT]
    # DONE is marked in a callback, which may come late or not at all.
    done = min(times.get(Moment.DONE, copied), copied)
    order = (times[Moment.FULL], times[Moment.LAUNCHED], done, copied)
    # Marks of several streams may differ by a tick, so they are put in order.
    return BucketTimes(number, *accumulate(order, max))
