"""Decide which rank is slow, from the times that all ranks posted."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidp.core import Reducer

logger = logging.getLogger("minidp")

DATA, FORWARD, BACKWARD, WAITING, OPTIMIZER = range(5)
PHASES = ("data", "forward", "backward", "waiting", "optimizer")
OWN = [DATA, FORWARD, BACKWARD, OPTIMIZER]  # in which a rank waits for no other one
_WORDS = {
    DATA: "time between steps (data loading, logging)",
    FORWARD: "forward",
    BACKWARD: "backward",
    OPTIMIZER: "optimizer step",
}
# A rank is slow if it takes longer than all others, by this share of a step, in all but
# one of so many steps. What lasts may be smaller than what is seen at once.
WINDOWS = {5: 0.25, 50: 0.1}
LEAST_SECONDS = 0.001


@dataclass(frozen=True)
class Slow:
    """Hold a rank that is slow, its slow phase, and what that costs in each step."""

    rank: int
    phase: int
    here: float  # seconds of that phase on this rank
    others: float  # the same on the other ranks, the median
    cost: float  # per step: the next slowest rank takes that much less
    step: float  # of a step


def find_slow(times: NDArray[np.float64], share: float) -> Slow | None:
    """Return as `Slow` the rank that works longer than all others; None if none does.

    ``times``: seconds, shape (ranks, steps, phases), two ranks and three steps or more.
    Work: all phases but waiting. The rank's second shortest step must exceed each other
    rank's second longest by ``share`` of a step and by 1 ms: one odd step decides
    nothing.
    """
    own = np.sort(times[:, :, OWN].sum(axis=2), axis=1)
    low, high = own[:, 1], own[:, -2]
    rank = int(low.argmax())
    step = float(np.median(times[rank].sum(axis=1)))
    ahead = low[rank] - np.delete(high, rank).max()
    return None if ahead < max(share * step, LEAST_SECONDS) else describe(times, rank)


def describe(times: NDArray[np.float64], rank: int) -> Slow:
    """Return as `Slow` how ``rank``, slow or not, differs from the other ranks.

    ``times`` as in `find_slow`. The phase is that of all but waiting in which ``rank``
    exceeds their median most. The cost is negative if another rank works longer.
    """
    typical = np.median(times, axis=1)
    others = np.median(np.delete(typical, rank, axis=0), axis=0)
    phase = max(OWN, key=lambda each: typical[rank, each] - others[each])
    own = typical[:, OWN].sum(axis=1)
    return Slow(
        rank,
        phase,
        here=float(typical[rank, phase]),
        others=float(others[phase]),
        cost=float(own[rank] - np.delete(own, rank).max()),
        step=float(np.median(times[rank].sum(axis=1))),
    )


def align(
    rows: Sequence[Sequence[tuple[int, Sequence[float]]]],
) -> tuple[list[int], NDArray[np.float64]]:
    """Return numbers of steps, and times of shape (ranks, steps, phases).

    ``rows``: by rank, (number, seconds by phase) of its last steps. Takes the steps
    that all ranks have. If there are none (steps are fast), takes each rank's last
    ones, as many as all have, numbered as on the rank that is behind.
    """
    by_number = [dict(each) for each in rows]
    numbers = sorted(set.intersection(*map(set, by_number)))
    if numbers:
        return numbers, np.array([[row[n] for n in numbers] for row in by_number])
    size = min(map(len, rows))
    latest = min(rows, key=lambda each: max(dict(each), default=0))
    numbers = [number for number, _ in latest[len(latest) - size :]]
    tails = [[times for _, times in each[len(each) - size :]] for each in rows]
    return numbers, np.array(tails).reshape(len(rows), size, len(PHASES))


def late_bucket(full: Mapping[int, Mapping[str, float]], rank: int) -> int | None:
    """Return the bucket before which a rank loses most time in its backward.

    ``full``: by rank and bucket, seconds from the backward's begin until the bucket was
    full; compared with the others' median. None if the ranks' buckets differ (they are
    just being rebuilt), or no bucket.
    """
    buckets = sorted(full[rank], key=lambda bucket: full[rank][bucket])
    if not buckets or any(set(each) != set(buckets) for each in full.values()):
        return None
    lost, before = {}, 0.0
    for bucket in buckets:
        others = median(each[bucket] for r, each in full.items() if r != rank)
        behind = full[rank][bucket] - others
        lost[bucket], before = behind - before, behind
    return int(max(lost, key=lambda bucket: lost[bucket]))


class Judge:
    """Decide at each `judge`, on rank 0, which rank is slow; log when that changes.

    `slow` holds it, or None. The reducer is held weakly, for the layers' names.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = weakref.ref(reducer)
        self.slow: Slow | None = None
        self._window = 0  # in which that rank was found, steps
        self._since = 0  # its first slow step
        self._step = 0  # the last one judged

    def judge(self, posted: Mapping[int, Any]) -> None:
        """Judge the steps that all ranks posted since the last call; update `slow`.

        ``posted``: by rank, what `SpeedWatch._exchange` returned there. Logs a warning
        when a rank becomes slow, and when it no longer is.
        """
        numbers, times = align([posted[rank]["steps"] for rank in sorted(posted)])
        new = {n: end for end, n in enumerate(numbers, start=1) if n > self._step}
        for size, share in WINDOWS.items():
            every = size // min(WINDOWS)
            for number, end in new.items():
                if end >= size and number % every == 0:
                    window = times[:, end - size : end]
                    self._note(size, self._by_work(window, share), number, posted)
        self._step = max([self._step, *numbers])

    def _by_work(self, times: NDArray[np.float64], share: float) -> Slow | None:
        """Return as `Slow` the rank that is slow by its work; None: no rank.

        If no rank is named yet, by `find_slow`. Else look at the named rank only: it
        stays slow while it costs more than half of ``share`` of a step.
        """
        if self.slow is None:
            return find_slow(times, share)
        now = describe(times, self.slow.rank)
        return now if now.cost > share / 2 * now.step else None

    def _note(
        self, window: int, now: Slow | None, step: int, posted: Mapping[int, Any]
    ) -> None:
        """Set `slow` and log when a rank becomes slow; clear it and log when that ends.

        ``now``: the slow rank found in this ``window`` of steps, or None, which clears
        `slow` only in the window in which the rank was named. ``step``: the last one of
        the window.
        """
        if self.slow is None and now is not None:
            self.slow, self._window = now, window
            self._since = step - window + 1
            self._log_begin(now, posted)
        elif self.slow is not None and now is None and window == self._window:
            self._log_end(self.slow, step)
            self.slow = None

    def _log_begin(self, slow: Slow, posted: Mapping[int, Any]) -> None:
        where = _WORDS[slow.phase]
        if slow.phase == BACKWARD:
            full = {rank: row["full"] for rank, row in posted.items()}
            where += self._layers(late_bucket(full, slow.rank))
        logger.warning(
            "[rank 0] Rank %d (%s) slows all ranks down, since step %d: its %s takes "
            "%.4g ms, that of the others %.4g ms. This costs %.4g ms of each step of "
            "%.4g ms (%.0f %%).",
            slow.rank,
            posted[slow.rank]["host"],
            self._since,
            where,
            slow.here * 1e3,
            slow.others * 1e3,
            slow.cost * 1e3,
            slow.step * 1e3,
            100 * slow.cost / slow.step,
        )

    def _layers(self, bucket: int | None) -> str:
        reducer = self._reducer()
        if reducer is None or bucket is None:
            return ""
        names = [*reducer.queue.buckets[bucket].names]
        return f" (most of it before bucket {bucket}: {names[0]} to {names[-1]})"

    def _log_end(self, slow: Slow, step: int) -> None:
        logger.warning(
            "[rank 0] Rank %d slows the others down no longer, at step %d. It did for "
            "%d steps, which cost about %.3g s.",
            slow.rank,
            step,
            step - self._since,
            (step - self._since) * slow.cost,
        )
