"""The fit of a network: lines, noise, outliers, and what is no line. Schedules: known
cases, refused inputs, torch's rule, and 10,000 parameters.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from minidp.costmodel import (
    Backward,
    Network,
    best_groups,
    capped_groups,
    fit_network,
    in_ready_order,
    lower_bound,
    messages_of,
    play,
)

SIZES = (4, 4096, 2**20, 4 * 2**20, 28 * 2**20)


def samples_of(network, sizes=SIZES, repeats=1):
    return [(n, network.seconds(n)) for n in sizes for _ in range(repeats)]


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        ([], []),
        ([(8, 0, 2), (4, 1, 3)], [(8, 2), (4, 1)]),  # queues behind it
        ([(8, 0, 2), (4, 5, 6)], [(8, 2), (4, 1)]),
        ([(12, 0, 4), (4, 1, 3)], [(12, 3), (4, 1)]),  # is overtaken
        ([(10, 0, 4), (0, 1, 3), (6, 4, 5)], [(6, 1)]),  # by an unknown one
        ([(0, 0, 4), (6, 1, 3), (6, 1, 5)], [(6, 1)]),  # unknown, only busy
    ],
)
def test_messages_of_one_wire(spans, found):
    assert list(messages_of(spans)) == found


networks = st.builds(
    Network,
    st.sampled_from([0.0, 1e-6, 3e-4, 0.02]),
    st.sampled_from([1e6, 2.5e8, 1e10]),
)


def test_one_size_tells_no_latency():
    with pytest.raises(ValueError, match=r"at least two sizes.* of 1 size"):
        fit_network([(8, 0.1)] * 5)


@given(networks, st.lists(st.integers(0, 10**8), min_size=2, unique=True))
@example(Network(0.25, 2.0), [0, 8])
@example(Network(0.25, 2**28), [4, 2**30])
def test_a_line_is_found(network, sizes):
    sizes = [n for n in sizes if network.seconds(n)]  # a message takes some time
    assume(len(sizes) > 1)
    samples = samples_of(network, sizes)
    found = fit_network(samples)
    assert fit_network(samples[::-1]) == found
    for nbytes in sizes:
        assert found.seconds(nbytes) == pytest.approx(network.seconds(nbytes))


TRUE = Network(3e-4, 2.5e8)


def with_two_of_five_late():
    samples = samples_of(TRUE, repeats=5)
    return [(n, 10 * s) if k % 5 < 2 else (n, s) for k, (n, s) in enumerate(samples)]


def with_one_size_late():
    samples = samples_of(TRUE, [2**k for k in range(8, 26)])
    samples[9] = (samples[9][0], 10 * samples[9][1])
    return samples


@pytest.mark.parametrize(
    ("samples", "tolerance"),
    [(with_two_of_five_late(), 1e-6), (with_one_size_late(), 0.03)],
)
def test_outliers_hardly_count(samples, tolerance):
    found = fit_network(samples)
    assert found.latency_s == pytest.approx(TRUE.latency_s, rel=0.05)
    for nbytes in SIZES:
        seconds = TRUE.seconds(nbytes)
        assert found.seconds(nbytes) == pytest.approx(seconds, rel=tolerance)


def test_a_line_below_zero_has_no_latency():
    found = fit_network([(100, 1.0), (200, 3.0), (300, 5.0)])
    assert found.latency_s == 0.0
    assert 300 / 5.0 < found.bytes_per_s < 100 / 1.0


def test_where_size_makes_no_difference_the_largest_message_shows_the_bandwidth():
    level = fit_network([(10, 2.0), (100, 2.0)])
    falling = fit_network([(10, 4.0), (100, 2.0)])
    assert level.bytes_per_s == falling.bytes_per_s == pytest.approx(50.0)
    assert level.latency_s == pytest.approx((1.8 + 0.0) / 2)
    assert falling.latency_s > 0


@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.floats(1e-7, 1e3)),
        min_size=2,
        max_size=12,
        unique_by=lambda sample: sample[0],
    )
)
def test_whatever_is_measured_there_is_a_network(samples):
    found = fit_network(samples)
    assert 0 <= found.latency_s < math.inf
    assert 0 < found.bytes_per_s < math.inf


# ------------------------------------------------------------------------ schedules

SECOND_PER_10 = Network(latency_s=1.0, bytes_per_s=10.0)


def of_sizes(*nbytes, end_s=None, kinds=()):
    """One gradient per second, from 1 s on."""
    ready = tuple(float(k + 1) for k in range(len(nbytes)))
    return Backward(ready, nbytes, len(nbytes) if end_s is None else end_s, kinds)


@pytest.mark.parametrize(
    ("backward", "groups", "buckets"),
    [
        # Buckets wait for their gradients and for each other.
        (
            of_sizes(10, 20, 30, 0),
            [[0, 1], [2], [3]],
            [(2.0, 6.0), (6.0, 10.0), (10.0, 11.0)],
        ),
        # A bucket launched before it is full blocks the network.
        (of_sizes(10, 10), [[0], [1]], [(1.0, 3.0), (3.0, 5.0)]),
        (of_sizes(10, 10), [[1], [0]], [(2.0, 4.0), (4.0, 6.0)]),
        # Positions may come in any order.
        (of_sizes(1, 2, 7), [[0, 2, 1]], [(3.0, 5.0)]),
    ],
)
def test_start_and_end_of_each_bucket(backward, groups, buckets):
    schedule = play(backward, groups, SECOND_PER_10)
    assert list(schedule.buckets) == buckets
    assert schedule.done_s == buckets[-1][1]
    assert schedule.exposed_s == buckets[-1][1] - backward.end_s


def test_nothing_is_exposed_of_what_ends_before_the_backward():
    schedule = play(of_sizes(10, end_s=100.0), [[0]], SECOND_PER_10)
    assert (schedule.done_s, schedule.exposed_s) == (100.0, 0.0)


def test_without_parameters_the_backward_is_all():
    nothing = Backward((), (), 3.0)
    assert best_groups(nothing, SECOND_PER_10) == []
    assert play(nothing, [], SECOND_PER_10).done_s == 3.0
    assert lower_bound(nothing, SECOND_PER_10) == 3.0


def test_gradients_in_ready_order():
    """Of equal times, the last parameter comes first; a missing gradient comes last."""
    kinds = [("a", False), ("a", False), ("a", True), ("a", True), ("b", False)]
    times = {0: 9.0, 1: None, 2: -0.1, 3: 2.0, 4: 2.0}
    backward = in_ready_order(times, [10, 20, 30, 40, 50], kinds, 5.0)
    assert backward.order == (2, 4, 3, 0, 1)
    assert backward.positions([[0, 1], [2]]) == [[3, 4], [0]]
    assert backward.ready_s == (0.0, 2.0, 2.0, 5.0, 5.0)
    assert backward.nbytes == (30, 50, 40, 10, 20)
    assert backward.kinds == (0, 1, 2, 3, 3)  # a sparse gradient is a kind of its own


def test_the_bound_counts_what_is_sent_after_each_moment():
    backward = Backward((0.0, 5.0), (20, 40), 6.0)
    assert lower_bound(backward, SECOND_PER_10) == 5.0 + 1.0 + 4.0
    assert lower_bound(backward, Network(1.0, 8.0)) == 5.0 + 1.0 + 5.0
    assert lower_bound(backward, Network(0.0, 1000.0)) == 6.0


@pytest.mark.parametrize("num_kinds", [1, 2, 3])
@pytest.mark.parametrize("latency_s", [1e-4, 1e-2])
def test_ten_thousand_parameters(num_kinds, latency_s):
    draw = random.Random(0)
    count = 10_000
    ready = tuple(sorted(draw.random() for _ in range(count)))
    nbytes = tuple(draw.choice([256, 1024, 2**20]) for _ in range(count))
    kinds = tuple(draw.randrange(num_kinds) for _ in range(count))
    backward = Backward(ready, nbytes, 1.0, kinds)
    network = Network(latency_s, sum(nbytes))
    schedule = play(backward, best_groups(backward, network), network)
    caps = [[2**k] for k in range(18, 33)]
    by_cap = min(
        play(backward, capped_groups(backward, cap), network).exposed_s for cap in caps
    )
    assert lower_bound(backward, network) <= schedule.done_s
    assert schedule.exposed_s <= 1.02 * by_cap
