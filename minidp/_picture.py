"""Recorded steps as a picture: a whole step, then its buckets, hidden and exposed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._analysis import (
    BucketOverlap,
    by_hiding,
    most_exposed,
    overlap_of,
    overlaps_of,
    to_show,
)
from ._skew import aligned, common_steps, last_launches, offset_of
from ._timeline import Span, Step, Timeline

MAX_RANKS = 4  # panels; more are not drawn
MAX_BUCKETS = 60  # rows of a panel; more are not drawn
BACKWARD, EXPOSED, HIDDEN = "#b9c4d0", "#d1495b", "#2a9d8f"
WAITING, LATE = "#f3d9a4", "#8d6ab8"
FORWARD, OPTIMIZER = "#8fb3d9", "#5c6770"
LOCAL_FORWARD, LOCAL_BACKWARD = "#d9e6f3", "#e6d3c5"
_END_OF_BACKWARD: dict[str, Any] = {"color": "#444444", "lw": 1, "ls": "--"}
# The words of the report's rows and columns.
_LOCAL = {"local forward": LOCAL_FORWARD, "local backward": LOCAL_BACKWARD}
_PARTS = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "optimizer": OPTIMIZER,
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
    overlaps = overlaps_of(ranks)
    steps = together[overlaps[0].step]
    launches = last_launches(ranks, steps)
    views = [_View(t, s, launches) for t, s in zip(ranks, steps, strict=True)]
    reported = most_exposed(overlaps).rank
    views.sort(key=lambda view: view.rank != reported)  # its panel is always drawn
    drawn = sorted(views[:MAX_RANKS], key=lambda view: view.rank)
    _draw(drawn, len(views) - len(drawn), path)


def _draw(views: Sequence[_View], num_left_out: int, path: str | Path) -> None:
    figures, patches = _matplotlib("figure"), _matplotlib("patches")
    lines = _matplotlib("lines")
    heights = [1.5 + len(views), *(2 + len(view.rows) for view in views)]
    figure = figures.Figure(
        figsize=(11, 1.8 + 0.3 * sum(heights)), layout="constrained"
    )
    whole, *panels = figure.subplots(
        len(heights), 1, squeeze=False, height_ratios=heights
    )[:, 0]
    _whole_step(whole, views, num_left_out)
    for panel, view in zip(panels, views, strict=True):
        panel.sharex(panels[0])
        panel.tick_params(labelbottom=view is views[-1])
        _panel(panel, view, min(view.begin_ns for view in views))
    panels[-1].set_xlabel("ms after the first rank's backward began")
    parts = _PARTS
    if any(view.local for view in views):
        parts = _LOCAL | parts
    handles = [patches.Patch(color=c, label=name) for name, c in parts.items()]
    end = lines.Line2D([], [], label="end of the backward", **_END_OF_BACKWARD)
    figure.legend(
        handles=[*handles, end],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    figure.savefig(path, dpi=110)


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
        self.offset = offset = offset_of(timeline)
        own = {number: ns + offset for number, ns in launches.items()}
        self.rank = timeline.where.rank
        self.begin_ns = step.backward.begin_ns - offset
        self.step = step
        self.local = (*step.local_forwards, *step.local_backwards)
        self.overlap = overlap_of(step, own)
        shown = to_show(self.overlap.buckets, MAX_BUCKETS)
        self.rows = [row for row in self.overlap.buckets if row.number in shown]
        self.labels = ["backward"]
        for row in self.rows:
            size = _size(timeline.nbytes(step, row.number))
            self.labels.append(f"bucket {row.number}, {size}")


def _whole_step(panel: Any, views: Sequence[_View], num_left_out: int) -> None:
    """Where the time of a step goes, a row per rank: all of it, in its order."""
    origin = min(view.step.begin_ns - view.offset for view in views)
    for row, view in enumerate(views):
        for span, colour in _phases(view):
            begin = (span.begin_ns - view.offset - origin) / 1e6
            panel.barh(row, span.seconds * 1e3, left=begin, color=colour, height=0.7)
    _tidy(panel, [f"rank {view.rank}" for view in views])
    panel.set_xlabel("ms after the first rank's step began")
    ranks = "ranks are" if num_left_out > 1 else "rank is"
    ranks = f"; {num_left_out} more {ranks} not drawn" if num_left_out else ""
    title = f"the whole step; white: data, loss and the like, copies{ranks}"
    panel.set_title(title, fontsize=10, loc="left")


def _phases(view: _View) -> list[tuple[Span, str]]:
    step, end = view.step, view.step.backward.end_ns
    exposed = [
        (Span(begin, stop), EXPOSED)
        for bucket in step.buckets
        for begin, stop, hides in by_hiding(step, bucket.launched_ns, bucket.done_ns)
        if begin >= end and not hides
    ]
    return [
        *((span, LOCAL_FORWARD) for span in step.local_forwards),
        *((span, LOCAL_BACKWARD) for span in step.local_backwards),
        *((span, FORWARD) for span in step.forwards),
        (step.backward, BACKWARD),
        *((span, OPTIMIZER) for span in step.optimizers),
        *exposed,
    ]


def _tidy(panel: Any, labels: Sequence[str]) -> None:
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.invert_yaxis()
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _panel(panel: Any, view: _View, origin_ns: int) -> None:
    one, shift = view.overlap, (view.begin_ns - origin_ns) / 1e9
    end = shift + one.backward_s
    pieces = [(0, shift, one.backward_s, BACKWARD)]
    for row, bucket in enumerate(view.rows, 1):
        pieces += [(row, shift + b, s, c) for b, s, c in _pieces(bucket, view.step)]
    for row, begin, seconds, colour in pieces:
        panel.barh(row, seconds * 1e3, left=begin * 1e3, color=colour, height=0.7)
    panel.axvline(end * 1e3, **_END_OF_BACKWARD)
    _tidy(panel, view.labels)
    left_out = len(one.buckets) - len(view.rows)
    more = f"; the {left_out} least exposed buckets are not drawn" if left_out else ""
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
