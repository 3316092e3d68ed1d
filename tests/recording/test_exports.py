"""What a trace of recorded steps holds."""

from __future__ import annotations

import json

from minidp.overlap import chrome_trace
from tests.support.timelines import step, timeline

BUCKETS = [(20, 20, 28, 35), (30, 30, 40, 41)]
LOCAL = {
    "forward": (6, 8),
    "local_forwards": [(0, 1), (3, 4)],
    "local_backwards": [(1, 3), (4, 6)],
}


def ranks(count, **more):
    steps = [step(n, BUCKETS, at=60 * n, **more) for n in range(3)]
    return [timeline(steps, rank=rank, world_size=count) for rank in range(count)]


def events_of(timelines):
    return json.loads(chrome_trace(timelines))["traceEvents"]


def test_processes_and_tracks_begin_at_1():
    """Some versions of Perfetto do not show those of number 0."""
    events = events_of(ranks(2))
    names = {}
    for event in events:
        if event["name"] in ("process_name", "thread_name"):
            names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
    tracks = ("forward", "backward", "optimizer", "bucket 0", "bucket 1")
    wanted = {("process_name", pid, 1): f"rank {pid - 1}" for pid in (1, 2)}
    for pid in (1, 2):
        wanted |= {("thread_name", pid, n): t for n, t in enumerate(tracks, 1)}
    assert names == wanted
    places = {(e["pid"], e["tid"]) for e in events}
    assert places == {(pid, tid) for pid in (1, 2) for tid in range(1, 6)}


def test_local_forwards_and_backwards_are_slices_of_their_tracks():
    found = {}
    for event in events_of(ranks(1, **LOCAL)):
        if event["ph"] == "X" and event["args"]["step"] == 0:
            found.setdefault(event["name"], []).append((event["tid"], event["ts"]))
    assert found["local forward"] == [(1, 0), (1, 3000)]
    assert found["local backward"] == [(2, 1000), (2, 4000)]
    assert found["forward"] == [(1, 6000)]
