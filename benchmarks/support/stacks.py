"""A grid of stacked bars: what a step computes, and what it waits for communication."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from support.bars import FAINT, INK, Words
from support.baselines import BARE
from support.comparison import short
from support.exposure import Exposure
from support.output import shrink_png
from support.report import can_draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMPUTE, TORCH, MINIDP, OTHER, BOUND = (
    "#d5dae1",
    "#8a94a3",
    "#e4632d",
    "#b9a37e",
    "#2b6cb0",
)
TOP, BOTTOM = 0.75, 0.45  # inches for what is written around the panels
LEFT_OUT = "again"  # no news in it


def draw_stacks(path: Path, words: Words, grid: Sequence[Sequence[Exposure]]) -> None:
    """Write the chart, a PNG; a panel for each measurement."""
    if not can_draw():
        return
    import matplotlib as mpl  # not above: rank processes import this module too

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    columns, names = max(map(len, grid)), _names(grid[0][0])
    width = max(4.2 * columns + 1.2, 8.5)
    height = (0.27 * len(names) + 0.9) * len(grid) + TOP + BOTTOM
    figure, axes = plt.subplots(
        len(grid), columns, figsize=(width, height), squeeze=False, layout="constrained"
    )
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0, BOTTOM / height, 1, 1 - (TOP + BOTTOM) / height))
    for ax_row, row in zip(axes, grid, strict=True):
        for k, ax in enumerate(ax_row):
            if k < len(row):
                same = k > 0 and _names(row[k]) == _names(row[k - 1])
                _draw(ax, row[k], words.unit, with_labels=not same)
            else:
                ax.axis("off")
    handles = [
        Patch(color=COMPUTE, label="step without communication"),
        Patch(color=TORCH, label="exposed, torch"),
        Patch(color=MINIDP, label="exposed, minidp"),
        Patch(color=OTHER, label="exposed, after backward"),
        Line2D([], [], color=BOUND, lw=2, label="bound of these steps"),
    ]
    figure.text(0.01, 1 - 0.1 / height, words.title, size=13, weight="bold", va="top")
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 1 - 0.32 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        columnspacing=1.2,
    )
    figure.text(
        0.01, 0.07 / height, words.footnote, size=8, color="#555555", va="bottom"
    )
    figure.savefig(path, dpi=110)
    shrink_png(path)
    plt.close(figure)


def _names(cell: Exposure) -> list[str]:
    return [n for n in cell.rows if n != BARE and not n.endswith(LEFT_OUT)]


def _draw(ax: Axes, cell: Exposure, unit: str, *, with_labels: bool) -> None:
    names = _names(cell)
    bare = 1e3 * cell.rows[BARE].seconds[1]
    widest = max(1e3 * cell.rows[name].seconds[2] for name in names)
    for y, name in enumerate(names):
        low, median, high = (1e3 * s for s in cell.rows[name].seconds)
        colour = OTHER
        if name.startswith(("torch", "minidp")):
            colour = TORCH if name.startswith("torch") else MINIDP
        ax.barh(y, min(bare, median), 0.78, color=COMPUTE)
        ax.barh(y, max(0, median - bare), 0.78, left=bare, color=colour)
        ax.plot([low, high], [y, y], color=INK, lw=1)
        bound = cell.rows[name].bound
        if bound is not None:
            ax.plot([1e3 * bound] * 2, [y - 0.42, y + 0.42], color=BOUND, lw=2)
        ax.text(
            max(high, median) + 0.02 * widest, y, short(median), va="center", size=8
        )
    ax.set_yticks(range(len(names)), names if with_labels else [""] * len(names))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.16 * widest)
    ax.grid(axis="x", color=FAINT, lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(left=False, labelsize=9)
    title = cell.title.replace(" Gbit/s", "\u00a0Gbit/s")  # stays on one line
    ax.set_title(textwrap.fill(title, 54), size=9.5, loc="left")
    ax.set_xlabel(unit, size=8.5)
