"""Laws of the split into hidden and exposed, on any recorded step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidp.overlap.analysis import overlap_of as overlap_of_a_rank
from minidp.overlap.timeline import BucketTimes, Span, Step
from tests.support.timelines import timeline

pytestmark = pytest.mark.laws

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


def overlap_of(step, launches=None):
    members = [(n,) for n in range(5)]
    return overlap_of_a_rank(timeline([step], members=members), step, launches)


@given(steps(), st.dictionaries(st.integers(0, 4), st.integers(0, LATEST)))
def test_hidden_and_exposed_are_all_there_is(step, launches):
    """Slower ranks change what a rank was waiting for, and nothing else."""
    alone, together = overlap_of(step), overlap_of(step, launches)
    assert together.hidden_s == pytest.approx(alone.hidden_s, abs=1e-12)
    assert together.exposed_s == pytest.approx(alone.exposed_s, abs=1e-12)
    for ours, theirs in zip(together.buckets, alone.buckets, strict=True):
        assert ours.wire_s <= theirs.wire_s + 1e-12
    for part in (together, *together.buckets):
        values = [getattr(part, name) for name in part.__dataclass_fields__]
        assert all(v >= -1e-15 for v in values if isinstance(v, float))
    for bucket in together.buckets:
        assert bucket.hidden_s + bucket.exposed_s == pytest.approx(
            bucket.late_s + bucket.wire_s, abs=1e-12
        )


@given(steps())
def test_communication_is_counted_once(step):
    one = overlap_of(step)
    if step.buckets:
        first = min(bucket.launched_ns for bucket in step.buckets)
        last = max(bucket.done_ns for bucket in step.buckets)
        assert one.hidden_s + one.exposed_s <= (last - first) / 1e9 + 1e-12


@given(steps())
def test_what_is_hidden_is_within_the_backward_or_an_optimizer(step):
    for bucket, found in zip(step.buckets, overlap_of(step).buckets, strict=True):
        if bucket.done_ns <= step.backward.end_ns:
            assert found.exposed_s == 0
        if bucket.launched_ns >= step.backward.end_ns and not step.optimizers:
            assert found.hidden_s == 0
