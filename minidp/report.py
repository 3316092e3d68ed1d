"""Recorded steps in words: is communication hidden, if not, why, and what then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ._advice import MIB, WORTH, Model, advise, layers_of, model_of
from ._analysis import BucketOverlap, Overlap, overlaps_of
from ._skew import BACKWARD, FORWARD, Skew, aligned, skew_of
from ._timeline import Timeline

Item = TypeVar("Item")
MAX_ROWS = 40  # of a table
FEW = 10  # steps; among fewer, none is typical
_NO_STEPS = (
    "No complete step was recorded{dropped}. A step is a forward of the DataParallel, "
    "its backward outside no_sync(), and what follows until the next forward. What to "
    "do: train a few dozen steps inside the with block."
)


def report(timelines: Sequence[Timeline]) -> str:
    """The report of one rank, or of several of one run.

    Args:
        timelines: recordings of different ranks, in any order.

    Raises:
        ValueError: they do not belong together.
    """
    ranks = aligned(timelines)
    overlaps = overlaps_of(ranks)
    if not overlaps:
        return _nothing(ranks)
    # The rank that waits most shows what the others cost it.
    first, skew = max(overlaps, key=lambda one: one.typical.exposed_s), skew_of(ranks)
    model = model_of(ranks, first)
    parts = [
        _header(ranks, first),
        _verdict(ranks[0], first) + f"\nAdvice: {advise(ranks, first, model, skew)}",
        _split(first),
    ]
    if model is not None:
        parts += [_buckets(ranks, first), _network(ranks[0], first, model)]
    if skew is not None:
        parts.append(_skew(skew))
    return "\n\n".join(parts)


def _nothing(ranks: Sequence[Timeline]) -> str:
    num_dropped = max(timeline.num_dropped for timeline in ranks)
    if len(ranks) > 1 and all(timeline.steps for timeline in ranks):
        return "The ranks recorded no step in common: record the same steps on all."
    dropped = f" ({num_dropped} were not completed)" if num_dropped else ""
    return _NO_STEPS.format(dropped=dropped)


def _header(ranks: Sequence[Timeline], overlap: Overlap) -> str:
    where = ranks[0].where
    seen = ", ".join(str(timeline.where.rank) for timeline in _few(ranks))
    of = f"rank{'s' if len(ranks) > 1 else ''} {seen} of {where.world_size}"
    versions = ", ".join(f"{name} {v}" for name, v in where.versions.items())
    hook = f"; comm hook {where.comm_hook}" if where.comm_hook else ""
    count = f"{overlap.num_steps} step{'s' if overlap.num_steps > 1 else ''}"
    few = "; too few to be sure: record a few dozen" * (overlap.num_steps < FEW)
    return (
        f"{of}; {where.backend} on {where.device}; {versions}{hook}\n"
        f"the typical one of {count} with the same buckets, on rank {overlap.rank}"
        f"{', which waits most' if len(ranks) > 1 else ''}{few}"
    )


# --------------------------------------------------------------------- what it means


def _verdict(timeline: Timeline, overlap: Overlap) -> str:
    one = overlap.typical
    total = one.hidden_s + one.exposed_s
    if not total:
        return "Is communication hidden? There is none."
    share = one.exposed_s / one.seconds
    first = (
        f"Is communication hidden? {one.hidden_s / total:.0%} of {_ms(total)} ms per "
        f"step; {_ms(one.exposed_s)} ms are exposed, {share:.0%} of the step."
    )
    if share < WORTH:
        return first
    worst = max(one.buckets, key=lambda bucket: bucket.exposed_s)
    numbers = [bucket.number for bucket in one.buckets]
    layers = layers_of(timeline, overlap.members[numbers.index(worst.number)])
    return (
        f"{first}\nWhy? {_ms(worst.exposed_s)} ms of them are bucket {worst.number} "
        f"({layers}): {_cause(worst, one.backward_s)}."
    )


def _cause(bucket: BucketOverlap, backward_s: float) -> str:
    longest = max(bucket.late_s, bucket.queued_s, bucket.wire_s)
    if bucket.late_s == longest:
        return f"a slower rank launches it {_ms(bucket.late_s)} ms later"
    if bucket.queued_s == longest:
        return (
            f"it waits {_ms(bucket.queued_s)} ms while the buckets before it are on "
            "the wire"
        )
    left_s = max(0.0, backward_s - bucket.full_s)
    return (
        f"its last gradient comes {_ms(left_s)} ms before the backward ends, and it "
        f"takes {_ms(bucket.wire_s)} ms"
    )


def _split(overlap: Overlap) -> str:
    one = overlap.typical
    hides = f"hides {_ms(one.hidden_s)} ms of communication"
    late = f"of hidden and exposed, {_ms(one.late_s)} ms are waiting for slower ranks"
    rows = [
        ("forward", one.forward_s, ""),
        ("backward", one.backward_s, hides),
        ("exposed communication", one.exposed_s, late if one.late_s else ""),
        ("copying averages out", one.finish_s, ""),
        ("optimizer", one.optimizer_s, ""),
        ("everything else", one.other_s, "data, loss, zero_grad, no_sync backwards"),
    ]
    lines = [
        f"One step: {_ms(one.seconds)} ms (p10 {_ms(overlap.p10_s)}, "
        f"p90 {_ms(overlap.p90_s)})"
    ]
    for name, seconds, note in rows:
        share = seconds / one.seconds if one.seconds else 0.0
        line = f"  {name:<21} {_ms(seconds):>8} ms {share:>4.0%}   {note}"
        lines.append(line.rstrip())
    return "\n".join(lines)


# --------------------------------------------------------------------- tables


def _buckets(ranks: Sequence[Timeline], overlap: Overlap) -> str:
    title = ["bucket", "params", "MiB", "first", "full", "waited", "late", "wire"]
    rows = [[*title, "hidden", "exposed", "layers"]]
    for bucket, members, nbytes in zip(
        overlap.typical.buckets, overlap.members, overlap.nbytes, strict=True
    ):
        moments = [bucket.first_s, bucket.full_s]
        spans = [bucket.waited_s, bucket.late_s, bucket.wire_s]
        times = [*moments, *spans, bucket.hidden_s, bucket.exposed_s]
        cells = ["-" if seconds is None else _ms(seconds) for seconds in times]
        facts = [str(bucket.number), str(len(members)), f"{nbytes / MIB:.2f}"]
        rows.append([*facts, *cells, layers_of(ranks[0], members)])
    if len(ranks) == 1:  # nobody knows
        rows = [[*row[:6], *row[7:]] for row in rows]
    lines = _table([rows[0], *_few(rows[1:])])
    if len(rows) - 1 > MAX_ROWS:
        left_out = len(rows) - 1 - MAX_ROWS
        lines.insert(1 + MAX_ROWS // 2, f"   ... {left_out} more ...")
    return "\n".join([*lines, *_legend(is_merged=len(ranks) > 1)])


def _legend(*, is_merged: bool) -> list[str]:
    others = "waiting for slower ranks included; rec.gather() tells it apart"
    late = ["late     until the slowest rank has launched it, too"] if is_merged else []
    return [
        "All in ms.",
        "  first    when its first gradient is there, after the backward began",
        "  full     ... and its last one",
        "  waited   until it is flattened, and the buckets before it are done",
        *(f"  {line}" for line in late),
        f"  wire     bytes move{'' if is_merged else f' ({others})'}",
        "  hidden   of these, while the backward computes; exposed: after it",
    ]


def _network(timeline: Timeline, overlap: Overlap, model: Model) -> str:
    size, wire_s = timeline.where.world_size, overlap.typical.wire_s
    on_bus = 2 * (size - 1) / size  # of a ring: bytes that each rank sends
    achieved = sum(overlap.nbytes) * on_bus / wire_s if wire_s else 0.0
    fitted = model.network
    ratio = overlap.typical.seconds / model.bound_s
    return (
        f"Bus bandwidth: {_bandwidth(achieved)} achieved; a bucket takes "
        f"{fitted.latency_s * 1e3:.2g} ms + its bytes at "
        f"{_bandwidth(fitted.bytes_per_s * on_bus)}\n"
        f"Lower bound: {_ms(model.bound_s)} ms per step, if each byte left as soon as "
        f"it is there; this is {ratio:.2f} times that"
    )


def _bandwidth(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s ({8 * bytes_per_s / 1e9:.3g} Gbit/s)"


def _skew(skew: Skew) -> str:
    names = {FORWARD: "forward begins", BACKWARD: "backward begins"}
    rows = [["", "last is", "ms behind"]]
    for place in _few(list(skew.late)):
        rank = skew.latest(place)
        late = skew.late[place][rank]
        name = names.get(str(place), f"bucket {place}")
        rows.append([name, f"rank {rank}", f"{late.typical_s * 1e3:.1f}"])
    lines = ["Who comes last, behind the median of the other ranks:", *_table(rows)]
    if skew.error_s:
        lines.append(f"The clocks of hosts are known to +-{_ms(skew.error_s)} ms.")
    return "\n".join(lines)


def _few(items: Sequence[Item]) -> Sequence[Item]:
    """The first and the last, if there are too many to read."""
    half = MAX_ROWS // 2
    return items if len(items) <= MAX_ROWS else [*items[:half], *items[-half:]]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of numbers to the right; layers, which come last, to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        if rows[0][-1] == "layers":
            cells[-1] = row[-1]
        lines.append("  ".join(cells).rstrip())
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
