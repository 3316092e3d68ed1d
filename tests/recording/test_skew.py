"""Clocks of hosts, and who comes late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidp.overlap.skew import BACKWARD, FORWARD, aligned, compare_clocks, skew_of
from minidp.overlap.timeline import ClockOffset
from tests.support.timelines import MS, step, timeline

BUCKETS = [(20, 20, 25, 35), (30, 30, 40, 41)]


def shifted(ms, rank=1, host="there"):
    """The same steps on a host whose clock is ahead."""
    steps = [step(n, BUCKETS, at=60 * n + ms) for n in range(3)]
    return timeline(steps, rank=rank, host=host)


ZERO = shifted(0, rank=0, host="here")


def test_barriers_bound_the_offset_and_the_tightest_counts():
    zero = [(0, 100), (1000, 1010)]
    other = [(5000, 5100), (6000, 6010)]
    assert compare_clocks(zero, other) == ClockOffset(5000, 10)


@given(
    offset=st.integers(-(10**12), 10**12),
    rounds=st.lists(st.tuples(*[st.integers(0, 10**6)] * 4), min_size=1, max_size=20),
)
def test_the_true_offset_is_within_the_error(offset, rounds):
    now, zero, other = 0, [], []
    for early, late, out, out_too in rounds:  # a barrier: all enter, then all leave
        all_here = now + max(early, late)
        zero.append((now + early, all_here + out))
        other.append((now + late + offset, all_here + out_too + offset))
        now = all_here + max(out, out_too)
    clock = compare_clocks(zero, other)
    assert abs(clock.offset_ns - offset) <= clock.error_ns


def test_ranks_of_one_host_share_a_clock():
    run = aligned([shifted(7, host="here"), ZERO])
    assert run.ranks == (ZERO, shifted(7, host="here"))
    assert run.clocks == (ClockOffset(0, 0),) * 2


def test_all_reduces_tell_how_far_other_hosts_are_ahead():
    run = aligned([ZERO, shifted(5000)])
    # The shortest of them takes 5 ms.
    assert run.clocks[1] == ClockOffset(5000 * MS, 5 * MS)
    assert run.ranks[1].steps == ZERO.steps
    zero = replace(ZERO, clock=ClockOffset(0, 9))  # gathered clocks count more
    known = replace(shifted(5000), clock=ClockOffset(4999 * MS, 1))
    assert aligned([zero, known]).clocks[1] == ClockOffset(4999 * MS, 1)
    alone = aligned([ZERO, replace(shifted(5000), steps=())])
    assert alone.clocks[1] is None
    assert alone.error_s is None


def test_ranks_without_rank_0_count_from_the_first_of_them():
    one, two = (
        replace(
            shifted(offset),
            clock=ClockOffset(offset * MS, 2),
            where=replace(ZERO.where, rank=rank, world_size=3, host=f"host {rank}"),
        )
        for rank, offset in ((1, 5000), (2, 7000))
    )
    assert aligned([one, two]).clocks == (ClockOffset(0, 0), ClockOffset(2000 * MS, 4))


def test_what_does_not_belong_together_is_refused():
    later = shifted(58000, host="here")
    steps = [replace(one, number=n) for n, one in enumerate(later.steps)]
    for other, says in (
        (ZERO, r"of different ranks, but are of \[0, 0\]; after rec.gather"),
        (timeline([], rank=1, world_size=3), "world sizes of ranks 0 and 1 differ"),
        (
            timeline([], rank=1, nbytes=4),
            "one model, but params of ranks 0 and 1 differ",
        ),
        # On one host, with one clock: what is reduced together overlaps in time.
        (timeline(steps, rank=1), r"ranks 0 and 1 reduced together is 5\d\.\d s"),
    ):
        with pytest.raises(ValueError, match=says):
            aligned([ZERO, other])


def test_lateness_by_place():
    slow = [(24, 24, 25, 35), (37, 37, 40, 41)]
    steps = [step(n, slow, at=60 * n, backward=(12, 37)) for n in range(3)]
    skew = skew_of(aligned([ZERO, timeline(steps, rank=1)]))
    late = {place: by_rank[1] for place, by_rank in skew.late.items()}
    assert late == pytest.approx({FORWARD: 0, BACKWARD: 0.002, 0: 0.004, 1: 0.007})
    assert list(skew.late) == [FORWARD, BACKWARD, 0, 1]
    assert skew.latest(1) == 1
    assert skew.grows_at(1) == (1, pytest.approx(0.003))
    assert skew.often_s == pytest.approx({0: -0.007, 1: 0.007})
    assert skew_of(aligned([ZERO])) is None
