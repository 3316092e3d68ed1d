"""Clocks of hosts, and who comes late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidp._skew import BACKWARD, FORWARD, aligned, compare_clocks, skew_of
from minidp._timeline import Clock
from tests.support.timelines import MS, step, timeline

BUCKETS = [(20, 20, 25, 35), (30, 30, 40, 41)]


def shifted(one, rank, ms, host="there"):
    """The same steps on a host whose clock is ahead."""
    steps = [step(s.number, BUCKETS, at=60 * s.number + ms) for s in one.steps]
    return timeline(steps, rank=rank, host=host)


ZERO = timeline([step(n, BUCKETS, at=60 * n) for n in range(3)])


def test_barriers_bound_the_offset_and_the_tightest_counts():
    zero = [(0, 100), (1000, 1010)]
    other = [(5000, 5100), (6000, 6010)]
    assert compare_clocks(zero, other) == Clock(5000, 10)


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
    ranks = aligned([shifted(ZERO, 1, 7, host="here"), ZERO])
    assert [t.where.rank for t in ranks] == [0, 1]
    assert [t.clock for t in ranks] == [Clock(0, 0), Clock(0, 0)]


def test_all_reduces_tell_how_far_other_hosts_are_ahead():
    _, other = aligned([ZERO, shifted(ZERO, 1, 5000)])
    assert other.clock == Clock(5000 * MS, 5 * MS)  # the shortest of them takes 5 ms


def test_gathered_clocks_count_more():
    zero, other = replace(ZERO, clock=Clock(0, 9)), shifted(ZERO, 1, 5000)
    known = replace(other, clock=Clock(4999 * MS, 1))
    assert aligned([zero, known])[1].clock == Clock(4999 * MS, 1)


def test_ranks_without_rank_0_count_from_the_first_of_them():
    one, two = (
        replace(
            shifted(ZERO, 1, offset),
            clock=Clock(offset * MS, 2),
            where=replace(ZERO.where, rank=rank, world_size=3, host=f"host {rank}"),
        )
        for rank, offset in ((1, 5000), (2, 7000))
    )
    assert [t.clock for t in aligned([one, two])] == [Clock(0, 0), Clock(2000 * MS, 4)]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (ZERO, r"of different ranks, but are of \[0, 0\]; after rec.gather"),
        (timeline([], rank=1, world_size=3), "world sizes are 2 and 3"),
        (timeline([], rank=1, nbytes=4), "parameters of ranks 0 and 1 differ"),
    ],
)
def test_what_does_not_belong_together_is_refused(other, says):
    with pytest.raises(ValueError, match=says):
        aligned([ZERO, other])


def test_ranks_of_two_runs_are_refused():
    """On one host, with one clock: what is reduced together overlaps in time."""
    later = timeline(
        [replace(one, number=n) for n, one in enumerate(shifted(ZERO, 1, 58000).steps)],
        rank=1,
    )
    with pytest.raises(
        ValueError, match=r"ranks 0 and 1 reduced together is 5\d\.\d s"
    ):
        aligned([ZERO, later])


def test_lateness_by_place():
    slow = [(24, 24, 25, 35), (37, 37, 40, 41)]
    steps = [step(n, slow, at=60 * n, backward=(12, 37)) for n in range(3)]
    skew = skew_of(aligned([ZERO, timeline(steps, rank=1)]))
    typical = {place: by_rank[1].typical_s for place, by_rank in skew.late.items()}
    assert typical == pytest.approx({FORWARD: 0, BACKWARD: 0.002, 0: 0.004, 1: 0.007})
    assert list(skew.late) == [FORWARD, BACKWARD, 0, 1]
    assert skew.latest(1) == 1
    assert skew.last_bucket() == 1
    place, growth = skew.grows_at(1)
    assert place == 1
    assert growth == pytest.approx(0.003)
    assert skew.late[1][0].typical_s == pytest.approx(-0.007)


def test_one_rank_has_no_skew():
    assert skew_of(aligned([ZERO])) is None
