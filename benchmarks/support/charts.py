"""Draw bar charts and line charts, as PNG files.

matplotlib is imported when a chart is drawn: rank processes import this module too, and
`support.report` skips charts where matplotlib is not installed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support.estimates import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMPUTE, THEIRS, OURS, OTHER = "#d5dae1", "#8a94a3", "#e4632d", "#b9a37e"
DARK, BOUND, INK, FAINT = "#7a2e12", "#2b6cb0", "#222222", "#dddddd"
PALETTE_SIZE = 96  # colours of a chart: bars, lines, and their smooth edges


@dataclass(frozen=True)
class Bar:
    """A horizontal bar.

    Args:
        label: left of the bar.
        parts: length and colour of each part, from left to right.
        interval: drawn as a thin line.
        mark: drawn as a line across; None: none.
    """

    label: str
    parts: Sequence[tuple[float, str]]
    interval: tuple[float, float]
    mark: float | None = None

    @property
    def length(self) -> float:
        """Sum of the lengths of all parts."""
        return sum(part for part, _ in self.parts)


@dataclass(frozen=True)
class Line:
    """A curve of ``y`` over ``x``; a band from ``low`` to ``high`` unless empty."""

    colour: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "o-"
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Words:
    """What is written around the panels: title, unit of the values, footnote."""

    title: str
    unit: str
    footnote: str


def colour_of(name: str) -> str:
    """Return the colour of an implementation: minidp's, torch's, or another."""
    if name.startswith("minidp"):
        return OURS
    return THEIRS if name.startswith("torch") else OTHER


def draw_bars(
    path: Path,
    words: Words,
    legend: Mapping[str, str],
    rows: Sequence[Mapping[str, Sequence[Bar]]],
) -> None:
    """Write a grid of bar charts.

    Args:
        path: of the PNG.
        words: around the panels.
        legend: colours by name.
        rows: the panels of each row, by title.
    """
    from matplotlib.patches import Patch

    columns = max(map(len, rows))
    most = max(len(bars) for row in rows for bars in row.values())
    size = (max(4.4 * columns + 3, 8), (0.26 * most + 1.0) * len(rows) + 1.1)
    figure, grid = _figure(len(rows), columns, size, words)
    for axes, row in zip(grid, rows, strict=True):
        for ax, (title, bars) in zip(axes, row.items(), strict=False):
            _draw_panel(ax, bars, words.unit)
            ax.set_title(textwrap.fill(title, 54), size=9.5, loc="left")
        for ax in axes[len(row) :]:
            ax.axis("off")
    handles = [Patch(color=colour, label=name) for name, colour in legend.items()]
    # Beside the panels: above them it would lie on the title.
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
    _save(figure, path)


def _draw_panel(ax: Axes, bars: Sequence[Bar], unit: str) -> None:
    widest = max(1e-9, *(max(bar.length, bar.interval[1]) for bar in bars))
    for y, bar in enumerate(bars):
        left = 0.0
        for length, colour in bar.parts:
            ax.barh(y, length, 0.78, left=left, color=colour)
            left += length
        ax.plot(bar.interval, [y, y], color=INK, lw=1)
        if bar.mark is not None:
            ax.plot([bar.mark] * 2, [y - 0.42, y + 0.42], color=BOUND, lw=2)
        end = max(bar.length, bar.interval[1], 0) + 0.02 * widest
        ax.text(end, y, short(bar.length), va="center", size=8)
    ax.set_yticks(range(len(bars)), [bar.label for bar in bars])
    ax.invert_yaxis()
    ax.set_xlim(right=1.18 * widest)
    ax.grid(axis="x", color=FAINT, lw=0.6)
    ax.tick_params(left=False)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(unit, size=8.5)


def draw_lines(
    path: Path,
    words: Words,
    x: tuple[str, Sequence[float]],
    panels: Mapping[str, Mapping[str, Line]],
) -> None:
    """Write line charts side by side, over a logarithmic axis.

    Args:
        path: of the PNG.
        words: around the panels.
        x: the label of the x axis, and its ticks.
        panels: curves by name, by title.
    """
    label, ticks = x
    size = (max(6.2 * len(panels), 7.5), 5.2)
    figure, grid = _figure(1, len(panels), size, words)
    for ax, (title, lines) in zip(grid[0], panels.items(), strict=True):
        for name, line in lines.items():
            if line.low:
                ax.fill_between(
                    line.x, line.low, line.high, color=line.colour, alpha=0.15
                )
            ax.plot(line.x, line.y, line.style, color=line.colour, label=name)
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{tick:,g}" for tick in ticks], rotation=45)
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
        ax.set_xlabel(label, size=9)
        ax.set_ylabel(words.unit, size=9)
        ax.grid(color=FAINT, lw=0.6)
        ax.set_title(title, size=10, loc="left")
        ax.legend(frameon=False, fontsize=8.5)
    _save(figure, path)


def _figure(
    rows: int, columns: int, size: tuple[float, float], words: Words
) -> tuple[Figure, Sequence[Sequence[Axes]]]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained"
    )
    for ax in grid.flat:
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=9, colors=INK)
    figure.suptitle(words.title, size=13, weight="bold", x=0.01, ha="left")
    figure.supxlabel(words.footnote, size=8, color="#555555", x=0.01, ha="left")
    return figure, grid


def _save(figure: Figure, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=110)
    plt.close(figure)
    shrink_png(path)


def shrink_png(path: Path) -> None:
    """Write a PNG again with a palette: a third of the bytes in git."""
    from PIL import Image  # matplotlib needs it

    with Image.open(path) as chart:
        few = chart.convert("RGB").quantize(PALETTE_SIZE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
