"""What recorded steps say: how much communication the backward hides.

One bucket, in one step::

    full    launched        last rank launched         done
     |--- waited ---|-------- late --------|---- wire ----|
                    |                      '- all ranks are here: bytes move
                    '- its turn: the bucket before is done

    backward or optimizer  ===============================|
                            hidden .......................|. exposed

*Hidden* is what runs while the backward, or an optimizer step inside it, computes on
this rank. *Exposed* is the rest. Both together are what `late` and `wire` are together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ._network import messages_of
from ._schedule import Backward, Network, fit_network
from ._skew import common_steps, last_launches, offset_of
from ._timeline import BucketTimes, Span, Step, Timeline
from ._typical import Spread, spread, typical_step

Interval = tuple[int, int]  # ns


@dataclass(frozen=True)
class BucketOverlap:
    """One bucket; seconds, moments counted from where the backward begins."""

    number: int
    first_s: float | None  # moment of its first gradient, if that was taken
    full_s: float  # moment of its last gradient
    waited_s: float  # flattened, launched, and waited for its turn
    queued_s: float  # ... of it because the bucket before was on the wire
    late_s: float  # waited for slower ranks; 0 if only this rank is known
    wire_s: float
    hidden_s: float
    exposed_s: float


@dataclass(frozen=True)
class StepOverlap:
    """Where the time of a step goes; seconds. Hidden communication costs none."""

    seconds: float
    num_local_forwards: int  # under no_sync()
    local_forward_s: float
    local_backward_s: float  # of backwards that averaged nothing
    forward_s: float
    backward_s: float
    hidden_s: float
    exposed_s: float
    late_s: float  # in hidden and exposed: waiting for slower ranks
    finish_s: float  # averages are copied out
    optimizer_s: float
    other_s: float
    buckets: tuple[BucketOverlap, ...]

    @property
    def wire_s(self) -> float:
        """Seconds that bytes moved."""
        return sum(bucket.wire_s for bucket in self.buckets)


def overlap_of(step: Step, last_launch: Mapping[int, int] | None = None) -> StepOverlap:
    """Take one step apart.

    Args:
        step: of one rank.
        last_launch: when the last rank launched each bucket, on this rank's clock.
    """
    busy = _union([step.backward, *step.optimizers])
    buckets = []
    free = step.backward.begin_ns
    for bucket in step.buckets:
        # Gloo may have two collectives at work: the second is then done first.
        turn = min(max(bucket.launched_ns, free), bucket.done_ns)
        start = (last_launch or {}).get(bucket.number, turn)
        start = min(max(start, turn), bucket.done_ns)
        buckets.append(_bucket(step, bucket, (turn, start), busy))
        free = max(free, bucket.done_ns)
    hidden, exposed, late = (
        sum(getattr(bucket, name) for bucket in buckets)
        for name in ("hidden_s", "exposed_s", "late_s")
    )
    after = (step.backward.end_ns, step.finalize_end_ns)
    inside = sum(_length(_cut(span, after)) for span in step.optimizers) / 1e9
    forward = sum(span.seconds for span in step.forwards)
    local_forward = sum(span.seconds for span in step.local_forwards)
    local_backward = sum(map(_length, _union(step.local_backwards))) / 1e9
    optimizer = sum(span.seconds for span in step.optimizers)
    finish = max(0.0, _length(after) / 1e9 - exposed - inside)
    known = local_forward + local_backward + forward + step.backward.seconds
    known += exposed + finish + optimizer
    return StepOverlap(
        seconds=step.seconds,
        num_local_forwards=len(step.local_forwards),
        local_forward_s=local_forward,
        local_backward_s=local_backward,
        forward_s=forward,
        backward_s=step.backward.seconds,
        hidden_s=hidden,
        exposed_s=exposed,
        late_s=late,
        finish_s=finish,
        optimizer_s=optimizer,
        other_s=max(0.0, step.seconds - known),
        buckets=tuple(buckets),
    )


def to_show(buckets: Sequence[BucketOverlap], most: int) -> set[int]:
    """Numbers of the buckets to show where there is room for so many: the most exposed.

    The first and the last one are among them, for they show when it begins and ends.
    """
    ends = {bucket.number for bucket in (*buckets[:1], *buckets[-1:])}
    middle = sorted(buckets[1:-1], key=lambda bucket: -bucket.exposed_s)
    return ends | {bucket.number for bucket in middle[: most - len(ends)]}


def by_hiding(step: Step, begin: int, end: int) -> list[tuple[int, int, bool]]:
    """Pieces of an interval (ns): begin, end, and whether this rank computes then."""
    found, at = [], begin
    for busy in _union([step.backward, *step.optimizers]):
        first, last = _overlap((at, end), busy)
        if first < last:
            found += [(at, first, False), (first, last, True)]
            at = last
    found.append((at, end, False))
    return [piece for piece in found if piece[0] < piece[1]]


def _bucket(
    step: Step, bucket: BucketTimes, turn_start: Interval, busy: Sequence[Interval]
) -> BucketOverlap:
    turn, start = turn_start
    begin = step.backward.begin_ns
    whole = (turn, bucket.done_ns)
    hidden = sum(_length(_overlap(whole, span)) for span in busy)
    return BucketOverlap(
        number=bucket.number,
        first_s=None,
        full_s=(bucket.full_ns - begin) / 1e9,
        waited_s=max(0, turn - bucket.full_ns) / 1e9,
        queued_s=max(0, turn - bucket.launched_ns) / 1e9,
        late_s=(start - turn) / 1e9,
        wire_s=(bucket.done_ns - start) / 1e9,
        hidden_s=hidden / 1e9,
        exposed_s=(_length(whole) - hidden) / 1e9,
    )


def _union(spans: Iterable[Span]) -> list[Interval]:
    found: list[Interval] = []
    for begin, end in sorted((span.begin_ns, span.end_ns) for span in spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _overlap(one: Interval, other: Interval) -> Interval:
    return max(one[0], other[0]), min(one[1], other[1])


def _cut(span: Span, window: Interval) -> Interval:
    return _overlap((span.begin_ns, span.end_ns), window)


def _length(interval: Interval) -> int:
    return max(0, interval[1] - interval[0])


# --------------------------------------------------------------------- over many steps


@dataclass(frozen=True)
class Overlap:
    """One rank's steps with its last layout, and the one that stands for them.

    A real step, so that its parts add up, which medians of each part would not. Only
    when first gradients come is taken from other steps: few have it.
    """

    rank: int
    num_steps: int
    step: int  # number among the steps in common; the same on all ranks
    typical: StepOverlap
    spread_s: Spread  # of the whole step
    exposed_spread_s: Spread
    usually_exposed_s: float  # median over the steps
    members: tuple[tuple[int, ...], ...]  # parameter indices, of `typical.buckets`
    nbytes: tuple[int, ...]  # of the same buckets
    dense_bytes: tuple[int, ...]  # ... 0 where the gradient is sparse


def overlaps_of(timelines: Sequence[Timeline]) -> tuple[Overlap, ...]:
    """Of each rank, over the steps that all of them recorded; () if there are none.

    Args:
        timelines: `aligned`.
    """
    together = common_steps(timelines)
    if not together:
        return ()
    launches = [last_launches(timelines, steps) for steps in together]
    mine = [[steps[r] for steps in together] for r in range(len(timelines))]
    found = [_overlaps(*pair, launches) for pair in zip(timelines, mine, strict=True)]
    number = typical_step(
        [[one.seconds for one in steps] for steps in found],
        [[one.exposed_s for one in steps] for steps in found],
    )
    return tuple(
        _of_rank(timeline, steps, overlaps, number)
        for timeline, steps, overlaps in zip(timelines, mine, found, strict=True)
    )


def _overlaps(
    timeline: Timeline, steps: Sequence[Step], launches: Sequence[Mapping[int, int]]
) -> list[StepOverlap]:
    offset = offset_of(timeline)
    return [
        overlap_of(step, {number: ns + offset for number, ns in launch.items()})
        for step, launch in zip(steps, launches, strict=True)
    ]


def most_exposed(overlaps: Sequence[Overlap]) -> Overlap:
    """The rank to report: the one that usually waits most, which is what others cost.

    Args:
        overlaps: of all ranks, at least one.
    """
    return max(overlaps, key=lambda one: one.usually_exposed_s)


def _of_rank(
    timeline: Timeline,
    steps: Sequence[Step],
    found: Sequence[StepOverlap],
    number: int,
) -> Overlap:
    typical = found[number]
    buckets = tuple(
        replace(bucket, first_s=_first_s(timeline, steps, bucket))
        for bucket in typical.buckets
    )
    numbers = [bucket.number for bucket in buckets]
    return Overlap(
        rank=timeline.where.rank,
        num_steps=len(steps),
        step=number,
        typical=replace(typical, buckets=buckets),
        spread_s=spread([one.seconds for one in found]),
        exposed_spread_s=spread([one.exposed_s for one in found]),
        usually_exposed_s=median(one.exposed_s for one in found),
        members=tuple(timeline.members(steps[-1], each) for each in numbers),
        nbytes=tuple(timeline.nbytes(steps[-1], each) for each in numbers),
        dense_bytes=tuple(timeline.dense_bytes(steps[-1], each) for each in numbers),
    )


def _first_s(
    timeline: Timeline, steps: Sequence[Step], bucket: BucketOverlap
) -> float | None:
    """When a bucket's first gradient came, if it filled as where that was taken.

    As a share of the time until it is full: steps of other lengths may be compared.
    """
    shares = _first_shares(timeline, steps, bucket.number)
    return bucket.full_s * median(shares) if shares else None


def _first_shares(
    timeline: Timeline, steps: Sequence[Step], number: int
) -> list[float]:
    """First gradient over last, since the backward began, where the first was taken."""
    found = []
    for step in steps:
        begin = step.backward.begin_ns
        first = step.first_gradient_ns(timeline.members(step, number))
        full = [bucket.full_ns for bucket in step.buckets if bucket.number == number]
        if first is not None and full and full[0] > begin:
            found.append(min(1.0, (first - begin) / (full[0] - begin)))
    return found


# --------------------------------------------------------------------- for the model


def backward_of(timeline: Timeline) -> tuple[Backward, tuple[int, ...]]:
    """The typical backward, and the parameter index at each of its positions.

    Parameters whose times were never taken count as ready with the last gradient of
    their bucket.

    Raises:
        ValueError: no step is recorded.
    """
    if not timeline.steps:
        raise ValueError("no step is recorded")
    last = timeline.steps[-1].layout
    end_s = median(s.backward.seconds for s in timeline.steps if s.layout == last)
    ready = _ready_times(timeline)
    order = sorted(range(len(ready)), key=lambda i: (ready[i], i))
    # A sparse gradient travels alone, so each is of a kind of its own.
    kind_of = [
        (p.kind, i if p.kind.startswith("sparse") else -1)
        for i, p in enumerate(timeline.params)
    ]
    kinds = {kind: n for n, kind in enumerate(dict.fromkeys(kind_of))}
    backward = Backward(
        ready_s=tuple(min(ready[i], end_s) for i in order),
        nbytes=tuple(timeline.params[i].nbytes for i in order),
        end_s=end_s,
        kinds=tuple(kinds[kind_of[i]] for i in order),
    )
    return backward, tuple(order)


def _ready_times(timeline: Timeline) -> list[float]:
    """Seconds since the backward began, by parameter index; medians."""
    hooks: list[list[float]] = [[] for _ in timeline.params]
    buckets: list[list[float]] = [[] for _ in timeline.params]
    for step in timeline.steps:
        begin = step.backward.begin_ns
        for i, ready in enumerate(step.ready_ns):
            if ready is not None:
                hooks[i].append((ready - begin) / 1e9)
        for bucket in step.buckets:
            for i in timeline.members(step, bucket.number):
                buckets[i].append((bucket.full_ns - begin) / 1e9)
    longest = max(step.backward.seconds for step in timeline.steps)
    return [median(a or b or [longest]) for a, b in zip(hooks, buckets, strict=True)]


def network_of(timelines: Sequence[Timeline]) -> Network | None:
    """The network that the recorded collectives show; None if nothing travelled.

    All recorded layouts count: buckets of several sizes tell latency from bandwidth.
    With one size only, all its time counts as bandwidth. Waiting for slower ranks does
    not count if all ranks are known, else of each size the faster half of its times.

    Args:
        timelines: `aligned`.
    """
    samples = samples_of(timelines)
    if not samples or timelines[0].where.world_size == 1:
        return None
    if len(timelines) < timelines[0].where.world_size:
        samples = _faster_half(samples)
    sizes = {nbytes for nbytes, _ in samples}
    if len(sizes) == 1:
        return Network(0.0, sizes.pop() / median(seconds for _, seconds in samples))
    return fit_network(samples)


def samples_of(timelines: Sequence[Timeline]) -> list[tuple[int, float]]:
    """Bytes and seconds of each collective, on the first of the ranks (`aligned`)."""
    first = timelines[0]
    by_number = [{step.number: step for step in t.steps} for t in timelines]
    found = []
    for number, step in by_number[0].items():
        everyone = [steps[number] for steps in by_number if number in steps]
        launches = None
        if len(everyone) == len(timelines):
            launches = last_launches(timelines, everyone)
            launches = {n: ns + offset_of(first) for n, ns in launches.items()}
        spans = []
        for bucket in overlap_of(step, launches).buckets:
            start_s = bucket.full_s + bucket.waited_s + bucket.late_s
            # In whole nanoseconds: those that end together must not differ by rounding.
            start, done = (round(s * 1e9) for s in (start_s, start_s + bucket.wire_s))
            spans.append((first.dense_bytes(step, bucket.number), start, done))
        found += [(nbytes, ns / 1e9) for nbytes, ns in messages_of(spans)]
    return found


def _faster_half(samples: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    by_size: dict[int, list[float]] = {}
    for nbytes, seconds in samples:
        by_size.setdefault(nbytes, []).append(seconds)
    return [
        (nbytes, seconds)
        for nbytes, times in by_size.items()
        for seconds in sorted(times)[: (len(times) + 1) // 2]
    ]
