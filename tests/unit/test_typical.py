"""The step that stands for all, and the spread that is shown beside it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minidp._typical import spread, typical_step, usually_largest


def test_a_spread_is_two_of_the_values():
    assert spread([3.0]) == (3.0, 3.0)
    assert spread([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert spread(range(11)) == (1, 9)
    assert spread(range(101)) == (10, 90)


def matrices(num_ranks, num_steps):
    row = st.lists(st.integers(0, 9), min_size=num_steps, max_size=num_steps)
    return st.lists(row, min_size=num_ranks, max_size=num_ranks)


measures = st.tuples(st.integers(1, 3), st.integers(1, 30)).flatmap(
    lambda shape: st.tuples(matrices(*shape), matrices(*shape))
)


@given(measures)
def test_both_numbers_lie_within_their_spreads_on_the_rank_that_is_shown(both):
    shown, number = usually_largest(both[1]), typical_step(*both)
    for values in (both[0][shown], both[1][shown]):
        low, high = spread(values)
        assert low <= values[number] <= high


def test_the_nearest_to_the_medians_may_be_outside_of_a_spread():
    """It has the median length, and exposes a little more than nine of ten."""
    lengths = [[100] + [50] * 5 + [150] * 5]
    exposed = [[20, *range(10, 20)]]
    assert typical_step(lengths, exposed) != 0


def test_of_such_steps_one_in_which_the_shown_rank_waits_most():
    lengths = [[10, 10, 10, 10], [10, 10, 10, 10]]
    exposed = [[4, 5, 7, 7], [5, 6, 6, 1]]  # medians: 6 and 5.5
    assert usually_largest(exposed) == 0
    assert typical_step(lengths, exposed) == 2


def test_of_those_the_nearest_to_the_medians():
    assert typical_step([[9, 12, 10, 30, 11]], [[0, 0, 0, 0, 0]]) == 4
