"""Draw recorded steps: the typical one as a picture, all of them as a trace.

Traces are for Perfetto (https://ui.perfetto.dev) and ``chrome://tracing``. Bars and
slices are named as the report's columns.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minidp.config import MIB

from .analysis import (
    Slice,
    StepOverlap,
    most_exposed,
    overlap_of,
    overlaps_of,
    slices,
    to_show,
)
from .skew import aligned
from .timeline import Timeline

MAX_RANKS = 4  # number of panels
MAX_BUCKETS = 60  # rows of a panel
COLOURS = {
    "local forward": "#d9e6f3",
    "local backward": "#e6d3c5",
    "forward": "#8fb3d9",
    "backward": "#b9c4d0",
    "optimizer step": "#5c6770",
    "waited": "#f3d9a4",
    "late (slower ranks)": "#8d6ab8",
    "wire, hidden": "#2a9d8f",
    "wire, exposed": "#d1495b",
}
_END_OF_BACKWARD: dict[str, Any] = {"color": "#444444", "lw": 1, "ls": "--"}
_TRACKS = ("forward", "backward", "optimizer")
_GREY = ("finalize", "filling", "waited", "done, not copied out")
# Colours that both viewers know.
_TRACE_COLOURS = {"wire, hidden": "good", "wire, exposed": "terrible"}
_TRACE_COLOURS |= dict.fromkeys(_GREY, "grey")


def draw(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Draw the typical step of the most exposed rank and at most 3 others to a file.

    Raises ModuleNotFoundError without matplotlib; ValueError if no bucket was reduced
    in a step of all ranks, or the recordings are not of different ranks of one run.
    """
    run = aligned(timelines)
    overlaps = overlaps_of(run)
    if not overlaps or not overlaps[0].typical.buckets:
        raise ValueError("there is nothing to draw: no recorded step sent anything")
    reported = most_exposed(overlaps).rank  # always drawn
    drawn = sorted(overlaps, key=lambda one: one.rank != reported)[:MAX_RANKS]
    views = [one.typical for one in sorted(drawn, key=lambda one: one.rank)]
    figures, patches, lines = map(_matplotlib, ("figure", "patches", "lines"))
    heights = [2 + min(len(one.buckets), MAX_BUCKETS) for one in views]
    size = (11, 1.8 + 0.3 * sum(heights))
    figure = figures.Figure(figsize=size, layout="constrained")
    panels = figure.subplots(
        len(views), 1, squeeze=False, sharex=True, height_ratios=heights
    )[:, 0]
    origin = min(one.step.begin_ns for one in views)
    for panel, one in zip(panels, views, strict=True):
        _panel(panel, one, origin)
    missing = len(overlaps) - len(views)
    more = f" ({missing} more ranks are not drawn)" if missing else ""
    panels[-1].set_xlabel(f"ms after the first rank's step began{more}")
    used = {each.name for one in views for each in slices(one)}
    handles = [
        patches.Patch(color=colour, label=name)
        for name, colour in COLOURS.items()
        if name in used
    ]
    end = lines.Line2D([], [], label="end of the backward", **_END_OF_BACKWARD)
    where = "outside lower center"
    figure.legend(handles=[*handles, end], loc=where, ncols=3, frameon=False)
    figure.savefig(path, dpi=110)


def _matplotlib(part: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{part}")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "A picture needs matplotlib, which is not installed. What to do: "
            "pip install matplotlib."
        ) from None


def _panel(panel: Any, one: StepOverlap, origin: int) -> None:
    """Draw one rank's step: a row of phases, a row for each of up to 60 buckets.

    ``origin``: ns on the ranks' common clock that the axis shows as 0 ms.
    """
    shown = to_show(one.buckets, MAX_BUCKETS)
    buckets = [bucket for bucket in one.buckets if bucket.number in shown]
    rows = {bucket.number: row for row, bucket in enumerate(buckets, 1)}
    for each in slices(one):
        row = rows.get(each.row) if isinstance(each.row, int) else 0
        if row is not None and each.name in COLOURS:
            begin, length = each.begin_ns - origin, each.end_ns - each.begin_ns
            colour = COLOURS[each.name]
            panel.barh(row, length / 1e6, left=begin / 1e6, color=colour, height=0.7)
    panel.axvline((one.step.backward.end_ns - origin) / 1e6, **_END_OF_BACKWARD)
    labels = [f"bucket {b.number}, {b.nbytes / MIB:.3g} MiB" for b in buckets]
    panel.set_yticks(range(1 + len(labels)), ["computes", *labels], fontsize=8)
    panel.invert_yaxis()
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    left_out = len(one.buckets) - len(buckets)
    more = f"; the {left_out} least exposed buckets are not drawn" if left_out else ""
    panel.set_title(
        f"rank {one.timeline.where.rank}: {one.hidden_s * 1e3:.1f} ms of communication "
        f"hidden, {one.exposed_s * 1e3:.1f} ms exposed, in a step of "
        f"{one.seconds * 1e3:.1f} ms{more}",
        fontsize=10,
        loc="left",
    )


# ---------------------------------------------------------------------------- trace


def chrome_trace(timelines: Sequence[Timeline]) -> str:
    """Return a trace of all steps as JSON text, in microseconds from the first event.

    A process per rank holds tracks for forward, backward, optimizer and each bucket.
    Raises ValueError if the recordings are not of different ranks of one run.
    """
    run = aligned(timelines)
    origin = min((t.steps[0].begin_ns for t in run.ranks if t.steps), default=0)
    events: list[dict[str, Any]] = []
    for timeline in run.ranks:
        events += _names(timeline)
        for step in timeline.steps:
            one = overlap_of(timeline, step, run.launches.get(step.number))
            events += [_event(one, each, origin) for each in slices(one)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the trace events that name and sort one rank's process and tracks."""
    rank = timeline.where.rank
    num_buckets = max(map(len, timeline.layouts), default=0)
    tracks = [*_TRACKS, *(f"bucket {n}" for n in range(num_buckets))]
    found = [("process", 1, f"rank {rank}", rank)]
    # Some versions of Perfetto do not show processes and tracks of number 0.
    found += [("thread", tid, name, tid) for tid, name in enumerate(tracks, 1)]
    for kind, tid, name, order in found:
        common = {"ph": "M", "pid": rank + 1, "tid": tid}
        yield {**common, "name": f"{kind}_name", "args": {"name": name}}
        yield {**common, "name": f"{kind}_sort_index", "args": {"sort_index": order}}


def _event(one: StepOverlap, each: Slice, origin: int) -> dict[str, Any]:
    args: dict[str, Any] = {"step": one.step.number}
    if isinstance(each.row, int):
        tid = 1 + len(_TRACKS) + each.row
        (bucket,) = (found for found in one.buckets if found.number == each.row)
        args["bytes"] = bucket.nbytes
        args["parameters"] = [one.timeline.params[i].name for i in bucket.members]
    else:
        tid = 1 + _TRACKS.index(each.row)
    event = {
        "ph": "X",
        "name": each.name,
        "pid": one.timeline.where.rank + 1,
        "tid": tid,
        "ts": (each.begin_ns - origin) / 1e3,
        "dur": (each.end_ns - each.begin_ns) / 1e3,
        "args": args,
    }
    colour = _TRACE_COLOURS.get(each.name)
    return event | {"cname": colour} if colour else event
