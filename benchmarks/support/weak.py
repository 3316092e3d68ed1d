"""Weak scaling of one model: throughput per rank on ever more ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from support.baselines import AUTO, BARE, TORCH
from support.comparison import short, with_interval
from support.curves import Line, Panel
from support.estimates import Estimate, ratio
from support.rounds import Measured

COLOURS = {
    BARE: "#b0b6bf",
    TORCH: "#8a94a3",
    "minidp": "#e9a07f",
    "minidp 1 MiB": "#e4632d",
    AUTO: "#7a2e12",
}


@dataclass(frozen=True)
class Scaling:
    """One model on ever more ranks.

    Args:
        title: model and network.
        measured: by number of ranks.
    """

    title: str
    measured: Mapping[int, Measured]

    @property
    def names(self) -> list[str]:
        """Of the implementations."""
        return list(next(iter(self.measured.values())).times)

    def step(self, name: str, size: int) -> float:
        """Median seconds."""
        return float(np.median(self.measured[size].times[name]))

    def efficiency(self, name: str, size: int) -> float:
        """Throughput per rank, over that of the fewest ranks without communication."""
        return self.step(BARE, min(self.measured)) / self.step(name, size)

    def share(self, name: str, size: int) -> Estimate:
        """Bare step over step, both on ``size`` ranks: what communication leaves."""
        times = self.measured[size].times
        return ratio(times[BARE], times[name])

    def table(self) -> Table:
        """For printing."""
        any_of_them = next(iter(self.measured.values()))
        facts = f"{any_of_them.num_params} parameters, "
        facts += f"{any_of_them.num_bytes / 2**20:.3g} MiB"
        title = Text.assemble((self.title, "bold"), "\n", (facts, "dim"))
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
        table.add_column("\nranks", justify="right")
        table.add_column("\nimplementation", no_wrap=True)
        for column in (
            "step, ms\nmedian",
            "\np10-p90",
            "efficiency",
            "bare step /\nstep (95%)",
            "CPU, ms\nper rank",
            "\nrounds",
            "\n#wrong",
        ):
            table.add_column(column, justify="right", no_wrap=True)
        for size, measured in self.measured.items():
            for name in self.names:
                style = "bold" if name.startswith("minidp") else ""
                table.add_row(*self._texts(name, size, measured), style=style)
        return table

    def _texts(self, name: str, size: int, measured: Measured) -> list[str]:
        times, wrong = measured.times[name], measured.wrong[name]
        low, median, high = (short(1e3 * s) for s in np.percentile(times, [10, 50, 90]))
        return [
            str(size) if name == self.names[0] else "",
            name,
            median,
            f"{low}-{high}",
            f"{self.efficiency(name, size):.0%}",
            "-" if name == BARE else with_interval(self.share(name, size)),
            short(1e3 * float(np.median(measured.cpu[name]))),
            str(measured.num_rounds),
            "-" if wrong is None else str(wrong),
        ]

    def panel(self) -> Panel:
        """The curves."""
        sizes = list(self.measured)
        lines = {}
        for name in self.names:
            y = [100 * self.efficiency(name, size) for size in sizes]
            style = "o:" if name == BARE else "o-"
            lines[name] = Line(COLOURS[name], sizes, y, style=style)
        return Panel(self.title, lines)

    def as_json(self) -> dict[str, Any]:
        """For a file, with the raw times."""
        return {
            "title": self.title,
            "ranks": {
                str(size): {
                    name: {
                        "efficiency": self.efficiency(name, size),
                        "bare_over_step": dataclasses.asdict(self.share(name, size)),
                        "cpu_seconds": float(np.median(measured.cpu[name])),
                        "wrong": measured.wrong[name],
                        "microseconds_of_each_round": " ".join(
                            f"{1e6 * seconds:.0f}" for seconds in measured.times[name]
                        ),
                    }
                    for name in self.names
                }
                for size, measured in self.measured.items()
            },
        }
