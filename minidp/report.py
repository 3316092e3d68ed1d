"""Recorded steps in words: is communication hidden, if not, why, and what then."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Sequence
from typing import Any

from ._advice import WORTH, advise, layers_of
from ._analysis import (
    BucketOverlap,
    Overlap,
    most_exposed,
    overlaps_of,
    to_show,
)
from ._forecast import MIB, Forecast, forecast_of
from ._skew import BACKWARD, FORWARD, Place, Skew, aligned, common_steps, skew_of
from ._timeline import AUTO, AUTO_TRIES, Timeline
from ._typical import Spread

MAX_ROWS = 40  # buckets in a table
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
    first, skew = most_exposed(overlaps), skew_of(ranks)
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
    count = one.num_local_forwards
    rows = [
        ("local forwards", one.local_forward_s, f"{count} under no_sync()"),
        ("local backwards", one.local_backward_s, "nothing is averaged in them"),
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
        if name.startswith("local") and not seconds:
            continue
        share = seconds / one.seconds if one.seconds else 0.0
        line = f"  {name:<21} {_ms(seconds):>8} ms {share:>4.0%}   {note}"
        lines.append(line.rstrip())
    return "\n".join(lines)


# --------------------------------------------------------------------- tables


def _buckets(ranks: Sequence[Timeline], overlap: Overlap) -> str:
    title = ["bucket", "params", "MiB", "first", "full", "waited", "late", "wire"]
    rows = [[*title, "hidden", "exposed", "layers"]]
    shown = to_show(overlap.typical.buckets, MAX_ROWS)
    others: list[tuple[BucketOverlap, int, int]] = []
    for bucket, members, nbytes in zip(
        overlap.typical.buckets, overlap.members, overlap.nbytes, strict=True
    ):
        if bucket.number not in shown:
            others.append((bucket, len(members), nbytes))
            continue
        moments = [bucket.first_s, bucket.full_s]
        spans = [bucket.waited_s, bucket.late_s, bucket.wire_s]
        times = [*moments, *spans, bucket.hidden_s, bucket.exposed_s]
        cells = ["-" if seconds is None else _ms(seconds) for seconds in times]
        facts = [str(bucket.number), str(len(members)), f"{nbytes / MIB:.2f}"]
        rows.append([*facts, *cells, layers_of(ranks[0], members)])
    if others:
        rows.append(_sums(others))
    if len(ranks) == 1:  # nobody knows
        rows = [[*row[:6], *row[7:]] for row in rows]
    return "\n".join([*_table(rows), *_legend(ranks, overlap)])


def _sums(others: Sequence[tuple[BucketOverlap, int, int]]) -> list[str]:
    """The row of buckets that have none of their own, so that the table adds up."""
    buckets, counts, nbytes = zip(*others, strict=True)
    sums = [
        _ms(sum(getattr(bucket, name) for bucket in buckets))
        for name in ("late_s", "wire_s", "hidden_s", "exposed_s")
    ]
    numbers = _runs([bucket.number for bucket in buckets])
    facts = ["others", str(sum(counts)), f"{sum(nbytes) / MIB:.2f}", "-", "-", "-"]
    return [*facts, *sums, f"the sums of {len(others)} buckets: {numbers}"]


def _runs(numbers: Collection[int]) -> str:
    """Growing numbers, those in a row as their ends: 3, 5 to 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join(" to ".join(map(str, run)) for run in runs)


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
        f"No bucket layout is predicted below {_ms(forecast.bound_s)} ms per step, "
        "where each byte leaves as soon as it is there; this one takes "
        f"{ratio:.2f} times as long"
    )


def _bandwidth(bytes_per_s: float) -> str:
    return (
        f"{_digits(bytes_per_s / 1e9)} GB/s ({_digits(8 * bytes_per_s / 1e9)} Gbit/s)"
    )


def _digits(number: float) -> str:
    """Three, but no power of ten: a fast link has 3600 Gbit/s, not 3.6e+03."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def _skew(skew: Skew, ranks: Sequence[Timeline], overlap: Overlap) -> str:
    names = {FORWARD: "forward begins", BACKWARD: "backward begins"}
    shown = [t.where.rank for t in ranks][:MAX_COLUMNS]
    title = ["", "last is", "ms behind", *(f"rank {rank}" for rank in shown)]
    rows = [[*title, "layers"]]
    members = {
        bucket.number: layers_of(ranks[0], each)
        for bucket, each in zip(overlap.typical.buckets, overlap.members, strict=True)
    }
    left_out: dict[int, float] = {}
    shown_places = _places(skew)
    for place, late in skew.late.items():
        rank = skew.latest(place)
        if isinstance(place, int) and place not in shown_places:
            left_out[place] = late[rank].typical_s
            continue
        name = names.get(str(place), f"bucket {place}")
        behind = [_ms(late[r].typical_s) for r in (rank, *shown)]
        layers = members.get(place, "") if isinstance(place, int) else ""
        rows.append([name, f"rank {rank}", *behind, layers])
    lines = _table(rows)
    if left_out:
        lines.append(
            f"(Buckets {_runs(left_out)} are left out: no rank is more than "
            f"{_ms(max(left_out.values()))} ms behind there.)"
        )
    lines.insert(
        0, "When each rank comes, in ms behind the others (medians, over steps, too):"
    )
    if len(ranks) > len(shown):
        more = len(ranks) - len(shown)
        words = "ranks count, but are" if more > 1 else "rank counts, but is"
        lines.append(f"({more} more {words} not shown.)")
    if skew.error_s:
        lines.append(f"The clocks of hosts are known to +-{_ms(skew.error_s)} ms.")
    return "\n".join(lines)


def _places(skew: Skew) -> set[Place]:
    """Where the last rank is most behind, of buckets; the last one is always there."""
    buckets = [place for place in skew.late if isinstance(place, int)]
    last = skew.last_bucket()

    def behind(place: int) -> tuple[bool, float]:
        return place == last, skew.late[place][skew.latest(place)].typical_s

    return {*sorted(buckets, key=behind)[-MAX_ROWS:]}


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
