"""The chart of the simulation: predicted beside measured, and scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from support.bars import FAINT, INK
from support.output import shrink_png
from support.report import can_draw
from support.scale import Sweep
from support.validation import LIMIT, Validation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#e4632d", "#3b6ea5")  # a model each
GREY = "#8a94a3"


def draw_scale(
    path: Path, rows: Sequence[Validation], sweeps: Sequence[Sweep], date: str
) -> None:
    """Write the chart, a PNG: validation, efficiency over ranks, step over cap."""
    if not can_draw():
        return
    import matplotlib as mpl  # not above: rank processes import this module too

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = [lambda ax: _draw_validation(ax, rows)] if rows else []
    if sweeps:
        panels.append(lambda ax: _draw_efficiency(ax, sweeps))
        panels += [lambda ax, each=each: _draw_caps(ax, each) for each in sweeps]
    if not panels:
        return
    figure, axes = plt.subplots(
        1, len(panels), figsize=(max(4.6 * len(panels), 6.0), 4.9), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for ax, panel in zip(axes[0], panels, strict=True):
        panel(ax)
        ax.grid(color=FAINT, lw=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=9, colors=INK)
    figure.suptitle("Data parallelism at scale, on paper", size=13, weight="bold",
                    x=0.01, ha="left")  # fmt: skip
    notes = []
    if rows:
        notes.append("Measured: real ranks; computation replaced by timed waits.")
    if sweeps:
        notes.append("SIMULATED: not measured; assumptions are above the tables.")
    figure.supxlabel(
        "   ".join([*notes, date]), size=8, color="#555555", x=0.01, ha="left"
    )
    figure.savefig(path, dpi=110)
    shrink_png(path)
    plt.close(figure)


def _draw_validation(ax: Axes, rows: Sequence[Validation]) -> None:
    most = 1.1e3 * max(max(row.measured_s, row.predicted_s) for row in rows)
    ax.fill_between(
        [0, most], [0, most * (1 - LIMIT)], [0, most * (1 + LIMIT)],
        color=GREY, alpha=0.18, label=f"within {LIMIT:.0%}", lw=0,
    )  # fmt: skip
    ax.plot([0, most], [0, most], color=GREY, lw=1)
    for num_ranks, marker in zip(
        sorted({row.num_ranks for row in rows}), "os^Dv", strict=False
    ):
        for late, colour in enumerate(COLOURS):
            chosen = [
                row
                for row in rows
                if row.num_ranks == num_ranks and row.stragglers == bool(late)
            ]
            label = f"{num_ranks} ranks" + (", stragglers" if late else "")
            ax.plot(
                [1e3 * row.measured_s for row in chosen],
                [1e3 * row.predicted_s for row in chosen],
                marker, color=colour, label=label, ms=5.5, alpha=0.8,
            )  # fmt: skip
    ax.set(xlim=(0, most), ylim=(0, most))
    ax.set_xlabel("measured step, ms", size=9)
    ax.set_ylabel("predicted step, ms", size=9)
    ax.set_title("Predicted beside measured", size=10, loc="left")
    ax.legend(frameon=False, fontsize=8.5, loc="upper left")


def _draw_efficiency(ax: Axes, sweeps: Sequence[Sweep]) -> None:
    for found, colour in zip(sweeps, COLOURS, strict=True):
        ranks = [point.num_ranks for point in found.points]
        for label, style, seconds in (
            ("best layout", "o-", [p.best_s for p in found.points]),
            ("torch's default cap", "o:", [p.torch_s for p in found.points]),
            ("best layout, stragglers", "x--", [p.late_s for p in found.points]),
        ):
            ax.plot(
                ranks,
                [100 * found.efficiency(each) for each in seconds],
                style, color=colour, ms=4.5, lw=1.3,
                label=f"{found.work.title}: {label}",
            )  # fmt: skip
    ticks = [point.num_ranks for point in sweeps[0].points]
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45)
    ax.minorticks_off()
    ax.set_ylim(0, 105)
    ax.set_xlabel("ranks", size=9)
    ax.set_ylabel("scaling efficiency, %", size=9)
    ax.set_title("SIMULATED: efficiency", size=10, loc="left")
    ax.legend(frameon=False, fontsize=8, loc="lower left")


def _draw_caps(ax: Axes, found: Sweep) -> None:
    shown = [
        found.points[k]
        for k in sorted({0, len(found.points) // 2, -1 % len(found.points)})
    ]
    for point, colour in zip(shown, ("#f0b596", COLOURS[0], "#7a2c0c"), strict=False):
        caps = list(point.caps_s)
        ax.plot(
            caps, [1e3 * point.caps_s[cap] for cap in caps], "o-",
            color=colour, ms=4, lw=1.3, label=f"{point.num_ranks:,} ranks",
        )  # fmt: skip
        ax.axhline(1e3 * point.best_s, color=colour, lw=1, ls="--")
        ax.plot([25], [1e3 * point.torch_s], "D", color=colour, ms=6, mec=INK, mew=0.8)
    ax.plot([], [], "D", color="white", mec=INK, label="torch's default")
    ax.plot([], [], "--", color=GREY, label="best layout")
    ax.set_xscale("log", base=2)
    ticks = [0.25, 1, 4, 25, 128, 512]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_ylim(0, 1.08 * ax.get_ylim()[1])
    ax.set_xlabel("bucket cap, MiB", size=9)
    ax.set_ylabel("step, ms", size=9)
    ax.set_title(f"SIMULATED: {found.work.title}", size=10, loc="left")
    ax.legend(frameon=False, fontsize=8.5)
