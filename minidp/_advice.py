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
from ._timeline import Timeline

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
        step_s: the measured step.
        exposed_s: of it, communication that nothing hides.
    """

    backward: Backward
    groups: Sequence[Sequence[int]]
    network: Network
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
    return Model(backward, groups, network, typical.seconds, typical.exposed_s)


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
    worth = WORTH * step_s
    if exposed_s < worth:
        return f"Only {_ms(exposed_s)} are exposed, too little to gain anything."
    late_s, who = _straggler(timelines[0], overlap, skew)
    cap, gain_s = model.best_cap()
    is_compressible = _is_compressible(timelines[0], overlap)
    half_s = model.gain_of_half() if is_compressible else 0.0
    if late_s >= max(worth, gain_s):
        return f"{who}; {_predicted(step_s, late_s)}."
    if gain_s >= max(worth, 0.5 * half_s):
        return f'Use bucket_cap_mb={cap:g} (or "auto"): {_predicted(step_s, gain_s)}.'
    if half_s >= worth:
        return (
            "The link is the limit, not the layout: model.register_comm_hook(None, "
            "minidp.comm_hooks.fp16_compress_hook) sends half the bytes; "
            f"{_predicted(step_s, half_s)}, less what the casts take"
            f"{_shared(timelines)}."
        )
    late_s = min(overlap.typical.late_s, exposed_s)
    if late_s >= max(worth, 0.5 * exposed_s):
        return (
            f"Ranks wait up to {_ms(late_s)} for each other, and none is late in most "
            "steps: look for other load on the machines, or inputs of unequal length; "
            f"{_predicted(step_s, late_s)} at best."
        )
    return (
        f"{_ms(exposed_s)} are exposed, and no bucket size would change that: do more "
        "per step, with larger batches, or with no_sync() for all but the last of "
        f"several backwards: of two, predicted {_ms(step_s - exposed_s / 2)} for each "
        f"instead of {_ms(step_s)}."
    )


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
    modules = [
        timeline.params[i].name.rpartition(".")[0] or timeline.params[i].name
        for i in sorted(members)
    ]
    first, last = modules[0], modules[-1]
    return first if first == last else f"{first} to {last}"


def _predicted(step_s: float, gain_s: float) -> str:
    return f"predicted {_ms(step_s - gain_s)} instead of {_ms(step_s)} per step"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
