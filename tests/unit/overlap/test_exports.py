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
    """Begin and length of the bars of one name, in ms."""
    from matplotlib.colors import to_hex

    return [
        (round(bar.get_x(), 6), round(bar.get_width(), 6))
        for bar in panel.patches
        if to_hex(bar.get_facecolor()) == picture.COLOURS[name]
    ]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_whole_step_shows_what_is_local(drawn):
    figure = drawn(ranks(1, **LOCAL))
    whole, _ = figure.axes
    assert bars(whole, "local forward") == [(0, 1), (3, 1)]
    assert bars(whole, "local backward") == [(1, 2), (4, 2)]
    assert bars(whole, "forward") == [(6, 2)]
    assert bars(whole, "backward") == [(10, 20)]
    assert bars(whole, "wire, exposed") == [(30, 10)]
    assert bars(whole, "optimizer step") == [(50, 5)]
    assert legend(figure)[:2] == ["local forward", "local backward"]
    assert "local forward" not in legend(drawn(ranks(1)))


def test_ranks_and_buckets_that_are_not_drawn_are_counted(drawn):
    figure = drawn(ranks(5))
    assert len(figure.axes) == 1 + picture.MAX_RANKS
    assert "1 more ranks are not drawn" in figure.axes[0].get_title(loc="left")
    many = [(10, 10, 11 + n, 99) for n in range(63)]
    members = [(n,) for n in range(63)]
    one = timeline([step(0, many, end=120, optimizers=())], members=members)
    title = drawn([one]).axes[1].get_title(loc="left")
    assert "the 3 least exposed buckets are not drawn" in title


def test_the_rank_of_the_report_is_drawn(drawn):
    """It is the last of six, of which four are drawn."""
    waits = [(20, 20, 28, 35), (30, 30, 45, 46)]
    steps = [step(n, waits, at=60 * n) for n in range(3)]
    last = timeline(steps, rank=5, world_size=6)
    others = [timeline(ranks(1)[0].steps, rank=r, world_size=6) for r in range(5)]
    labels = drawn([*others, last]).axes[0].get_yticklabels()
    found = [label.get_text() for label in labels]
    assert found == [f"rank {rank}" for rank in (0, 1, 2, 5)]
