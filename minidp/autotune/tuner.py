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
TIMED_STEPS = (2, 3)  # ... and in these backwards of them
LONG_SECONDS = 5.0  # trials that take longer in all say how far they are


class AutotunePolicy(RebuildPolicy, Observer):
    """Let forwards rebuild the buckets for each trial, then for the chosen layout.

    Rank 0's `Search` proposes and chooses. No trials, and no rebuild at all, if
    ``saved`` was saved after a rebuild. `measure` must be called before `is_due`.
    """

    def __init__(self, saved: SavedLayout | None) -> None:
        super().__init__(saved)
        self.told: Callable[[dict[str, Any], Choice], None] | None = None
        self._measurement: Measurement | None = None  # on rank 0, while trials run
        self._reset_trials()

    def measure(self, queue: BucketQueue, hooks: GradHooks) -> None:
        """Become an observer of ``queue``, to count backwards; keep weak references.

        Call this once, before the first backward. Measures nothing yet: that starts on
        rank 0 with trial 0, in `next_layout`.
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
        self._stop_measuring()

    # -- rebuilds, see `RebuildPolicy` -------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether the current layout stays: trials are over, or there are none."""
        return self._starts_rebuilt or self._trial >= NUM_TRIALS

    @property
    def is_due(self) -> bool:
        """Whether the next forward rebuilds; equal on all ranks.

        Before trial 0: once a ready order is kept; or, if the config follows none,
        after one backward. Then after each `STEPS` backwards, until `is_settled`.
        """
        if self.is_settled:
            return False
        if self._trial >= 0:
            return self._count >= STEPS
        if self._pipeline.config.follows_ready_order:
            return self._order is not None
        return self._count > 0

    def next_layout(self, specs: Sequence[ParamSpec], config: ReducerConfig) -> Layout:
        """Begin the next trial, or end the last; return its layout, to be broadcast.

        Only rank 0's is used. Trial 0 has torch's layout; on rank 0 measuring starts.
        Later, and for the final layout, rank 0 decides by what it measured (and calls
        `told` after the last trial); other ranks return the current layout. Drops the
        kept ready order. May print progress.
        """
        now = self._pipeline.layout
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
        if self._pipeline.communicator.rank == 0:
            self._measurement = Measurement(self._pipeline, self._hooks, torchs)
        return torchs

    def _say_trial(self) -> None:
        """Print progress on a terminal if `told` is set or trials may take over 5 s.

        In trial 0 also store when the trials began.
        """
        number, now = self._trial, time.monotonic()
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
        """Return ``now`` as `to_plain` does; "rebuilt" is True once `is_settled`.

        While a ready order is kept (before trial 0): torch's layout by that order.
        """
        plain = super().plain_layout(now, specs, config)
        return plain | {"rebuilt": self.is_settled}

    def reset(self, *, rebuilds_again: bool = False) -> None:
        """Forget the ready order, stop measuring; let the trials begin again.

        No trials if ``saved`` was rebuilt, not even with ``rebuilds_again``. Does not
        change the buckets.
        """
        super().reset()  # a tuned layout stays
        self._reset_trials()

    # -- an observer of the queue ---------------------------------------------------

    def finished(self) -> None:
        """Count a finished reduction; all ranks finish the same, so counts agree."""
        self._count += 1

    # -- rank 0 ------------------------------------------------------------------------

    def _stop_measuring(self) -> None:
        if self._measurement is not None:
            self._measurement.stop()
            self._measurement = None

    def _decide(self, now: Layout) -> Layout:
        """Return the layout of the trial that begins, or in the end the one that stays.

        For rank 0 only. After the last trial measuring ends, and `told` gets the
        choice; if nobody has set `told`, the choice is logged. Neither happens if
        `Measurement.decide` returned ``now`` without a choice.
        """
        assert self._measurement is not None
        layout, choice = self._measurement.decide(self._trial, now)
        if self.is_settled:
            self._stop_measuring()
        if choice is None:
            return layout
        if self.told is not None:
            self.told(to_plain(layout, self._pipeline.specs, rebuilt=True), choice)
        else:
            # A warning: that is what people see who have set up no logging.
            logger.warning('bucket_cap_mb="auto": %s.', choice)
        return layout


class Measurement:
    """Measure the trials of one reducer's ``queue``; decide which layout is next.

    `AutotunePolicy` makes it, on rank 0 only, in the first forward of trial 0: the
    constructor starts that trial's stopwatch. ``torchs``: trial 0's layout.
    """

    def __init__(self, queue: BucketQueue, hooks: GradHooks, torchs: Layout) -> None:
        self._queue, self._hooks = queue, hooks
        self._search = Search(queue.specs, torchs)
        self._stopwatch = self._started(0)

    def _started(self, trial: int) -> Stopwatch:
        """Return a running stopwatch for ``trial``; its first forward begins now.

        In trials 0 and 1 it also times the gradients of two backwards.
        """
        timed = TIMED_STEPS * (trial in TIMED_TRIALS)
        watch = Stopwatch(self._queue, self._hooks, keep=STEPS, timed_steps=timed)
        watch.start()
        watch.enter(StepEvent.FORWARD_BEGIN)
        return watch

    def stop(self) -> None:
        """Stop the stopwatch for good, so that nothing is measured any more."""
        self._stopwatch.stop()

    def decide(self, trial: int, now: Layout) -> tuple[Layout, Choice | None]:
        """Store the ended trial's steps but its first; return ``trial``'s layout, None.

        ``trial`` NUM_TRIALS: return the layout that stays and the `Choice`.
        Return (now, None) if the comm hook may know the buckets, or, with a warning, if
        the search raises ValueError. ``now``: the ended trial's layout. Replaces the
        stopwatch by a new one, which runs. Waits for the GPU, if one is timed.
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
        """Return whether a comm hook is set whose state is not None nor a group."""
        hook = self._queue.averaging.comm_hook
        return not (hook is None or hook.state is None or is_group(hook.state))
