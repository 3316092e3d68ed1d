"""Recorded steps as data, and the file they are kept in."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from minidp.overlap.timeline import ClockOffset, from_json, to_json
from tests.support.timelines import step, timeline

BUCKETS = [(20, 20, 25, 35), (30, 30, 40, 41)]
LOCAL = {"local_forwards": [(1, 2)], "local_backwards": [(3, 4), (5, 6)]}
STEPS = [step(3, BUCKETS, ready=(28, None), **LOCAL), step(4, BUCKETS, at=60)]
GOOD = timeline(STEPS)
TURNS = {"turns": [(4, 1, 7), (5, 8, 50)], "forward": (9, 10)}
VALUES = {"values": [(1, 40, 41, 42, 45), (0, 41, 42, 45, 47)]}
WITH_VALUES = timeline([step(4, BUCKETS, at=60, **VALUES)])
WITH_TURNS = timeline([step(4, BUCKETS, at=60, **TURNS)], logical_ranks=8)


def test_a_step_begins_with_its_first_forward_local_or_not():
    spans = {"forward": (6, 8), "local_forwards": [(2, 3), (4, 5)]}
    assert step(0, BUCKETS, **spans).begin_ns == 2_000_000
    assert step(0, BUCKETS, forward=(1, 8)).begin_ns == 1_000_000


def test_a_step_of_logical_ranks_begins_with_their_loop():
    one = step(0, BUCKETS, at=10, turns=[(3, 2, 35)], forward=(5, 8))
    assert one.begin_ns == 10_000_000
    assert one.first_forward_ns == 15_000_000


def test_first_gradient_is_the_earliest_that_was_taken():
    assert STEPS[0].first_gradient_ns((0, 1)) == 28_000_000
    assert STEPS[0].first_gradient_ns((1,)) is None
    assert STEPS[1].first_gradient_ns((0, 1)) is None


def test_all_times_of_a_step_move():
    moved = [step(3, BUCKETS, ready=(28, None), at=5, **LOCAL)]
    moved.append(step(4, BUCKETS, at=65))
    assert GOOD.moved(5_000_000) == timeline(moved)
    moved = [step(4, BUCKETS, at=65, **VALUES)]
    assert WITH_VALUES.moved(5_000_000) == timeline(moved)
    moved = [step(4, BUCKETS, at=65, **TURNS)]
    assert WITH_TURNS.moved(5_000_000) == timeline(moved, logical_ranks=8)


def test_what_was_written_is_read():
    other = replace(GOOD, where=replace(GOOD.where, rank=1), clock=ClockOffset(-5, 2))
    every = GOOD, other, WITH_TURNS, WITH_VALUES
    assert from_json(to_json(every)) == every


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("kind",), "novel", 'is not a recording: .* "kind": "minidp timeline"'),
        (("version",), 99, "must be of version 6, but is of version 99"),
        (("ranks",), {}, "is damaged: it holds no rank"),
        (("ranks", 0), 5, "is damaged"),
        (("ranks", 0, "where", "host"), None, "is damaged: .*'host'"),
        (("ranks", 0, "layouts", 0, 1), 3, "is damaged"),
        (("ranks", 0, "steps", 0, "backward"), None, "is damaged: .*'backward'"),
    ],
)
def test_bad_files_are_named(path, value, says):
    """One thing is changed, or taken out."""
    place = data = json.loads(to_json([GOOD]))
    *way, last = path
    for key in way:
        place = place[key]
    place[last] = value
    if value is None:
        del place[last]
    with pytest.raises(ValueError, match=f"^f.json {says}") as caught:
        from_json(json.dumps(data), "f.json")
    assert "Recording.save()" in str(caught.value)  # what to do


def test_files_from_before_divided_steps_are_read():
    value = json.loads(to_json([WITH_TURNS]))
    value["version"] = 5
    for each in value["ranks"][0]["steps"]:
        del each["values"]
    assert from_json(json.dumps(value)) == (WITH_TURNS,)


def test_files_from_before_logical_ranks_are_read():
    value = json.loads(to_json([GOOD]))
    value["version"] = 4
    (rank,) = value["ranks"]
    del rank["where"]["logical_ranks"]
    for each in rank["steps"]:
        del each["loop_begin_ns"], each["turns"], each["values"]
    assert from_json(json.dumps(value)) == (GOOD,)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match=r"f.json is (damaged|not a recording)"):
        from_json(text, "f.json")
