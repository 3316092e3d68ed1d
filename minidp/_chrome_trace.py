"""Recorded steps for Perfetto (https://ui.perfetto.dev) and ``chrome://tracing``.

A process per rank; in it tracks for forward, backward and optimizer, and one for each
bucket. Ranks stand on one clock. Slices have the names of the report's columns. Numbers
of processes and tracks begin at 1: some versions of Perfetto show no 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ._analysis import by_hiding, overlap_of
from ._skew import aligned, last_launches, offset_of
from ._timeline import Span, Step, Timeline

FORWARD, BACKWARD, OPTIMIZER, BUCKETS = range(1, 5)  # tracks; BUCKETS: bucket 0's
_TRACKS = ("forward", "backward", "optimizer")
# Names of colours that both viewers know.
_HIDDEN, _EXPOSED, _GREY = "good", "terrible", "grey"


def chrome_trace(timelines: Sequence[Timeline]) -> str:
    """The trace, as JSON; times in microseconds from the first event.

    Args:
        timelines: recordings of different ranks of one run.

    Raises:
        ValueError: they do not belong together.
    """
    ranks = aligned(timelines)
    begins = [t.steps[0].begin_ns - offset_of(t) for t in ranks if t.steps]
    origin = min(begins, default=0)
    events: list[dict[str, Any]] = []
    by_number = _launches(ranks)
    for timeline in ranks:
        events += _names(timeline)
        shift = origin + offset_of(timeline)
        for step in timeline.steps:
            launches = by_number.get(step.number, {})
            own = {n: ns + offset_of(timeline) for n, ns in launches.items()}
            events += _Slices(timeline, step, shift).all(own)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _launches(ranks: Sequence[Timeline]) -> Mapping[int, Mapping[int, int]]:
    """By step that all ranks recorded: when the last of them launched each bucket."""
    everyone: dict[int, list[Step]] = {}
    for timeline in ranks:
        for step in timeline.steps:
            everyone.setdefault(step.number, []).append(step)
    return {
        number: last_launches(ranks, steps)
        for number, steps in everyone.items()
        if len(steps) == len(ranks)
    }


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    rank, pid = timeline.where.rank, _pid(timeline)
    num_buckets = max(map(len, timeline.layouts), default=0)
    tracks = [*_TRACKS, *(f"bucket {n}" for n in range(num_buckets))]
    yield _meta("process_name", pid, FORWARD, name=f"rank {rank}")
    yield _meta("process_sort_index", pid, FORWARD, sort_index=rank)
    for tid, name in enumerate(tracks, FORWARD):
        yield _meta("thread_name", pid, tid, name=name)
        yield _meta("thread_sort_index", pid, tid, sort_index=tid)


def _pid(timeline: Timeline) -> int:
    return timeline.where.rank + 1


def _meta(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


class _Slices:
    """The slices of one step of one rank.

    Args:
        timeline: of the rank.
        step: one of its steps.
        origin: where the trace begins, on the rank's clock.
    """

    def __init__(self, timeline: Timeline, step: Step, origin: int) -> None:
        self._timeline = timeline
        self._step = step
        self._origin = origin

    def all(self, last_launch: Mapping[int, int]) -> Iterator[dict[str, Any]]:
        """Every slice; ``last_launch`` as in `overlap_of`."""
        step = self._step
        for span in step.local_forwards:
            yield self._slice(FORWARD, "local forward", span)
        for span in step.local_backwards:
            yield self._slice(BACKWARD, "local backward", span)
        for span in step.forwards:
            yield self._slice(FORWARD, "forward", span)
        yield self._slice(BACKWARD, "backward", step.backward)
        finalize = Span(step.backward.end_ns, step.finalize_end_ns)
        yield self._slice(BACKWARD, "finalize", finalize, colour=_GREY)
        for span in step.optimizers:
            yield self._slice(OPTIMIZER, "optimizer step", span)
        for bucket, found in zip(
            step.buckets, overlap_of(step, last_launch).buckets, strict=True
        ):
            late, wire, waited = (
                round(seconds * 1e9)
                for seconds in (found.late_s, found.wire_s, found.waited_s)
            )
            full, done = bucket.full_ns, bucket.done_ns
            first = step.first_gradient_ns(self._timeline.members(step, bucket.number))
            turn, start = full + waited, done - wire
            pieces = [
                ("filling", full if first is None else min(first, full), full, _GREY),
                ("waited", full, turn, _GREY),
                ("late (slower ranks)", turn, turn + late, ""),
                *self._wire(start, done),
                ("done, not copied out", done, bucket.copied_out_ns, _GREY),
            ]
            for name, begin, end, colour in pieces:
                if begin < end:
                    span = Span(begin, end)
                    yield self._slice(BUCKETS + bucket.number, name, span, colour)

    def _wire(self, start: int, done: int) -> list[tuple[str, int, int, str]]:
        """Hidden while the backward runs, or an optimizer step in it; else exposed."""
        return [
            ("wire, hidden" if hides else "wire, exposed", begin, end, colour)
            for begin, end, hides in by_hiding(self._step, start, done)
            for colour in [_HIDDEN if hides else _EXPOSED]
        ]

    def _slice(
        self, tid: int, name: str, span: Span, colour: str = ""
    ) -> dict[str, Any]:
        args: dict[str, Any] = {"step": self._step.number}
        if tid >= BUCKETS:
            number = tid - BUCKETS
            members = self._timeline.members(self._step, number)
            args["bytes"] = self._timeline.nbytes(self._step, number)
            args["parameters"] = [self._timeline.params[i].name for i in members]
        event = {
            "ph": "X",
            "name": name,
            "pid": _pid(self._timeline),
            "tid": tid,
            "ts": (span.begin_ns - self._origin) / 1e3,
            "dur": (span.end_ns - span.begin_ns) / 1e3,
            "args": args,
        }
        return {**event, "cname": colour} if colour else event
