"""Put the ranks of a run on one clock, and measure which rank is late, and where.

Clocks of hosts differ by more than a step takes. They are compared by barriers, because
no rank leaves a barrier before every rank has entered it::

    rank 0   enter |-------------| leave
    rank 1             enter |---------------| leave      on another clock

So rank 1's clock is ahead of rank 0's by at least *enter 1 - leave 0*, and at most
*leave 1 - enter 0*. Several barriers narrow the interval. An all-reduce is a barrier,
too, so recordings that were never gathered also bound the offset, but less tightly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np
from numpy.typing import NDArray

from .timeline import ClockOffset, Step, Timeline

Round = tuple[int, int]  # when a rank entered a barrier and left it, on its clock
Place = int  # FORWARD, BACKWARD, or the number of a bucket

APART_SECONDS = 0.1  # the clocks of a host and of its devices differ by less
FORWARD, BACKWARD = -2, -1


def compare_clocks(zero: Sequence[Round], other: Sequence[Round]) -> ClockOffset:
    """Return how far the second rank's clock is ahead of the first one's.

    Both arguments are the rounds of the same barriers, in the same order, on each
    rank's own clock. There must be at least one.
    """
    pairs = list(zip(zero, other, strict=True))
    least = max(theirs[0] - ours[1] for ours, theirs in pairs)
    most = min(theirs[1] - ours[0] for ours, theirs in pairs)
    # Clocks that drift can make least > most. The error is half of that gap then.
    return ClockOffset((least + most) // 2, (abs(most - least) + 1) // 2)


@dataclass(frozen=True)
class Run:
    """The recordings of one run, on the first rank's clock where an offset is known.

    `aligned` makes it.
    """

    ranks: tuple[Timeline, ...]  # by rank
    clocks: tuple[ClockOffset | None, ...]  # what was subtracted; None if unknown

    @property
    def error_s(self) -> float | None:
        """The largest error of an offset in seconds, or None if one is unknown."""
        errors = [-1 if clock is None else clock.error_ns for clock in self.clocks]
        return None if -1 in errors else max(errors) / 1e9

    @cached_property
    def common(self) -> list[tuple[Step, ...]]:
        """The `common_steps` of all recorded ranks."""
        return common_steps(self.ranks)

    @cached_property
    def launches(self) -> Mapping[int, Mapping[int, int]]:
        """When the slowest rank launched a bucket, by step and number of the bucket.

        It holds the steps that all ranks have recorded, whatever their layout is.
        """
        found: dict[int, dict[int, int]] = {}
        for steps in _of_all(self.ranks):
            last = found[steps[0].number] = {}
            for bucket in (each for step in steps for each in step.buckets):
                before = last.get(bucket.number, bucket.launched_ns)
                last[bucket.number] = max(before, bucket.launched_ns)
        return found


def _of_all(timelines: Sequence[Timeline]) -> list[tuple[Step, ...]]:
    """Return the steps that all timelines have, each as a tuple by rank."""
    by_number = [{step.number: step for step in t.steps} for t in timelines]
    numbers = sorted(set.intersection(*(set(steps) for steps in by_number)))
    return [tuple(steps[number] for steps in by_number) for number in numbers]


def common_steps(timelines: Sequence[Timeline]) -> list[tuple[Step, ...]]:
    """Return the steps that all timelines have, each as a tuple by rank.

    Steps with another bucket layout than the last one are left out.
    """
    together = _of_all(timelines)
    layouts = [timelines[0].layouts[steps[0].layout] for steps in together]
    pairs = zip(together, layouts, strict=True)
    return [steps for steps, layout in pairs if layout == layouts[-1]]


def aligned(timelines: Sequence[Timeline]) -> Run:
    """Return recordings as a run, with times moved to the lowest rank's clock.

    A rank of another host, with no collective in common, keeps its own clock.

    Raises:
        ValueError: The recordings are not of different ranks of one run. This is also
            found by all-reduces of the same number that lie far apart in time.
    """
    ordered = sorted(timelines, key=lambda timeline: timeline.where.rank)
    first, ranks = ordered[0], [timeline.where.rank for timeline in ordered]
    if len(set(ranks)) < len(ranks):
        raise ValueError(
            f"recordings must be of different ranks, but are of {ranks}; after "
            "rec.gather() one file has all ranks"
        )
    for other in ordered:
        names = f"ranks {first.where.rank} and {other.where.rank} differ"
        if other.where.world_size != first.where.world_size:
            raise ValueError(
                f"recordings must be of one run, but world sizes of {names}"
            )
        if other.params != first.params:
            raise ValueError(f"recordings must be of one model, but params of {names}")
    clocks = tuple(_clock(first, other) for other in ordered)
    pairs = zip(ordered, clocks, strict=True)
    run = Run(tuple(t.moved(-c.offset_ns) if c else t for t, c in pairs), clocks)
    for other, clock in zip(run.ranks, clocks, strict=True):
        # In one run, no all-reduce ends on a rank before it begins on another one.
        gaps = [max(a[0], b[0]) - min(a[1], b[1]) for a, b in _rounds(first, other)]
        apart_s = median(gaps) / 1e9 if gaps else 0.0
        if clock is not None and apart_s > clock.error_ns / 1e9 + APART_SECONDS:
            raise ValueError(
                f"recordings must be of one run, but what ranks {first.where.rank} and "
                f"{other.where.rank} reduced together is {apart_s:.1f} s apart"
            )
    return run


def _clock(first: Timeline, other: Timeline) -> ClockOffset | None:
    """Return how far the second rank's clock is ahead of the first one's, if known.

    Ranks of one host share a clock. Otherwise the offsets to rank 0 tell, which
    `gather` measured, or the all-reduces that both have recorded.
    """
    if other.where.host == first.where.host:
        return ClockOffset(0, 0)
    if first.clock is not None and other.clock is not None:
        # Both were compared with rank 0, whose recording may be missing.
        offset_ns = other.clock.offset_ns - first.clock.offset_ns
        is_rank_0 = first.where.rank == 0  # compared with itself
        error_ns = other.clock.error_ns + (0 if is_rank_0 else first.clock.error_ns)
        return ClockOffset(offset_ns, error_ns)
    rounds = _rounds(first, other)
    return compare_clocks(*zip(*rounds, strict=True)) if rounds else None


def _rounds(first: Timeline, other: Timeline) -> list[tuple[Round, Round]]:
    """Return when both ranks launched and ended each all-reduce they have in common."""
    return [
        ((ours.launched_ns, ours.done_ns), (theirs.launched_ns, theirs.done_ns))
        for one, two in common_steps((first, other))
        for ours in one.buckets
        for theirs in two.buckets
        if ours.number == theirs.number
    ]


# ------------------------------------------------------------------------ who is late


@dataclass(frozen=True)
class Skew:
    """How late each rank is at some places: seconds after the median of the others.

    The places are the start of its first forward and of its backward, and the launch of
    each bucket. A rank that is early has negative seconds.
    """

    late: Mapping[Place, Mapping[int, float]]  # median over steps; in order of time
    often_s: Mapping[int, float]  # how late it is at the last place in 3 of 4 steps
    error_s: float  # the largest error of a clock offset

    def latest(self, place: Place) -> int:
        """Return the rank that is latest at a place."""
        by_rank = self.late[place]
        return max(by_rank, key=lambda rank: by_rank[rank])

    def grows_at(self, rank: int) -> tuple[Place, float]:
        """Return where a rank's lateness grows most, and by how many seconds."""
        growth, before = {}, 0.0
        for place, by_rank in self.late.items():
            growth[place] = by_rank[rank] - before
            before = by_rank[rank]
        return max(growth.items(), key=lambda item: item[1])


def skew_of(run: Run) -> Skew | None:
    """Return how late the ranks are, by medians over the steps that all recorded.

    It is None for one rank, without a common clock, and without a common bucket.
    """
    if len(run.ranks) < 2 or run.error_s is None:
        return None
    found: dict[Place, list[list[int]]] = {}  # per place and step, ns by rank
    for steps in run.common:
        arrivals = [_arrivals(step) for step in steps]
        for place in arrivals[0]:
            if all(place in arrived for arrived in arrivals):
                times = [arrived[place] for arrived in arrivals]
                found.setdefault(place, []).append(times)
    if max(found, default=BACKWARD) < 0:
        return None  # no bucket
    ranks = [timeline.where.rank for timeline in run.ranks]
    late: dict[Place, dict[int, float]] = {}
    for place in sorted(found):
        behind = _behind(found[place])
        late[place] = dict(zip(ranks, np.median(behind, axis=0).tolist(), strict=True))
    often = np.quantile(behind, 0.25, axis=0).tolist()
    return Skew(late, dict(zip(ranks, often, strict=True)), run.error_s)


def _arrivals(step: Step) -> dict[Place, int]:
    """Return when a rank began forward and backward, and launched each bucket."""
    begins = {FORWARD: step.first_forward_ns, BACKWARD: step.backward.begin_ns}
    return begins | {bucket.number: bucket.launched_ns for bucket in step.buckets}


def _behind(rows: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return how many seconds each rank comes after the median of the others.

    The rows have nanoseconds by step and rank, and the result has the same shape.
    """
    times = np.array(rows) - np.array(rows)[:, :1]
    columns = range(times.shape[1])
    others = [np.median(np.delete(times, n, axis=1), axis=1) for n in columns]
    return np.array((times - np.transpose(others)) / 1e9)
