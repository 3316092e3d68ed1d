"""Measure how much communication the backward hides, and pick the step to report.

This happens to one bucket in one step::

    full    launched        last rank launched         done
     |--- waited ---|-------- late --------|---- wire ----|
                    |                      '- all ranks launched: bytes move
                    '- the bucket before is done

    backward or optimizer  ===============================|
                            hidden .......................|. exposed

*Hidden* is the part of late and wire in which this rank computes its backward, runs
an optimizer step, or is busy with values (see below). *Exposed* is the rest, so hidden
+ exposed = late + wire.

With divided steps (`sharded_step`) a bucket's new values come back later::

    started     sent               awaited            back
       |-- busy --|---- hidden ----|------ busy ------|

*Hidden* is the part of it in which this rank is not busy with values, neither with
these nor with those of another bucket. *Exposed* is the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from .skew import Run
from .timeline import BucketTimes, Span, Step, Timeline, ValueTimes

TURNS = "logical ranks"  # the row of their turns
VALUES = "values"  # the row of those that come back to all ranks
HIDDEN_VALUES, EXPOSED_VALUES = "values, hidden", "values, exposed"  # slices of them
Spread = tuple[float, float]  # p10 and p90 over steps


@dataclass(frozen=True)
class BucketOverlap:
    """The stages of one bucket in one step of one rank, in seconds.

    The picture at the head of this file explains them.
    """

    number: int  # in launch order
    members: tuple[int, ...]  # parameter indices
    nbytes: int
    dense_bytes: int  # the same, but 0 if the bucket's gradient is sparse
    first_s: float | None  # from the backward's start to the first gradient, if known
    full_s: float  # from the backward's start to the last gradient
    waited_s: float  # from full until launched and the bucket before is done
    late_s: float  # waiting for slower ranks; 0 if only this rank was recorded
    wire_s: float  # while the bytes move
    hidden_s: float  # the part of late and wire while this rank does something else
    exposed_s: float  # the other part of late and wire
    turn_ns: int  # when late begins: launched, and the bucket before is done
    start_ns: int  # when the bytes begin to move
    times: BucketTimes


@dataclass(frozen=True)
class ValuesOverlap:
    """The way back of one bucket's values that a step has sent, in seconds."""

    number: int  # of the bucket
    members: tuple[int, ...]  # parameter indices
    nbytes: int  # of all members, also of those that this rank sends
    start_s: float  # from the backward's end until they are started
    hidden_s: float  # from then on until they are back: while this rank does otherwise
    exposed_s: float  # the other part of that time
    waited_s: float  # the part of exposed in which this rank waits for this bucket


_VALUE_SECONDS = ("start_s", "hidden_s", "exposed_s", "waited_s")


@dataclass(frozen=True)
class StepOverlap:
    """One step of one rank: its seconds, split into phases, and its buckets.

    `hidden_s`, `late_s` and `hidden_values_s` are no phases. Hidden time lies in the
    backward or in optimizer steps, late time in hidden and exposed, and values may be
    on their way in any phase.
    """

    seconds: float  # from its begin to that of the next step
    local_forward_s: float  # of forwards under no_sync()
    local_backward_s: float  # of backwards without averaging
    between_s: float  # of the loop over logical ranks, but in the turn of none
    forward_s: float
    backward_s: float
    hidden_s: float
    exposed_s: float
    late_s: float  # the part of hidden and exposed that waits for slower ranks
    finish_s: float  # copying the averages out
    values_s: float  # this rank sends or awaits values; no other phase has this time
    hidden_values_s: float  # values are on their way, and this rank does other things
    optimizer_s: float
    other_s: float
    buckets: tuple[BucketOverlap, ...]
    values: tuple[ValuesOverlap, ...]  # those that this step has sent
    step: Step
    timeline: Timeline


def overlap_of(
    timeline: Timeline, step: Step, last_launch: Mapping[int, int] | None = None
) -> StepOverlap:
    """Split one step of one rank into phases, and each of its buckets into stages.

    Args:
        timeline: The recording of the rank.
        step: One of its steps.
        last_launch: When the slowest rank launched each bucket, in nanoseconds, by the
            number of the bucket. If a bucket is missing, nobody is taken to be late.
    """
    buckets, free = [], step.backward.begin_ns
    busy = busy_with(step.values)
    for bucket in step.buckets:
        # Gloo may run two collectives at once, and the second may be done first.
        turn = min(max(bucket.launched_ns, free), bucket.done_ns)
        start = (last_launch or {}).get(bucket.number, turn)
        start = min(max(start, turn), bucket.done_ns)
        buckets.append(_bucket(timeline, step, bucket, turn, start))
        free = max(free, bucket.done_ns)
    end, finished = step.backward.end_ns, step.finalize_end_ns
    exposed = sum(bucket.exposed_s for bucket in buckets)
    inside = covered((*step.optimizers, *busy), end, finished) / 1e9
    local = step.local_backwards
    loop, loop_end = step.begin_ns, max((t.end_ns for t in step.turns), default=0)
    outside = pieces(step.turns, loop, max(loop, loop_end))

    def without_values(seconds: float, spans: Sequence[Span]) -> float:
        return seconds - common(spans, busy, step.begin_ns, step.end_ns) / 1e9

    optimizer = covered(step.optimizers, step.begin_ns, step.end_ns) / 1e9
    forward = sum(span.seconds for span in step.forwards)
    local_forward = sum(span.seconds for span in step.local_forwards)
    local_backward = covered(local, step.begin_ns, step.end_ns) / 1e9
    parts = {
        "local_forward_s": without_values(local_forward, step.local_forwards),
        "local_backward_s": without_values(local_backward, local),
        "between_s": sum(b - a for a, b, in_turn in outside if not in_turn) / 1e9,
        "forward_s": without_values(forward, step.forwards),
        "backward_s": without_values(step.backward.seconds, (step.backward,)),
        "exposed_s": exposed,
        "finish_s": max(0.0, (finished - end) / 1e9 - exposed - inside),
        "values_s": covered(busy, step.begin_ns, step.end_ns) / 1e9,
        "optimizer_s": without_values(optimizer, step.optimizers),
    }
    hidden_ns = covered(ways_of(step.values), step.begin_ns, step.end_ns)
    hidden_ns -= covered(busy, step.begin_ns, step.end_ns)
    seconds = (step.end_ns - step.begin_ns) / 1e9
    return StepOverlap(
        seconds=seconds,
        hidden_s=sum(bucket.hidden_s for bucket in buckets),
        late_s=sum(bucket.late_s for bucket in buckets),
        hidden_values_s=hidden_ns / 1e9,
        other_s=max(0.0, seconds - sum(parts.values())),
        buckets=tuple(buckets),
        values=tuple(_values(timeline, step, busy)),
        step=step,
        timeline=timeline,
        **parts,
    )


def busy_with(values: Iterable[ValueTimes]) -> list[Span]:
    """Return when this rank sends values of parameters, or waits for them."""
    found = []
    for each in values:
        found.append(Span(each.started_ns, each.sent_ns))
        found.append(Span(each.awaited_ns, each.back_ns))
    return found


def _hiding(step: Step) -> tuple[Span, ...]:
    """Return when this rank does something while buckets are on the wire."""
    return (step.backward, *step.optimizers, *busy_with(step.values))


def ways_of(values: Iterable[ValueTimes]) -> list[Span]:
    """Return when values are on their way, from their start until they are back."""
    return [Span(each.started_ns, each.back_ns) for each in values]


def _values(
    timeline: Timeline, step: Step, busy: Sequence[Span]
) -> Iterator[ValuesOverlap]:
    by_bucket: dict[int, list[ValueTimes]] = {}
    for each in step.values:
        if each.started_ns >= step.begin_ns:  # else it is told of in the step before
            by_bucket.setdefault(each.number, []).append(each)
    for number, parts in by_bucket.items():
        members = timeline.layouts[step.layout][number]
        begin = min(each.started_ns for each in parts)
        limits = begin, max(each.back_ns for each in parts)
        exposed = common(ways_of(parts), busy, *limits)
        yield ValuesOverlap(
            number=number,
            members=members,
            nbytes=sum(timeline.params[i].nbytes for i in members),
            start_s=(begin - step.backward.end_ns) / 1e9,
            hidden_s=(covered(ways_of(parts), *limits) - exposed) / 1e9,
            exposed_s=exposed / 1e9,
            waited_s=sum(each.back_ns - each.awaited_ns for each in parts) / 1e9,
        )


def _bucket(
    timeline: Timeline, step: Step, bucket: BucketTimes, turn: int, start: int
) -> BucketOverlap:
    members = timeline.layouts[step.layout][bucket.number]
    params = [timeline.params[i] for i in members]
    nbytes = sum(param.nbytes for param in params)
    is_sparse = any(param.kind.startswith("sparse") for param in params)
    first, begin = step.first_gradient_ns(members), step.backward.begin_ns
    hidden = covered(_hiding(step), turn, bucket.done_ns)
    return BucketOverlap(
        number=bucket.number,
        members=members,
        nbytes=nbytes,
        dense_bytes=0 if is_sparse else nbytes,
        first_s=None if first is None else (first - begin) / 1e9,
        full_s=(bucket.full_ns - begin) / 1e9,
        waited_s=(turn - bucket.full_ns) / 1e9,
        late_s=(start - turn) / 1e9,
        wire_s=(bucket.done_ns - start) / 1e9,
        hidden_s=hidden / 1e9,
        exposed_s=(bucket.done_ns - turn - hidden) / 1e9,
        turn_ns=turn,
        start_ns=start,
        times=bucket,
    )


def pieces(spans: Sequence[Span], begin: int, end: int) -> list[tuple[int, int, bool]]:
    """Cut an interval into pieces: begin, end, and whether it is inside some span.

    Spans may overlap, come in any order, and reach outside. No piece is empty.
    """
    found, at = [], begin
    for span in sorted(spans, key=lambda span: span.begin_ns):
        first, last = max(at, span.begin_ns), min(end, span.end_ns)
        if first < last:
            found += [(at, first, False), (first, last, True)]
            at = last
    found.append((at, end, False))
    return [piece for piece in found if piece[0] < piece[1]]


def covered(spans: Sequence[Span], begin: int, end: int) -> int:
    """Return how much of an interval lies inside spans. Overlaps count once."""
    return sum(b - a for a, b, inside in pieces(spans, begin, end) if inside)


def common(one: Sequence[Span], other: Sequence[Span], begin: int, end: int) -> int:
    """Return how much of an interval lies inside spans of both kinds."""
    found = pieces(other, begin, end)
    return sum(covered(one, a, b) for a, b, inside in found if inside)


class Slice(NamedTuple):
    """A named interval on a row of a trace or of the page."""

    # "forward", "backward", "optimizer", TURNS, VALUES, or a bucket's number
    row: str | int
    name: str
    begin_ns: int
    end_ns: int
    bucket: int | None = None  # of what the row VALUES has


def slices(found: StepOverlap) -> Iterator[Slice]:
    """Yield one rank's step as slices: its phases, then the stages of each bucket.

    The wire is cut into hidden and exposed parts, and so are values on their way back:
    those of all buckets together, and those of each bucket. Of them a step has what
    lies in it. Stages without length are left out.
    """
    step = found.step
    for turn in step.turns:
        name = f"logical rank {turn.number}"
        yield Slice(TURNS, name, turn.begin_ns, turn.end_ns)
    for row, name, spans in (
        ("forward", "local forward", step.local_forwards),
        ("backward", "local backward", step.local_backwards),
        ("forward", "forward", step.forwards),
        ("backward", "backward", (step.backward,)),
        ("optimizer", "optimizer step", step.optimizers),
        ("backward", "finalize", (Span(step.backward.end_ns, step.finalize_end_ns),)),
    ):
        for span in spans:
            yield Slice(row, name, span.begin_ns, span.end_ns)
    yield from _value_slices(found)
    hiding = _hiding(step)
    for bucket in found.buckets:
        times = bucket.times
        first = step.first_gradient_ns(bucket.members) or times.full_ns
        stages = [
            ("filling", first, times.full_ns),
            ("waited", times.full_ns, bucket.turn_ns),
            ("late (slower ranks)", bucket.turn_ns, bucket.start_ns),
        ]
        for begin, end, hides in pieces(hiding, bucket.start_ns, times.done_ns):
            stages.append((f"wire, {'hidden' if hides else 'exposed'}", begin, end))
        stages.append(("done, not copied out", times.done_ns, times.copied_out_ns))
        for name, begin, end in stages:
            if begin < end:
                yield Slice(bucket.number, name, begin, end)


def _value_slices(found: StepOverlap) -> Iterator[Slice]:
    """Yield the ways back of values: all in one row, and then those of each bucket.

    Only what lies in the step is a part of it.
    """
    values, busy = found.step.values, busy_with(found.step.values)
    limits = found.step.begin_ns, found.step.end_ns

    def cut(ways: Sequence[Span]) -> Iterator[tuple[str, int, int]]:
        for begin, end, is_any in pieces(ways, *limits):
            for a, b, is_busy in pieces(busy, begin, end) if is_any else ():
                yield EXPOSED_VALUES if is_busy else HIDDEN_VALUES, a, b

    for each in values:
        for _, begin, end in cut(busy_with([each])):
            yield Slice(VALUES, EXPOSED_VALUES, begin, end, each.number)
    for name, begin, end in cut(ways_of(values)):
        if name == HIDDEN_VALUES:
            yield Slice(VALUES, name, begin, end)
    for bucket in found.buckets:
        for parts in cut(ways_of(v for v in values if v.number == bucket.number)):
            yield Slice(bucket.number, *parts)


# ------------------------------------------------------------------- logical ranks


class TurnTimes(NamedTuple):
    """The turn of one logical rank in a step, in seconds; or medians over steps."""

    number: int  # of the logical rank
    seconds: float  # without waiting for averages, and copying them out
    share: float  # of the step that these seconds are
    forward_s: float  # of all its forwards
    backward_s: float  # of all its backwards


def turns_of(one: StepOverlap) -> Iterator[TurnTimes]:
    """Yield the times of the turns that one rank had in a step."""
    step = one.step
    forwards = (*step.forwards, *step.local_forwards)
    backwards = (step.backward, *step.local_backwards)
    reduces = (Span(step.backward.end_ns, step.finalize_end_ns),)
    for turn in step.turns:
        within = turn.begin_ns, turn.end_ns
        seconds = turn.seconds - covered(reduces, *within) / 1e9
        share = seconds / one.seconds if one.seconds else 0.0
        both = [covered(spans, *within) / 1e9 for spans in (forwards, backwards)]
        yield TurnTimes(turn.number, seconds, share, *both)


def usual_turns(steps: Sequence[StepOverlap]) -> tuple[TurnTimes, ...]:
    """Return the medians over the steps of a rank, by logical rank."""
    found: dict[int, list[TurnTimes]] = {}
    for one in steps:
        for turn in turns_of(one):
            found.setdefault(turn.number, []).append(turn)
    return tuple(
        TurnTimes(
            number, *(median(column) for column in [*zip(*rows, strict=True)][1:])
        )
        for number, rows in sorted(found.items())
    )


# ----------------------------------------------------------------- values of parameters


def usual_values(steps: Sequence[StepOverlap]) -> tuple[ValuesOverlap, ...]:
    """Return the medians over the steps of a rank, in the order of their starts.

    The values of the last step may still have been on their way when the recording
    ended.
    """
    found: dict[int, list[ValuesOverlap]] = {}
    for each in (each for one in steps for each in one.values):
        found.setdefault(each.number, []).append(each)
    usual = [
        replace(
            same[0],
            **{n: median(getattr(each, n) for each in same) for n in _VALUE_SECONDS},
        )
        for same in found.values()
    ]
    return tuple(sorted(usual, key=lambda each: each.start_s))


# -------------------------------------------------------------------- the typical step


@dataclass(frozen=True)
class Overlap:
    """The typical step of one rank, and how much its steps vary.

    The steps are those that all ranks recorded with the bucket layout of the last one.
    The typical one is the same step on all ranks.
    """

    rank: int
    num_steps: int
    typical: StepOverlap
    spread_s: Spread  # of the steps' lengths
    exposed_spread_s: Spread
    usually_exposed_s: float  # the median over steps
    turns: tuple[TurnTimes, ...]  # of its logical ranks, if any: medians over steps
    values: tuple[ValuesOverlap, ...]  # of divided steps, by bucket: medians over steps


def overlaps_of(run: Run) -> tuple[Overlap, ...]:
    """Return the overlap of each rank, or () if no step was recorded by all ranks."""
    if not run.common:
        return ()
    found = [
        [overlap_of(rank, step, run.launches[step.number]) for step in steps]
        for rank, steps in zip(run.ranks, zip(*run.common, strict=True), strict=True)
    ]
    lengths = [[one.seconds for one in steps] for steps in found]
    exposed = [[one.exposed_s for one in steps] for steps in found]
    number = typical_step(lengths, exposed)
    return tuple(
        Overlap(
            rank=timeline.where.rank,
            num_steps=len(steps),
            typical=_with_first_gradients(steps[number], steps),
            spread_s=spread(lengths[n]),
            exposed_spread_s=spread(exposed[n]),
            usually_exposed_s=median(exposed[n]),
            turns=usual_turns(steps),
            values=usual_values(steps),
        )
        for n, (timeline, steps) in enumerate(zip(run.ranks, found, strict=True))
    )


def most_exposed(overlaps: Sequence[Overlap]) -> Overlap:
    """Return the overlap of the rank that is exposed longest, by its median."""
    return max(overlaps, key=lambda one: one.usually_exposed_s)


def _with_first_gradients(
    typical: StepOverlap, steps: Sequence[StepOverlap]
) -> StepOverlap:
    """Estimate when the first gradients of the typical step's buckets came.

    Gradients are timed in some steps only. Steps differ in length, so what is taken
    from the others is the median of first / full.
    """
    numbered = [{bucket.number: bucket for bucket in one.buckets} for one in steps]
    buckets = []
    for bucket in typical.buckets:
        same = [each[bucket.number] for each in numbered if bucket.number in each]
        timed = [(b.first_s, b.full_s) for b in same if b.first_s is not None]
        shares = [min(1.0, first / full) for first, full in timed if full > 0]
        first_s = bucket.full_s * median(shares) if shares else None
        buckets.append(replace(bucket, first_s=first_s))
    return replace(typical, buckets=tuple(buckets))


def spread(values: Sequence[float]) -> Spread:
    """Return p10 and p90: two of the values, with at most a tenth beyond each."""
    ordered, left_out = sorted(values), (len(values) - 1) // 10
    return ordered[left_out], ordered[-1 - left_out]


def typical_step(
    lengths: Sequence[Sequence[float]], exposed: Sequence[Sequence[float]]
) -> int:
    """Return the index of the step to report, which is the same on all ranks.

    On the rank that is reported, the length and the exposed time of that step lie
    between p10 and p90. Of such steps, those are better in which no other rank is
    exposed longer, and of these the one that is nearest to the medians.

    Args:
        lengths: The seconds of steps, by rank and step.
        exposed: The exposed seconds, by rank and step.
    """
    of_ranks, outside = np.array(exposed), np.zeros(len(exposed[0]), bool)
    shown = int(np.median(of_ranks, axis=1).argmax())
    for values in (lengths[shown], exposed[shown]):
        low, high = spread(values)
        outside |= (np.array(values) < low) | (np.array(values) > high)
    waits_less = of_ranks[shown] < of_ranks.max(axis=0)
    both = np.array([*lengths, *exposed])
    distance = abs(both - np.median(both, axis=1, keepdims=True)).sum(axis=0)
    return int(np.lexsort((distance, waits_less, outside))[0])  # the last key is first


def to_show(buckets: Sequence[BucketOverlap], most: int) -> set[int]:
    """Return the numbers of ``most`` buckets: first, last, and the most exposed."""
    ends = {bucket.number for bucket in (*buckets[:1], *buckets[-1:])}
    middle = sorted(buckets[1:-1], key=lambda bucket: -bucket.exposed_s)
    return ends | {bucket.number for bucket in middle[: most - len(ends)]}
