"""The fit of latency and bandwidth: lines, noise, outliers, and what is no line."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidp.costmodel.network import Network, fit_network, messages_of

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


@given(networks, st.lists(st.integers(1, 10**8), min_size=2, unique=True))
def test_a_line_is_found(network, sizes):
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


@pytest.mark.parametrize(("small", "large"), [(0, 8), (0, 2**30), (4, 2**30)])
def test_two_sizes_are_met_exactly(small, large):
    found = fit_network([(small, 0.25), (large, 4.25)])
    assert found.seconds(small) == pytest.approx(0.25)
    assert found.seconds(large) == pytest.approx(4.25)
