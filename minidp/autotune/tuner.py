"""Try layouts in the first backwards, and keep the best (``bucket_cap_mb="auto"``).

Backwards are counted, and after every six of them the next layout is tried::

    backward   0          torch's first layout
               1 .. 6     trial 0                    `trials` chooses the layouts
               7 .. 12    trial 1
               ...        ...
               49 ..      the layout that stays

Every rank counts the same backwards, so all ranks rebuild before the same forward.
Rank 0 measures and decides. The others adopt its layout, as after torch's rebuild.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from minidp import world
from minidp.comm import ProcessGroup
from minidp.config import ReducerConfig, SavedLayout
from minidp.console import say_progress
from minidp.core import BucketQueue, GradHooks, Observer, RebuildPolicy, layout_after
from minidp.layout import Layout, ParamSpec, to_plain
from minidp.overlap import AUTO, AUTO_TRIES, Stopwatch
from minidp.trace import StepEvent

from .trials import NUM_TRIALS, Choice, Search

logger = logging.getLogger("minidp")
STEPS = 6  # the backwards of a trial; the first has cold caches and does not count
TIMED_TRIALS = (0, 1)  # in these trials gradients are timed, for the model
TIMED_STEPS = (2, 3)  # in these backwards of such a trial
LONG_SECONDS = 5.0  # if all trials take longer, they say how far they are


class AutotunePolicy(RebuildPolicy, Observer):
    """Let forwards rebuild the buckets for each trial, and then for the chosen layout.

    If ``saved`` is a final layout, there are no trials, and no rebuild at all.
    `measure` must be called first.
    """

    def __init__(self, saved: SavedLayout | None) -> None:
        super().__init__(saved)
        # Is called on rank 0 with the layout that stays; without it that is logged.
        self.told: Callable[[dict[str, Any], Choice], None] | None = None
        self._measurement: Measurement | None = None  # on rank 0, while trials run
        self._reset_trials()

    def measure(self, queue: BucketQueue, hooks: GradHooks) -> None:
        """Count the backwards of a queue. This must be called before the first one.

        Rank 0 begins to measure with trial 0, in `next_layout`.
        """
        # The queue refers to this object, and a cycle would keep the buckets until the
        # garbage collector runs.
        self._queue: BucketQueue = weakref.proxy(queue)
        self._hooks: GradHooks = weakref.proxy(hooks)
        queue.observers.append(self)

    def _reset_trials(self) -> None:
        self.layout_by = "" if self._starts_rebuilt else AUTO_TRIES
        self._trial = -1  # the number of the trial; -1 before the first
        self._began = 0.0  # when trial 0 began
        self._count = 0  # how many backwards there were since the last rebuild
        self._stop_measuring()

    # -- rebuilds, see `RebuildPolicy` -------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether the present layout stays: trials are over, or there are none."""
        return self._starts_rebuilt or self._trial >= NUM_TRIALS

    @property
    def is_due(self) -> bool:
        """Whether the next forward rebuilds the buckets, which is equal on all ranks.

        The first time it does so when the order of gradients is known. Then it does
        after each trial.
        """
        if self.is_settled:
            return False
        if self._trial >= 0:
            return self._count >= STEPS
        if self._queue.config.follows_ready_order:
            return self._order is not None
        return self._count > 0

    def next_layout(self, specs: Sequence[ParamSpec], config: ReducerConfig) -> Layout:
        """Begin the next trial, or end the last one, and return the layout to use.

        Rank 0's layout is broadcast afterwards, so the other ranks return any. In trial
        0 it is torch's, and measuring begins. Later rank 0 decides by what it has
        measured.
        """
        now = self._queue.layout
        self._count = 0
        self._trial += 1
        if not self.is_settled:
            self._say_trial()
        self.layout_by = AUTO if self.is_settled else AUTO_TRIES
        order, self._order = self._order, None
        if self._trial > 0:
            return now if self._measurement is None else self._decide(now)
        self.has_rebuilt = True
        torchs = now if order is None else layout_after(order, specs, config)
        if self._queue.communicator.rank == 0:
            self._measurement = Measurement(self._queue, self._hooks, torchs)
        return torchs

    def _say_trial(self) -> None:
        """Print progress on a terminal, if somebody waits for it or it takes long."""
        number, now = self._trial, world.now()
        if number == 0:
            self._began = now
        spent = now - self._began
        left = spent * (NUM_TRIALS - number) / max(number, 1)
        if self.told is not None or spent + left > LONG_SECONDS:
            until = f", {max(left, 1):.0f} s to go" * bool(number)
            text = f"tries layout {number + 1} of {NUM_TRIALS}{until}"
            say_progress(f'minidp: bucket_cap_mb="auto" {text}')

    def plain_layout(
        self, now: Layout, specs: Sequence[ParamSpec], config: ReducerConfig
    ) -> dict[str, Any]:
        """Return the layout as plain data, which is final only once `is_settled`."""
        plain = super().plain_layout(now, specs, config)
        return plain | {"rebuilt": self.is_settled}

    def reset(self, *, rebuilds_again: bool = False) -> None:
        """Let the trials begin again. The buckets stay as they are."""
        super().reset()  # a tuned layout stays, even with `rebuilds_again`
        self._reset_trials()

    # -- an observer of the queue ---------------------------------------------------

    def finished(self) -> None:
        """Count a finished reduction. All ranks finish the same ones."""
        self._count += 1

    # -- rank 0 ------------------------------------------------------------------------

    def _stop_measuring(self) -> None:
        if self._measurement is not None:
            self._measurement.stop()
            self._measurement = None

    def _decide(self, now: Layout) -> Layout:
        """Return the layout of the next trial, or in the end the one that stays."""
        assert self._measurement is not None
        layout, choice = self._measurement.decide(self._trial, now)
        if self.is_settled:
            self._stop_measuring()
        if choice is None:
            return layout
        if self.told is not None:
            self.told(to_plain(layout, self._queue.specs, rebuilt=True), choice)
        else:
            # This is a warning, because people who have set up no logging see only
            # those.
            logger.warning('bucket_cap_mb="auto": %s.', choice)
        return layout


class Measurement:
    """Measure the trials of one reducer, and decide which layout is next.

    `AutotunePolicy` makes it on rank 0 in the first forward of trial 0, whose layout is
    ``torchs``. The constructor begins to measure.
    """

    def __init__(self, queue: BucketQueue, hooks: GradHooks, torchs: Layout) -> None:
        self._queue, self._hooks = queue, hooks
        self._search = Search(queue.specs, torchs)
        self._stopwatch = self._started(0)

    def _started(self, trial: int) -> Stopwatch:
        """Return a stopwatch for a trial, whose first forward begins now."""
        timed = TIMED_STEPS * (trial in TIMED_TRIALS)
        watch = Stopwatch(self._queue, self._hooks, keep=STEPS, timed_steps=timed)
        watch.start()
        watch.begin_step()
        watch.on_step_event(StepEvent.FORWARD_BEGIN)
        return watch

    def stop(self) -> None:
        """Stop measuring for good."""
        self._stopwatch.stop()

    def decide(self, trial: int, now: Layout) -> tuple[Layout, Choice | None]:
        """End a trial, and return the layout of the next one, or the one that stays.

        In the last case the choice is returned, too. The layout stays as it is if the
        comm hook may know the buckets, or if nothing could be decided.

        Args:
            trial: The number of the trial that begins; NUM_TRIALS after the last one.
            now: The layout of the trial that has ended.
        """
        steps, layouts = self._stopwatch.steps()
        ended = [step for step in steps if layouts[step.layout] == now.assignment]
        self._search.add(now, ended[1:])
        self._stopwatch.stop()
        self._stopwatch = self._started(trial)
        if self._hook_may_know_buckets():
            if trial == NUM_TRIALS:
                logger.warning(
                    'bucket_cap_mb="auto": the layout stays as it is, because the comm '
                    "hook has a state, which may depend on the buckets."
                )
            return now, None
        try:
            if trial < NUM_TRIALS:
                return self._search.proposal(trial), None
            choice = self._search.choice()
        except ValueError as error:  # the measurements do not fit the model
            logger.warning('bucket_cap_mb="auto" keeps the layout: %s', error)
            return now, None
        return choice.best.layout, choice

    def _hook_may_know_buckets(self) -> bool:
        # A hook with a state of its own may keep errors or factors for each bucket.
        hook = self._queue.averaging.comm_hook
        return not (
            hook is None or hook.state is None or isinstance(hook.state, ProcessGroup)
        )
