"""What another layout, or fewer bytes, would have made of the steps that were recorded.

Every prediction is a difference within the model of `_schedule`, taken off the step
that was measured, so that what the model leaves out stays in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ._analysis import Overlap, backward_of, network_of, samples_of
from ._schedule import Backward, Network, capped_groups, lower_bound, play
from ._timeline import Timeline

MIB = 2**20
CAPS_MB = (0.25, 0.5, 1, 2, 4, 8, 16, 25, 50, 100)  # to choose from


@dataclass(frozen=True)
class Forecast:
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


def forecast_of(timelines: Sequence[Timeline], overlap: Overlap) -> Forecast | None:
    """Of what a rank recorded; None if its collectives do not tell of the network.

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
    is_one_size = len({nbytes for nbytes, _ in samples_of(timelines)}) == 1
    return Forecast(
        backward, groups, network, is_one_size, typical.seconds, typical.exposed_s
    )
