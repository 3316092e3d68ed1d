"""Predict what another layout, or fewer bytes, would gain.

The model of `costmodel` leaves out much of a step. So every prediction is a difference
between two steps of the model, subtracted from the measured step. What the model leaves
out stays in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from minidp.config import MIB
from minidp.costmodel import (
    Backward,
    Network,
    capped_groups,
    fit_network,
    in_ready_order,
    lower_bound,
    messages_of,
    play,
)

from .analysis import Overlap, most_exposed, overlap_of, overlaps_of
from .skew import Run, Skew, skew_of
from .timeline import Timeline

CAPS_MB = (0.25, 0.5, 1, 2, 4, 8, 16, 25, 50, 100)  # the bucket caps that are tried


@dataclass(frozen=True)
class Forecast:
    """A model of one rank's typical step, to predict what other buckets gain.

    `forecast_of` makes it for the rank of which the report shows a step.
    """

    backward: Backward  # the typical one
    groups: Sequence[Sequence[int]]  # the recorded layout, as positions in ready order
    network: Network  # fitted to the recorded collectives
    is_one_size: bool  # whether all collectives have one size: then latency is unknown
    step_s: float  # the measured seconds of the typical step
    exposed_s: float  # the measured seconds of exposed communication in that step

    @property
    def bound_s(self) -> float:
        """The predicted seconds of a step that no bucket layout can undercut."""
        least = lower_bound(self.backward, self.network) - self.backward.end_s
        return self.step_s - max(0.0, self.exposed_s - least)

    def gain(self, backward: Backward, groups: Sequence[Sequence[int]]) -> float:
        """Predict the seconds per step that a layout saves, or loses if negative.

        Args:
            backward: The backward, which may have other bytes than the recorded one.
            groups: The buckets of the layout in launch order, as positions in it.
        """
        now = play(self.backward, self.groups, self.network).exposed_s
        then = play(backward, groups, self.network).exposed_s
        return min(now - then, self.exposed_s)

    def best_cap(self) -> tuple[float, float]:
        """Return the best bucket cap in MiB, and the seconds per step that it gains.

        Each bucket costs time that the model does not know. So the best cap is the
        largest one that gains almost the most, within 1 % of a step. If several caps
        hold all bytes, they are the same, and it is the smallest of these.
        """
        now = self.backward
        groups = {cap: capped_groups(now, [int(cap * MIB)]) for cap in CAPS_MB}
        gains = {cap: self.gain(now, groups[cap]) for cap in CAPS_MB}
        least = max(gains.values()) - 0.01 * self.step_s
        cap = max(cap for cap, gain in gains.items() if gain >= least)
        whole = sum(now.nbytes)
        enough = min((c for c in CAPS_MB if c * MIB >= whole), default=cap)
        return min(cap, enough), gains[cap]

    def gain_of_half(self) -> float:
        """Predict the seconds per step that half the bytes in the same buckets save."""
        half = tuple(nbytes // 2 for nbytes in self.backward.nbytes)
        return self.gain(replace(self.backward, nbytes=half), self.groups)


@dataclass(frozen=True)
class Analysis:
    """All numbers of a run that its report and advice use."""

    run: Run
    overlaps: tuple[Overlap, ...]  # by rank
    shown: Overlap  # the one that `most_exposed` picks
    skew: Skew | None  # None for one rank, without a common clock, or without a bucket
    forecast: Forecast | None  # of the rank of `shown`; None if no message was timed


def analyse(run: Run) -> Analysis | None:
    """Return the analysis of a run, or None if its ranks recorded no step in common."""
    overlaps = overlaps_of(run)
    if not overlaps:
        return None
    shown = most_exposed(overlaps)
    return Analysis(run, overlaps, shown, skew_of(run), forecast_of(run, shown))


def forecast_of(run: Run, overlap: Overlap) -> Forecast | None:
    """Return the forecast for the typical step of ``overlap``.

    Parameters that this step did not reduce count as buckets of their own, which come
    last. There is no forecast for one rank, or if no message was timed.
    """
    samples = samples_of(run)
    network = network_of(run, samples)
    if network is None:
        return None
    typical = overlap.typical
    backward = backward_of(typical.timeline)
    groups = backward.positions(bucket.members for bucket in typical.buckets)
    reduced = {k for group in groups for k in group}
    groups += [[k] for k in range(len(backward.order)) if k not in reduced]
    is_one_size = len({nbytes for nbytes, _ in samples}) == 1
    return Forecast(
        backward, groups, network, is_one_size, typical.seconds, typical.exposed_s
    )


def backward_of(timeline: Timeline) -> Backward:
    """Return a backward of one rank, with the medians of times over its steps.

    Gradients are timed in steps of all layouts. The end of the backward depends on the
    layout, so only steps with the last one count for it.
    """
    last = timeline.steps[-1].layout
    end_s = median(s.backward.seconds for s in timeline.steps if s.layout == last)
    params = timeline.params
    kinds = [(param.kind, param.kind.startswith("sparse")) for param in params]
    nbytes = [param.nbytes for param in params]
    return in_ready_order(_ready_times(timeline), nbytes, kinds, end_s)


def _ready_times(timeline: Timeline) -> dict[int, float | None]:
    """Return how long after the backward's start each gradient usually comes.

    If the grad hook of a parameter was never timed, it is the time when its bucket was
    full. It is None if no recorded step reduced that bucket.
    """
    hooks: list[list[float]] = [[] for _ in timeline.params]
    buckets: list[list[float]] = [[] for _ in timeline.params]
    for step in timeline.steps:
        begin = step.backward.begin_ns
        for i, ready in enumerate(step.ready_ns):
            if ready is not None:
                hooks[i].append((ready - begin) / 1e9)
        for bucket in step.buckets:
            for i in timeline.layouts[step.layout][bucket.number]:
                buckets[i].append((bucket.full_ns - begin) / 1e9)
    return {
        i: median(both[0] or both[1]) if any(both) else None
        for i, both in enumerate(zip(hooks, buckets, strict=True))
    }


def network_of(run: Run, samples: Sequence[tuple[int, float]]) -> Network | None:
    """Fit a network to samples of bytes and seconds.

    It is None without samples, or for one rank. Only buckets of several sizes tell
    latency from bandwidth, so the samples should be of all layouts. If all have one
    size, the latency counts as 0. If recordings of some ranks are missing, the slower
    half of the times does not count, because there the bucket may have waited for one
    of these ranks.
    """
    world_size = run.ranks[0].where.world_size
    by_size: dict[int, list[float]] = {}
    for nbytes, seconds in samples:
        by_size.setdefault(nbytes, []).append(seconds)
    if not by_size or world_size == 1:
        return None
    if len(run.ranks) < world_size:
        by_size = {n: sorted(s)[: (len(s) + 1) // 2] for n, s in by_size.items()}
    if len(by_size) == 1:
        ((nbytes, times),) = by_size.items()
        return Network(0.0, nbytes / median(times))
    return fit_network((nbytes, s) for nbytes, times in by_size.items() for s in times)


def samples_of(run: Run) -> list[tuple[int, float]]:
    """Return bytes and seconds on the wire of each bucket, in all steps of one rank.

    Sparse gradients are left out, and so is what was sent at the same time.
    """
    first, found = run.ranks[0], []
    for step in first.steps:
        buckets = overlap_of(first, step, run.launches.get(step.number)).buckets
        spans = [(b.dense_bytes, b.start_ns, b.times.done_ns) for b in buckets]
        found += [(nbytes, ns / 1e9) for nbytes, ns in messages_of(spans)]
    return found
