"""One sentence: what to change, and what it is predicted to gain (`_forecast`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ._analysis import Overlap, StepOverlap
from ._forecast import Forecast
from ._overrides import aside
from ._skew import BACKWARD, FORWARD, Skew
from ._timeline import AUTO, AUTO_TRIES, Timeline

WORTH = 0.03  # of a step: smaller gains are not worth a sentence
COMPRESSIBLE, COMPRESSION = "float32", "fp16_compress_hook"
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
    if not overlap.typical.buckets:
        return "Nothing travelled in the recorded steps: record synchronised backwards."
    if timelines[0].where.layout_by == AUTO_TRIES:
        return (
            'bucket_cap_mb="auto" is still trying layouts: record after its choice, '
            "which the logger minidp tells at level INFO."
        )
    worth = WORTH * step_s
    if exposed_s < worth:
        return f"Only {_ms(exposed_s)} are exposed, too little to gain anything."
    gains = _Gains.of(timelines[0], overlap, forecast)
    late_s, who = _straggler(timelines[0], overlap, skew)
    if late_s >= max(worth, gains.cap_s):
        return f"{who}; {_predicted(step_s, late_s)}."
    waiting_s = _exposed_waiting(overlap)
    if waiting_s >= max(worth, 0.5 * exposed_s):
        return (
            f"For {_ms(waiting_s)} of what is exposed, ranks wait for each other, and "
            "it is not always the same one that is late: look for other load on the "
            "machines, or inputs of unequal length."
        )
    return gains.words(timelines, overlap, worth)


@dataclass(frozen=True)
class _Gains:
    """What is predicted; seconds per step."""

    cap_mb: float
    cap_s: float  # of that bucket cap; 0 where "auto" has measured instead
    half_s: float  # of half the bytes; 0 where they may be halved already
    is_sure: bool  # that small messages are as quick, by the byte, as they seem
    unknown: str  # why there is no forecast

    @classmethod
    def of(
        cls, timeline: Timeline, overlap: Overlap, forecast: Forecast | None
    ) -> _Gains:
        if forecast is None:
            why = "the clocks of the hosts do not tell waiting from transfer"
            if not any(overlap.dense_bytes):
                why = "nobody knows how many bytes a sparse gradient sends"
            return cls(0.0, 0.0, 0.0, is_sure=False, unknown=why)
        cap_mb, cap_s = forecast.best_cap()
        if timeline.where.layout_by == AUTO:
            cap_s = 0.0
        is_compressible = _is_compressible(timeline, overlap)
        half_s = forecast.gain_of_half() if is_compressible else 0.0
        return cls(cap_mb, cap_s, half_s, not forecast.is_one_size, "")

    def words(
        self, timelines: Sequence[Timeline], overlap: Overlap, worth: float
    ) -> str:
        """The one to take, if it is worth it and not lost in how steps differ."""
        step_s, exposed_s = overlap.typical.seconds, overlap.typical.exposed_s
        if self.cap_s >= max(worth, 0.5 * self.half_s):
            choice = self._of_cap(step_s)
        elif self.half_s >= worth:
            choice = self._of_half(step_s, _shared(timelines))
        else:
            choice = self._of_less_often(overlap.typical)
        if choice.gain_s < worth:
            return f"Only {_ms(exposed_s)} are exposed, too little to gain anything."
        least, most = overlap.spread_s
        if choice.gain_s < (most - least) / 2:
            return (
                f"No change is certain to help: with {choice.what}, "
                f"{_predicted(step_s, choice.gain_s)}, but steps differ by more "
                f"(p10 {_ms(least)}, p90 {_ms(most)})."
            )
        return choice.advice

    def _of_cap(self, step_s: float) -> _Choice:
        cap, gain = f"bucket_cap_mb={self.cap_mb:g}", _predicted(step_s, self.cap_s)
        here = aside(bucket_cap_mb=f"{self.cap_mb:g}")
        advice = f'Use {cap} (or "auto"){here}: {gain}.'
        if not self.is_sure:
            advice = (
                f'Try bucket_cap_mb="auto"{aside(bucket_cap_mb="auto")}, or {cap}: '
                f"{gain}, if small buckets are as "
                "fast, by the byte, as these, which are all of one size."
            )
        return _Choice(self.cap_s, f'{cap} (or "auto", which measures)', advice)

    def _of_half(self, step_s: float, doubt: str) -> _Choice:
        return _Choice(
            self.half_s,
            f"half the bytes ({COMPRESSION})",
            "The link is the limit, not the layout: model.register_comm_hook(None, "
            f"minidp.comm_hooks.{COMPRESSION}) sends half the bytes; "
            f"{_predicted(step_s, self.half_s)}, less what the casts take{doubt}.",
        )

    def _of_less_often(self, one: StepOverlap) -> _Choice:
        exposed_s, half_s = one.exposed_s, one.seconds - one.exposed_s / 2
        why = self.unknown or "no bucket size would change that"
        what = "no_sync() for every other backward"
        how = "with no_sync() for all but the last of several backwards: of two"
        if one.num_local_forwards:  # it does so already
            what = "twice as many backwards under no_sync()"
            how = "with more backwards under no_sync(): of two such steps in one"
        return _Choice(
            exposed_s / 2,
            what,
            f"{_ms(exposed_s)} are exposed, and {why}: do more per step, with larger "
            f"batches, or {how}, predicted {_ms(half_s)} for each instead of "
            f"{_ms(one.seconds)}.",
        )


class _Choice(NamedTuple):
    """One thing to do.

    Args:
        gain_s: predicted, per step.
        what: it is, in short.
        advice: if it is sure.
    """

    gain_s: float
    what: str
    advice: str


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
    last = skew.last_bucket()
    rank = skew.latest(last)
    late = skew.late[last][rank]
    if late.often_s <= max(skew.error_s, 0.5 * late.typical_s):
        return 0.0, ""
    place, growth_s = skew.grows_at(rank)
    if place == FORWARD:
        why = f"begins its forward {_ms(growth_s)} late: look at its data and logging"
    elif place == BACKWARD:
        one = overlap.typical
        is_local = one.local_forward_s or one.local_backward_s
        work = "local forwards and backwards" if is_local else "forward"
        why = f"takes {_ms(growth_s)} longer for its {work}: balance the load"
    else:
        numbers = [one.number for one in overlap.typical.buckets]
        names = layers_of(timeline, overlap.members[numbers.index(int(place))])
        where = f"at bucket {place} ({names})"
        why = f"falls {_ms(growth_s)} behind {where}: balance the load"
    return min(late.typical_s, overlap.typical.exposed_s), (
        f"Rank {rank} is {_ms(late.typical_s)} late at the last bucket, above all "
        f"because it {why}"
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
