"""One model on growing simulated clusters: step, efficiency, best bucket cap."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.table import Table

from minidp._schedule import Network, capped_groups
from support.simulation import (
    Cluster,
    Fastest,
    Pauses,
    Work,
    best_layout,
    bound_seconds,
    step_seconds,
)

MIB = 2**20
TORCH_LIMITS = (MIB, 25 * MIB)
CAPS_MB = (0.25, 0.5, 1, 2, 4, 8, 16, 25, 32, 64, 128, 256, 512)
SAMPLES = 1_000_000  # pauses drawn for each size, at most 200 steps


def _option(default: float, unit: str, meaning: str) -> Any:
    return field(default=default, metadata={"unit": unit, "meaning": meaning})


@dataclass(frozen=True)
class Assumptions:
    """Everything that is assumed of a simulated cluster, and can be given otherwise."""

    ranks_per_node: int = _option(8, "N", "ranks in a node")
    node_gbit: float = _option(
        100.0, "G", "Gbit/s between nodes, each direction, shared by a node's ranks"
    )
    hop_us: float = _option(15.0, "US", "latency between two nodes")
    nvlink_gb: float = _option(
        130.0, "GB", "GB/s between two ranks of a node, each direction"
    )
    nvlink_us: float = _option(4.0, "US", "latency between two ranks of a node")
    launch_us: float = _option(
        20.0, "US", "what a collective costs before its first hop"
    )
    resnet50_ms: float = _option(
        97.0, "MS", "forward and backward of ResNet-50 on one rank"
    )
    gpt2_ms: float = _option(125.0, "MS", "the same of GPT-2 small")

    @classmethod
    def options(cls) -> dict[str, tuple[float, str, str]]:
        """Of a command line: name -> default, unit, meaning."""
        return {
            each.name.replace("_", "-"): (
                each.default,
                each.metadata["unit"],
                each.metadata["meaning"],
            )
            for each in dataclasses.fields(cls)
        }

    @classmethod
    def of(cls, args: argparse.Namespace) -> Assumptions:
        """From a command line."""
        return cls(**{f.name: getattr(args, f.name) for f in dataclasses.fields(cls)})

    def cluster(self, num_ranks: int) -> Cluster:
        """Of whole nodes."""
        per_node = min(self.ranks_per_node, num_ranks)
        return Cluster(
            -(-num_ranks // per_node),
            per_node,
            Network(self.nvlink_us / 1e6, self.nvlink_gb * 1e9),
            Network(self.hop_us / 1e6, self.node_gbit * 1e9 / 8),
            self.launch_us / 1e6,
        )

    def lines(self) -> dict[str, str]:
        """For a header."""
        return {
            "simulated": f"nodes of {self.ranks_per_node} ranks; inside "
            f"{self.nvlink_gb:g} GB/s, {self.nvlink_us:g} us a hop; between nodes "
            f"{self.node_gbit:g} Gbit/s, {self.hop_us:g} us; a collective costs "
            f"{self.launch_us:g} us more",
            "all-reduce": "the fastest for each size of: a ring of all ranks; a ring "
            "or two trees of nodes, with a ring inside each node",
            "computation": f"forward and backward: ResNet-50 {self.resnet50_ms:g} ms, "
            f"GPT-2 small {self.gpt2_ms:g} ms; a third is forward; gradients ready by "
            "operation counts; float32",
        }


@dataclass(frozen=True)
class Point:
    """One model on one number of ranks; seconds are of a step.

    Args:
        num_ranks: of the cluster.
        way: the fastest all-reduce of all gradients in one message.
        all_reduce_s: of that.
        torch_s: with torch's default cap.
        caps_s: by cap in MiB.
        best_s: with the best layout.
        best_buckets: of that.
        bound_s: what no layout can beat.
        late_s: mean of the best layout's step with stragglers.
        late_alone_s: the same where communication is free: stragglers alone.
    """

    num_ranks: int
    way: str
    all_reduce_s: float
    torch_s: float
    caps_s: dict[float, float]
    best_s: float
    best_buckets: int
    bound_s: float
    late_s: float
    late_alone_s: float

    @property
    def best_caps(self) -> tuple[float, float]:
        """From the smallest to the largest cap within 1% of the best one, in MiB."""
        limit = 1.01 * min(self.caps_s.values())
        good = [cap for cap, seconds in self.caps_s.items() if seconds <= limit]
        return min(good), max(good)


@dataclass(frozen=True)
class Sweep:
    """One model on all numbers of ranks."""

    work: Work
    points: tuple[Point, ...]

    def efficiency(self, seconds: float) -> float:
        """A step of one rank without communication, over this one."""
        return self.work.seconds / seconds

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {
            "model": self.work.title,
            "one_rank_s": self.work.seconds,
            "bytes": self.work.nbytes,
            "points": [asdict(point) for point in self.points],
        }


def sweep(
    work: Work, assumptions: Assumptions, num_ranks: int, jitter: Sequence[float]
) -> Point:
    """Simulate all layouts on one cluster."""
    ways = assumptions.cluster(num_ranks).collectives()
    cost, nothing = Fastest(tuple(ways.values())), Pauses.none()

    def seconds(groups: list[list[int]]) -> float:
        return float(step_seconds(work, groups, cost, nothing)[0])

    torch_groups = capped_groups(work.backward, TORCH_LIMITS)
    capped = {cap: capped_groups(work.backward, [round(cap * MIB)]) for cap in CAPS_MB}
    candidates = [torch_groups, *capped.values()]
    best = best_layout(work, list(ways.values()), candidates)
    steps = max(10, min(200, SAMPLES // num_ranks))
    pauses = Pauses.drawn(jitter, (steps, num_ranks), seed=num_ranks)
    alone = (pauses.lengths.max(axis=1) + 1) * work.seconds
    way = min(ways, key=lambda name: ways[name].seconds(work.nbytes))
    return Point(
        num_ranks=num_ranks,
        way=way,
        all_reduce_s=ways[way].seconds(work.nbytes),
        torch_s=seconds(torch_groups),
        caps_s={cap: seconds(groups) for cap, groups in capped.items()},
        best_s=seconds(best),
        best_buckets=len(best),
        bound_s=bound_seconds(work, list(ways.values())),
        late_s=float(step_seconds(work, best, cost, pauses).mean()),
        late_alone_s=float(alone.mean()),
    )


def scale_table(found: Sweep) -> Table:
    """For printing."""
    work = found.work
    table = Table(
        title=f"SIMULATED: {work.title}, {work.nbytes / MIB:.0f} MiB of gradients; one "
        f"rank alone {1e3 * work.seconds:.0f} ms; milliseconds of a step",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    names = (
        "ranks", "all-reduce", "of all", "torch's\ndefault", "best cap\nMiB",
        "with\nit", "best\nlayout", "of\nbuckets", "bound", "effi-\nciency",
        "late,\nalone", "late",
    )  # fmt: skip
    for name in names:
        justify = "left" if name == "all-reduce" else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for point in found.points:
        low, high = point.best_caps
        table.add_row(
            f"{point.num_ranks:,}",
            point.way,
            f"{1e3 * point.all_reduce_s:.1f}",
            f"{1e3 * point.torch_s:.1f}",
            f"{low:g}-{high:g}" if low < high else f"{low:g}",
            f"{1e3 * min(point.caps_s.values()):.1f}",
            f"{1e3 * point.best_s:.1f}",
            str(point.best_buckets),
            f"{1e3 * point.bound_s:.1f}",
            f"{found.efficiency(point.best_s):.1%}",
            f"{1e3 * point.late_alone_s:.1f}",
            f"{1e3 * point.late_s:.1f}",
        )
    return table
