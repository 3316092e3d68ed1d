"""One data-parallel step on N ranks, as events on a clock that nobody waits for.

Each rank computes: forward, then a backward whose gradients become ready one by one; a
straggler pauses once, somewhere in between. When the last gradient of a bucket is ready
on the slowest rank, and the bucket before is done, all ranks reduce it::

    rank 0   |-- forward --|----- backward ------|
    rank 1   |-- forward --|--- (pause) ----- backward ------|
    wire                        [bucket 0]    [bucket 1]   [bucket 2]
                                                            step ends ^

The rules of the wire are those of ``minidp._schedule``. What a collective costs comes
from the number of ranks and the cables between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from minidp._schedule import Backward, Network, best_groups, lower_bound

Groups = list[list[int]]
Floats = NDArray[np.float64]
NOTHING = Network(0.0, 1e30)  # what a collective of one rank costs
FREE = 1e30  # bytes per second that are copied into and out of buckets

# Seconds of a step over their median, at 0%, 5%, ... 100% of 72 steps of a transformer
# on one rank, one thread, of two shared cores (the bare model in a run of overhead.py
# on 2026-11-21, whose results are in git's history).
RECORDED_JITTER = (
    0.966, 0.969, 0.974, 0.977, 0.979, 0.981, 0.983, 0.984, 0.991, 0.995, 1.0,
    1.001, 1.005, 1.006, 1.014, 1.034, 1.042, 1.05, 1.064, 1.084, 1.535,
)  # fmt: skip


def words(network: Network) -> str:
    """For people."""
    rate = network.bytes_per_s / 1e9
    return f"{1e6 * network.latency_s:.0f} us + {rate:.3g} GB/s"


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal ranks: fast cables inside, one network between them.

    Args:
        nodes: at least 1.
        ranks_per_node: at least 1.
        inside: one hop between two ranks of a node: seconds, bytes per second.
        between: one hop between two nodes; all ranks of a node share its bandwidth.
        launch_s: seconds that a collective costs before its first hop.
    """

    nodes: int
    ranks_per_node: int
    inside: Network
    between: Network
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1 or self.launch_s < 0:
            raise ValueError(f"expected ranks, and a launch of 0 s or more: {self}")

    @property
    def num_ranks(self) -> int:
        """In all nodes."""
        return self.nodes * self.ranks_per_node

    def collectives(self) -> dict[str, Network]:
        """The ways to all-reduce, by name: seconds of a bucket's bytes."""
        if self.num_ranks == 1:
            return {"none": NOTHING}
        local = ring(self.ranks_per_node, self.inside)
        found = {
            "flat ring": _flat_ring(self),
            "node ring": _together(local, ring(self.nodes, self.between)),
            "node tree": _together(local, tree(self.nodes, self.between)),
        }
        if self.nodes == 1:
            found = {"ring": local, "tree": tree(self.ranks_per_node, self.inside)}
        elif self.ranks_per_node == 1:
            del found["flat ring"]
        return {
            name: replace(cost, latency_s=cost.latency_s + self.launch_s)
            for name, cost in found.items()
        }


def ring(num_ranks: int, hop: Network) -> Network:
    """All-reduce in a ring: ``2 (n - 1)`` steps, each with an n-th of the bytes."""
    if num_ranks == 1:
        return NOTHING
    steps = 2 * (num_ranks - 1)
    return Network(steps * hop.latency_s, hop.bytes_per_s * num_ranks / steps)


def tree(num_ranks: int, hop: Network) -> Network:
    """All-reduce up and down two binary trees, each with half of the bytes.

    In pieces, so that all levels work at once: every rank sends its bytes once up and
    once down, and only the first piece pays for the depth.
    """
    if num_ranks == 1:
        return NOTHING
    depth = math.ceil(math.log2(num_ranks))
    return Network(2 * depth * hop.latency_s, hop.bytes_per_s / 2)


def _flat_ring(cluster: Cluster) -> Network:
    """One ring through all ranks: every step is as slow as its slowest hop."""
    slow = Network(
        max(cluster.inside.latency_s, cluster.between.latency_s),
        min(cluster.inside.bytes_per_s, cluster.between.bytes_per_s),
    )
    return ring(cluster.num_ranks, slow)


def _together(*costs: Network) -> Network:
    """One after the other: reduce-scatter inside, all-reduce between, all-gather."""
    return Network(
        sum(cost.latency_s for cost in costs),
        1 / sum(1 / cost.bytes_per_s for cost in costs),
    )


@dataclass(frozen=True)
class Fastest:
    """The best of several collectives for each size, as libraries choose."""

    ways: tuple[Network, ...]

    def seconds(self, nbytes: float) -> float:
        """Of the fastest."""
        return min(way.seconds(nbytes) for way in self.ways)


# -- one step --------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What one rank computes in a step."""

    title: str
    forward_s: float
    backward: Backward

    @property
    def seconds(self) -> float:
        """Without any communication."""
        return self.forward_s + self.backward.end_s

    @property
    def nbytes(self) -> int:
        """Of all gradients."""
        return sum(self.backward.nbytes)


@dataclass(frozen=True)
class Pauses:
    """How each rank is held up in each step.

    Args:
        moments: where in its computation a rank pauses, 0 to 1; (steps, ranks).
        lengths: of the pauses over the time of the computation, 0 or more.
    """

    moments: Floats
    lengths: Floats

    @classmethod
    def none(cls) -> Pauses:
        """One step, in which nothing happens."""
        return cls(np.zeros((1, 1)), np.zeros((1, 1)))

    @classmethod
    def drawn(
        cls, jitter: Sequence[float], shape: tuple[int, int], seed: int = 0
    ) -> Pauses:
        """At random moments; lengths between the quantiles of a measured ``jitter``.

        Args:
            jitter: sorted times of a step over their median. A step that is faster than
                the median has no pause; none is longer than the longest one seen.
            shape: steps, ranks.
            seed: of the random numbers.
        """
        rng = np.random.default_rng(seed)
        levels = np.linspace(0, 1, len(jitter))
        lengths = np.interp(rng.random(shape), levels, np.maximum(jitter, 1.0)) - 1.0
        return cls(rng.random(shape), lengths)


def step_seconds(
    work: Work,
    groups: Groups,
    cost: Network | Fastest,
    pauses: Pauses,
    copies: float = FREE,
) -> Floats:
    """Seconds of each step, until the last rank has its gradients; 1D.

    A gradient is late on a rank by the pause that came before it, so on all ranks by
    the longest pause that came before it on any. A bucket is copied together (at
    ``copies`` bytes per second) before it leaves, and apart after the backward.
    """
    ready = np.asarray([max(work.backward.ready_s[k] for k in g) for g in groups])
    ready += work.forward_s
    sizes = [sum(work.backward.nbytes[k] for k in g) for g in groups]
    costs = [(nbytes / copies, cost.seconds(nbytes)) for nbytes in sizes]
    order = np.argsort(pauses.moments, axis=1)
    moments = np.take_along_axis(pauses.moments, order, axis=1) * work.seconds
    lengths = np.take_along_axis(pauses.lengths, order, axis=1) * work.seconds
    longest = np.maximum.accumulate(lengths, axis=1)
    steps = []
    for moment, so_far in zip(moments, longest, strict=True):
        before = np.searchsorted(moment, ready, side="left")
        late = np.where(before > 0, so_far[before - 1], 0.0)
        free_s, out_s = 0.0, work.seconds + so_far[-1]
        for full_s, (copy_s, wire_s) in zip(ready + late, costs, strict=True):
            free_s = max(free_s, full_s + copy_s) + wire_s
            out_s = max(out_s, free_s) + copy_s
        steps.append(out_s)
    return np.asarray(steps)


def best_layout(
    work: Work, ways: Sequence[Network], candidates: Sequence[Groups] = ()
) -> Groups:
    """The best by any of the ways, and of candidates, for the fastest of all ways."""
    found = [best_groups(work.backward, way) for way in ways]
    return min(
        [*found, *candidates],
        key=lambda groups: play_fastest(work.backward, groups, ways),
    )


def play_fastest(backward: Backward, groups: Groups, ways: Sequence[Network]) -> float:
    """When backward and buckets are done, without pauses."""
    nothing = Pauses.none()
    work = Work("", 0.0, backward)
    return float(step_seconds(work, groups, Fastest(tuple(ways)), nothing)[0])


def bound_seconds(work: Work, ways: Sequence[Network]) -> float:
    """Of a step without pauses, at least.

    As if there were one way with the least latency and the highest bandwidth of all:
    each message may take another way, so none of them alone is a bound.
    """
    ideal = Network(
        min(way.latency_s for way in ways), max(way.bytes_per_s for way in ways)
    )
    return work.forward_s + lower_bound(work.backward, ideal)
