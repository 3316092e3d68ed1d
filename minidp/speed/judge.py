"""Decide which rank is slow, from the times that all ranks posted."""

from __future__ import annotations

import logging
import weakref
from collections import deque
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
    WAITING: "network connection",
}
# A rank is slow if it takes longer than all others, by this share of a step, in all but
# one of so many steps. What lasts may be smaller than what is seen at once.
WINDOWS = {5: 0.25, 50: 0.1}
LEAST_SECONDS = 0.001
# A link is slow if its rate is below this share of its usual one and of the others'; if
# it was never faster, below that share of the others'. To send at that rate must take
# at least a share of the time that all ranks wait.
SLOWER, NEVER_FASTER, EXPLAINED = 0.4, 0.25, 0.7
LAST, FEW, MANY = 3, 6, 40  # rates of links: the last ones; at least as many; all kept


@dataclass(frozen=True)
class Slow:
    """Hold a rank that is slow, its slow phase, and what that costs in each step."""

    rank: int
    phase: int
    here: float  # seconds of that phase on this rank; of a link: bytes per second
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


def find_slow_link(
    rates: NDArray[np.float64],
    waits: NDArray[np.float64],
    nbytes: Sequence[float],
    step: float,
) -> Slow | None:
    """Return as `Slow` a rank whose network link got slow or never was fast; or None.

    Got slow: sends below `SLOWER` times its usual rate, and other ranks' last rates.
    Never was fast: below `NEVER_FASTER` times other ranks' rates; known after `MANY`
    times. ``rates``: bytes per second, shape (times, ranks), often estimated far too
    high. ``waits``: at those times, seconds per step that every rank waits at least;
    the last must exceed the usual one (never fast: 0) by ``step`` / 4 seconds, and
    sending must explain it. ``nbytes``: per step, by rank. None before `FEW` times.
    """
    if len(rates) < FEW:
        return None
    last = np.median(rates[-LAST:], axis=0)
    before, wait = float(np.median(waits[:-LAST])), float(waits[-1])
    rank = int(last.argmin())
    usual = float(np.median(rates[:-LAST, rank]))
    lower = np.percentile(rates[:-LAST], 25, axis=0)  # nearer to what the link can do
    others = float(np.delete(lower, rank).min())
    highest = SLOWER * min(usual, np.delete(last, rank).min())
    if len(rates) == MANY and np.median(rates[:, rank]) < NEVER_FASTER * others:
        highest, before = NEVER_FASTER * others, 0.0
    highest = min(highest, nbytes[rank] / (EXPLAINED * max(wait, LEAST_SECONDS)))
    cost = wait - before
    if last[rank] > highest or cost < max(max(WINDOWS.values()) * step, LEAST_SECONDS):
        return None
    return Slow(rank, WAITING, float(last[rank]), others, cost, step)


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
        self._window = 0  # in which that rank was found, steps; 0: by its link
        self._since = 0  # its first slow step
        self._step = 0  # the last one judged
        # Rates of the ranks' links, and how long all waited, while no rank was slow.
        self._links: deque[tuple[Sequence[float], float]] = deque(maxlen=MANY)

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
        is_by_work = self.slow is not None and self._window > 0
        if new and len(numbers) >= min(WINDOWS) and not is_by_work:
            links = [posted[rank]["link"] for rank in sorted(posted)]
            link = self._by_link(links, times[:, -min(WINDOWS) :])
            self._note(0, link, numbers[-1], posted)
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

    def _by_link(
        self, links: Sequence[tuple[float, float]], times: NDArray[np.float64]
    ) -> Slow | None:
        """Return as `Slow` the rank whose connection is slow; None: no rank's.

        Once named, a rank stays slow until the shortest wait of all ranks has fallen by
        half of its cost. Before, None if any rank's rate is 0 (unknown); else
        `find_slow_link` judges the rates and shortest waits so far. ``links``: by rank,
        what `SpeedWatch._link` returned; ``times``: as in `find_slow`.
        """
        rates, nbytes = zip(*links, strict=True)
        wait = float(np.median(times[:, :, WAITING], axis=1).min())
        step = float(np.median(times.sum(axis=2)))
        if self.slow is None:
            if not all(rates):  # unknown: no TCP, not Linux, or just begun
                return None
            self._links.append((rates, wait))
            earlier, waits = zip(*self._links, strict=True)
            return find_slow_link(np.array(earlier), np.array(waits), nbytes, step)
        # Ranks wait as long as before? Single rates are too high too often to tell.
        _, waited = self._links[-1]
        return self.slow if waited - wait < self.slow.cost / 2 else None

    def _note(
        self, window: int, now: Slow | None, step: int, posted: Mapping[int, Any]
    ) -> None:
        """Set `slow` and log when a rank becomes slow; clear it and log when that ends.

        ``now``: the slow rank found in this ``window`` of steps (0: by connections), or
        None, which clears `slow` only in the window in which the rank was named.
        ``step``: the last one of the window. After a slow link, its last rates are
        dropped.
        """
        if self.slow is None and now is not None:
            self.slow, self._window = now, window
            self._since = step - (window or min(WINDOWS)) + 1
            self._log_begin(now, posted)
        elif self.slow is not None and now is None and window == self._window:
            self._log_end(self.slow, step)
            self.slow = None
            for _ in range(0 if window else LAST):  # of the slow link
                self._links.pop()

    def _log_begin(self, slow: Slow, posted: Mapping[int, Any]) -> None:
        where, is_link = _WORDS[slow.phase], slow.phase == WAITING
        unit, factor = ("Mbit/s", 8e-6) if is_link else ("ms", 1e3)
        if slow.phase == BACKWARD:
            full = {rank: row["full"] for rank, row in posted.items()}
            where += self._layers(late_bucket(full, slow.rank))
        logger.warning(
            "[rank 0] Rank %d (%s) slows all ranks down, since step %d: its %s "
            "%.4g %s, that of the others %.4g %s. This costs %.4g ms of each step of "
            "%.4g ms (%.0f %%).",
            slow.rank,
            posted[slow.rank]["host"],
            self._since,
            f"{where} {'carries' if is_link else 'takes'}",
            slow.here * factor,
            unit,
            slow.others * factor,
            unit,
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
