"""A grid of bar charts: torch beside minidp, a panel per measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support.comparison import short
from support.estimates import Estimate
from support.output import shrink_png
from support.report import can_draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"torch": "#8a94a3", "minidp": "#e4632d"}
INK, FAINT = "#222222", "#dddddd"
BAR = 0.38  # height; two share the room of 1


@dataclass(frozen=True)
class Panel:
    """One panel: ``bars[mode][who]`` for ``who`` in torch, minidp."""

    title: str
    bars: Mapping[str, Mapping[str, Estimate]]


@dataclass(frozen=True)
class Words:
    """What is written around the panels."""

    title: str
    unit: str
    footnote: str


def draw(path: Path, words: Words, rows: Sequence[Sequence[Panel]]) -> None:
    """Write the chart, a PNG."""
    if not can_draw():
        return
    import matplotlib as mpl  # not above: rank processes import this module too

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    columns = max(map(len, rows))
    figure, grid = plt.subplots(
        len(rows),
        columns,
        figsize=(max(3.9 * columns + 1.2, 7), 2.9 * len(rows) + 1.1),
        squeeze=False,
        layout="constrained",
    )
    for axes, row in zip(grid, rows, strict=True):
        for k, ax in enumerate(axes):
            if k < len(row):
                is_new = k == 0 or list(row[k].bars) != list(row[k - 1].bars)
                _draw_panel(ax, row[k], words.unit, with_labels=is_new)
            else:
                ax.axis("off")
    handles = [Patch(color=colour, label=who) for who, colour in COLOURS.items()]
    figure.suptitle(words.title, size=13, weight="bold", x=0.01, ha="left")
    figure.legend(handles=handles, loc="upper right", ncols=2, frameon=False)
    figure.supxlabel(words.footnote, size=8, color="#555555", x=0.01, ha="left")
    figure.savefig(path, dpi=110)
    shrink_png(path)
    plt.close(figure)


def _draw_panel(ax: Axes, panel: Panel, unit: str, *, with_labels: bool) -> None:
    estimates = [e for bars in panel.bars.values() for e in bars.values()]
    widest = max(max(e.high, e.value) for e in estimates)
    for row, bars in enumerate(panel.bars.values()):
        for who, estimate in bars.items():
            side = -0.5 if who == "torch" else 0.5
            y = row + (BAR * side if len(bars) > 1 else 0)
            ax.barh(y, estimate.value, BAR * 0.94, color=COLOURS[who])
            ax.plot([estimate.low, estimate.high], [y, y], color=INK, lw=1.2)
            end = max(estimate.high, estimate.value, 0) + 0.02 * widest
            ax.text(end, y, short(estimate.value), va="center", size=8)
    labels = list(panel.bars) if with_labels else [""] * len(panel.bars)
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set_xlim(right=1.18 * widest)
    ax.axvline(0, color=INK, lw=0.8)
    ax.grid(axis="x", color=FAINT, lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(left=False, labelsize=9)
    ax.set_title(panel.title, size=10, loc="left")
    ax.set_xlabel(unit, size=9)
