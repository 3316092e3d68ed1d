"""Listens to one reducer and writes down its steps.

    note     a moment of a bucket                      any thread
    enter    a phase of the step begins or ends        data_parallel, _reducer
    take     when grad hooks ran, in one of N steps    _timing
    hooks    before and after optimizer steps          torch

What is kept while steps run is a few marks for each bucket. They become `Step`s when
somebody asks.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import _clock
from ._clock import Mark
from ._phase import Phase
from ._timeline import BucketTimes, Clock, Param, Span, Step, Timeline, Where
from ._untraced import untraced
from ._version import __version__
from .trace import Moment, StepPhase

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.utils.hooks import RemovableHandle

    from ._layout import Layout
    from ._reducer import Reducer

KEEP_STEPS = 200
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class Draft:
    """A step while it runs: marks of the clock, or None where nothing happened yet."""

    number: int
    begin: Mark
    forwards: list[list[Mark]] = field(default_factory=list)  # begin, end
    local_forwards: list[list[Mark]] = field(default_factory=list)  # ... each
    local_backwards: list[list[Mark]] = field(default_factory=list)
    backward_begin: Mark | None = None
    finalize_begin: Mark | None = None
    finalize_end: Mark | None = None
    end: Mark | None = None
    optimizers: list[list[Mark]] = field(default_factory=list)  # begin, end
    moments: dict[tuple[Moment, int], Mark] = field(default_factory=dict)
    stamps: Sequence[Mark | None] = ()  # of the grad hooks
    layout: Layout | None = None

    @property
    def is_finished(self) -> bool:
        """Whether everything is reduced."""
        return self.finalize_end is not None


class Stopwatch:
    """Records the last steps of a reducer, from `start` to `stop`.

    Args:
        reducer: whose steps.
        keep: how many steps; older ones are dropped. Of each is kept about 100 bytes
            per bucket, and 8 per parameter in those whose parameters are timed.
        clock: read at each moment.

    Raises:
        RuntimeError: from `start`: somebody else records this reducer.
    """

    def __init__(
        self,
        reducer: Reducer,
        *,
        keep: int = KEEP_STEPS,
        clock: _clock.Clock | None = None,
    ) -> None:
        self._reducer: Reducer | None = reducer
        specs = reducer.pipeline.specs
        self._clock = clock or _clock.clock_for(spec.device for spec in specs)
        self._managed = set(map(id, reducer.params))
        self._params = tuple(
            Param(
                spec.name,
                spec.nbytes,
                f"{'sparse ' * spec.sparse}{_short(spec.dtype)} on {spec.device}",
            )
            for spec in specs
        )
        self._where = where_of(reducer)
        self._draft: Draft | None = None
        self._finished: deque[Draft] = deque(maxlen=keep)
        self._num_opened = 0
        self._handles: list[RemovableHandle] = []
        self._is_timing = False

    # -- on and off --------------------------------------------------------------------

    def start(self) -> None:
        """Listen."""
        reducer = self._of()
        listeners = reducer.pipeline.tracer.listeners
        if any(isinstance(other, Stopwatch) for other in listeners):
            raise RuntimeError(
                "This model is being recorded already: use the Recording of the "
                "minidp.record() block around, or leave that block first."
            )
        self._timing = reducer.hooks.timed_by(self._clock.read)
        listeners.append(self)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]

    def stop(self) -> ProcessGroup:
        """Listen no more, and let go of the reducer; returns its group of now."""
        reducer = self._of()
        reducer.pipeline.tracer.listeners.remove(self)
        self._time_hooks(on=False)
        del self._timing
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._close(None)
        self._where = where_of(reducer)  # reset() may have changed it
        self._clock.settle()
        self._reducer = None
        return reducer.pipeline.group

    def _of(self) -> Reducer:
        if self._reducer is None:
            raise RuntimeError(
                "This recording is over, and its model is let go: call "
                "minidp.record(model) again for another one."
            )
        return self._reducer

    def _time_hooks(self, *, on: bool) -> None:
        if on is not self._is_timing:
            self._is_timing = on
            self._timing.switch(on=on)

    # -- what happens ------------------------------------------------------------------

    def note(self, moment: Moment, bucket: int) -> None:
        """See `trace.Listener`; ``FIRST_GRADIENT`` follows from the hooks' times."""
        draft = self._draft
        if draft is not None and draft.backward_begin is not None:
            draft.moments[moment, bucket] = self._clock.read()

    def enter(self, phase: StepPhase) -> None:
        """See `trace.Listener`."""
        now, draft = self._clock.read(), self._draft
        if phase is StepPhase.FORWARD_BEGIN:
            if draft is None or draft.is_finished or self._has_failed(draft):
                self._close(now)
                draft = self._open(now)
            draft.forwards.append([now, None])
        elif draft is None:
            return  # recording began in the middle of a step
        elif phase is StepPhase.FORWARD_END:
            draft.forwards[-1][1] = now
        elif phase is StepPhase.LOCAL_FORWARD_END:
            draft.local_forwards.append([draft.forwards.pop()[0], now])
        elif phase is StepPhase.LOCAL_BACKWARD_BEGIN:
            draft.local_backwards.append([now, None])
        elif phase is StepPhase.LOCAL_BACKWARD_END:
            _end_last(draft.local_backwards, now)
        elif draft.is_finished:
            return  # a backward without a forward: nothing is synchronised
        else:
            self._enter_backward(draft, phase, now)

    def _enter_backward(self, draft: Draft, phase: StepPhase, now: Mark) -> None:
        if phase is StepPhase.BACKWARD_BEGIN:
            draft.backward_begin = now
            draft.moments.clear()
        elif phase is StepPhase.BACKWARD_BYPASSED:
            draft.local_backwards.append([draft.backward_begin, now])
            draft.backward_begin = None
        elif phase is StepPhase.FINALIZE_BEGIN:
            draft.finalize_begin = now
        else:
            draft.finalize_end = now
            draft.layout = self._of().pipeline.layout
            draft.stamps = self._timing.take() if self._is_timing else ()

    def _has_failed(self, draft: Draft) -> bool:
        """Whether an unfinished step will never be finished."""
        begun = draft.backward_begin is not None
        return begun and self._of().phase.now is not Phase.ARMED

    def _open(self, now: Mark) -> Draft:
        draft = self._draft = Draft(self._of().pipeline.tracer.backward, now)
        self._time_hooks(on=self._num_opened % self._clock.params_every == 0)
        self._num_opened += 1
        return draft

    def _close(self, now: Mark | None) -> None:
        if self._draft is not None and self._draft.is_finished:
            self._draft.end = now
            self._finished.append(self._draft)
        self._draft = None

    @untraced
    def _before_optimizer(self, optimizer: Optimizer, *_arguments: Any) -> None:
        if self._draft is not None and self._holds_managed(optimizer):
            self._draft.optimizers.append([self._clock.read(), None])

    @untraced
    def _after_optimizer(self, optimizer: Optimizer, *_arguments: Any) -> None:
        draft = self._draft
        if draft is not None and draft.optimizers and self._holds_managed(optimizer):
            draft.optimizers[-1][1] = self._clock.read()

    def _holds_managed(self, optimizer: Optimizer) -> bool:
        groups = optimizer.param_groups
        return any(id(p) in self._managed for group in groups for p in group["params"])

    # -- what is told ------------------------------------------------------------------

    def timeline(self, clock: Clock | None = None) -> Timeline:
        """What is kept, as plain data. While it listens, this waits for the device.

        Args:
            clock: how far this rank's is ahead of rank 0's, if that is known.
        """
        if self._reducer is not None:
            self._clock.settle()
        drafts = list(self._finished)
        layouts: dict[tuple[tuple[int, ...], ...], int] = {}
        steps = []
        for draft in drafts:
            assert draft.layout is not None
            layout = layouts.setdefault(draft.layout.assignment, len(layouts))
            step = _Reading(self._clock, draft).step(layout)
            if step is not None:
                steps.append(step)
        num_dropped = self._num_opened - (self._draft is not None) - len(steps)
        return Timeline(
            self._where, self._params, tuple(layouts), tuple(steps), num_dropped, clock
        )


class _Reading:
    """A draft, read off: every mark becomes nanoseconds."""

    def __init__(self, clock: _clock.Clock, draft: Draft) -> None:
        self._clock = clock
        self._draft = draft
        self._anchor = draft.begin

    def step(self, layout: int) -> Step | None:
        """The step; None if it lacks something."""
        draft = self._draft
        forwards = self._spans(draft.forwards)
        begin, end = self._ns(draft.backward_begin), self._ns(draft.finalize_begin)
        finalized = self._ns(draft.finalize_end)
        if not forwards or begin is None or end is None or finalized is None:
            return None
        buckets = [self._bucket(number) for number in self._numbers()]
        optimizers = self._spans(draft.optimizers)
        local_backwards = self._spans(draft.local_backwards)
        after = (*optimizers, *local_backwards)
        last = max([finalized, *(span.end_ns for span in after)])
        closed = self._ns(draft.end)
        return Step(
            number=draft.number,
            layout=layout,
            forwards=forwards,
            backward=Span(begin, end),
            finalize_end_ns=finalized,
            end_ns=last if closed is None else closed,
            buckets=tuple(bucket for bucket in buckets if bucket is not None),
            optimizers=optimizers,
            ready_ns=self._ready(begin, end),
            local_forwards=self._spans(draft.local_forwards),
            local_backwards=local_backwards,
        )

    def _ns(self, mark: Mark | None) -> int | None:
        return None if mark is None else self._clock.resolve(mark, self._anchor)

    def _spans(self, pairs: Sequence[Sequence[Mark]]) -> tuple[Span, ...]:
        """Those that came to their end; one that raised did not."""
        found = [(self._ns(begin), self._ns(end)) for begin, end in pairs]
        return tuple(
            Span(begin, end)
            for begin, end in found
            if begin is not None and end is not None
        )

    def _numbers(self) -> list[int]:
        moments = self._draft.moments
        return sorted(n for moment, n in moments if moment is Moment.COPIED_OUT)

    def _bucket(self, number: int) -> BucketTimes | None:
        """Its times; without ``DONE`` (the callback of a future may be late) the next.

        On several streams times may differ by a clock tick from the order of events.
        """
        moments = self._draft.moments
        order = (Moment.FULL, Moment.LAUNCHED, Moment.DONE, Moment.COPIED_OUT)
        times = [self._ns(moments.get((moment, number))) for moment in order]
        full, launched, done, copied = times
        if full is None or launched is None or copied is None:
            return None
        launched = max(full, launched)
        copied = max(launched, copied)
        done = copied if done is None else min(max(launched, done), copied)
        return BucketTimes(number, full, launched, done, copied)

    def _ready(self, begin: int, end: int) -> tuple[int | None, ...]:
        """Of hooks that ran in this backward, not in a local one before."""
        found = [self._ns(stamp) for stamp in self._draft.stamps]
        return tuple(t if t and begin <= t <= end else None for t in found)


def _end_last(pairs: Sequence[list[Mark]], now: Mark) -> None:
    """End the last one that has not ended: one within another ends first."""
    for pair in reversed(pairs):
        if pair[1] is None:
            pair[1] = now
            return


def where_of(reducer: Reducer) -> Where:
    """On what a reducer runs."""
    group, device = reducer.pipeline.group, reducer.pipeline.specs[0].device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    hook = reducer.pipeline.averaging.comm_hook
    return Where(
        rank=group.rank(),
        world_size=group.size(),
        backend=str(group.name()),
        device=f"{device} {name}".strip(),
        host=_host(),
        versions=_versions(),
        comm_hook="" if hook is None else hook.name,
        layout_by=reducer.ready_order.layout_by,
    )


def _host() -> str:
    """Equal for processes that share a clock, containers included."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return boot or platform.node()


def _versions() -> Mapping[str, str]:
    return {
        "minidp": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
