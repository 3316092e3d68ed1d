"""benchmarks/simulate.py: what collectives cost, and that predictions are ordered."""

from __future__ import annotations

import importlib
from argparse import Namespace
from pathlib import Path

import pytest

from minidp.costmodel import Network

HOP = Network(1.0, 8.0)


@pytest.fixture
def simulate(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("simulate")


def test_a_ring_sends_each_byte_almost_twice_and_a_tree_is_as_deep_as_the_logarithm(
    simulate,
):
    assert simulate.ring(2, HOP) == Network(2.0, 8.0)
    assert simulate.ring(5, HOP).seconds(40) == 8 * HOP.seconds(40 / 5)
    for num_ranks, depth in ((2, 1), (3, 2), (4, 2), (9, 4)):
        assert simulate.tree(num_ranks, HOP) == Network(2.0 * depth, 4.0)
    for cost in simulate.Cluster(1, 1, HOP, HOP).collectives().values():
        assert cost.seconds(1e12) < 1e-9


def test_nodes_reduce_inside_and_between(simulate):
    inside, between = Network(0.25, 100.0), Network(1.0, 10.0)
    found = simulate.Cluster(3, 4, inside, between, launch_s=0.125).collectives()
    parts = simulate.ring(4, inside).seconds(60) + simulate.ring(3, between).seconds(60)
    assert found["node ring"].seconds(60) == pytest.approx(0.125 + parts)
    assert found["node tree"].latency_s == 0.125 + 6 * 0.25 + 2 * 2 * 1.0


@pytest.mark.parametrize(
    ("model", "count", "million"), [("resnet50", 161, 25.6), ("gpt2", 148, 124)]
)
def test_a_model_is_ready_in_its_backward(simulate, model, count, million):
    work = getattr(simulate, model)(0.3)
    assert len(work.backward.ready_s) == count
    assert sum(work.backward.nbytes) == pytest.approx(4e6 * million, rel=0.01)
    assert work.seconds == pytest.approx(0.3)
    assert work.backward.ready_s[-1] == pytest.approx(0.2)
    assert list(work.backward.ready_s) == sorted(work.backward.ready_s)


@pytest.mark.parametrize("num_ranks", [8, 64, 4096])
def test_the_best_layout_is_between_the_bound_and_any_other(simulate, num_ranks):
    defaults = {n.replace("-", "_"): v for n, (v, _) in simulate.ASSUMPTIONS.items()}
    work = simulate.gpt2(0.125)
    cluster = simulate.Cluster.of(Namespace(**defaults), num_ranks)
    point = simulate.predict(work, cluster)
    assert point.num_ranks == num_ranks
    assert work.seconds <= point.bound_s <= point.best_s
    assert point.best_s <= min(point.torch_s, *point.caps_s.values())
    assert point.efficiency == work.seconds / point.best_s
    assert len(point.row()) == 10
