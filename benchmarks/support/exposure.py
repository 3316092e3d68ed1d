"""What communication costs a step: a row per implementation, as table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from support.baselines import BARE, TORCH, TORCH_AGAIN
from support.comparison import short, with_interval
from support.estimates import Estimate, Times, difference, ratio
from support.memory import Memory
from support.rounds import Measured

MIB = 2**20
PEAK, BOUNDS = "peak,\nMiB", ("bound,\nms", "step /\nbound")
COLUMNS = (
    "step, ms\nmedian",
    "\np10-p90",
    "step /\ntorch (95%)",
    "exposed,\nms",
    "CPU,\nms",
    PEAK,
    *BOUNDS,
    "buckets,\nMiB",
    "\n#wrong",
)


@dataclass(frozen=True)
class Row:
    """One implementation; differences and ratios are paired by round.

    Args:
        name: of the implementation.
        seconds: of a step: 10th percentile, median, 90th percentile.
        step_ratio: step over that of torch's default.
        exposed: seconds longer than a step without communication; None: it is that.
        cpu: seconds of all threads of a rank in a step, median.
        bound: seconds that its steps had to take, median; None: there is no link.
        bound_ratio: step over the bound of the same step.
        peak: bytes allocated beyond the weights; None: not measured.
        wrong: parameters with a wrong gradient; None: not compared.
        buckets: bytes of each bucket; None: it does not tell.
    """

    name: str
    seconds: tuple[float, float, float]
    step_ratio: Estimate
    exposed: Estimate | None
    cpu: float
    bound: float | None
    bound_ratio: Estimate | None
    peak: int | None
    wrong: int | None
    buckets: list[int] | None

    @property
    def layout(self) -> str:
        """The buckets, for people."""
        sizes = sorted(nbytes / MIB for nbytes in self.buckets or [])
        if not sizes:
            return "-"
        ends = dict.fromkeys(
            f"{size:.2g}" if size >= 0.01 else "0.00" for size in (sizes[0], sizes[-1])
        )
        return f"{len(sizes)} of {'-'.join(ends)}"


@dataclass(frozen=True)
class Exposure:
    """One cell of the table of all measurements.

    Args:
        title: model, ranks, link.
        measured: the times.
        note: anything else to say about it.
        memory: by implementation.
    """

    title: str
    measured: Measured
    note: str = ""
    memory: Mapping[str, Memory] = field(default_factory=dict)

    @property
    def noise(self) -> tuple[float, float]:
        """Torch's default over itself, in one round: 10th and 90th percentile."""
        times = self.measured.times
        low, high = np.percentile(times[TORCH_AGAIN] / times[TORCH], [10, 90])
        return float(low), float(high)

    @cached_property
    def rows(self) -> dict[str, Row]:
        """By name, in the order of the measurement."""
        return {name: self._row(name) for name in self.measured.times}

    def over_bound(self, name: str) -> Estimate | None:
        """An implementation's steps over their own bounds."""
        bounds = self.measured.watched.get(name)
        return None if bounds is None else ratio(self.measured.times[name], bounds)

    @property
    def shortest(self) -> float | None:
        """The least that any step took over its own bound; below 1 it is no bound."""
        times, bounds = self.measured.times, self.measured.watched
        ratios = [float((times[name] / bounds[name]).min()) for name in bounds]
        return min(ratios, default=None)

    def _row(self, name: str) -> Row:
        times: Mapping[str, Times] = self.measured.times
        low, median, high = np.percentile(times[name], [10, 50, 90])
        is_bare, bounds = name == BARE, self.measured.watched.get(name)
        return Row(
            name=name,
            seconds=(float(low), float(median), float(high)),
            step_ratio=ratio(times[name], times[TORCH]),
            exposed=None if is_bare else difference(times[name], times[BARE]),
            cpu=float(np.median(self.measured.cpu[name])),
            bound=None if bounds is None else float(np.median(bounds)),
            bound_ratio=self.over_bound(name),
            peak=self.memory[name].peak if name in self.memory else None,
            wrong=self.measured.wrong[name],
            buckets=self.measured.buckets.get(name),
        )

    def table(self) -> Table:
        """For printing."""
        measured, (low, high) = self.measured, self.noise
        facts = (
            f"{measured.num_params} parameters, {measured.num_bytes / MIB:.3g} MiB; "
            f"{measured.num_rounds} timed rounds, {measured.checks} checks{self.note}"
            f"\ntorch again / torch, p10-p90: {low:.3f}-{high:.3f}"
        )
        if self.shortest is not None:
            facts += f"; shortest step over its bound: {self.shortest:.3f}"
        title = Text.assemble((self.title, "bold"), "\n", (facts, "dim"))
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
        table.add_column("\nimplementation", no_wrap=True)
        left_out = {PEAK} if not self.memory else set()
        left_out |= {*BOUNDS} if self.shortest is None else set()
        for column in COLUMNS:
            if column not in left_out:
                table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows.values():
            style = "bold" if row.name.startswith("minidp") else ""
            name, *texts = _texts(row)
            pairs = zip(COLUMNS, texts, strict=True)
            texts = [text for column, text in pairs if column not in left_out]
            table.add_row(name, *texts, style=style)
        return table

    def as_json(self) -> dict[str, Any]:
        """For a file, with the raw times."""
        found = []
        for name, row in self.rows.items():
            content = dataclasses.asdict(row)
            content["p10_median_p90_seconds"] = content.pop("seconds")
            content["cpu_seconds"] = content.pop("cpu")
            content["peak_bytes"] = content.pop("peak")
            content["bucket_bytes"] = content.pop("buckets")
            content["bound_seconds"] = content.pop("bound")
            content["microseconds_of_each_round"] = _micros(self.measured.times[name])
            if name in self.measured.watched:
                bounds = _micros(self.measured.watched[name])
                content["bound_microseconds_of_each_round"] = bounds
            found.append(content)
        return {
            "title": self.title,
            "note": self.note.removeprefix("; "),
            "num_params": self.measured.num_params,
            "num_bytes": self.measured.num_bytes,
            "timed_rounds": self.measured.num_rounds,
            "checks": self.measured.checks,
            "torch_over_itself_p10_p90": self.noise,
            "shortest_step_over_its_bound": self.shortest,
            "rows": found,
        }


def _texts(row: Row) -> list[str]:
    low, median, high = (short(1e3 * seconds) for seconds in row.seconds)
    return [
        row.name,
        median,
        f"{low}-{high}",
        with_interval(row.step_ratio),
        "-" if row.exposed is None else short(1e3 * row.exposed.value),
        short(1e3 * row.cpu),
        "-" if row.peak is None else f"{row.peak / MIB:.0f}",
        "-" if row.bound is None else short(1e3 * row.bound),
        "-" if row.bound_ratio is None else f"{row.bound_ratio.value:.3f}",
        row.layout,
        "-" if row.wrong is None else str(row.wrong),
    ]


def _micros(times: Times) -> str:
    return " ".join(f"{1e6 * seconds:.0f}" for seconds in times)
