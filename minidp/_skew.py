"""Which rank comes late, where in the step, and how far clocks of hosts are apart.

No rank leaves a barrier before every rank has entered it::

    rank 0   enter |-------------| leave
    rank 1             enter |---------------| leave      on another clock

so rank 1's clock is ahead of rank 0's by at least *enter 1 - leave 0*, and at most
*leave 1 - enter 0*. Several barriers narrow this down. All-reduces are barriers, too:
recordings that were never gathered still say how far their clocks are apart, although
less tightly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles

from ._timeline import Clock, Step, Timeline

Round = tuple[int, int]  # one rank's nanoseconds: enters a barrier, leaves it

APART_SECONDS = 0.1  # more than clocks of one host, and of a device and it, differ
FORWARD = "forward"
BACKWARD = "backward"
Place = str | int  # a phase, or the number of a bucket


def compare_clocks(zero: Sequence[Round], other: Sequence[Round]) -> Clock:
    """How far another rank's clock is ahead of rank 0's.

    Args:
        zero: of rank 0, at least one barrier.
        other: of the other rank, the same barriers.
    """
    pairs = list(zip(zero, other, strict=True))
    least = max(theirs[0] - ours[1] for ours, theirs in pairs)
    most = min(theirs[1] - ours[0] for ours, theirs in pairs)
    # Clocks that drift apart leave nothing in between: then that is the uncertainty.
    return Clock((least + most) // 2, (abs(most - least) + 1) // 2)


def aligned(timelines: Sequence[Timeline]) -> tuple[Timeline, ...]:
    """The same recordings, by rank, each with its clock.

    Raises:
        ValueError: they are not of different ranks of one run.
    """
    if not timelines:
        raise ValueError("there must be at least one recording")
    ordered = sorted(timelines, key=lambda timeline: timeline.where.rank)
    first = ordered[0]
    ranks = [timeline.where.rank for timeline in ordered]
    if len(set(ranks)) < len(ranks):
        raise ValueError(
            f"recordings must be of different ranks, but are of {ranks}; after "
            "rec.gather() one file has all ranks"
        )
    for timeline in ordered:
        if timeline.where.world_size != first.where.world_size:
            raise ValueError(
                "recordings must be of one run, but their world sizes are "
                f"{first.where.world_size} and {timeline.where.world_size}"
            )
        if timeline.params != first.params:
            raise ValueError(
                "recordings must be of one model, but the parameters of ranks "
                f"{first.where.rank} and {timeline.where.rank} differ"
            )
    found = tuple(replace(t, clock=_clock(first, t)) for t in ordered)
    for timeline in found[1:]:
        _check_met(found[0], timeline)
    return found


def _check_met(first: Timeline, other: Timeline) -> None:
    """An all-reduce ends on no rank before it has begun on all."""
    theirs = {step.number: _rounds(step) for step in other.steps}
    ahead = offset_of(other) - offset_of(first)
    gaps = [
        max(a[0], b[0] - ahead) - min(a[1], b[1] - ahead)
        for step in first.steps
        for number, a in _rounds(step).items()
        for b in [theirs.get(step.number, {}).get(number)]
        if b is not None
    ]
    if other.clock is None or not gaps:
        return
    apart_s = median(gaps) / 1e9
    if apart_s > other.clock.error_ns / 1e9 + APART_SECONDS:
        raise ValueError(
            f"recordings must be of one run, but what ranks {first.where.rank} and "
            f"{other.where.rank} reduced together is {apart_s:.1f} s apart"
        )


def _clock(first: Timeline, other: Timeline) -> Clock | None:
    """None: nothing tells."""
    if other.where.host == first.where.host:
        return Clock(0, 0)
    if first.clock is not None and other.clock is not None:
        # Compared with rank 0, which need not be here: the first one's clock counts.
        offset_ns = other.clock.offset_ns - first.clock.offset_ns
        is_rank_0 = first.where.rank == 0  # compared with itself
        error_ns = other.clock.error_ns + (0 if is_rank_0 else first.clock.error_ns)
        return Clock(offset_ns, error_ns)
    both = common_steps((first, other))
    zero = [_rounds(steps[0]) for steps in both]
    theirs = [_rounds(steps[1]) for steps in both]
    pairs = [
        (a[number], b[number])
        for a, b in zip(zero, theirs, strict=True)
        for number in a.keys() & b.keys()
    ]
    if not pairs:
        return None
    return compare_clocks([a for a, _ in pairs], [b for _, b in pairs])


def _rounds(step: Step) -> dict[int, Round]:
    return {
        bucket.number: (bucket.launched_ns, bucket.done_ns) for bucket in step.buckets
    }


def common_steps(timelines: Sequence[Timeline]) -> list[tuple[Step, ...]]:
    """Steps that every rank recorded, with the last step's layout; one tuple each."""
    by_number = [{step.number: step for step in t.steps} for t in timelines]
    numbers = sorted(set.intersection(*(set(steps) for steps in by_number)))
    if not numbers:
        return []
    layout = _assignment(timelines[0], by_number[0][numbers[-1]])
    return [
        tuple(steps[number] for steps in by_number)
        for number in numbers
        if _assignment(timelines[0], by_number[0][number]) == layout
    ]


def _assignment(timeline: Timeline, step: Step) -> tuple[tuple[int, ...], ...]:
    return timeline.layouts[step.layout]


def last_launches(
    timelines: Sequence[Timeline], steps: Sequence[Step]
) -> Mapping[int, int]:
    """When the last rank launched each bucket, on the clock that ranks share."""
    last: dict[int, int] = {}
    for timeline, step in zip(timelines, steps, strict=True):
        for bucket in step.buckets:
            shared = bucket.launched_ns - offset_of(timeline)
            last[bucket.number] = max(shared, last.get(bucket.number, shared))
    return last


def offset_of(timeline: Timeline) -> int:
    """Nanoseconds from the shared clock to this rank's."""
    return 0 if timeline.clock is None else timeline.clock.offset_ns


@dataclass(frozen=True)
class Late:
    """By how much one rank comes later than the median of the others; seconds.

    Negative: earlier.
    """

    typical_s: float  # median over steps
    often_s: float  # in three of four steps it is more

    @classmethod
    def over(cls, steps: Sequence[float]) -> Late:
        """Of one rank at one place, in each step; at least one."""
        quartile = (
            quantiles(steps, n=4, method="inclusive")[0] if len(steps) > 1 else steps[0]
        )
        return cls(median(steps), quartile)


@dataclass(frozen=True)
class Skew:
    """How late each rank is: where its forward and backward begin, and at buckets."""

    late: Mapping[Place, Mapping[int, Late]]  # by place, in their order, and rank
    error_s: float  # of the clocks

    def latest(self, place: Place) -> int:
        """The rank that is most behind."""
        by_rank = self.late[place]
        return max(by_rank, key=lambda rank: by_rank[rank].typical_s)

    def last_bucket(self) -> int:
        """The one that all steps wait for."""
        return max(place for place in self.late if isinstance(place, int))

    def grows_at(self, rank: int) -> tuple[Place, float]:
        """Where a rank falls behind most since the place before, and by how much."""
        growth = {}
        before = 0.0
        for place, by_rank in self.late.items():
            growth[place] = by_rank[rank].typical_s - before
            before = by_rank[rank].typical_s
        return max(growth.items(), key=lambda item: item[1])


def skew_of(timelines: Sequence[Timeline]) -> Skew | None:
    """Who comes late; None if fewer than two ranks recorded the same steps.

    Args:
        timelines: `aligned`.
    """
    together = common_steps(timelines)
    clocks = [timeline.clock for timeline in timelines if timeline.clock is not None]
    if min(len(timelines), len(clocks)) < max(2, len(timelines)) or not together:
        return None
    ranks = [timeline.where.rank for timeline in timelines]
    behind: dict[Place, list[list[float]]] = {}  # per step, per rank
    for steps in together:
        arrivals = [_arrivals(*pair) for pair in zip(timelines, steps, strict=True)]
        for place in set.intersection(*map(set, arrivals)):
            times = [arrived[place] for arrived in arrivals]
            behind.setdefault(place, []).append(_behind(times))
    if not any(isinstance(place, int) for place in behind):
        return None
    late = {
        place: {
            rank: Late.over(found)
            for rank, found in zip(ranks, zip(*behind[place], strict=True), strict=True)
        }
        for place in sorted(behind, key=_in_order)
    }
    return Skew(late, max(clock.error_ns for clock in clocks) / 1e9)


def _in_order(place: Place) -> int:
    """Forward, backward, buckets."""
    return place if isinstance(place, int) else (FORWARD, BACKWARD).index(place) - 2


def _behind(times: Sequence[int]) -> list[float]:
    """Seconds by which each comes after the median of the others."""
    return [
        (time - median([*times[:r], *times[r + 1 :]])) / 1e9
        for r, time in enumerate(times)
    ]


def _arrivals(timeline: Timeline, step: Step) -> dict[Place, int]:
    offset = offset_of(timeline)
    found: dict[Place, int] = {
        FORWARD: step.begin_ns - offset,
        BACKWARD: step.backward.begin_ns - offset,
    }
    for bucket in step.buckets:
        found[bucket.number] = bucket.launched_ns - offset
    return found
