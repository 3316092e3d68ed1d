"""What one measurement says: a row per implementation, as table and as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from support.estimates import Estimate, difference, ratio, ratio_of_extras
from support.rounds import Measured

PLAIN = "no wrapper"
MINIDP, TORCH = "minidp", "torch"  # names start with these; the rest is the mode


@dataclass(frozen=True)
class Row:
    """One implementation; differences and ratios are paired by round.

    Args:
        name: of the implementation.
        seconds: of a step: 10th percentile, median, 90th percentile.
        step_ratio: step over the base's step.
        same_mode: minidp only: step over torch's in the same mode.
        extra: seconds per parameter over no wrapper.
        extra_ratio: extra over the base's extra.
        wrong: parameters with a wrong gradient; None: not compared.
    """

    name: str
    seconds: tuple[float, float, float]
    step_ratio: Estimate
    same_mode: Estimate | None
    extra: Estimate | None
    extra_ratio: Estimate | None
    wrong: int | None


@dataclass(frozen=True)
class Comparison:
    """One measurement.

    Args:
        title: model, ranks.
        base: name of the implementation that all are compared with.
        measured: the times.
        note: anything else to say about it.
    """

    title: str
    base: str
    measured: Measured
    note: str = ""

    @cached_property
    def rows(self) -> dict[str, Row]:
        """By name, in the order of the measurement."""
        return {name: self._row(name) for name in self.measured.times}

    def fastest(self, who: str) -> str:
        """The name among ``who``'s modes with the least median of a step."""
        times = self.measured.times
        names = [name for name in times if name.startswith(who)]
        return min(names, key=lambda name: float(np.median(times[name])))

    def _row(self, name: str) -> Row:
        measured = self.measured
        times, plain = measured.times[name], measured.times[PLAIN]
        base = measured.times[self.base]
        twin = measured.times.get(name.replace(MINIDP, TORCH))
        low, median, high = np.percentile(times, [10, 50, 90])
        is_ours, is_plain = name.startswith(MINIDP), name == PLAIN
        extra = difference(times, plain).scaled(1 / measured.num_params)
        return Row(
            name=name,
            seconds=(float(low), float(median), float(high)),
            step_ratio=ratio(times, base),
            same_mode=ratio(times, twin) if is_ours and twin is not None else None,
            extra=None if is_plain else extra,
            extra_ratio=None if is_plain else ratio_of_extras(times, base, plain),
            wrong=measured.wrong[name],
        )

    def table(self) -> Table:
        """For printing."""
        measured = self.measured
        facts = (
            f"{measured.num_params} parameters, {measured.num_bytes / 2**20:.3g} MiB; "
            f"{measured.num_rounds} timed rounds, {measured.checks} checks" + self.note
        )
        base = "torch"
        if self.base != base:
            base, facts = "base", f"{facts}; base: {self.base}"
        title = Text.assemble((self.title, "bold"), "\n", (facts, "dim"))
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
        table.add_column("\nimplementation", no_wrap=True)
        for column in (
            "step, ms\nmedian",
            "\np10-p90",
            f"step /\n{base}",
            "step / torch,\nsame mode (95%)",
            "extra per\nparameter, us (95%)",
            f"extra /\n{base}",
            "\n#wrong",
        ):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows.values():
            style = "bold" if row.name.startswith(MINIDP) else ""
            table.add_row(*_texts(row), style=style)
        return table

    def as_json(self) -> dict[str, Any]:
        """For a file, with the raw times."""
        found = []
        for name, row in self.rows.items():
            content = dataclasses.asdict(row)
            content["p10_median_p90_seconds"] = content.pop("seconds")
            micros = (f"{1e6 * seconds:.0f}" for seconds in self.measured.times[name])
            content["microseconds_of_each_round"] = " ".join(micros)
            found.append(content)
        return {
            "title": self.title,
            "note": self.note.removeprefix("; "),
            "num_params": self.measured.num_params,
            "num_bytes": self.measured.num_bytes,
            "timed_rounds": self.measured.num_rounds,
            "checks": self.measured.checks,
            "base": self.base,
            "rows": found,
        }


def _texts(row: Row) -> list[str]:
    low, median, high = (short(1e3 * seconds) for seconds in row.seconds)
    extra = row.extra and row.extra.scaled(1e6)
    return [
        row.name,
        median,
        f"{low}-{high}",
        f"{row.step_ratio.value:.3f}",
        "-" if row.same_mode is None else with_interval(row.same_mode),
        "-"
        if extra is None
        else f"{short(extra.value)} ({short(extra.low)}-{short(extra.high)})",
        "-" if row.extra_ratio is None else f"{row.extra_ratio.value:.2f}",
        "-" if row.wrong is None else str(row.wrong),
    ]


def with_interval(ratio: Estimate) -> str:
    """A ratio and its 95% interval."""
    return f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"


def short(value: float) -> str:
    """Three significant digits, at most two of them after the point."""
    size = abs(value)
    return f"{value:.{2 if size < 10 else 1 if size < 100 else 0}f}"
