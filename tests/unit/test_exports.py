"""What a trace and a picture of recorded steps hold."""

from __future__ import annotations

import json

import pytest

from minidp import _picture
from minidp._chrome_trace import chrome_trace
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


# ----------------------------------------------------------------------------- trace


def test_processes_and_tracks_begin_at_1():
    """Some versions of Perfetto do not show those of number 0."""
    events = json.loads(chrome_trace(ranks(2)))["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}
    assert {event["tid"] for event in events} == {1, 2, 3, 4, 5}
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["name"] == "thread_name"
    }
    assert list(names.values())[:5] == [
        "forward",
        "backward",
        "optimizer",
        "bucket 0",
        "bucket 1",
    ]
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= names.keys()
    processes = {
        e["pid"]: e["args"]["name"] for e in events if "process_n" in e["name"]
    }
    assert processes == {1: "rank 0", 2: "rank 1"}


def test_local_forwards_and_backwards_are_slices_of_their_tracks():
    events = json.loads(chrome_trace(ranks(1, **LOCAL)))["traceEvents"]
    found = {}
    for event in events:
        if event["ph"] == "X" and event["args"]["step"] == 0:
            found.setdefault(event["name"], []).append((event["tid"], event["ts"]))
    assert found["local forward"] == [(1, 0), (1, 3000)]
    assert found["local backward"] == [(2, 1000), (2, 4000)]
    assert found["forward"] == [(1, 6000)]


# --------------------------------------------------------------------------- picture


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
        _picture.draw(timelines, tmp_path / "out.png")
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
        return figures[-1]

    return draw


def bars(panel, colour):
    """Begin and length of the bars of one colour, in ms."""
    from matplotlib.colors import to_hex

    return [
        (round(bar.get_x(), 6), round(bar.get_width(), 6))
        for bar in panel.patches
        if to_hex(bar.get_facecolor()) == colour
    ]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_whole_step_shows_what_is_local(drawn):
    figure = drawn(ranks(1, **LOCAL))
    whole, _ = figure.axes
    assert bars(whole, _picture.LOCAL_FORWARD) == [(0, 1), (3, 1)]
    assert bars(whole, _picture.LOCAL_BACKWARD) == [(1, 2), (4, 2)]
    assert bars(whole, _picture.FORWARD) == [(6, 2)]
    assert bars(whole, _picture.BACKWARD) == [(10, 20)]
    assert bars(whole, _picture.EXPOSED) == [(30, 10)]
    assert bars(whole, _picture.OPTIMIZER) == [(50, 5)]
    assert legend(figure)[:2] == ["local forward", "local backward"]


def test_what_is_not_there_is_not_in_the_legend(drawn):
    assert "local forward" not in legend(drawn(ranks(1)))


def test_ranks_and_buckets_that_are_not_drawn_are_counted(drawn):
    figure = drawn(ranks(5))
    assert len(figure.axes) == 1 + _picture.MAX_RANKS
    assert "1 more rank is not drawn" in figure.axes[0].get_title(loc="left")
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
    others = [
        timeline(one.steps, rank=one.where.rank, world_size=6) for one in ranks(5)
    ]
    labels = [
        label.get_text() for label in drawn([*others, last]).axes[0].get_yticklabels()
    ]
    assert labels == ["rank 0", "rank 1", "rank 2", "rank 5"]
