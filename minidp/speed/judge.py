"""Decide which rank is slow, from the times that all ranks have posted.

A rank's *work* is what it does without waiting for others: all phases but `WAITING`. A
rank is slow if it works longer than each other one, and keeps doing so.
"""

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
OWN = [DATA, FORWARD, BACKWARD, OPTIMIZER]  # the phases in which a rank works
_WORDS = {
    DATA: "time between steps (data loading, logging)",
    FORWARD: "forward",
    BACKWARD: "backward",
    OPTIMIZER: "optimizer step",
}
# A rank is slow if, in all but one of so many steps, it takes longer than all others by
# this share of a step. A smaller share is enough if it lasts for more steps.
WINDOWS = {5: 0.25, 50: 0.1}
LEAST_SECONDS = 0.001


@dataclass(frozen=True)
class Slow:
    """A rank that is slow, its slow phase, and what that costs, in seconds."""

    rank: int
    phase: int
    here: float  # what that phase takes on this rank
    others: float  # the median of what it takes on the other ranks
    cost: float  # by how much the next slowest rank is faster, in each step
    step: float  # what a step takes


def find_slow(times: NDArray[np.float64], share: float) -> Slow | None:
    """Return the rank that works longer than all others, or None if none does.

    Args:
        times: Seconds, with the shape (ranks, steps, phases), of at least two ranks and
            three steps.
        share: By which share of a step the rank must work longer.
    """
    # One odd step must not decide, so the rank's second shortest step is compared with
    # the second longest of each other rank.
    own = np.sort(times[:, :, OWN].sum(axis=2), axis=1)
    low, high = own[:, 1], own[:, -2]
    rank = int(low.argmax())
    step = float(np.median(times[rank].sum(axis=1)))
    ahead = low[rank] - np.delete(high, rank).max()
    return None if ahead < max(share * step, LEAST_SECONDS) else describe(times, rank)


def describe(times: NDArray[np.float64], rank: int) -> Slow:
    """Return how a rank, which may be slow or not, differs from the others.

    The phase is the one in which it exceeds the median of the others most. The cost is
    negative if another rank works longer. The times are those of `find_slow`.
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
    """Bring the steps of all ranks together.

    Steps may be so fast that no rank still has the steps of another one. Then the last
    steps of each rank are taken, equally many, numbered as on the rank that is behind.

    Args:
        rows: For each rank, the number and the seconds by phase of its last steps.

    Returns:
        The numbers of the steps, and their times in seconds, with the shape (ranks,
        steps, phases).
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

    It is None while the ranks have different buckets, because these are being rebuilt.

    Args:
        full: The seconds from the backward's start until a bucket was full, by rank and
            bucket.
        rank: The rank to compare with the median of the others.
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
    """Decide on rank 0 which rank is slow, and log when that changes."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = weakref.ref(reducer)  # for the names of layers
        self.slow: Slow | None = None
        self._window = 0  # how many steps that rank was found slow in
        self._since = 0  # its first slow step
        self._step = 0  # the last step that was judged

    def judge(self, posted: Mapping[int, Any]) -> None:
        """Judge the steps that all ranks have posted since the last call.

        A warning is logged when a rank becomes slow, and when it no longer is. What is
        ``posted``, by rank, is what `SpeedWatch` returned there.
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
        """Return the rank that is slow by its work, or None."""
        if self.slow is None:
            return find_slow(times, share)
        # A rank that was named stays slow for longer than it took to be named:
        # otherwise one at the limit would be named again and again.
        now = describe(times, self.slow.rank)
        return now if now.cost > share / 2 * now.step else None

    def _note(
        self, window: int, now: Slow | None, step: int, posted: Mapping[int, Any]
    ) -> None:
        """Set or clear `slow`, and log that, if it has changed.

        Args:
            window: The number of steps that were looked at.
            now: The slow rank in these steps, or None. A rank is no longer slow only if
                it is not in a window of the length in which it was named.
            step: The last step of the window.
            posted: What all ranks have posted.
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
