"""Try layouts in the first backwards, and keep the best (``bucket_cap_mb="auto"``).

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
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from minidp.comm import is_group
from minidp.config import ReducerConfig, SavedLayout
from minidp.console import say_progress
from minidp.core import BucketQueue, GradHooks, Observer, RebuildPolicy, layout_after
from minidp.layout import Layout, ParamSpec, to_plain
from minidp.overlap import AUTO, AUTO_TRIES, Stopwatch
from minidp.trace import StepEvent

from .trials import NUM_TRIALS, Choice, Search

logger = logging.getLogger("minidp")
STEPS = 6  # backwards of one trial; the first has cold caches and is not counted
TIMED_TRIALS = (0, 1)  # gradients are timed, for the model, in these trials
TIMED_STEPS = (1, 2)  # ... and in these backwards of them
LONG_SECONDS = 5.0  # trials that take longer in all say how far they are


class AutotunePolicy(RebuildPolicy, Observer):
    """Decide on rebuilds of buckets: several layouts on trial, then the fastest."""

    def __init__(self, saved: SavedLayout | None) -> None:
        super().__init__(saved)
        self.told: Callable[[dict[str, Any], Choice], None] | None = None
        self._stopwatch: Stopwatch | None = None  # on rank 0, while trials run
        self._reset_trials()

    def measure(self, queue: BucketQueue, hooks: GradHooks) -> None:
        """Attach to ``queue``, to count its backwards; keep weak references to both.

        Call this once, before the first backward. Rank 0 measures with both, later.
        """
        # The queue refers to this object: a cycle would keep buckets until gc runs.
        self._pipeline: BucketQueue = weakref.proxy(queue)
        self._hooks: GradHooks = weakref.proxy(hooks)
        queue.observers.append(self)

    def _reset_trials(self) -> None:
        self.layout_by = "" if self._starts_rebuilt else AUTO_TRIES
        self._trial = -1  # -1: not begun
        self._began = 0.0  # trial 0, seconds
        self._count = 0  # backwards since the last rebuild
        self._search: Search | None = None  # on rank 0
        self._stop_measuring()

    # -- rebuilds, see `RebuildPolicy` -------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether the current layout stays: trials are over, or there are none."""
        return self._starts_rebuilt or self._trial >= NUM_TRIALS

    @property
    def is_due(self) -> bool:
        """Whether the next forward rebuilds for another trial; equal on all ranks."""
        if self.is_settled:
            return False
        if self._trial >= 0:
            return self._count >= STEPS
        if self._pipeline.config.follows_ready_order:
            return self._order is not None
        return self._count > 0

    def next_layout(self, specs: Sequence[ParamSpec], config: ReducerConfig) -> Layout:
        """Begin the next trial; return a layout for it, of which only rank 0's counts.

        Trial 0 has torch's layout; on rank 0 measuring starts. For later ones rank 0
        decides by what it measured; the other ranks return the current layout.
        """
        now = self._pipeline.layout
        self._count = 0
        self._trial += 1
        if not self.is_settled:
            self._say_trial()
        self.layout_by = AUTO if self.is_settled else AUTO_TRIES
        order, self._order = self._order, None
        if self._trial > 0:
            return now if self._search is None else self._decide(self._search, now)
        self.has_rebuilt = True
        torchs = now if order is None else layout_after(order, specs, config)
        if self._pipeline.communicator.rank == 0:
            self._search = Search(specs, torchs)
            self._stopwatch = Stopwatch(self._pipeline, self._hooks, keep=STEPS)
            self._stopwatch.timed_steps = TIMED_STEPS
            self._stopwatch.start()
            self._stopwatch.enter(StepEvent.FORWARD_BEGIN)  # this one has begun
        return torchs

    def _say_trial(self) -> None:
        """Print on a terminal how far trials are, if they are long or for `told`."""
        number, now = self._trial, time.monotonic()
        if number == 0:
            self._began = now
        spent = now - self._began
        left = spent * (NUM_TRIALS - number) / max(number, 1)
        if self.told is not None or spent + left > LONG_SECONDS:
            until = f", {left:.0f} s to go" * bool(number)
            text = f"tries layout {number + 1} of {NUM_TRIALS}{until}"
            say_progress(f'minidp: bucket_cap_mb="auto" {text}')

    def plain_layout(
        self, now: Layout, specs: Sequence[ParamSpec], config: ReducerConfig
    ) -> dict[str, Any]:
        """Return layout ``now`` as a dict; "rebuilt" is False until trials are over."""
        plain = super().plain_layout(now, specs, config)
        return plain | {"rebuilt": self.is_settled}

    def reset(self, *, rebuilds_again: bool = False) -> None:
        """Forget the ready order and all measurements; start trials again, if any."""
        super().reset(rebuilds_again=rebuilds_again)
        self._reset_trials()

    # -- an observer of the queue ---------------------------------------------------

    def finished(self) -> None:
        """Count a finished backward; the count is the same on all ranks."""
        self._count += 1

    # -- rank 0 ------------------------------------------------------------------------

    def _stop_measuring(self) -> None:
        if self._stopwatch is not None:
            self._stopwatch.stop()
            self._stopwatch = None

    def _decide(self, search: Search, now: Layout) -> Layout:
        """On rank 0: store the ended trial's times, return the next trial's layout.

        After the last trial: stop measuring, log and return the layout that stays, pass
        it to `told`, if set. Return ``now`` instead, without `told`, if the comm hook
        may know the buckets, or the measurements do not fit the model.
        """
        assert self._stopwatch is not None
        is_last = self._trial == NUM_TRIALS
        steps, _ = self._stopwatch.steps()
        search.add(now, steps[1:])
        self._stopwatch.clear()
        self._stopwatch.timed_steps = TIMED_STEPS * (self._trial in TIMED_TRIALS)
        if is_last:
            self._stop_measuring()
        hook = self._pipeline.averaging.comm_hook
        if not (hook is None or hook.state is None or is_group(hook.state)):
            if is_last:
                logger.info(
                    'bucket_cap_mb="auto": the layout stays as it is, because the comm '
                    "hook has a state, which may depend on the buckets."
                )
            return now
        try:
            layout = search.proposal(self._trial)
        except ValueError as error:  # the measurements do not fit the model
            logger.warning('bucket_cap_mb="auto" keeps the layout: %s', error)
            return now
        if is_last:
            choice = search.choice()
            logger.info('bucket_cap_mb="auto": %s.', choice)
            if self.told is not None:
                plain = to_plain(layout, self._pipeline.specs, rebuilt=True)
                self.told(plain, choice)
        return layout
