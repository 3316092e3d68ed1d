"""Recorded steps as data: their invariants, and the file they are kept in."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from minidp._timeline import BucketTimes, Clock, Span, Where, from_json, to_json
from tests.support.timelines import step, timeline

BUCKETS = [(20, 20, 25, 35), (30, 30, 40, 41)]
GOOD = timeline([step(3, BUCKETS, ready=(28, None)), step(4, BUCKETS, at=60)])

# --------------------------------------------------------------------------- invariants


def test_spans_do_not_end_before_they_begin():
    with pytest.raises(ValueError, match="must not end before it begins: 2 ns to 1 ns"):
        Span(2, 1)


def test_moments_of_a_bucket_are_in_order():
    with pytest.raises(ValueError, match="bucket 7 must be full, launched, done"):
        BucketTimes(7, 1, 3, 2, 4)


def test_a_step_has_a_forward_before_its_backward():
    with pytest.raises(ValueError, match="step 0 must begin its forward"):
        step(0, [], backward=(-5, 30))
    with pytest.raises(ValueError, match="step 0 must have a forward"):
        replace(step(0, []), forwards=())


def test_a_timeline_holds_together():
    with pytest.raises(ValueError, match="has layout 1, but there are 1 layouts"):
        timeline([replace(step(0, BUCKETS), layout=1)])
    with pytest.raises(ValueError, match="one ready time for each of the 2 parameters"):
        timeline([step(0, BUCKETS, ready=(1, 2, 3))])
    with pytest.raises(ValueError, match=r"of the 2 of its layout, but has \[0, 1, 2"):
        timeline([step(0, [*BUCKETS, BUCKETS[1]])])
    for members in (((1,), (2,)), ((1,), (-1,)), ((1,), ())):
        with pytest.raises(ValueError, match="some of the 2 parameters, but one has"):
            replace(GOOD, layouts=(members,))
    with pytest.raises(ValueError, match="the numbers of steps must grow"):
        timeline([step(0, BUCKETS), step(0, BUCKETS)])
    with pytest.raises(ValueError, match="less than the world size of 2"):
        Where(2, 2, "gloo", "cpu", "here")


def test_a_step_begins_with_its_first_forward_local_or_not():
    spans = {"forward": (6, 8), "local_forwards": [(2, 3), (4, 5)]}
    assert step(0, BUCKETS, **spans).begin_ns == 2_000_000
    assert step(0, BUCKETS, forward=(1, 8)).begin_ns == 1_000_000


def test_first_gradient_is_the_earliest_that_was_taken():
    one = GOOD.steps[0]
    assert one.first_gradient_ns((0, 1)) == 28_000_000
    assert one.first_gradient_ns((1,)) is None
    assert GOOD.steps[1].first_gradient_ns((0, 1)) is None


# --------------------------------------------------------------------------- the file


def test_what_was_written_is_read():
    local = {"local_forwards": [(1, 2)], "local_backwards": [(3, 4), (5, 6)]}
    assert from_json(to_json([timeline([step(0, BUCKETS, **local)])]))[0].steps == (
        step(0, BUCKETS, **local),
    )
    other = replace(GOOD, where=replace(GOOD.where, rank=1), clock=Clock(-5, 2))
    assert from_json(to_json([GOOD, other])) == (GOOD, other)


def broken(path, value):
    """The file with one thing changed, or taken out."""
    data = json.loads(to_json([GOOD]))
    *way, last = path
    place = data
    for key in way:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return json.dumps(data)


FIRST = ("ranks", 0, "steps", 0)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("kind",), "novel", 'f.json is not a recording: .* "kind": "minidp timeline"'),
        (("version",), 99, "f.json must be of version 4, but is of version 99"),
        (("ranks",), {}, "f.json is damaged: ranks must be a list, but is {}"),
        (("ranks", 0), 5, r"ranks\[0\] must be an object, but is 5"),
        (
            ("ranks", 0, "where", "rank"),
            2,
            r"where: rank must be at least 0",
        ),
        (("ranks", 0, "where", "host"), None, r"ranks\[0\].where.host is missing"),
        (("ranks", 0, "where", "versions"), {"a": 1}, "versions must be strings"),
        (("ranks", 0, "params", 1, "name"), 3, r"params\[1\].name must be a string"),
        (("ranks", 0, "layouts", 0, 1), "x", r"layouts\[0\]\[1\] must be a list"),
        (
            ("ranks", 0, "layouts", 0, 1, 0),
            "x",
            r"\[0\]\[1\]\[0\] must be an int",
        ),
        (("ranks", 0, "clock"), {"offset_ns": 1}, r"clock.error_ns is missing"),
        (
            (*FIRST, "number"),
            True,
            r"number must be an integer, but is true",
        ),
        ((*FIRST, "backward"), None, r"steps\[0\].backward is missing"),
        ((*FIRST, "backward", "end_ns"), 0, r"backward: a span must not end before"),
        ((*FIRST, "buckets", 1, "done_ns"), 0, r"buckets\[1\]: bucket 1 must be full"),
        ((*FIRST, "ready_ns", 0), "soon", r"ready_ns\[0\] must be an integer"),
        ((*FIRST, "local_forwards"), None, r"steps\[0\].local_forwards is missing"),
        ((*FIRST, "layout"), 3, r"ranks\[0\]: step 3 has layout 3"),
    ],
)
def test_bad_files_are_named(path, value, says):
    with pytest.raises(ValueError, match=says) as caught:
        from_json(broken(path, value), "f.json")
    assert "Recording.save()" in str(caught.value)  # what to do


@pytest.mark.parametrize("text", ["", "{", "[1", "[]", "3"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match=r"f.json is not (JSON|a recording)"):
        from_json(text, "f.json")
