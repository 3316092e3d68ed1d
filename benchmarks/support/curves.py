"""Line charts: something over a size, with levels to compare it with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from support.bars import FAINT, INK, Words
from support.output import shrink_png
from support.report import can_draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOP, BOTTOM = 0.45, 0.35  # inches for what is written around the panels


@dataclass(frozen=True)
class Line:
    """One curve, with a band from ``low`` to ``high``; of one point: a marker."""

    colour: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: str = "o-"


@dataclass(frozen=True)
class Level:
    """A horizontal line, and a marker on it where ``x`` says."""

    colour: str
    y: float
    style: str = "--"
    x: float | None = None
    marker: str = "o"


@dataclass(frozen=True)
class Panel:
    """One chart; what is in it is named in its legend."""

    title: str
    lines: Mapping[str, Line]
    levels: Mapping[str, Level] = field(default_factory=dict)


@dataclass(frozen=True)
class Axis:
    """What is written at the axes, and where x has ticks."""

    x: str
    y: str
    ticks: Sequence[float]
    is_log: bool = True


def draw_curves(path: Path, words: Words, axis: Axis, panels: Sequence[Panel]) -> None:
    """Write the chart, a PNG; panels side by side."""
    if not can_draw():
        return
    import matplotlib as mpl  # not above: rank processes import this module too

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    width, height = max(6.2 * len(panels), 7.5), 4.4 + TOP + BOTTOM
    figure, axes = plt.subplots(
        1, len(panels), figsize=(width, height), squeeze=False, layout="constrained"
    )
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0, BOTTOM / height, 1, 1 - (TOP + BOTTOM) / height))
    for ax, panel in zip(axes[0], panels, strict=True):
        _draw(ax, panel, axis)
    figure.text(0.01, 1 - 0.12 / height, words.title, size=13, weight="bold", va="top")
    figure.text(0.01, 0.08 / height, words.footnote, size=8, color="#555555")
    figure.savefig(path, dpi=110)
    shrink_png(path)
    plt.close(figure)


def _draw(ax: Axes, panel: Panel, axis: Axis) -> None:
    for name, line in panel.lines.items():
        if line.low:
            ax.fill_between(line.x, line.low, line.high, color=line.colour, alpha=0.15)
        ax.plot(line.x, line.y, line.style, color=line.colour, label=name)
    for name, level in panel.levels.items():
        style = {"color": level.colour, "ls": level.style, "lw": 1.4}
        label = name if level.x is None else None
        ax.axhline(level.y, label=label, **style)
        if level.x is not None:
            ax.plot(
                [level.x], [level.y], marker=level.marker, ms=9, label=name, **style
            )
    if axis.is_log:
        ax.set_xscale("log", base=2)
    ax.set_xticks(axis.ticks, [f"{tick:g}" for tick in axis.ticks])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel(axis.x, size=9)
    ax.set_ylabel(axis.y, size=9)
    ax.grid(color=FAINT, lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=9, colors=INK)
    ax.set_title(panel.title, size=10, loc="left")
    ax.legend(frameon=False, fontsize=8.5, loc="best")
