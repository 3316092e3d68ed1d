"""Schedules: known cases, refused inputs, torch's rule, and 10,000 parameters."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidp.costmodel.schedule import (
    Backward,
    Network,
    best_groups,
    capped_groups,
    in_ready_order,
    lower_bound,
    play,
)
from minidp.layout import plan

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


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), max_size=25),
    st.lists(st.integers(0, 400), min_size=1, max_size=3),
)
def test_capped_groups_are_those_of_the_layout(params, limits):
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    specs = [
        plan.ParamSpec("p", (n,), (1,), dtypes[kind], torch.device("cpu"))
        for n, kind in params
    ]
    backward = Backward(
        tuple(float(k) for k in range(len(params))),
        tuple(spec.nbytes for spec in specs),
        float(len(params)),
        tuple(kind for _, kind in params),
    )
    order = range(len(params))
    if params:
        layout = plan.rebuilt_layout(specs, limits, order)
        found = capped_groups(backward, limits)
        assert found == [sorted(bucket.indices) for bucket in layout.buckets]


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
