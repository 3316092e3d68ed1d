"""Write the report of recorded steps: is communication hidden, and if not, why?"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from minidp.config import MIB

from .advice import WORTH, advise, layers_of
from .analysis import BucketOverlap, Spread, ValuesOverlap, to_show
from .forecast import Analysis, analyse
from .skew import BACKWARD, FORWARD, Run, Skew, aligned
from .timeline import AUTO, AUTO_TRIES, Timeline

MAX_ROWS = 40  # how many buckets a table shows
MAX_COLUMNS = 8  # how many ranks a table shows
SHOWN = 0.05e-3  # so many seconds are not printed as 0.0 ms
FEW = 10  # with fewer steps, the report asks for a longer recording
# The rows of one step, and the attributes of `StepOverlap`. Those whose names begin
# with one of `RARE` are left out where they are zero.
RARE = ("local", "between", "values")
PHASES = {
    "local forwards": "local_forward_s",
    "local backwards": "local_backward_s",
    "between turns": "between_s",
    "forward": "forward_s",
    "backward": "backward_s",
    "exposed communication": "exposed_s",
    "copying averages out": "finish_s",
    "optimizer": "optimizer_s",
    "values, exposed": "values_s",
    "everything else": "other_s",
}
VALUES_HEAD = (
    "New values of parameters come back from the ranks that step them. All in ms, "
    "medians over steps;\nstart: after the backward; exposed: this rank sends or awaits"
    " values; waited: it awaits those of this bucket."
)
_VALUE_TIMES = ("start", "hidden", "exposed", "waited")
_CHOICE = {
    AUTO: '; bucket_cap_mb="auto" chose the buckets',
    AUTO_TRIES: '; bucket_cap_mb="auto" is still trying buckets',
}


def report(timelines: Sequence[Timeline]) -> str:
    """Return the report on the ranks of a run, or what to record if they share no step.

    Raises:
        ValueError: The recordings are not of different ranks of one run.
    """
    run = aligned(timelines)
    found = analyse(run)
    if found is None:
        return _nothing(run)
    where, *answers = headline(found)
    parts = [where, "\n".join(answers), _split(found)]
    if rows := turn_rows(found):
        parts.append("\n".join([slowest_turn(found), *_table(rows)]))
    if found.shown.typical.buckets:
        parts.append(_buckets(found))
    if rows := value_rows(found):
        parts.append("\n".join([VALUES_HEAD, *_table(rows)]))
    if found.forecast is not None:
        parts.append("\n".join(network_lines(found)))
    if found.skew is not None:
        rows, notes = skew_rows(found.skew, found)
        head = "When each rank comes, in ms behind the median of the others (medians "
        parts.append("\n".join([f"{head}over steps):", *_table(rows), *notes]))
    return "\n\n".join(parts)


def headline(found: Analysis) -> list[str]:
    """Return the first lines of the report: what was recorded, a verdict, the advice.

    The first item has a line break inside. A caution stands before the advice if few
    steps were recorded, or if they differ much.
    """
    few = "Record a few dozen steps; these few say: " * (found.shown.num_steps < FEW)
    least, most = found.shown.spread_s
    if most > 2 * least:
        few = f"Steps differ ({spread_text((least, most))}), so one says little: {few}"
    verdict = [*_verdict(found), *values_sentence(found)]
    return [_header(found), *verdict, f"Advice: {few}{advise(found)}"]


def _nothing(run: Run) -> str:
    if any(timeline.steps for timeline in run.ranks):
        counts = ", ".join(f"rank {t.where.rank} {len(t.steps)}" for t in run.ranks)
        return (
            "The ranks recorded no step in common: record the same steps on all. "
            f"(Complete steps: {counts}.)"
        )
    num_dropped = max(timeline.num_dropped for timeline in run.ranks)
    dropped = f" ({num_dropped} were not completed)" if num_dropped else ""
    return (
        f"No complete step was recorded{dropped}. A step is a forward of the "
        "DataParallel, its backward outside no_sync(), and what follows until the next "
        "forward or the end of the with block. What to do: train a few dozen steps "
        "inside it."
    )


def _header(found: Analysis) -> str:
    ranks, one = found.run.ranks, found.shown
    where = ranks[0].where
    numbers = [str(timeline.where.rank) for timeline in ranks]
    if len(numbers) > MAX_ROWS:
        numbers[2:] = [f"... {numbers[-1]} ({len(numbers)})"]
    versions = ", ".join(f"{name} {text}" for name, text in where.versions.items())
    hook = f"; comm hook {where.comm_hook}" if where.comm_hook else ""
    memory = ""
    if where.no_shared_memory is not None:
        why = where.no_shared_memory
        memory = f"; no shared memory ({why})" if why else "; buckets in shared memory"
    most, missing = "", where.world_size - len(ranks)
    if len(ranks) > 1:
        most = ", which waits most"
        most += f" of these; not here: {missing} more" if missing else ""
    return (
        f"rank{'s' * (len(ranks) > 1)} {', '.join(numbers)} of {where.world_size}; "
        f"{where.backend} on {where.device}; {versions}{hook}{memory}"
        f"{_CHOICE.get(where.layout_by, '')}\n"
        f"the typical one (step {one.typical.step.number}) of {one.num_steps} "
        f"step{'s' * (one.num_steps > 1)} with the same buckets, on rank "
        f"{one.rank}{most}"
    )


# --------------------------------------------------------------------- what it means


def _verdict(found: Analysis) -> list[str]:
    """Return a line that says how much is hidden, and one that says why not more is.

    There is no second line if so little is exposed that nothing can be gained.
    """
    one, first = found.shown.typical, found.run.ranks[0]
    total = one.hidden_s + one.exposed_s
    if not total or first.where.world_size == 1:
        return ["Is communication hidden? There is none."]
    share = one.exposed_s / one.seconds
    late_s = sum(min(bucket.late_s, bucket.hidden_s) for bucket in one.buckets)
    answer = (
        f"Is communication hidden? {one.hidden_s / total:.0%} of the gradients' "
        f"{ms(total)} ms per step; {ms(one.exposed_s)} ms are exposed "
        f"({spread_text(found.shown.exposed_spread_s)}), {share:.0%} of the step."
    )
    if late_s > 0.5 * one.hidden_s:
        answer += f" {ms(late_s)} ms of what is hidden are waiting for slower ranks."
    if share < WORTH:
        return [answer]
    worst = max(one.buckets, key=lambda bucket: bucket.exposed_s)
    name = f"{worst.number} ({layers_of(first, worst.members)})"
    count = sum(bucket.exposed_s >= SHOWN for bucket in one.buckets)
    why = (
        f"{count} of {len(one.buckets)} buckets are still to come when the backward "
        f"ends. Bucket {name} takes longest, {ms(worst.exposed_s)} ms"
    )
    if worst.exposed_s >= 0.5 * one.exposed_s:
        why = f"{ms(worst.exposed_s)} ms of what is exposed are bucket {name}"
    error_s = 0.0 if found.skew is None else found.skew.error_s
    return [answer, f"Why? {why}: {_cause(worst, one.backward_s, error_s)}."]


def _cause(bucket: BucketOverlap, backward_s: float, clock_error_s: float) -> str:
    """Describe what a bucket's exposed time is made of, and how it came about.

    Waiting for slow ranks is told from the transfer only if the clocks are exact
    enough.
    """
    # In time, waiting comes before the transfer, and the hidden part before the
    # exposed.
    late_s = max(0.0, bucket.late_s - bucket.hidden_s)
    wire_s = bucket.exposed_s - late_s
    exposed = [(late_s, "waiting for slower ranks"), (wire_s, "on the wire")]
    if clock_error_s > (bucket.late_s + bucket.wire_s) / 2:
        why = "which the clocks of the hosts are too inaccurate to tell apart"
        what = f"waiting for slower ranks or on the wire, {why}"
        exposed = [(bucket.exposed_s, what)]
    parts = ", ".join(f"{ms(s)} ms {what}" for s, what in exposed if s >= SHOWN)
    left_s, then = max(0.0, backward_s - bucket.full_s), ""
    if bucket.waited_s >= SHOWN:
        then = f"; then it waits {ms(bucket.waited_s)} ms for its turn"
    full = f"Its last gradient comes {ms(left_s)} ms before the backward ends{then}"
    return f"{parts}. {full}"


def values_sentence(found: Analysis) -> list[str]:
    """Return a line about the values of divided steps, [] if there are none."""
    one = found.shown.typical
    if not one.step.values:
        return []
    share = one.values_s / one.seconds if one.seconds else 0.0
    return [
        "Are values of parameters back in time? To send and to await them takes "
        f"{ms(one.values_s)} ms, {share:.0%} of the step; for "
        f"{ms(one.hidden_values_s)} ms more they are on their way while the rank does "
        "other things."
    ]


def _split(found: Analysis) -> str:
    one = found.shown.typical
    late = f"of hidden and exposed, {ms(one.late_s)} ms are waiting for slower ranks"
    notes = {
        "local forwards": f"{len(one.step.local_forwards)} under no_sync()",
        "local backwards": "nothing is averaged in them",
        "forward": "with its collectives, if any (module buffers, SyncBatchNorm)",
        "backward": f"hides {ms(one.hidden_s)} ms of communication",
        "exposed communication": late * bool(one.late_s),
        "values, exposed": "sending new values of parameters, and waiting for them",
        "everything else": "data, loss, zero_grad and the like",
    }
    if one.step.turns:
        notes |= {
            "local forwards": "of all logical ranks but this rank's last one",
            "local backwards": "of the same; nothing is sent in them",
            "between turns": "module buffers, and sums of this rank's gradients",
            "forward": "of this rank's last logical rank",
        }
    lines = [f"One step: {ms(one.seconds)} ms ({spread_text(found.shown.spread_s)})"]
    for name, attribute in PHASES.items():
        seconds, note = getattr(one, attribute), notes.get(name, "")
        if seconds or not name.startswith(RARE):
            share = seconds / one.seconds if one.seconds else 0.0
            line = f"  {name:<21} {ms(seconds):>8} ms {share:>4.0%}   {note}"
            lines.append(line.rstrip())
    return "\n".join(lines)


# --------------------------------------------------------------------- tables


def _buckets(found: Analysis) -> str:
    buckets, first = found.shown.typical.buckets, found.run.ranks[0]
    times = ["first", "full", "waited", "late", "wire", "hidden", "exposed"]
    rows = [["bucket", "params", "MiB", *times, "layers"]]
    numbers = to_show(buckets, MAX_ROWS)
    others = [bucket for bucket in buckets if bucket.number not in numbers]
    for bucket in buckets:
        if bucket.number in numbers:
            seconds = [getattr(bucket, f"{name}_s") for name in times]
            cells = ["-" if each is None else ms(each) for each in seconds]
            rows.append([str(bucket.number), *_sizes([bucket]), *cells])
            rows[-1].append(layers_of(first, bucket.members))
    if others:  # the columns must add up
        sums = [ms(sum(getattr(b, f"{n}_s") for b in others)) for n in times[3:]]
        note = f"the sums of {len(others)} buckets"
        rows.append(["others", *_sizes(others), "-", "-", "-", *sums, note])
    if len(found.run.ranks) == 1:  # lateness is unknown
        rows = [[*row[:6], *row[7:]] for row in rows]
    return "\n".join([*_table(rows), *_legend(found)])


def value_rows(found: Analysis) -> list[list[str]]:
    """Return the usual ways back of values as a table, [] if there are none.

    Of many, it has those that are exposed longest.
    """
    values, first = found.shown.values, found.run.ranks[0]
    longest = sorted(values, key=lambda each: -each.waited_s)[:MAX_ROWS]
    rows = [["of bucket", "params", "MiB", *_VALUE_TIMES, "layers"]]
    for each in values:
        if each in longest:
            cells = [ms(getattr(each, f"{name}_s")) for name in _VALUE_TIMES]
            rows.append([str(each.number), *_sizes([each]), *cells])
            rows[-1].append(layers_of(first, each.members))
    return rows if values else []


def slowest_turn(found: Analysis) -> str:
    """Return a sentence about the logical rank that takes longest, by its median."""
    turns = [(turn, one.rank) for one in found.overlaps for turn in one.turns]
    slowest, rank = max(turns, key=lambda pair: pair[0].seconds)
    usual = median(turn.seconds for turn, _ in turns)
    times = f", {slowest.seconds / usual:.2f} times the median" if usual else ""
    some = "" if len(turns) == (of := _number(found)) else f" Here are {len(turns)}."
    return (
        f"{of} logical ranks, of which {slowest.number}, on rank {rank}, takes "
        f"longest: {ms(slowest.seconds)} ms{times}.{some}"
    )


def _number(found: Analysis) -> int:
    return found.run.ranks[0].where.logical_ranks or 0


def turn_rows(found: Analysis) -> list[list[str]]:
    """Return the usual times of logical ranks as a table, [] if there are none.

    Of many, it has those that take longest.
    """
    turns = [(turn, one.rank) for one in found.overlaps for turn in one.turns]
    longest = sorted(turns, key=lambda pair: -pair[0].seconds)[:MAX_ROWS]
    rows = [["logical", "rank", "ms", "of step", "forward", "backward", "else"]]
    for turn, rank in sorted(longest):
        both = turn.forward_s, turn.backward_s
        others = max(0.0, turn.seconds - sum(both))
        cells = [ms(turn.seconds), f"{turn.share:.0%}", *map(ms, (*both, others))]
        rows.append([str(turn.number), str(rank), *cells])
    return rows if turns else []


def _sizes(buckets: Sequence[BucketOverlap | ValuesOverlap]) -> list[str]:
    count = sum(len(bucket.members) for bucket in buckets)
    return [str(count), f"{sum(bucket.nbytes for bucket in buckets) / MIB:.2f}"]


def _legend(found: Analysis) -> list[str]:
    where, num_ranks = found.run.ranks[0].where, len(found.run.ranks)
    notes = []
    if any(bucket.wire_s < SHOWN for bucket in found.shown.typical.buckets):
        notes.append("0.0 if sent together with the bucket before, which counts it")
    if num_ranks == 1:
        notes.append("includes waiting for slower ranks; rec.gather() tells it apart")
    elif num_ranks < where.world_size:
        notes.append("includes waiting for the ranks that are not here")
    if where.comm_hook:
        notes.append(f"includes the work of {where.comm_hook} itself")
    more = f" ({'; '.join(notes)})" if notes else ""
    late = ["  late     until the slowest rank has launched it"]
    return [
        "All in ms.",
        "  first    its first gradient arrives, after the backward began",
        "  full     its last gradient arrives",
        "  waited   until it is flattened, and the buckets before it are done",
        *(late if num_ranks > 1 else []),
        f"  wire     bytes move{more}",
        "  hidden   of these, while the backward computes; exposed: after it",
    ]


def network_lines(found: Analysis) -> list[str]:
    """Return a line about the bandwidth, and one about what no bucket layout can reach.

    The analysis must have a forecast.
    """
    where, forecast = found.run.ranks[0].where, found.forecast
    assert forecast is not None
    dense = [bucket for bucket in found.shown.typical.buckets if bucket.dense_bytes]
    wire_s = sum(bucket.wire_s for bucket in dense)
    # In a ring, each rank sends so many times the bytes of a bucket.
    on_bus = 2 * (where.world_size - 1) / where.world_size
    nbytes = sum(bucket.dense_bytes for bucket in dense) * on_bus
    fitted = forecast.network
    takes, unknown = f"{fitted.latency_s * 1e3:.2g} ms + ", ""
    times = "" if on_bus == 1 else f"{_digits(on_bus)} times "
    if forecast.is_one_size:
        takes, unknown = "", "; all have one size, so this includes the latency"
    other = ""  # why other bytes than those of the gradients may travel
    if where.comm_hook:
        other = "the comm hook may send others"
    elif where.logical_ranks is not None:
        other = "a rank sends more if it has several sums of logical ranks"
    elif found.run.ranks[0].is_divided:
        other = "half of them are sent, to the ranks that own the parameters"
    note = f"; computed from the gradients' bytes: {other}" if other else ""
    return [
        f"Bus bandwidth: {_bandwidth(nbytes / wire_s if wire_s else 0.0)}, bytes over "
        f"the time on the wire; predictions give a bucket {takes}{times}its bytes at "
        f"{_bandwidth(fitted.bytes_per_s * on_bus)}"
        f"{unknown}{note}",
        f"No bucket layout is predicted below {ms(forecast.bound_s)} ms per step, "
        "where each byte is sent as soon as it is computed and no rank is late; this "
        f"one takes {forecast.step_s / forecast.bound_s:.2f} times as long",
    ]


def _bandwidth(bytes_per_s: float) -> str:
    gigabytes = bytes_per_s / 1e9
    return f"{_digits(gigabytes)} GB/s ({_digits(8 * gigabytes)} Gbit/s)"


def _digits(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def skew_rows(skew: Skew, found: Analysis) -> tuple[list[list[str]], list[str]]:
    """Return how late each rank is at each place, as a table and notes below it.

    The table shows some ranks and buckets only. The notes say what is left out.
    """
    first = found.run.ranks[0]
    shown = [timeline.where.rank for timeline in found.run.ranks][:MAX_COLUMNS]
    rows = [["", "last is", "ms behind", *(f"rank {rank}" for rank in shown), "layers"]]
    names = {FORWARD: "forward begins", BACKWARD: "backward begins"}
    members = {bucket.number: bucket.members for bucket in found.shown.typical.buckets}
    drawn = {*names, *to_show(found.shown.typical.buckets, MAX_ROWS)}
    for place, late in skew.late.items():
        if place in drawn:
            rank = skew.latest(place)
            layers = layers_of(first, members[place]) if place in members else ""
            cells = [ms(late[r]) for r in (rank, *shown)]
            name = names.get(place, f"bucket {place}")
            rows.append([name, f"rank {rank}", *cells, layers])
    notes = []
    if left_out := len(skew.late.keys() - drawn):
        notes.append(f"({left_out} buckets are left out.)")
    if len(found.run.ranks) > len(shown):
        more = len(found.run.ranks) - len(shown)
        notes.append(f"(Not shown: {more} more; the medians count them.)")
    if skew.error_s:
        notes.append(f"The clocks of hosts are known to +-{ms(skew.error_s)} ms.")
    return rows, notes


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with all cells but the last one right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0
    return ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]


def spread_text(spread_s: Spread) -> str:
    """Return the text "p10 A, p90 B", in milliseconds."""
    return f"p10 {ms(spread_s[0])}, p90 {ms(spread_s[1])}"


def ms(seconds: float) -> str:
    """Return seconds as a text of milliseconds, without the unit."""
    return f"{round(seconds * 1e3, 1) + 0.0:.1f}"  # the addition makes 0.0 of -0.0
