"""One sentence: what to change, and what it is predicted to gain (`_forecast`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ._analysis import Overlap
from ._forecast import Forecast
from ._skew import BACKWARD, FORWARD, Skew
from ._timeline import AUTO, AUTO_TRIES, Timeline

WORTH = 0.03  # of a step: smaller gains are not worth a sentence
COMPRESSIBLE = "float32"
LATENCY_BYTES = 64 * 1024  # a bucket up to this size takes as long if it is halved


def advise(
    timelines: Sequence[Timeline],
    overlap: Overlap,
    forecast: Forecast | None,
    skew: Skew | None,
) -> str:
    """What to change; one sentence."""
    step_s, exposed_s = overlap.typical.seconds, overlap.typical.exposed_s
    if timelines[0].where.world_size == 1:
        return "There is one rank: nothing is sent, nothing to gain."
    if forecast is None:
        return "Nothing travelled in the recorded steps: record synchronised backwards."
    if timelines[0].where.layout_by == AUTO_TRIES:
        return (
            'bucket_cap_mb="auto" is still trying layouts: record when it has logged '
            "its choice."
        )
    worth = WORTH * step_s
    if exposed_s < worth:
        return f"Only {_ms(exposed_s)} are exposed, too little to gain anything."
    best = _Best.of(timelines[0], overlap, forecast)
    late_s, who = _straggler(timelines[0], overlap, skew)
    if late_s >= max(worth, best.cap_gain_s):
        return f"{who}; {_predicted(step_s, late_s)}."
    waiting_s = _exposed_waiting(overlap)
    if waiting_s >= max(worth, 0.5 * exposed_s):
        return (
            f"Ranks wait {_ms(waiting_s)} for each other after the backward, and none "
            "is late in most steps: look for other load on the machines, or inputs of "
            f"unequal length; {_predicted(step_s, waiting_s)} at best."
        )
    return best.words(timelines, overlap, worth)


@dataclass(frozen=True)
class _Best:
    """What is predicted of buckets and bytes; gains in seconds per step."""

    cap_mb: float
    cap_gain_s: float  # 0 where "auto" has measured instead
    is_sure: bool  # that small messages are as quick, by the byte, as they seem
    half_gain_s: float  # of half the bytes; 0 where they may be halved already

    @classmethod
    def of(cls, timeline: Timeline, overlap: Overlap, forecast: Forecast) -> _Best:
        cap_mb, gain_s = forecast.best_cap()
        if timeline.where.layout_by == AUTO:
            gain_s = 0.0
        is_compressible = _is_compressible(timeline, overlap)
        half_s = forecast.gain_of_half() if is_compressible else 0.0
        return cls(cap_mb, gain_s, not forecast.is_one_size, half_s)

    def words(
        self, timelines: Sequence[Timeline], overlap: Overlap, worth: float
    ) -> str:
        """The one to take, if it is worth it and not lost in how steps differ."""
        step_s, exposed_s = overlap.typical.seconds, overlap.typical.exposed_s
        least, most = overlap.spread_s
        takes_cap = self.cap_gain_s >= max(worth, 0.5 * self.half_gain_s)
        gain_s = self.cap_gain_s if takes_cap else self.half_gain_s
        cap = f"bucket_cap_mb={self.cap_mb:g}"
        if worth <= gain_s < (most - least) / 2:
            what = (
                f'{cap} (or "auto", which measures)' if takes_cap else "half the bytes"
            )
            return (
                f"Nothing is sure to gain: {what} is {_predicted(step_s, gain_s)}, and "
                f"steps differ by more (p10 {_ms(least)}, p90 {_ms(most)})."
            )
        if takes_cap and self.is_sure:
            return f'Use {cap} (or "auto"): {_predicted(step_s, gain_s)}.'
        if takes_cap:
            return (
                f'Try bucket_cap_mb="auto", or {cap}: {_predicted(step_s, gain_s)}, if '
                "small buckets are as fast, by the byte, as these, which are all of "
                "one size."
            )
        if gain_s >= worth:
            return (
                "The link is the limit, not the layout: model.register_comm_hook(None, "
                "minidp.comm_hooks.fp16_compress_hook) sends half the bytes; "
                f"{_predicted(step_s, gain_s)}, less what the casts take"
                f"{_shared(timelines)}."
            )
        of_two = _ms(step_s - exposed_s / 2)
        return (
            f"{_ms(exposed_s)} are exposed, and no bucket size would change that: do "
            "more per step, with larger batches, or with no_sync() for all but the "
            f"last of several backwards: of two, predicted {of_two} for each instead "
            f"of {_ms(step_s)}."
        )


def _exposed_waiting(overlap: Overlap) -> float:
    """Seconds of a step that a bucket waits for slower ranks after the backward.

    A bucket's waiting comes before its bytes, and what is hidden before what is not.
    """
    return sum(max(0.0, one.late_s - one.hidden_s) for one in overlap.typical.buckets)


def _straggler(
    timeline: Timeline, overlap: Overlap, skew: Skew | None
) -> tuple[float, str]:
    """What a balanced load would gain, and who is to be relieved; 0: nobody.

    A step waits for the rank that comes last to the last bucket. Lateness counts where
    it is there in most steps, and more than clocks are uncertain.
    """
    if skew is None:
        return 0.0, ""
    last, worst = skew.last_bucket(), skew.worst_bucket()
    rank = skew.latest(worst)
    at_end = skew.late[last][rank]
    if at_end.often_s <= max(skew.error_s, 0.5 * at_end.typical_s):
        return 0.0, ""
    gain_s = min(at_end.typical_s, overlap.typical.seconds)
    late_s = skew.late[worst][rank].typical_s
    place = skew.grows_at(rank)
    if place == FORWARD:
        return gain_s, (
            f"Rank {rank} begins its forward {_ms(late_s)} late: look at data loading "
            "and logging there"
        )
    if place == BACKWARD:
        return gain_s, (
            f"The forward of rank {rank} takes {_ms(late_s)} longer: balance its load"
        )
    numbers = [one.number for one in overlap.typical.buckets]
    names = layers_of(timeline, overlap.members[numbers.index(int(place))])
    return gain_s, (
        f"Rank {rank} falls {_ms(late_s)} behind at bucket {place} ({names}): balance "
        "its load"
    )


def _shared(timelines: Sequence[Timeline]) -> str:
    """A doubt where ranks share a machine, where a cast may cost more than it gains."""
    hosts = {timeline.where.host for timeline in timelines}
    is_known = len(timelines) == timelines[0].where.world_size
    if not is_known or len(hosts) > 1:
        return ""
    return " (and these ranks share a machine: measure it)"


def _is_compressible(timeline: Timeline, overlap: Overlap) -> bool:
    is_wide = all(param.kind.startswith(COMPRESSIBLE) for param in timeline.params)
    has_hook = bool(timeline.where.comm_hook)  # it may do so already
    return is_wide and not has_hook and max(overlap.nbytes) > LATENCY_BYTES


def layers_of(timeline: Timeline, members: Sequence[int]) -> str:
    """The modules of some parameters: the first and the last, in registration order."""
    first, last = (
        _layer(timeline.params[i].name) for i in (min(members), max(members))
    )
    return first if first == last else f"{first} to {last}"


def _layer(param: str) -> str:
    """Its module; not of a child of an nn.Sequential, whose number says little."""
    module = param.rpartition(".")[0]
    return param if not module or module.isdecimal() else module


def _predicted(step_s: float, gain_s: float) -> str:
    return f"predicted {_ms(step_s - gain_s)} instead of {_ms(step_s)} per step"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
