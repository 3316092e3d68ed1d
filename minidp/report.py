"""Recorded steps in words: is communication hidden, if not, why, and what then."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from ._advice import WORTH, advise, layers_of
from ._analysis import BucketOverlap, Overlap, Spread, overlaps_of
from ._forecast import MIB, Forecast, forecast_of
from ._skew import BACKWARD, FORWARD, Skew, aligned, common_steps, skew_of
from ._timeline import AUTO, AUTO_TRIES, Timeline

MAX_ROWS = 40  # of a table
MAX_COLUMNS = 8  # of ranks
SHOWN = 0.05e-3  # s; less would be printed as 0.0 ms
FEW = 10  # steps; among fewer, none is typical
_CHOICE = {
    AUTO: '; bucket_cap_mb="auto" chose the buckets',
    AUTO_TRIES: '; bucket_cap_mb="auto" is still trying buckets',
}
_NO_STEPS = (
    "No complete step was recorded{dropped}. A step is a forward of the DataParallel, "
    "its backward outside no_sync(), and what follows until the next forward or the "
    "end of the with block. What to do: train a few dozen steps inside it."
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
    forecast = forecast_of(ranks, first)
    few = "Record a few dozen steps; these few say: " * (first.num_steps < FEW)
    parts = [
        _header(ranks, first),
        _verdict(ranks[0], first, 0.0 if skew is None else skew.error_s)
        + f"\nAdvice: {few}{advise(ranks, first, forecast, skew)}",
        _split(first),
    ]
    if first.typical.buckets:
        parts.append(_buckets(ranks, first))
    if forecast is not None:
        parts.append(_network(ranks[0], first, forecast))
    if skew is not None:
        parts.append(_skew(skew, ranks, first))
    return "\n\n".join(parts)


def _nothing(ranks: Sequence[Timeline]) -> str:
    num_dropped = max(timeline.num_dropped for timeline in ranks)
    if any(timeline.steps for timeline in ranks):
        counts = ", ".join(f"rank {t.where.rank} {len(t.steps)}" for t in ranks)
        return (
            "The ranks recorded no step in common: record the same steps on all. "
            f"(Complete steps: {counts}.)"
        )
    dropped = f" ({num_dropped} were not completed)" if num_dropped else ""
    return _NO_STEPS.format(dropped=dropped)


def _header(ranks: Sequence[Timeline], overlap: Overlap) -> str:
    where = ranks[0].where
    seen = _ranks([timeline.where.rank for timeline in ranks])
    of = f"rank{'s' if len(ranks) > 1 else ''} {seen} of {where.world_size}"
    versions = ", ".join(f"{name} {v}" for name, v in where.versions.items())
    hook = f"; comm hook {where.comm_hook}" if where.comm_hook else ""
    count = f"{overlap.num_steps} step{'s' if overlap.num_steps > 1 else ''}"
    step = common_steps(ranks)[overlap.step][0]
    missing = where.world_size - len(ranks)
    most = "" if len(ranks) == 1 else ", which waits most"
    if missing and most:
        most += f" of these; {missing} more {'are' if missing > 1 else 'is'} not here"
    return (
        f"{of}; {where.backend} on {where.device}; {versions}{hook}"
        f"{_CHOICE.get(where.layout_by, '')}\n"
        f"the typical one (step {step.number}) of {count} with the same buckets, on "
        f"rank {overlap.rank}{most}"
    )


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) <= MAX_ROWS:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]}, {numbers[1]}, ... {numbers[-1]} ({len(numbers)})"


# --------------------------------------------------------------------- what it means


def _verdict(timeline: Timeline, overlap: Overlap, clock_error_s: float) -> str:
    one = overlap.typical
    total = one.hidden_s + one.exposed_s
    if not total or timeline.where.world_size == 1:
        return "Is communication hidden? There is none."
    share = one.exposed_s / one.seconds
    first = (
        f"Is communication hidden? {one.hidden_s / total:.0%} of the gradients' "
        f"{_ms(total)} ms per step; {_ms(one.exposed_s)} ms are exposed "
        f"({_spread(overlap.exposed_spread_s)}), {share:.0%} of the step."
    )
    if share < WORTH:
        return first
    worst = max(one.buckets, key=lambda bucket: bucket.exposed_s)
    numbers = [bucket.number for bucket in one.buckets]
    layers = layers_of(timeline, overlap.members[numbers.index(worst.number)])
    cause = _cause(worst, one.backward_s, clock_error_s)
    if worst.exposed_s >= 0.5 * one.exposed_s:
        return (
            f"{first}\nWhy? {_ms(worst.exposed_s)} ms of them are bucket "
            f"{worst.number} ({layers}): {cause}."
        )
    count = sum(bucket.exposed_s >= SHOWN for bucket in one.buckets)
    return (
        f"{first}\nWhy? {count} of {len(one.buckets)} buckets are still to come when "
        f"the backward ends. Bucket {worst.number} ({layers}) takes longest, "
        f"{_ms(worst.exposed_s)} ms: {cause}."
    )


def _cause(bucket: BucketOverlap, backward_s: float, clock_error_s: float) -> str:
    """From its last gradient until it is done, in order."""
    left_s = max(0.0, backward_s - bucket.full_s)
    at_work = [
        (bucket.late_s, "until the slowest rank launches it"),
        (bucket.wire_s, "on the wire"),
    ]
    both_s = bucket.late_s + bucket.wire_s
    if clock_error_s > both_s / 2:
        why = "which clocks that are known so badly do not tell apart"
        at_work = [(both_s, f"of waiting for slower ranks and on the wire, {why}")]
    spans = [
        (bucket.waited_s - bucket.queued_s, "until it is launched"),
        (bucket.queued_s, "behind the buckets before it"),
        *at_work,
    ]
    then = [f"{_ms(seconds)} ms {what}" for seconds, what in spans if seconds >= SHOWN]
    return (
        f"its last gradient comes {_ms(left_s)} ms before the backward ends; then "
        f"{', '.join(then)}"
    )


def _split(overlap: Overlap) -> str:
    one = overlap.typical
    hides = f"hides {_ms(one.hidden_s)} ms of communication"
    late = f"of hidden and exposed, {_ms(one.late_s)} ms are waiting for slower ranks"
    rows = [
        (
            "forward",
            one.forward_s,
            "with its collectives, if any (module buffers, SyncBatchNorm)",
        ),
        ("backward", one.backward_s, hides),
        ("exposed communication", one.exposed_s, late if one.late_s else ""),
        ("copying averages out", one.finish_s, ""),
        ("optimizer", one.optimizer_s, ""),
        ("everything else", one.other_s, "data, loss, zero_grad and the like"),
    ]
    lines = [f"One step: {_ms(one.seconds)} ms ({_spread(overlap.spread_s)})"]
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
    lines = _shortened(_table(rows))
    return "\n".join([*lines, *_legend(ranks, overlap)])


def _legend(ranks: Sequence[Timeline], overlap: Overlap) -> list[str]:
    notes, hook, is_merged = [], ranks[0].where.comm_hook, len(ranks) > 1
    if any(bucket.wire_s < SHOWN for bucket in overlap.typical.buckets):
        notes.append("0.0: beside those of the bucket before, which counts them")
    if not is_merged:
        notes.append("waiting for slower ranks included; rec.gather() tells it apart")
    elif len(ranks) < ranks[0].where.world_size:
        notes.append("waiting for ranks that are not here included")
    if hook:
        notes.append(f"what {hook} itself does, included")
    more = f" ({'; '.join(notes)})" if notes else ""
    late = ["late     until the slowest rank has launched it, too"] if is_merged else []
    return [
        "All in ms.",
        "  first    when its first gradient is there, after the backward began",
        "  full     ... and its last one",
        "  waited   until it is flattened, and the buckets before it are done",
        *(f"  {line}" for line in late),
        f"  wire     bytes move{more}",
        "  hidden   of these, while the backward computes; exposed: after it",
    ]


def _network(timeline: Timeline, overlap: Overlap, forecast: Forecast) -> str:
    size = timeline.where.world_size
    pairs = zip(overlap.typical.buckets, overlap.dense_bytes, strict=True)
    wire_s = sum(bucket.wire_s for bucket, nbytes in pairs if nbytes)
    on_bus = 2 * (size - 1) / size  # of a ring: bytes that each rank sends
    achieved = sum(overlap.dense_bytes) * on_bus / wire_s if wire_s else 0.0
    fitted = forecast.network
    ratio = overlap.typical.seconds / forecast.bound_s
    hook = "; of the gradients' bytes: the comm hook may send others"
    takes, unknown = f"{fitted.latency_s * 1e3:.2g} ms + ", ""
    if forecast.is_one_size:
        takes, unknown = (
            "",
            "; all are of one size, so what each costs by itself is in it",
        )
    return (
        f"Bus bandwidth: {_bandwidth(achieved)} achieved; a bucket takes {takes}its "
        f"bytes at {_bandwidth(fitted.bytes_per_s * on_bus)}{unknown}"
        f"{hook if timeline.where.comm_hook else ''}\n"
        f"Lower bound of all bucket layouts: {_ms(forecast.bound_s)} ms per step, if "
        f"each byte left as soon as it is there; this is {ratio:.2f} times that"
    )


def _bandwidth(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s ({8 * bytes_per_s / 1e9:.3g} Gbit/s)"


def _skew(skew: Skew, ranks: Sequence[Timeline], overlap: Overlap) -> str:
    names = {FORWARD: "forward begins", BACKWARD: "backward begins"}
    shown = [t.where.rank for t in ranks][:MAX_COLUMNS]
    title = ["", "last is", "ms behind", *(f"rank {rank}" for rank in shown)]
    rows = [[*title, "layers"]]
    members = {
        bucket.number: layers_of(ranks[0], each)
        for bucket, each in zip(overlap.typical.buckets, overlap.members, strict=True)
    }
    for place, late in skew.late.items():
        rank = skew.latest(place)
        name = names.get(str(place), f"bucket {place}")
        behind = [_ms(late[r].typical_s) for r in (rank, *shown)]
        layers = members.get(place, "") if isinstance(place, int) else ""
        rows.append([name, f"rank {rank}", *behind, layers])
    lines = _shortened(_table(rows))
    lines.insert(
        0, "When each rank comes, in ms behind the others (medians, over steps, too):"
    )
    if len(ranks) > len(shown):
        lines.append(
            f"({len(ranks) - len(shown)} more ranks count, but are not shown.)"
        )
    if skew.error_s:
        lines.append(f"The clocks of hosts are known to +-{_ms(skew.error_s)} ms.")
    return "\n".join(lines)


def _shortened(table: list[str]) -> list[str]:
    """Only the first rows and the last, if there are too many to read."""
    left_out, half = len(table) - 1 - MAX_ROWS, MAX_ROWS // 2
    if left_out <= 0:
        return table
    return [*table[: 1 + half], f"   ... {left_out} more ...", *table[-half:]]


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


def _spread(spread_s: Spread) -> str:
    return f"p10 {_ms(spread_s[0])}, p90 {_ms(spread_s[1])}"


def _ms(seconds: float) -> str:
    return f"{round(seconds * 1e3, 1) + 0.0:.1f}"  # no -0.0


if __name__ == "__main__":  # python -m minidp.report FILE
    command: Any = importlib.import_module("minidp.__main__")
    sys.exit(command.main(["report", *sys.argv[1:]]))
