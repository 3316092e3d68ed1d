"""What a trace and a picture of recorded steps hold."""

from __future__ import annotations

import json

import pytest

from minidp.overlap import picture
from minidp.overlap.picture import chrome_trace
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


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """The figure of a picture that is written."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    figures = []
    save = figure.savefig

    def note(self, *arguments, **options):
        figures.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(figure, "savefig", note)

    def draw(timelines):
        picture.draw(timelines, tmp_path / "out.png")
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
        return figures[-1]

    return draw


def bars(panel, name):
    """Row, begin and length (ms) of the bars of one name."""
    from matplotlib.colors import to_hex

    return [
        (round(bar.get_y() + 0.35), round(bar.get_x(), 6), round(bar.get_width(), 6))
        for bar in panel.patches
        if to_hex(bar.get_facecolor()) == picture.COLOURS[name]
    ]


def test_a_picture_has_the_phases_and_buckets_of_a_step(drawn):
    figure = drawn(ranks(1, **LOCAL))
    (panel,) = figure.axes
    assert {name: bars(panel, name) for name in picture.COLOURS} == {
        "local forward": [(0, 0, 1), (0, 3, 1)],
        "local backward": [(0, 1, 2), (0, 4, 2)],
        "forward": [(0, 6, 2)],
        "backward": [(0, 10, 20)],
        "optimizer step": [(0, 50, 5)],
        "waited": [],
        "late (slower ranks)": [],
        "wire, hidden": [(1, 20, 8)],
        "wire, exposed": [(2, 30, 10)],
    }
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[:2] == ["local forward", "local backward"]
    assert "waited" not in legend


def test_buckets_that_are_not_drawn_are_counted(drawn):
    many = [(10, 10, 11 + n, 99) for n in range(63)]
    members = [(n,) for n in range(63)]
    one = timeline([step(0, many, end=120, optimizers=())], members=members)
    title = drawn([one]).axes[0].get_title(loc="left")
    assert title.startswith("rank 0: ")
    assert title.endswith("; the 3 least exposed buckets are not drawn")
