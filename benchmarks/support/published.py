"""Published results beside simulated ones, where the setup is known well enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from minidp._schedule import capped_groups
from support.scale import MIB, TORCH_LIMITS, Assumptions
from support.simulation import Cluster, Fastest, Pauses, Work, step_seconds
from support.workloads import resnet50

HOROVOD_LIMITS = (64 * MIB,)  # its fusion buffer
P100_S = 0.300  # ResNet-50, 64 images, forward and backward


@dataclass(frozen=True)
class Comparison:
    """One published number.

    Args:
        source: where it stands.
        setup: what is known of it, and what was assumed.
        what: was measured.
        published: the number.
        simulated: with the nominal network.
        gbit: nominal, between nodes.
        gbit_that_fits: at which the simulation gives the published number; None: at no
            rate.
    """

    source: str
    setup: str
    what: str
    published: float
    simulated: float
    gbit: float
    gbit_that_fits: float | None


def overlap_gain(work: Work, cluster: Cluster) -> float:
    """By how much overlap shortens a step; torch's default cap."""
    cost = Fastest(tuple(cluster.collectives().values()))
    groups = capped_groups(work.backward, TORCH_LIMITS)
    sizes = (sum(work.backward.nbytes[k] for k in group) for group in groups)
    apart = work.seconds + sum(cost.seconds(nbytes) for nbytes in sizes)
    return 1 - float(step_seconds(work, groups, cost, Pauses.none())[0]) / apart


def efficiency(limits: tuple[int, ...]) -> Callable[[Work, Cluster], float]:
    """One rank's step over a step of all."""

    def of(work: Work, cluster: Cluster) -> float:
        cost = Fastest(tuple(cluster.collectives().values()))
        groups = capped_groups(work.backward, limits)
        return work.seconds / float(step_seconds(work, groups, cost, Pauses.none())[0])

    return of


def compare(assumptions: Assumptions, console: Console) -> list[Comparison]:
    """Simulate the published setups, print a table."""
    v100 = resnet50(assumptions.resnet50_ms / 1e3)
    vldb = replace(assumptions, node_gbit=100.0, ranks_per_node=8)
    pascal = replace(assumptions, node_gbit=25.0, ranks_per_node=4, nvlink_gb=10.0)
    found = [
        _one(
            "PyTorch DDP paper, VLDB'20, 5.1",
            "ResNet-50, 32 GPUs in 4 nodes, NCCL; assumed: 100 Gbit/s for each node",
            "overlap shortens a step by",
            0.380,
            (v100, vldb, 32, overlap_gain),
        ),
        _one(
            "the same, 5.3",
            "ResNet-50, 256 GPUs, shared cluster; step about twice as long as on one",
            "scaling efficiency",
            0.50,
            (v100, vldb, 256, efficiency(TORCH_LIMITS)),
        ),
        _one(
            "Horovod paper",
            "ResNet/Inception, 128 GPUs, 25 GbE with TCP; assumed: 4 P100 to a node, "
            f"{1e3 * P100_S:.0f} ms, PCIe 10 GB/s, 64 MiB buckets",
            "scaling efficiency",
            0.88,
            (resnet50(P100_S), pascal, 128, efficiency(HOROVOD_LIMITS)),
        ),
    ]
    console.print(_table(found), "")
    return found


_Setup = tuple[Work, Assumptions, int, Callable[[Work, Cluster], float]]


def _one(
    source: str, setup: str, what: str, published: float, how: _Setup
) -> Comparison:
    work, assumptions, num_ranks, measure = how

    def simulated(gbit: float) -> float:
        network = replace(assumptions, node_gbit=gbit)
        return measure(work, network.cluster(num_ranks))

    nominal = assumptions.node_gbit
    fits = _crossing(simulated, published, nominal)
    return Comparison(source, setup, what, published, simulated(nominal), nominal, fits)


def _crossing(
    measure: Callable[[float], float], goal: float, nominal: float
) -> float | None:
    """The highest rate below ``nominal`` with this result, by steps of 1%."""
    gbit, was_above = nominal, measure(nominal) > goal
    while gbit > nominal / 1000:
        gbit *= 0.99
        if (measure(gbit) > goal) is not was_above:
            return gbit
    return None


def _table(rows: list[Comparison]) -> Table:
    table = Table(
        title="PUBLISHED beside SIMULATED, no stragglers; not compared: results whose "
        "hardware is not stated",
        title_justify="left",
        title_style="bold",
        show_lines=True,
    )
    for name, width in (("source", 18), ("setup", 34), ("what", 14)):
        table.add_column(name, width=width)
    for name in ("published", "simulated", "fits at"):
        table.add_column(name, justify="right")
    for row in rows:
        fits = row.gbit_that_fits
        table.add_row(
            row.source,
            row.setup,
            row.what,
            f"{row.published:.0%}",
            f"{row.simulated:.0%}",
            "no rate" if fits is None else f"{fits:.1f} of {row.gbit:g}\nGbit/s",
        )
    return table
