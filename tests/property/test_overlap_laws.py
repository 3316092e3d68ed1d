"""Laws of the split into hidden and exposed, on any recorded step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidp._analysis import overlap_of
from minidp._timeline import BucketTimes, Span, Step

LATEST = 10_000


@st.composite
def steps(draw):
    """Any moments that a step may have, in nanoseconds."""
    begin, end = sorted(draw(st.tuples(*[st.integers(100, 5_000)] * 2)))
    times = draw(st.lists(st.tuples(*[st.integers(begin, 9_000)] * 4), max_size=5))
    buckets = tuple(
        BucketTimes(number, *sorted(four)) for number, four in enumerate(times)
    )
    finalize_end = max([end, *(bucket.copied_out_ns for bucket in buckets)])
    inside = draw(
        st.lists(st.tuples(*[st.integers(end, finalize_end)] * 2), max_size=3)
    )
    return Step(
        number=0,
        layout=0,
        forwards=(Span(0, 50),),
        backward=Span(begin, end),
        finalize_end_ns=finalize_end,
        end_ns=LATEST,
        buckets=buckets,
        optimizers=tuple(Span(*sorted(pair)) for pair in inside),
    )


last_launches = st.dictionaries(st.integers(0, 4), st.integers(0, LATEST))


@given(steps(), last_launches)
def test_hidden_and_exposed_are_all_there_is(step, launches):
    for bucket in overlap_of(step, launches).buckets:
        assert bucket.hidden_s + bucket.exposed_s == pytest.approx(
            bucket.late_s + bucket.wire_s, abs=1e-12
        )


@given(steps(), last_launches)
def test_no_time_is_negative(step, launches):
    one = overlap_of(step, launches)
    for part in (one, *one.buckets):
        for name in part.__dataclass_fields__:
            value = getattr(part, name)
            assert not isinstance(value, float) or value >= -1e-15


@given(steps(), last_launches)
def test_slower_ranks_change_what_it_was_waiting_for_and_nothing_else(step, launches):
    alone, together = overlap_of(step), overlap_of(step, launches)
    assert together.hidden_s == pytest.approx(alone.hidden_s, abs=1e-12)
    assert together.exposed_s == pytest.approx(alone.exposed_s, abs=1e-12)
    assert together.wire_s <= alone.wire_s + 1e-12


@given(steps())
def test_communication_is_counted_once(step):
    one = overlap_of(step)
    if step.buckets:
        first = min(bucket.launched_ns for bucket in step.buckets)
        last = max(bucket.done_ns for bucket in step.buckets)
        assert one.hidden_s + one.exposed_s <= (last - first) / 1e9 + 1e-12


@given(steps())
def test_communication_within_the_backward_is_hidden(step):
    for bucket, found in zip(step.buckets, overlap_of(step).buckets, strict=True):
        if bucket.done_ns <= step.backward.end_ns:
            assert found.exposed_s == 0


@given(steps())
def test_nothing_is_hidden_that_begins_after_the_backward(step):
    for bucket, found in zip(step.buckets, overlap_of(step).buckets, strict=True):
        if bucket.launched_ns >= step.backward.end_ns and not step.optimizers:
            assert found.hidden_s == 0
