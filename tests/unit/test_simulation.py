"""The simulator of benchmarks/: a sweep over arrays against a queue of events."""

from __future__ import annotations

import heapq
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidp._schedule import Backward, Network, play

SOURCE = Path(__file__).parents[2] / "benchmarks" / "support" / "simulation.py"


def _load():
    # A script's folder is on the path of the script only: nothing to import from here.
    spec = importlib.util.spec_from_file_location("simulation_under_test", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


simulation = _load()
HOP = Network(1.0, 8.0)
COST = Network(0.5, 4.0)


# ------------------------------------------------------------------------ collectives


def test_a_ring_of_two_exchanges_halves():
    assert simulation.ring(2, HOP) == Network(2.0, 8.0)


def test_a_ring_sends_each_byte_almost_twice():
    cost = simulation.ring(5, HOP)
    assert cost.latency_s == 8.0
    assert cost.seconds(40) == 8 * HOP.seconds(40 / 5)


@pytest.mark.parametrize(("num_ranks", "depth"), [(2, 1), (3, 2), (4, 2), (9, 4)])
def test_a_tree_is_as_deep_as_the_logarithm(num_ranks, depth):
    assert simulation.tree(num_ranks, HOP) == Network(2.0 * depth, 4.0)


def test_one_rank_has_nothing_to_send():
    cluster = simulation.Cluster(1, 1, HOP, HOP, launch_s=1.0)
    (cost,) = cluster.collectives().values()
    assert cost.seconds(1e12) < 1e-9
    assert simulation.ring(1, HOP) == simulation.tree(1, HOP) == cost


def test_nodes_reduce_inside_and_between():
    inside, between = Network(0.25, 100.0), Network(1.0, 10.0)
    cluster = simulation.Cluster(3, 4, inside, between, launch_s=0.125)
    found = cluster.collectives()
    expected = (
        0.125
        + simulation.ring(4, inside).seconds(60)
        + simulation.ring(3, between).seconds(60)
    )
    assert cluster.num_ranks == 12
    assert found["node ring"].seconds(60) == pytest.approx(expected)
    assert found["flat ring"].seconds(60) == pytest.approx(
        0.125 + simulation.ring(12, between).seconds(60)
    )
    assert found["node tree"].latency_s == 0.125 + 6 * 0.25 + 2 * 2 * 1.0


def test_many_nodes_are_a_tree_for_small_messages_and_a_ring_for_large_ones():
    cluster = simulation.Cluster(512, 1, HOP, HOP)
    ways = cluster.collectives()
    best = simulation.Fastest(tuple(ways.values()))
    assert sorted(ways) == ["node ring", "node tree"]
    assert best.seconds(8) == ways["node tree"].seconds(8)
    large = 1e6
    assert simulation.ring(2, HOP).seconds(large) < simulation.tree(2, HOP).seconds(
        large
    )


# ----------------------------------------------------------------------------- a step


@st.composite
def steps(draw: st.DrawFn):
    ready = sorted(draw(st.lists(st.integers(0, 40), min_size=1, max_size=6)))
    count = len(ready)
    nbytes = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    end_s = ready[-1] + draw(st.integers(0, 9))
    backward = Backward(tuple(map(float, ready)), tuple(nbytes), float(end_s))
    work = simulation.Work("", float(draw(st.integers(1, 9))), backward)
    groups = [[0]]
    for k in range(1, count):
        if draw(st.booleans()):
            groups.append([k])
        else:
            groups[-1].append(k)
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    lengths = rng.integers(0, 4, shape) / 4
    return work, groups, simulation.Pauses(rng.random(shape), lengths)


def by_events(work, groups, cost, moments, lengths, copies):
    """One step, event by event: gradients of all ranks, then buckets on the wire."""
    queue = []
    for rank, (moment, length) in enumerate(zip(moments, lengths, strict=True)):
        for k, ready_s in enumerate(work.backward.ready_s):
            computed = work.forward_s + ready_s
            pause = length * work.seconds if computed > moment * work.seconds else 0.0
            heapq.heappush(queue, (computed + pause, rank, k))
    missing = [len(group) * len(moments) for group in groups]
    bucket_of = {k: n for n, group in enumerate(groups) for k in group}
    sent, free_s, done = 0, 0.0, []
    while queue:
        now, _, k = heapq.heappop(queue)
        missing[bucket_of[k]] -= 1
        while sent < len(groups) and missing[sent] == 0:
            nbytes = sum(work.backward.nbytes[k] for k in groups[sent])
            free_s = max(free_s, now + nbytes / copies) + cost.seconds(nbytes)
            done.append((free_s, nbytes))
            sent += 1
    end_s = work.seconds + max(lengths) * work.seconds
    for done_s, nbytes in done:
        end_s = max(end_s, done_s) + nbytes / copies
    return end_s


@given(steps(), st.sampled_from([0.5, 4.0, simulation.FREE]))
def test_a_step_is_what_its_events_give(step, copies):
    work, groups, pauses = step
    found = simulation.step_seconds(work, groups, COST, pauses, copies)
    expected = [
        by_events(work, groups, COST, moments, lengths, copies)
        for moments, lengths in zip(pauses.moments, pauses.lengths, strict=True)
    ]
    assert found.tolist() == pytest.approx(expected)


@given(steps())
def test_without_pauses_a_step_is_the_schedule(step):
    work, groups, _ = step
    (found,) = simulation.step_seconds(work, groups, COST, simulation.Pauses.none())
    schedule = play(work.backward, groups, COST)
    assert found == pytest.approx(work.forward_s + schedule.done_s)


@given(steps())
def test_the_best_layout_is_between_the_bound_and_any_other(step):
    work, groups, _ = step
    ways = [COST, Network(0.125, 1.0)]
    nothing, fastest = simulation.Pauses.none(), simulation.Fastest(tuple(ways))
    best = simulation.best_layout(work, ways, [groups])
    found, other = (
        float(simulation.step_seconds(work, each, fastest, nothing)[0])
        for each in (best, groups)
    )
    assert simulation.bound_seconds(work, ways) <= found <= other


# --------------------------------------------------------------------------- jitter


def test_pauses_follow_the_measured_jitter():
    jitter = [0.9, 0.95, 1.0, 1.1, 1.5]
    pauses = simulation.Pauses.drawn(jitter, (200, 50))
    share = np.mean(pauses.lengths == 0)
    assert pauses.lengths.min() == 0
    assert 0.45 < pauses.lengths.max() <= 0.5
    assert 0.47 < share < 0.53  # below the median there is no pause
    assert (simulation.Pauses.drawn(jitter, (200, 50)).moments == pauses.moments).all()


def test_the_recorded_jitter_is_sorted_around_its_median():
    jitter = simulation.RECORDED_JITTER
    assert list(jitter) == sorted(jitter)
    assert jitter[len(jitter) // 2] == 1.0


@pytest.mark.parametrize("shape", [(0, 1), (1, 0)])
def test_clusters_without_ranks_are_refused(shape):
    with pytest.raises(ValueError, match="expected ranks"):
        simulation.Cluster(*shape, HOP, HOP)
