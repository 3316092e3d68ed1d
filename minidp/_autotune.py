"""``bucket_cap_mb="auto"``: the first backwards try layouts, and the best one stays.

    backward   0          torch's first layout
               1 .. 6     trial 0                    `_tuning` says which layout
               7 .. 12    trial 1
               ...        ...
               49 ..      what stays

Every rank counts backwards alike, so all rebuild before the same forward; rank 0
measures and decides, and the others adopt its layout, as they do for torch's rebuild.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ._clock import Mark, clock_for
from ._groups import is_group
from ._network import messages_of
from ._rebuild import ReadyOrder, layout_after
from ._saved_layout import to_plain
from ._timeline import AUTO, AUTO_TRIES
from ._tuning import NUM_TRIALS, Choice, Sample, Search
from .trace import Moment, StepPhase

if TYPE_CHECKING:
    from ._autograd import GradHooks
    from ._layout import Layout, ParamSpec
    from ._pipeline import Pipeline
    from .config import ReducerConfig, SavedLayout

logger = logging.getLogger("minidp")
STEPS = 6  # backwards of one trial; the first meets cold memory and is not counted
TIMED_TRIALS = (0, 1)  # in which
TIMED_STEPS = (1, 2)  # each gradient is timed, for the model


class Tuner(ReadyOrder):
    """Takes the place of the ready order, and rebuilds several times.

    Args:
        saved: the layout to start with; if it is a final one, nothing is tried.
        pipeline: whose buckets; this is one of its observers.
        hooks: tell when gradients become ready.
    """

    uses_grads = False

    def __init__(
        self, saved: SavedLayout | None, pipeline: Pipeline, hooks: GradHooks
    ) -> None:
        super().__init__(saved)
        # It holds us, and must not wait for a garbage collection to go.
        self._pipeline: Pipeline = weakref.proxy(pipeline)
        self._hooks: GradHooks = weakref.proxy(hooks)
        pipeline.observers.append(self)
        self.told: Callable[[dict[str, Any], Choice], None] | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.layout_by = "" if self._starts_rebuilt else AUTO_TRIES
        self._trial = -1  # -1: not begun
        self._count = 0  # backwards since the last rebuild
        self._search: Search | None = None  # of rank 0
        self._probe: Probe | None = None

    # -- as a ready order --------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether this layout stays."""
        return self._starts_rebuilt or self._trial >= NUM_TRIALS

    @property
    def is_due(self) -> bool:
        """See `ReadyOrder`."""
        if self.is_settled:
            return False
        if self._trial >= 0:
            return self._count >= STEPS
        if self._pipeline.config.follows_ready_order:
            return self._order is not None
        return self._count > 0

    def next_layout(self, specs: Sequence[ParamSpec], config: ReducerConfig) -> Layout:
        """See `ReadyOrder`; what other ranks than 0 return does not count."""
        now = self._pipeline.layout
        self._count = 0
        self._trial += 1
        self.layout_by = AUTO if self.is_settled else AUTO_TRIES
        if self._trial == 0:
            self.has_rebuilt = True
            order, self._order = self._order, None
            torchs = now if order is None else layout_after(order, specs, config)
            if self._pipeline.rank == 0:
                self._search = Search(specs, torchs)
            self._listen()
            return torchs
        self._order = None
        if self._search is None:
            return now
        return self._decide(self._search, now)

    def plain_layout(
        self, now: Layout, specs: Sequence[ParamSpec], config: ReducerConfig
    ) -> dict[str, Any]:
        """See `ReadyOrder`; a layout that is being tried is not final."""
        plain = super().plain_layout(now, specs, config)
        return plain | {"rebuilt": self.is_settled}

    def allow_again(self) -> None:
        """See `ReadyOrder`."""
        self.start_over()

    def start_over(self) -> None:
        """See `ReadyOrder`."""
        super().start_over()
        self._stop_listening()
        self._begin_anew()

    # -- as an observer of the pipeline ------------------------------------------------

    def reduced(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Nothing to do for a bucket."""

    def finished(self) -> None:
        """A reduction is over; equally many on all ranks."""
        self._count += 1

    # -- measuring ---------------------------------------------------------------------

    def _listen(self) -> None:
        if self._search is not None:
            self._probe = Probe(self._pipeline, self._hooks)
            self._pipeline.tracer.listeners.append(self._probe)
            self._probe.begin_trial(TIMED_STEPS)

    def _stop_listening(self) -> None:
        if self._probe is not None:
            self._probe.time_hooks(on=False)
            self._pipeline.tracer.listeners.remove(self._probe)
            self._probe = None

    def _decide(self, search: Search, now: Layout) -> Layout:
        """Rank 0: what comes next."""
        probe = self._probe
        assert probe is not None
        search.add(now, probe.samples()[1:])
        probe.begin_trial(TIMED_STEPS if self._trial in TIMED_TRIALS else ())
        if self._trial == NUM_TRIALS:
            self._stop_listening()
        if self._hook_may_know_buckets():
            if self._trial == NUM_TRIALS:
                logger.info(
                    'bucket_cap_mb="auto": the layout stays as it is, because the comm '
                    "hook has a state, which may depend on the buckets."
                )
            return now
        try:
            layout = search.proposal(self._trial)
        except ValueError as error:  # nothing was measured that makes sense
            logger.warning('bucket_cap_mb="auto" keeps the layout: %s', error)
            return now
        if self._trial == NUM_TRIALS:
            self._conclude(search.choice(), layout)
        return layout

    def _conclude(self, choice: Choice, layout: Layout) -> None:
        logger.info('bucket_cap_mb="auto": %s.', choice)
        if self.told is not None:
            self.told(to_plain(layout, self._pipeline.specs, rebuilt=True), choice)

    def _hook_may_know_buckets(self) -> bool:
        """Whether a comm hook keeps something for each bucket (as PowerSGD does)."""
        hook = self._pipeline.averaging.comm_hook
        return not (hook is None or hook.state is None or is_group(hook.state))


@dataclass
class _Draft:
    """Marks of one backward."""

    phases: dict[StepPhase, Mark] = field(default_factory=dict)
    moments: dict[tuple[Moment, int], Mark] = field(default_factory=dict)
    stamps: Sequence[Mark | None] = ()
    sizes: tuple[int, ...] = ()  # bytes of each bucket; 0: nobody knows (sparse)


class Probe:
    """A listener of the tracer: what each backward takes."""

    def __init__(self, pipeline: Pipeline, hooks: GradHooks) -> None:
        self._pipeline = pipeline  # a proxy, too
        self._clock = clock_for(spec.device for spec in pipeline.specs)
        self._timing = hooks.timed_by(self._clock.read)
        self._is_timing = False
        self._draft = _Draft()
        self.begin_trial(())

    def begin_trial(self, timed: Sequence[int]) -> None:
        """Forget what was, and say in which backwards gradients are timed."""
        self._timed = timed
        self._drafts: list[_Draft] = []
        self.time_hooks(on=False)

    def time_hooks(self, *, on: bool) -> None:
        """Let grad hooks read the clock, or no more."""
        if on is not self._is_timing:
            self._is_timing = on
            self._timing.switch(on=on)

    def note(self, moment: Moment, bucket: int) -> None:
        """See `trace.Listener`."""
        self._draft.moments[moment, bucket] = self._clock.read()

    def enter(self, phase: StepPhase) -> None:
        """See `trace.Listener`."""
        if phase is StepPhase.FORWARD_BEGIN:  # hooks may change now
            self.time_hooks(on=len(self._drafts) in self._timed)
        if phase is StepPhase.BACKWARD_BEGIN:
            self._draft = _Draft()
        draft = self._draft
        draft.phases[phase] = self._clock.read()
        if phase is StepPhase.FINALIZE_END and StepPhase.BACKWARD_BEGIN in draft.phases:
            buckets = self._pipeline.layout.buckets
            draft.sizes = tuple(0 if b.sparse else b.nbytes for b in buckets)
            draft.stamps = self._timing.take() if self._is_timing else ()
            self._drafts.append(draft)
            self._draft = _Draft()

    def samples(self) -> list[Sample]:
        """What was measured since the trial began; waits for the device."""
        self._clock.settle()
        return [self._read(draft) for draft in self._drafts]

    def _read(self, draft: _Draft) -> Sample:
        anchor = draft.phases[StepPhase.BACKWARD_BEGIN]
        begin = self._clock.resolve(anchor, anchor)

        def seconds(mark: Mark) -> float:
            return (self._clock.resolve(mark, anchor) - begin) / 1e9

        spans = []
        for number, nbytes in enumerate(draft.sizes):
            launched = draft.moments.get((Moment.LAUNCHED, number))
            done = draft.moments.get((Moment.DONE, number))
            if launched is not None and done is not None:  # it travelled
                spans.append((nbytes, seconds(launched), seconds(done)))
        return Sample(
            tuple(None if s is None else max(0.0, seconds(s)) for s in draft.stamps),
            seconds(draft.phases[StepPhase.FINALIZE_BEGIN]),
            seconds(draft.phases[StepPhase.FINALIZE_END]),
            tuple(messages_of(spans)),
        )
