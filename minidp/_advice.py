"""One sentence: what to change, and what it is predicted to gain.

Every prediction is a difference within the model of `_schedule`, taken off the step
that was measured, so that what the model leaves out stays in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ._analysis import Overlap, backward_of, network_of
from ._schedule import Backward, Network, capped_groups, lower_bound, play
from ._skew import BACKWARD, FORWARD, Skew
from ._timeline import AUTO, AUTO_TRIES, Timeline

MIB = 2**20
CAPS_MB = (0.25, 0.5, 1, 2, 4, 8, 16, 25, 50, 100)  # to choose from
WORTH = 0.03  # of a step: smaller gains are not worth a sentence
COMPRESSIBLE = "float32"
LATENCY_BYTES = 64 * 1024  # a bucket up to this size takes as long if it is halved


@dataclass(frozen=True)
class Model:
    """The schedule of a recording, to play with.

    Args:
        backward: the typical one.
        groups: the recorded layout, positions in ready order.
        network: what the collectives showed.
        is_one_size: all buckets are of one size, which does not tell what a message
            costs by itself.
        step_s: the measured step.
        exposed_s: of it, communication that nothing hides.
    """

    backward: Backward
    groups: Sequence[Sequence[int]]
    network: Network
    is_one_size: bool
    step_s: float
    exposed_s: float

    @property
    def bound_s(self) -> float:
        """The shortest step that any layout could have."""
        least = lower_bound(self.backward, self.network) - self.backward.end_s
        return self.step_s - max(0.0, self.exposed_s - least)

    def gain(self, backward: Backward, groups: Sequence[Sequence[int]]) -> float:
        """Seconds per step that another layout, or smaller gradients, would save."""
        return self._saved(play(backward, groups, self.network).exposed_s)

    def _saved(self, exposed_s: float) -> float:
        now = play(self.backward, self.groups, self.network).exposed_s
        return min(now - exposed_s, self.exposed_s)

    def best_cap(self) -> tuple[float, float]:
        """The bucket cap in MiB that gains most, and its gain in seconds.

        Of caps that gain the same within one part in a hundred the largest: each
        bucket costs time that the model does not know.
        """
        gains = {
            cap: self.gain(
                self.backward, capped_groups(self.backward, [int(cap * MIB)])
            )
            for cap in CAPS_MB
        }
        least = max(gains.values()) - 0.01 * self.step_s
        cap = max(cap for cap, gain in gains.items() if gain >= least)
        whole = sum(self.backward.nbytes)
        enough = min((c for c in CAPS_MB if c * MIB >= whole), default=cap)
        return min(cap, enough), gains[cap]

    def gain_of_half(self) -> float:
        """What half the bytes on the wire would gain."""
        half = tuple(nbytes // 2 for nbytes in self.backward.nbytes)
        return self.gain(replace(self.backward, nbytes=half), self.groups)


def model_of(timelines: Sequence[Timeline], overlap: Overlap) -> Model | None:
    """The model of what a rank recorded; None if nothing travelled.

    Args:
        timelines: `aligned`.
        overlap: of one of them.
    """
    network = network_of(timelines)
    if network is None:
        return None
    (timeline,) = (t for t in timelines if t.where.rank == overlap.rank)
    backward, order = backward_of(timeline)
    position = {i: k for k, i in enumerate(order)}
    groups = [[position[i] for i in members] for members in overlap.members]
    left = set(position.values()) - {k for group in groups for k in group}
    groups += [[k] for k in sorted(left)]  # buckets that did not travel
    typical = overlap.typical
    is_one_size = len({step.layout for step in timeline.steps}) == 1 and (
        len(set(overlap.dense_bytes) - {0}) == 1
    )
    return Model(
        backward, groups, network, is_one_size, typical.seconds, typical.exposed_s
    )


def advise(
    timelines: Sequence[Timeline],
    overlap: Overlap,
    model: Model | None,
    skew: Skew | None,
) -> str:
    """What to change; one sentence."""
    step_s, exposed_s = overlap.typical.seconds, overlap.typical.exposed_s
    if timelines[0].where.world_size == 1:
        return "There is one rank: nothing is sent, nothing to gain."
    if model is None:
        return "Nothing travelled in the recorded steps: record synchronised backwards."
    if timelines[0].where.layout_by == AUTO_TRIES:
        return (
            'bucket_cap_mb="auto" is still trying layouts: record when it has logged '
            "its choice."
        )
    worth = WORTH * step_s
    if exposed_s < worth:
        return f"Only {_ms(exposed_s)} are exposed, too little to gain anything."
    best = _Best.of(timelines[0], overlap, model)
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
    """What the model says of buckets and bytes; gains in seconds per step."""

    cap_mb: float
    cap_gain_s: float  # 0 where "auto" has measured instead
    is_sure: bool  # that small messages are as quick, by the byte, as they seem
    half_gain_s: float  # of half the bytes; 0 where they may be halved already

    @classmethod
    def of(cls, timeline: Timeline, overlap: Overlap, model: Model) -> _Best:
        cap_mb, gain_s = model.best_cap()
        if timeline.where.layout_by == AUTO:
            gain_s = 0.0
        is_compressible = _is_compressible(timeline, overlap)
        half_s = model.gain_of_half() if is_compressible else 0.0
        return cls(cap_mb, gain_s, not model.is_one_size, half_s)

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
