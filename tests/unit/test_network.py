"""The fit of latency and bandwidth: lines, noise, outliers, and what is no line."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidp._network import Network, fit_network, messages_of

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


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "message"),
    [
        (-1e-9, 1.0, "latency of 0 seconds or more, but got -1e-09"),
        (float("nan"), 1.0, "but got nan"),
        (float("inf"), 1.0, "but got inf"),
        (0.0, 0.0, "positive, finite number of bytes per second, but got 0.0"),
        (0.0, float("inf"), "but got inf"),
    ],
)
def test_networks_that_are_refused(latency_s, bytes_per_s, message):
    with pytest.raises(ValueError, match=message):
        Network(latency_s, bytes_per_s)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "at least two sizes, .* got 0 of 0 size"),
        ([(8, 0.1)] * 5, "got 5 of 1 size.*Time some of another size"),
        ([(8, 0.1), (16, 0.0)], "positive time for each message, .* 16 bytes in 0.0"),
        ([(8, float("nan")), (16, 0.1)], "8 bytes in nan s"),
        ([(-8, 0.1), (16, 0.1)], "-8 bytes"),
    ],
)
def test_samples_that_are_refused(samples, message):
    with pytest.raises(ValueError, match=message):
        fit_network(samples)


@given(networks, st.lists(st.integers(1, 10**8), min_size=2, unique=True))
def test_a_line_is_found(network, sizes):
    found = fit_network(samples_of(network, sizes))
    for nbytes in sizes:
        assert found.seconds(nbytes) == pytest.approx(network.seconds(nbytes))


@given(networks, st.permutations(range(len(SIZES))))
def test_order_of_samples_does_not_matter(network, order):
    samples = samples_of(network)
    assert fit_network([samples[k] for k in order]) == fit_network(samples)


def test_late_messages_hardly_count():
    network = Network(3e-4, 2.5e8)
    samples = samples_of(network, repeats=5)
    late = [(n, 10 * s) if k % 5 < 2 else (n, s) for k, (n, s) in enumerate(samples)]
    found = fit_network(late)
    for nbytes in SIZES:
        assert found.seconds(nbytes) == pytest.approx(network.seconds(nbytes), rel=1e-6)


def test_a_size_off_the_line_hardly_counts():
    network = Network(3e-4, 2.5e8)
    samples = samples_of(network, [2**k for k in range(8, 26)])
    samples[9] = (samples[9][0], 10 * samples[9][1])
    found = fit_network(samples)
    assert found.latency_s == pytest.approx(network.latency_s, rel=0.03)
    assert found.bytes_per_s == pytest.approx(network.bytes_per_s, rel=0.03)


def test_noise_of_a_tenth():
    draw = random.Random(0)
    network = Network(3e-4, 2.5e8)
    samples = [
        (n, s * draw.uniform(0.9, 1.1)) for n, s in samples_of(network, repeats=9)
    ]
    found = fit_network(samples)
    for nbytes in SIZES:
        assert found.seconds(nbytes) == pytest.approx(network.seconds(nbytes), rel=0.05)


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
        st.tuples(st.integers(0, 10**9), st.floats(1e-7, 1e3)), min_size=2, max_size=12
    )
)
def test_whatever_is_measured_there_is_a_network_or_a_reason(samples):
    if len({nbytes for nbytes, _ in samples}) < 2:
        with pytest.raises(ValueError, match="two sizes"):
            fit_network(samples)
    else:
        found = fit_network(samples)  # which checks itself
        assert found.seconds(0) == found.latency_s


@pytest.mark.parametrize(("small", "large"), [(0, 8), (0, 2**30), (4, 2**30)])
def test_two_sizes_are_met_exactly(small, large):
    found = fit_network([(small, 0.25), (large, 4.25)])
    assert found.seconds(small) == pytest.approx(0.25)
    assert found.seconds(large) == pytest.approx(4.25)
