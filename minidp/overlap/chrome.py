"""Write recorded steps as a trace for https://ui.perfetto.dev and ``chrome://tracing``.

Its slices have the names of the columns of the report.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from .analysis import TURNS, VALUES, Slice, StepOverlap, overlap_of, slices
from .skew import aligned
from .timeline import Timeline

_TRACKS = ("forward", "backward", "optimizer")


def chrome_trace(timelines: Sequence[Timeline]) -> str:
    """Return all recorded steps of all ranks as Chrome trace events, as JSON text.

    In the trace a rank is a process, with tracks for the forward, the backward, the
    optimizer, each bucket, and, if there are any, the turns of its logical ranks, and
    values of parameters that come back after a divided step. Times are microseconds
    from the first forward of any rank.

    Raises:
        ValueError: The recordings are not of different ranks of one run.
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
    """Yield the events that name and order the process and the tracks of one rank."""
    rank = timeline.where.rank
    tracks = [*_TRACKS, *(f"bucket {n}" for n in range(_num_buckets(timeline)))]
    found = [("process", 1, f"rank {rank}", rank)]
    # Some versions of Perfetto do not show processes and tracks of number 0.
    if timeline.where.logical_ranks is not None:
        tracks.append(TURNS)
    elif timeline.is_divided:  # with logical ranks no step is
        tracks.append(VALUES)
    found += [("thread", tid, name, tid) for tid, name in enumerate(tracks, 1)]
    for kind, tid, name, order in found:
        common = {"ph": "M", "pid": rank + 1, "tid": tid}
        yield {**common, "name": f"{kind}_name", "args": {"name": name}}
        yield {**common, "name": f"{kind}_sort_index", "args": {"sort_index": order}}


def _num_buckets(timeline: Timeline) -> int:
    return max(map(len, timeline.layouts), default=0)


def _event(one: StepOverlap, each: Slice, origin: int) -> dict[str, Any]:
    args: dict[str, Any] = {"step": one.step.number}
    if isinstance(each.row, int):
        tid = 1 + len(_TRACKS) + each.row
        (bucket,) = (found for found in one.buckets if found.number == each.row)
        args["bytes"] = bucket.nbytes
        args["parameters"] = [one.timeline.params[i].name for i in bucket.members]
    elif each.row in _TRACKS:
        tid = 1 + _TRACKS.index(each.row)
    else:  # TURNS or VALUES
        tid = 1 + len(_TRACKS) + _num_buckets(one.timeline)
    if each.bucket is not None:
        args["bucket"] = each.bucket
    return {
        "ph": "X",
        "name": each.name,
        "pid": one.timeline.where.rank + 1,
        "tid": tid,
        "ts": (each.begin_ns - origin) / 1e3,
        "dur": (each.end_ns - each.begin_ns) / 1e3,
        "args": args,
    }
