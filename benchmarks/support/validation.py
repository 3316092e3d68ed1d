"""Predicted steps beside measured ones, of real ranks on real (shaped) links."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch.distributed as dist
from rich.table import Table

from minidp._schedule import Backward, Network
from support.simulation import Pauses, Work, ring, step_seconds, words
from support.waits import Timed, measure_copies, measure_network, measure_steps

LIMIT = 0.15  # of a predicted step's error


def _even(title: str, layers: int, nbytes: int, seconds: tuple[float, float]) -> Work:
    forward_s, backward_s = seconds
    ready = tuple(backward_s * (k + 1) / layers for k in range(layers))
    return Work(title, forward_s, Backward(ready, (nbytes,) * layers, backward_s))


WORK = _even("12 layers of 2.25 MiB", 12, 768 * 768 * 4, (0.030, 0.079))
SMOKE_WORK = _even("4 layers of 64 KiB", 4, 2**16, (0.002, 0.008))


@dataclass(frozen=True)
class Trial:
    """What real ranks do.

    Args:
        work: that they wait for.
        caps_mb: of buckets; None: torch's default.
        steps: timed for each cap, without and with stragglers.
        jitter: of stragglers.
    """

    work: Work
    caps_mb: tuple[float | None, ...]
    steps: int
    jitter: tuple[float, ...]

    def pauses(self, world_size: int) -> tuple[Pauses, Pauses]:
        """Without and with stragglers; the prediction draws the same."""
        shape = (self.steps, world_size)
        return (
            Pauses.drawn((1.0, 1.0), shape),
            Pauses.drawn(self.jitter, shape, seed=world_size),
        )


@dataclass(frozen=True)
class Validation:
    """One row: seconds are medians of the steps."""

    place: str
    num_ranks: int
    cap_mb: float | None
    num_buckets: int
    stragglers: bool
    measured_s: float
    predicted_s: float
    steps_s: list[float]
    wrong: int

    @property
    def error(self) -> float:
        """Of the prediction, over what was measured."""
        return self.predicted_s / self.measured_s - 1

    @property
    def cap(self) -> str:
        """For people."""
        return "torch's default" if self.cap_mb is None else f"{self.cap_mb:g} MiB"

    @property
    def name(self) -> str:
        """For people."""
        late = ", stragglers" if self.stragglers else ""
        return f"{self.num_ranks} ranks, {self.place}, cap {self.cap}{late}"

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True)
class Machine:
    """What is measured of two ranks, and predicts all other numbers.

    Args:
        network: of an all-reduce in a queue of them.
        copies: bytes per second that each rank copies.
    """

    network: Network
    copies: float

    @classmethod
    def of_two_ranks(cls) -> Machine:
        """Collective; measured before any step is."""
        return cls(measure_network(), measure_copies())

    def __str__(self) -> str:
        return f"{words(self.network)}; copies at {self.copies / 1e9:.2g} GB/s"

    def costs(self, num_ranks: int) -> tuple[Network, float]:
        """Of a ring of so many, and of copies where they share the cores."""
        # A ring of two has two steps with half of the bytes each.
        hop = Network(self.network.latency_s / 2, self.network.bytes_per_s)
        share = min(1.0, max(2, os.cpu_count() or 1) / num_ranks)
        return ring(num_ranks, hop), self.copies * share


@dataclass(frozen=True)
class OnRanks:
    """What rank 0 brings home."""

    trial: Trial
    machine: Machine | None
    timed: tuple[list[Timed], list[Timed]]  # without and with stragglers

    def rows(self, place: str, num_ranks: int, machine: Machine) -> list[Validation]:
        """Beside what is predicted from two ranks."""
        cost, copies = machine.costs(num_ranks)
        rows = []
        every = zip(self.timed, self.trial.pauses(num_ranks), strict=True)
        for late, (timed, pauses) in enumerate(every):
            for each in timed:
                predicted = step_seconds(
                    self.trial.work, each.groups, cost, pauses, copies
                )
                rows.append(
                    Validation(
                        place,
                        num_ranks,
                        each.cap_mb,
                        len(each.groups),
                        bool(late),
                        median(each.seconds),
                        median(predicted.tolist()),
                        each.seconds,
                        each.wrong,
                    )
                )
        return rows


def validate_on_rank(trial: Trial) -> OnRanks:
    """On every rank: measure the machine if there are two, then take steps."""
    world_size = dist.get_world_size()
    machine = Machine.of_two_ranks() if world_size == 2 else None
    without, late = (
        measure_steps(trial.work, list(trial.caps_mb), pauses)
        for pauses in trial.pauses(world_size)
    )
    return OnRanks(trial, machine, (without, late))


def validation_table(
    rows: Sequence[Validation], work: Work, machines: Sequence[str]
) -> Table:
    """For printing."""
    title = (
        f"validation: measured steps beside predicted ones; {work.title}, forward "
        f"{1e3 * work.forward_s:.0f} ms, backward {1e3 * work.backward.end_s:.0f} ms\n"
        "computation replaced by timed waits; gradients, minidp, Gloo and links are "
        "real; medians\n" + "\n".join(machines)
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("link", "ranks", "bucket cap", "buckets", "stragglers"):
        table.add_column(name, justify="left" if name == "link" else "right")
    for name in ("measured ms", "predicted ms", "error", "#wrong"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.place,
            str(row.num_ranks),
            row.cap,
            str(row.num_buckets),
            "drawn" if row.stragglers else "none",
            f"{1e3 * row.measured_s:.1f}",
            f"{1e3 * row.predicted_s:.1f}",
            f"{row.error:+.1%}",
            str(row.wrong),
            style="" if abs(row.error) <= LIMIT else "red",
        )
    return table
