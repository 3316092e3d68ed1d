"""Schedules: known cases, refused inputs, torch's rule, and 10,000 parameters."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidp import _layout
from minidp._kinds import PARTS
from minidp._schedule import (
    Backward,
    Network,
    best_groups,
    capped_groups,
    lower_bound,
    play,
)

SECOND_PER_10 = Network(latency_s=1.0, bytes_per_s=10.0)


def of_sizes(*nbytes, end_s=None, kinds=()):
    """One gradient per second, from 1 s on."""
    ready = tuple(float(k + 1) for k in range(len(nbytes)))
    return Backward(ready, nbytes, len(nbytes) if end_s is None else end_s, kinds)


# ----------------------------------------------------------------------------- play


def test_buckets_wait_for_their_gradients_and_for_each_other():
    schedule = play(of_sizes(10, 20, 30, 0), [[0, 1], [2], [3]], SECOND_PER_10)
    first, second, third = schedule.transfers
    assert (first.ready_s, first.start_s, first.done_s) == (2.0, 2.0, 6.0)
    assert (second.ready_s, second.start_s, second.done_s) == (3.0, 6.0, 10.0)
    assert (third.nbytes, third.waited_s, third.done_s) == (0, 6.0, 11.0)
    assert (schedule.done_s, schedule.exposed_s) == (11.0, 7.0)


def test_a_bucket_launched_before_it_is_full_stops_the_wire():
    early = play(of_sizes(10, 10), [[0], [1]], SECOND_PER_10)
    late = play(of_sizes(10, 10), [[1], [0]], SECOND_PER_10)
    assert [t.start_s for t in early.transfers] == [1.0, 3.0]
    assert [t.start_s for t in late.transfers] == [2.0, 4.0]


def test_positions_may_come_in_any_order():
    (transfer,) = play(of_sizes(1, 2, 3), [[2, 0, 1]], SECOND_PER_10).transfers
    assert transfer.positions == (0, 1, 2)
    assert transfer.ready_s == 3.0


def test_nothing_is_exposed_of_what_ends_before_the_backward():
    schedule = play(of_sizes(10, end_s=100.0), [[0]], SECOND_PER_10)
    assert (schedule.done_s, schedule.exposed_s) == (100.0, 0.0)


def test_without_parameters_the_backward_is_all():
    nothing = Backward((), (), 3.0)
    assert best_groups(nothing, SECOND_PER_10) == []
    assert play(nothing, [], SECOND_PER_10).done_s == 3.0
    assert lower_bound(nothing, SECOND_PER_10) == 3.0


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[0], [1]], "each of 3 gradients in one bucket, but the buckets hold"),
        ([[0, 1], [1, 2]], r"hold \[0, 1, 1, 2\]"),
        ([[0, 1, 2, 3]], "each of 3 gradients"),
        ([[0], [], [1], [2]], "bucket 1, but they are of kinds \\[\\]"),
        ([[0, 1], [2]], "one kind in bucket 0, but they are of kinds \\[4, 7\\]"),
    ],
)
def test_layouts_that_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        play(of_sizes(1, 1, 1, kinds=(7, 4, 4)), groups, SECOND_PER_10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1.0,), (), 2.0), "the 1 ready times, but got 0 sizes and 0 kinds"),
        (((1.0,), (1,), 2.0, (0, 0)), "got 1 sizes and 2 kinds"),
        (((1.0, 0.5), (1, 1), 2.0), "gradient 1 is ready at 0.5 s, after 1.0 s. Sort"),
        (((-1.0,), (1,), 2.0), "gradient 0 is ready at -1.0 s"),
        (((1.0,), (1,), 0.5), "the backward ends at 0.5 s, after 1.0 s"),
        (((float("nan"),), (1,), 2.0), "gradient 0 is ready at nan"),
        (((1.0,), (1,), float("inf")), "the backward ends at inf"),
        (((1.0,), (-1,), 2.0), "Gradient 0 has -1 bytes"),
    ],
)
def test_backwards_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Backward(*arguments)


# ----------------------------------------------------------------------------- best


def test_one_parameter_is_one_bucket():
    assert best_groups(of_sizes(5), SECOND_PER_10) == [[0]]


def test_head_and_tail_come_out_small():
    backward, network = of_sizes(*[10] * 12), Network(1.0, 30.0)
    groups = best_groups(backward, network)
    assert [len(group) for group in groups] == [1, 6, 3, 2]
    assert play(backward, groups, network).exposed_s == pytest.approx(1 + 20 / 30)


def test_all_at_once_is_one_bucket():
    backward = Backward((2.0,) * 5, (10,) * 5, 2.0)
    assert best_groups(backward, SECOND_PER_10) == [[0, 1, 2, 3, 4]]


def test_what_is_hidden_anyway_is_one_bucket():
    assert best_groups(of_sizes(1, 1, 1, end_s=9.0), SECOND_PER_10) == [[0, 1, 2]]


def test_a_free_wire_is_used_at_once():
    backward = of_sizes(10, 10, 10)
    groups = best_groups(backward, Network(0.0, 10.0))
    assert groups == [[0], [1], [2]]
    assert play(backward, groups, Network(0.0, 10.0)).exposed_s == 1.0


def test_a_parameter_over_the_limit_stands_alone():
    backward = of_sizes(1, 50, 1, 1)
    assert best_groups(backward, SECOND_PER_10, max_bytes=2) == [[0], [1], [2, 3]]


def test_kinds_do_not_share_a_bucket():
    backward = of_sizes(10, 10, 10, 10, end_s=99.0, kinds=(0, 1, 0, 1))
    assert best_groups(backward, SECOND_PER_10) == [[0, 2], [1, 3]]


def test_the_bound_counts_what_is_sent_after_each_moment():
    backward = Backward((0.0, 5.0), (20, 40), 6.0)
    assert lower_bound(backward, SECOND_PER_10) == 5.0 + 1.0 + 4.0
    assert lower_bound(backward, Network(1.0, 8.0)) == 5.0 + 1.0 + 5.0
    assert lower_bound(backward, Network(0.0, 1000.0)) == 6.0


# ------------------------------------------------------------------------ torch's rule


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), max_size=25),
    st.lists(st.integers(0, 400), min_size=1, max_size=3),
    st.booleans(),
)
def test_capped_groups_are_those_of_the_layout(params, limits, from_the_end):
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    specs = [
        _layout.ParamSpec("p", (n,), (1,), dtypes[kind], torch.device("cpu"))
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
        layout = _layout.rebuilt_layout(specs, limits, order, from_the_end=from_the_end)
        found = capped_groups(backward, limits, from_the_end=from_the_end)
        assert found == [sorted(bucket.indices) for bucket in layout.buckets]


# ------------------------------------------------------------------------------- large


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
    # With several kinds, buckets end within 1 / PARTS of all bytes of where they might.
    assert schedule.exposed_s <= by_cap + (num_kinds > 1) / PARTS
