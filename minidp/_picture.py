"""Recorded steps as a picture: buckets over the backward, hidden and exposed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._analysis import BucketOverlap, by_hiding, overlap_of, overlaps_of
from ._skew import aligned, common_steps, last_launches, offset_of
from ._timeline import Step, Timeline

MAX_RANKS = 4  # panels; more are not drawn
MAX_BUCKETS = 60  # rows of a panel; more are not drawn
BACKWARD, EXPOSED, HIDDEN = "#b9c4d0", "#d1495b", "#2a9d8f"
WAITING, LATE = "#f3d9a4", "#8d6ab8"
_END_OF_BACKWARD: dict[str, Any] = {"color": "#444444", "lw": 1, "ls": "--"}
# The words of the report's columns.
_PARTS = {
    "backward": BACKWARD,
    "full, waited": WAITING,
    "late (slower ranks; hidden until the dashed line, then exposed)": LATE,
    "wire, hidden": HIDDEN,
    "wire, exposed": EXPOSED,
}


def draw(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Write a PNG (or what the suffix asks for) of the typical step, as reported.

    Args:
        timelines: recordings of different ranks of one run.
        path: of the file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: there is nothing to draw, or they do not belong together.
    """
    ranks = aligned(timelines)
    together = common_steps(ranks)
    if not together or not together[0][0].buckets:
        raise ValueError("there is nothing to draw: no recorded step sent anything")
    steps = together[overlaps_of(ranks)[0].step]
    launches = last_launches(ranks, steps)
    views = [_View(t, s, launches) for t, s in zip(ranks, steps, strict=True)]
    figures, patches = _matplotlib("figure"), _matplotlib("patches")
    lines = _matplotlib("lines")
    views = views[:MAX_RANKS]
    rows = sum(2 + len(view.rows) for view in views)
    figure = figures.Figure(figsize=(11, 1.6 + 0.3 * rows), layout="constrained")
    panels = figure.subplots(len(views), 1, sharex=True, squeeze=False)[:, 0]
    for panel, view in zip(panels, views, strict=True):
        _panel(panel, view, min(view.begin_ns for view in views))
    panels[-1].set_xlabel("ms after the first rank's backward began")
    handles = [patches.Patch(color=c, label=name) for name, c in _PARTS.items()]
    end = lines.Line2D([], [], label="end of the backward", **_END_OF_BACKWARD)
    figure.legend(
        handles=[*handles, end],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    figure.savefig(path, dpi=130)


def _matplotlib(part: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{part}")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "A picture needs matplotlib, which is not installed. What to do: "
            "pip install matplotlib."
        ) from None


class _View:
    """One rank's part of a step, on the clock that ranks share."""

    def __init__(
        self, timeline: Timeline, step: Step, launches: Mapping[int, int]
    ) -> None:
        offset = offset_of(timeline)
        own = {number: ns + offset for number, ns in launches.items()}
        self.rank = timeline.where.rank
        self.begin_ns = step.backward.begin_ns - offset
        self.step = step
        self.overlap = overlap_of(step, own)
        self.rows = self.overlap.buckets[:MAX_BUCKETS]
        self.labels = ["backward"]
        for row in self.rows:
            size = _size(timeline.nbytes(step, row.number))
            self.labels.append(f"bucket {row.number}, {size}")


def _panel(panel: Any, view: _View, origin_ns: int) -> None:
    one, shift = view.overlap, (view.begin_ns - origin_ns) / 1e9
    end = shift + one.backward_s
    pieces = [(0, shift, one.backward_s, BACKWARD)]
    for row, bucket in enumerate(view.rows, 1):
        pieces += [(row, shift + b, s, c) for b, s, c in _pieces(bucket, view.step)]
    for row, begin, seconds, colour in pieces:
        panel.barh(row, seconds * 1e3, left=begin * 1e3, color=colour, height=0.7)
    panel.axvline(end * 1e3, **_END_OF_BACKWARD)
    panel.set_yticks(range(len(view.labels)), view.labels, fontsize=8)
    panel.invert_yaxis()
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    left_out = len(one.buckets) - len(view.rows)
    more = f"; {left_out} more buckets" if left_out else ""
    panel.set_title(
        f"rank {view.rank}: {one.hidden_s * 1e3:.1f} ms of communication hidden, "
        f"{one.exposed_s * 1e3:.1f} ms exposed, in a step of {one.seconds * 1e3:.1f} ms"
        f"{more}",
        fontsize=10,
        loc="left",
    )


def _pieces(bucket: BucketOverlap, step: Step) -> list[tuple[float, float, str]]:
    """Begin, seconds and colour of each piece of a bucket's row."""
    turn = bucket.full_s + bucket.waited_s
    start = turn + bucket.late_s
    zero = step.backward.begin_ns
    span = [zero + round(s * 1e9) for s in (start, start + bucket.wire_s)]
    pieces = [
        (bucket.full_s, bucket.waited_s, WAITING),
        (turn, bucket.late_s, LATE),
        *(
            ((b - zero) / 1e9, (e - b) / 1e9, HIDDEN if hides else EXPOSED)
            for b, e, hides in by_hiding(step, span[0], span[1])
        ),
    ]
    return [piece for piece in pieces if piece[1] > 0]


def _size(nbytes: int) -> str:
    mib = nbytes / 2**20
    return f"{mib:.1f} MiB" if mib >= 0.1 else f"{nbytes / 1024:.1f} KiB"
