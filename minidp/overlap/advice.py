"""Say in a sentence what to change about a run, with the gain that is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minidp.config import hint_from_outside

from .forecast import Analysis
from .skew import BACKWARD, FORWARD
from .timeline import AUTO, AUTO_TRIES, Timeline

WORTH = 0.03  # a gain must be this share of a step to be advised
COMPRESSIBLE, COMPRESSION = "float32", "fp16_compress_hook"
LATENCY_BYTES = 64 * 1024  # compression does not make smaller buckets faster


class Change(NamedTuple):
    """A change that the report may advise, and the gain that is predicted."""

    gain_s: float  # in seconds per step
    advice: str  # a sentence that says what to do, with its gain


def advise(found: Analysis) -> str:
    """Return the advice as a text: what to change, or why nothing is worth it.

    A late rank is looked at first, unless a bucket cap gains more. Then comes the case
    that ranks wait for each other, but not always for the same one. The rest is left to
    `_best_change`, whose advice is called uncertain if steps differ by more than it
    gains.
    """
    where, one = found.run.ranks[0].where, found.shown.typical
    if where.world_size == 1:
        return "There is one rank: nothing is sent, nothing to gain."
    if not one.buckets:
        return "No gradient was reduced: record synchronised backwards."
    if where.layout_by == AUTO_TRIES:
        return (
            'bucket_cap_mb="auto" is still trying layouts: record after it has chosen '
            'one, which the logger "minidp" reports at level INFO.'
        )
    worth = WORTH * one.seconds
    few = f"Only {_ms(one.exposed_s)} are exposed, too little to gain anything."
    if one.exposed_s < worth:
        return few
    late, change = straggler(found), _best_change(found)
    if late.gain_s >= max(worth, _cap_gain(found)):
        return late.advice
    # In time, waiting comes before the transfer, and the hidden part before the
    # exposed.
    waiting_s = sum(max(0.0, each.late_s - each.hidden_s) for each in one.buckets)
    if waiting_s >= max(worth, 0.5 * one.exposed_s):
        return (
            f"For {_ms(waiting_s)} of what is exposed, ranks wait for each other, and "
            "it is not always the same rank that is late: look for other load on the "
            "machines, or inputs of unequal length."
        )
    least, most = found.shown.spread_s
    if change.gain_s < worth:
        return few
    if change.gain_s >= (most - least) / 2:
        return change.advice
    return (
        f"{change.advice} This is not certain: steps differ by more (p10 {_ms(least)}, "
        f"p90 {_ms(most)})."
    )


def _cap_gain(found: Analysis) -> float:
    # What ``bucket_cap_mb="auto"`` has measured is better than a prediction.
    has_measured = found.run.ranks[0].where.layout_by == AUTO
    forecast = found.forecast
    return 0.0 if has_measured or forecast is None else forecast.best_cap()[1]


def _best_change(found: Analysis) -> Change:
    """Return the change to advise: a bucket cap, fp16 compression, or more per step.

    A bucket cap changes no gradient, so it is preferred to compression if it gains at
    least half as much. Doing more per step is advised if neither of them gains enough.
    """
    timelines, forecast = found.run.ranks, found.forecast
    step_s = found.shown.typical.seconds
    cap_s = _cap_gain(found)
    half_s = forecast.gain_of_half() if forecast and _is_compressible(found) else 0.0
    if forecast is not None and cap_s >= max(WORTH * step_s, 0.5 * half_s):
        number = f"{forecast.best_cap()[0]:g}"
        cap, gain = f"bucket_cap_mb={number}", _predicted(step_s, cap_s)
        how = hint_from_outside(bucket_cap_mb=number)
        either = "" if timelines[0].is_divided else ' (or "auto")'
        advice = f"Use {cap}{either}{how}: {gain}."
        if forecast.is_one_size:
            if either:
                how = hint_from_outside(bucket_cap_mb="auto")
                cap = f'bucket_cap_mb="auto"{how}, or {cap}'
            advice = (
                f"Try {cap}: {gain}, if small buckets are as fast, by the byte, as "
                "these, which are all of one size."
            )
        return Change(cap_s, advice)
    if half_s >= WORTH * step_s:
        hosts = {timeline.where.host for timeline in timelines}
        share = len(timelines) == timelines[0].where.world_size and len(hosts) == 1
        doubt = " (and these ranks share a machine: measure it)" if share else ""
        advice = (
            "The link is the limit, not the layout: model.register_comm_hook(None, "
            f"minidp.comm_hooks.{COMPRESSION}) sends half the bytes; "
            f"{_predicted(step_s, half_s)}, less what the casts take{doubt}."
        )
        return Change(half_s, advice)
    return _accumulation(found)


def allows_hook(timeline: Timeline) -> bool:
    """Return whether the model may have a comm hook."""
    return timeline.where.logical_ranks is None and not timeline.is_divided


def _is_compressible(found: Analysis) -> bool:
    first = found.run.ranks[0]
    is_wide = all(param.kind.startswith(COMPRESSIBLE) for param in first.params)
    largest = max(bucket.nbytes for bucket in found.shown.typical.buckets)
    # If there is a comm hook, it may compress already.
    is_free = not first.where.comm_hook and allows_hook(first)
    return is_wide and is_free and largest > LATENCY_BYTES


def _accumulation(found: Analysis) -> Change:
    """Return the advice to do more per step, which halves what is exposed.

    It also says why no layout is advised.
    """
    one, why = found.shown.typical, "no bucket size would change that"
    if found.forecast is None:
        why = "the clocks of the hosts do not tell waiting from transfer"
        if not any(bucket.dense_bytes for bucket in one.buckets):
            why = "the bytes of a sparse gradient are unknown"
    half_s = one.exposed_s / 2
    advice = (
        f"{_ms(one.exposed_s)} are exposed, and {why}: do more per step, with larger "
        "batches, or with more backwards under no_sync(): of two such steps in one, "
        f"predicted {_ms(one.seconds - half_s)} for each instead of {_ms(one.seconds)}."
    )
    return Change(half_s, advice)


def straggler(found: Analysis) -> Change:
    """Return the advice to balance the load, for the rank that comes last.

    It says where most of that rank's lateness arises. There is no such advice, and no
    gain, unless the rank is clearly late in three of four steps.
    """
    skew, one = found.skew, found.shown.typical
    if skew is None:
        return Change(0.0, "")
    last = max(skew.late)
    rank = skew.latest(last)
    late_s = skew.late[last][rank]
    if skew.often_s[rank] <= max(skew.error_s, 0.5 * late_s):
        return Change(0.0, "")
    place, growth_s = skew.grows_at(rank)
    counts = {each.rank: len(each.turns) for each in found.overlaps}
    if place == FORWARD:
        why = f"begins its forward {_ms(growth_s)} late: look at its data and logging"
    elif place == BACKWARD and counts[rank] > min(counts.values()):
        why = (
            f"does {counts[rank]} logical ranks, and another rank "
            f"{min(counts.values())}, which takes {_ms(growth_s)}: let the number of "
            "ranks divide that of logical ranks"
        )
    elif place == BACKWARD:
        is_local = one.local_forward_s or one.local_backward_s
        work = "local forwards and backwards" if is_local else "forward"
        work = "logical ranks" if counts[rank] else work
        why = f"takes {_ms(growth_s)} longer for its {work}: balance the load"
    else:
        members = [b.members for b in one.buckets if b.number == place]
        names = "".join(f" ({layers_of(found.run.ranks[0], each)})" for each in members)
        why = f"falls {_ms(growth_s)} behind at bucket {place}{names}: balance the load"
    gain_s = min(late_s, one.late_s, one.exposed_s)
    return Change(
        gain_s,
        f"Rank {rank} is {_ms(late_s)} late at the last bucket, above all "
        f"because it {why}; {_predicted(one.seconds, gain_s)}.",
    )


def layers_of(timeline: Timeline, members: Sequence[int]) -> str:
    """Return "A to B", the modules of the first and the last parameter of a bucket.

    It is "A" if they are equal. A module whose name says nothing, because it is the
    root or only a number, is replaced by the name of the parameter.
    """
    names = []
    for param in (timeline.params[i].name for i in (min(members), max(members))):
        module = param.rpartition(".")[0]
        is_telling = module and not module.isdecimal()
        names.append(module if is_telling else param)
    return " to ".join(dict.fromkeys(names))


def _predicted(step_s: float, gain_s: float) -> str:
    return f"predicted {_ms(step_s - gain_s)} instead of {_ms(step_s)} per step"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
