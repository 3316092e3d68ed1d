"""One chart of pairs: torch beside minidp, a row per measurement, on one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support.bars import COLOURS, FAINT, INK, Words
from support.comparison import short
from support.estimates import Estimate
from support.output import shrink_png
from support.report import can_draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW, AROUND = 0.34, 1.7  # inches
RATIO = "ratio"
COLUMNS = {"torch": 1.07, "minidp": 1.17, RATIO: 1.25}  # of numbers
SIDE = {"torch": -0.14, "minidp": 0.14}  # of its row


@dataclass(frozen=True)
class Pair:
    """One row; ``bars[who]`` for ``who`` in torch, minidp."""

    label: str
    bars: Mapping[str, Estimate]


def draw_pairs(path: Path, words: Words, groups: Mapping[str, Sequence[Pair]]) -> None:
    """Write the chart, a PNG. The axis is logarithmic: rows differ a thousandfold."""
    if not can_draw():
        return
    import matplotlib as mpl  # not above: rank processes import this module too

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = sum(len(pairs) + 1 for pairs in groups.values())
    figure, ax = plt.subplots(figsize=(9.5, ROW * rows + AROUND), layout="constrained")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0, 0, 0.93, 1))  # it does not see the last column
    ax.set_xscale("log")
    values = [
        e.value for pairs in groups.values() for p in pairs for e in p.bars.values()
    ]
    least = 0.5 * min((value for value in values if value > 0), default=0.01)
    ax.set_xlim(least, 1.4 * max(*values, least))
    row, ticks = 0, {}
    for title, pairs in groups.items():
        place = ax.get_yaxis_transform()
        ax.text(
            0.0, row, f" {title}", weight="bold", size=9, va="center", transform=place
        )
        for who, x in COLUMNS.items():
            colour = COLOURS.get(who, INK)
            ax.text(x, row, who, size=8.5, color=colour, weight="bold", ha="right",
                    va="center", transform=place)  # fmt: skip
        for pair in pairs:
            row += 1
            ticks[row] = pair.label
            _draw_pair(ax, row, pair, least)
        row += 1
    ax.set_yticks(list(ticks), list(ticks.values()), size=9)
    ax.set_ylim(row - 0.4, -0.7)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.grid(axis="x", color=FAINT, lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(left=False, labelsize=9)
    ax.set_xlabel(words.unit, size=9)
    figure.suptitle(words.title, size=12, weight="bold", x=0.01, ha="left")
    figure.supxlabel(words.footnote, size=8, color="#555555", x=0.01, ha="left")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    shrink_png(path)


def _draw_pair(ax: Axes, row: int, pair: Pair, least: float) -> None:
    place = ax.get_yaxis_transform()
    for who, estimate in pair.bars.items():
        y, colour = row + SIDE[who], COLOURS[who]
        ends = [max(least, x) for x in (estimate.low, estimate.high)]
        ax.plot(ends, [y, y], color=colour, lw=2.5, alpha=0.5, solid_capstyle="butt")
        ax.plot([max(least, estimate.value)], [y], "o", color=colour, ms=6)
        ax.text(COLUMNS[who], row, short(estimate.value), size=9, color=colour,
                ha="right", va="center", transform=place)  # fmt: skip
    torch, minidp = (pair.bars[who].value for who in ("torch", "minidp"))
    if torch > 0:
        ax.text(COLUMNS[RATIO], row, f"{minidp / torch:.2f}", size=9,
                color=INK, ha="right", va="center", transform=place)  # fmt: skip
