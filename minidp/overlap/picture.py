"""Draw recorded steps: the typical one of a rank as a picture, all as a trace.

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

MAX_BUCKETS = 60  # rows of a picture
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
_TRACKS = ("forward", "backward", "optimizer")


def draw(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Draw the typical step of the rank with most exposed time to an image file.

    A row for what the rank computes, and one for each of up to 60 buckets. The format
    is the suffix of ``path``; an old file is overwritten. Raises
    ModuleNotFoundError without matplotlib; ValueError if no step is common to all
    ranks, it reduced nothing, or the recordings are not of different ranks of one run.
    """
    overlaps = overlaps_of(aligned(timelines))
    if not overlaps or not overlaps[0].typical.buckets:
        raise ValueError("there is nothing to draw: no recorded step sent anything")
    one = most_exposed(overlaps).typical
    figures, patches, lines = map(_matplotlib, ("figure", "patches", "lines"))
    numbers = to_show(one.buckets, MAX_BUCKETS)
    shown = [bucket for bucket in one.buckets if bucket.number in numbers]
    size = (11, 2.4 + 0.3 * len(shown))
    figure = figures.Figure(figsize=size, layout="constrained")
    axes, origin = figure.subplots(), one.step.begin_ns
    rows = {bucket.number: row for row, bucket in enumerate(shown, 1)}
    handles = {}
    for each in slices(one):
        row = rows.get(each.row) if isinstance(each.row, int) else 0
        if row is not None and (colour := COLOURS.get(each.name)):
            begin, length = each.begin_ns - origin, each.end_ns - each.begin_ns
            axes.barh(row, length / 1e6, left=begin / 1e6, color=colour, height=0.7)
            handles[each.name] = patches.Patch(color=colour, label=each.name)
    style: dict[str, Any] = {"color": "#444444", "lw": 1, "ls": "--"}
    axes.axvline((one.step.backward.end_ns - origin) / 1e6, **style)
    end = lines.Line2D([], [], label="end of the backward", **style)
    labels = [f"bucket {b.number}, {b.nbytes / MIB:.3g} MiB" for b in shown]
    axes.set_yticks(range(1 + len(labels)), ["computes", *labels], fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms after the step began")
    left_out = len(one.buckets) - len(shown)
    more = f"; the {left_out} least exposed buckets are not drawn" if left_out else ""
    axes.set_title(
        f"rank {one.timeline.where.rank}: {one.hidden_s * 1e3:.1f} ms of communication "
        f"hidden, {one.exposed_s * 1e3:.1f} ms exposed, in a step of "
        f"{one.seconds * 1e3:.1f} ms{more}",
        fontsize=10,
        loc="left",
    )
    place = {"loc": "outside lower center", "ncols": 5, "frameon": False}
    figure.legend(handles=[*handles.values(), end], **place)
    figure.savefig(path, dpi=110)


def _matplotlib(part: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{part}")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "A picture needs matplotlib, which is not installed. What to do: "
            "pip install matplotlib."
        ) from None


# ---------------------------------------------------------------------------- trace


def chrome_trace(timelines: Sequence[Timeline]) -> str:
    """Return all recorded steps of all ranks as Chrome trace events, as JSON text.

    Times are in us from the first forward of any rank. A process per rank holds tracks
    for forward, backward, optimizer and each bucket.
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
    """Yield trace metadata events: names and order of one rank's process and tracks."""
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
    return {
        "ph": "X",
        "name": each.name,
        "pid": one.timeline.where.rank + 1,
        "tid": tid,
        "ts": (each.begin_ns - origin) / 1e3,
        "dur": (each.end_ns - each.begin_ns) / 1e3,
        "args": args,
    }
