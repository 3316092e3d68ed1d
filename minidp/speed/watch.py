"""Measure one rank's steps, and post them to the process group's store.

A `SpeedWatch` is an observer of the reducer. Each event of a step ends a phase,
and the time since the last event is added to it.
"""

from __future__ import annotations

import logging
import platform
import time
from collections import deque
from statistics import median
from typing import Any

from torch import nn

from minidp.attachment import Attachment
from minidp.core import Observer, Reducer
from minidp.data_parallel import DataParallel
from minidp.recording import wrapper_of
from minidp.trace import Moment, StepEvent

from .judge import BACKWARD, DATA, FORWARD, OPTIMIZER, PHASES, WAITING, WINDOWS, Judge

logger = logging.getLogger("minidp")

# Which phase has just ended when an event comes.
_ENDS = {
    StepEvent.LOOP_BEGIN: DATA,
    StepEvent.TURN_BEGIN: BACKWARD,  # the sums of this rank's gradients belong to it
    StepEvent.TURN_END: DATA,
    StepEvent.FORWARD_BEGIN: DATA,
    StepEvent.MODULE_BEGIN: WAITING,  # for module buffers from rank 0, or a rebuild
    StepEvent.FORWARD_END: FORWARD,
    StepEvent.LOCAL_FORWARD_END: FORWARD,
    StepEvent.BACKWARD_BEGIN: FORWARD,  # the loss belongs to it
    StepEvent.LOCAL_BACKWARD_BEGIN: FORWARD,
    StepEvent.LOCAL_BACKWARD_END: BACKWARD,
    StepEvent.BACKWARD_BYPASSED: BACKWARD,
    StepEvent.FINALIZE_BEGIN: BACKWARD,
    StepEvent.FINALIZE_END: WAITING,
    StepEvent.OPTIMIZER_BEGIN: OPTIMIZER,  # the clipping of gradients belongs to it
    StepEvent.OPTIMIZER_END: OPTIMIZER,
}
WARMUP_STEPS = 2  # they are not judged: caches are cold, and buckets are rebuilt


def watch_speed(model: DataParallel | Attachment | nn.Module) -> SpeedWatch:
    """Name, in the log of rank 0, a rank that makes the others wait.

    Call this once, on all ranks. It goes on as long as the model lives, or until
    `SpeedWatch.stop`:

        speed = minidp.watch_speed(model)
        ...                                       # train as usual
        writer.add_scalars("speed", speed.numbers(), step)

    A rank is named once it has worked longer than each other rank, by a quarter of a
    step in four of its last five steps, or by a tenth in 49 of 50. The log says its
    host, the phase that differs most (in the backward also the layers), what this
    costs, and since when.

    Waits inside collectives of the script's own count as work, and a slow network names
    nobody. If ``hang_timeout`` is None, the ranks cannot be compared, which a warning
    says.

    Args:
        model: A `DataParallel`, an `Attachment`, or an attached model.

    Raises:
        TypeError: minidp does not synchronise the model.
    """
    return SpeedWatch(wrapper_of(model, "watch_speed")._reducer)


class SpeedWatch(Observer):
    """What `watch_speed` returns: it measures the steps of this rank until `stop`.

    The watchdog's thread posts them to the store, and rank 0 judges those of all ranks.
    """

    sees_times = True

    def __init__(self, reducer: Reducer) -> None:
        communicator, self._observers = reducer.communicator, reducer.queue.observers
        self._size = communicator.size
        self._judge = Judge(reducer) if communicator.rank == 0 else None
        # The number and the seconds by phase of the last steps.
        self._steps: deque[tuple[int, list[float]]] = deque(maxlen=2 * max(WINDOWS))
        # When each bucket was full, in the last steps and in the one that runs.
        self._full: deque[dict[int, float]] = deque(maxlen=min(WINDOWS))
        self._full_now: dict[int, float] = {}
        self._now = [0.0] * len(PHASES)  # the seconds by phase of the step that runs
        self._mark = self._backward_began = time.perf_counter()
        self._has_reduced = False  # whether the step that runs has reduced gradients
        self._number = 0  # how many steps have finished
        self._observers.append(self)
        self._stop_exchange = communicator.peers.exchange_often("speed", self._exchange)
        if communicator.size > 1 and self._stop_exchange is None:
            logger.warning(
                "[rank %d] watch_speed() measures this rank only, because ranks are "
                "compared through the process group's store, by the thread of hang "
                "reports. What to do: do not pass hang_timeout=None.",
                communicator.rank,
            )

    def stop(self) -> None:
        """Stop measuring for good. `numbers` still returns what it did before."""
        self._observers.remove(self)
        if self._stop_exchange is not None:
            self._stop_exchange()
            self._stop_exchange = None

    def numbers(self) -> dict[str, float]:
        """Return numbers about this rank's last steps, for a metrics logger.

        Returns:
            The medians of the last five steps in seconds, as "data_s", "forward_s",
            "backward_s", "waiting_s" (for other ranks and for the network) and
            "optimizer_s"; until three steps have ended they are of the running step.
            "step" is the number of steps so far. Rank 0 also has "slow_rank" (-1 if
            there is none) and "slow_cost_s", what that rank costs in each step.
        """
        last = [row for _, row in [*self._steps][-min(WINDOWS) :]] or [self._now]
        medians = [median(column) for column in zip(*last, strict=True)]
        found = {f"{name}_s": s for name, s in zip(PHASES, medians, strict=True)}
        found["step"] = self._number
        if self._judge is not None:
            slow = self._judge.slow
            found["slow_rank"] = -1 if slow is None else slow.rank
            found["slow_cost_s"] = 0.0 if slow is None else slow.cost
        return found

    # -- events, see `Observer` --------------------------------------------------

    def on_bucket_event(self, moment: Moment, bucket: int) -> None:
        """Store when a bucket became full, after the start of the backward."""
        if moment is Moment.FULL:
            self._full_now[bucket] = time.perf_counter() - self._backward_began

    def on_step_event(self, event: StepEvent, leaf: int | None = None) -> None:
        """Add the time since the last event to the phase that this event ends.

        The first forward, or loop over logical ranks, after a synchronised backward
        begins a new step.
        """
        now = time.perf_counter()
        begins = event is StepEvent.FORWARD_BEGIN or event is StepEvent.LOOP_BEGIN
        if begins and self._has_reduced:
            self._close()
        elif event is StepEvent.BACKWARD_BEGIN:
            self._backward_began = now
        elif event is StepEvent.FINALIZE_END:
            self._has_reduced = True
        self._now[_ENDS[event]] += now - self._mark
        self._mark = now

    def _close(self) -> None:
        self._number += 1
        if self._number > WARMUP_STEPS:
            self._steps.append((self._number, self._now))
            self._full.append(self._full_now)
        self._now, self._full_now = [0.0] * len(PHASES), {}
        self._has_reduced = False

    # -- other ranks, in the watchdog's thread -----------------------------------------

    def _exchange(self, posted: dict[int, Any]) -> dict[str, Any]:
        """Judge on rank 0 what all have posted, and return what this rank posts next.

        The result holds the host, the last steps with their seconds by phase, and for
        each bucket the median seconds until it was full.
        """
        size = self._size
        if self._judge is not None and len(posted) == size:
            self._judge.judge(posted)
        full = list(self._full)
        shared = set.intersection(*map(set, full)) if full else ()
        return {
            "host": platform.node(),
            "steps": list(self._steps),
            "full": {bucket: median(row[bucket] for row in full) for bucket in shared},
        }
