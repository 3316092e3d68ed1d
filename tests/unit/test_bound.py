"""The lower bound of benchmarks/: from what a step recorded."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import minidp

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bound(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("support.bound")


def test_collectives_that_share_the_network_are_one_burst(bound):
    """Two of 10 bytes in flight from 0 to 4 say 20 bytes in 4 s, not 10 in 3."""
    step = bound.StepRecord((), (0.0, 1.0, 5.0), (3.0, 4.0, 6.0), (10, 10, 5))
    assert list(bound._bursts(step)) == [(20, 4.0), (5, 1.0)]


def test_a_burst_lasts_until_its_last_one_is_done(bound):
    step = bound.StepRecord((), (0.0, 1.0, 2.5), (3.0, 2.0, 4.0), (1, 2, 4))
    assert list(bound._bursts(step)) == [(7, 4.0)]


def test_nothing_sent_is_no_burst(bound):
    assert list(bound._bursts(bound.StepRecord((0.1,), (), (), ()))) == []


def test_the_slowest_rank_counts_at_each_moment(bound):
    fast = bound.StepRecord((1.0, 5.0), (1.0,), (7.0,), (8,))
    slow = bound.StepRecord((2.0, 4.0), (3.0,), (6.0,), (8,))
    assert bound._slowest([fast, slow]) == bound.StepRecord(
        (2.0, 5.0), (3.0,), (7.0,), (8,)
    )


def test_the_bound_is_never_below_the_backward(bound, lone_group):
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model = minidp.DataParallel(net)
    watcher = bound.BoundWatcher(model)
    for _ in range(4):
        watcher.begin()
        start = time.perf_counter_ns()
        model(torch.ones(8, 64)).sum().backward()
        watcher.end(start)
    last = [max(step.ready_s) for step in watcher._steps]
    result = watcher.result()
    assert len(result.seconds) == len(last) == 4
    assert all(result.seconds >= last)
