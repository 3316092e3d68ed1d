"""The bound of benchmarks/: what a step has to take, by when its gradients came."""

from __future__ import annotations

import importlib
import time
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minidp

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bound(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("support.bound")


class Wire:
    """1 MB/s and nothing for free."""

    burst_bytes = 0
    payload_bytes_per_s = 1e6


@pytest.mark.parametrize(
    ("ready", "megabytes", "ranks", "seconds"),
    [
        ((1.0, 10.0, 2.0), (1, 1, 2), 2, 11.0),  # the last one has the wire to itself
        ((1.0, 2.0), (5, 1), 2, 7.0),  # a wire that never pauses is the limit
        ((1.0,), (2,), 4, 4.0),  # in a ring of four each byte is sent 1.5 times
    ],
)
def test_what_comes_later_is_sent_later(bound, ready, megabytes, ranks, seconds):
    nbytes = [10**6 * count for count in megabytes]
    assert bound.least_seconds(ready, nbytes, Wire(), ranks) == seconds


def test_what_passes_at_once_takes_no_time(bound):
    wire = Wire()
    wire.burst_bytes = 10**6
    assert bound.least_seconds((1.0,), (3 * 10**6,), wire, 2) == 3.0
    assert bound.least_seconds((1.0,), (10,), wire, 2) == 1.0


@pytest.mark.parametrize("seed", range(50))
def test_no_layout_ends_earlier(bound, seed):
    """However gradients are put together, in whatever order buckets leave."""
    random = Random(seed)
    ready = [random.randrange(50) for _ in range(random.randint(1, 8))]
    nbytes = [10**6 * random.randrange(10) for _ in ready]
    order = random.sample(range(len(ready)), len(ready))
    edges = {0, len(order), *random.sample(order, random.randint(1, len(order)))}
    ended = float(max(ready))
    for begin, end in pairwise(sorted(edges)):
        bucket = order[begin:end]
        full = max(ready[i] for i in bucket)
        ended = max(ended, full) + sum(nbytes[i] for i in bucket) / 1e6
    assert bound.least_seconds(ready, nbytes, Wire(), 2) <= ended + 1e-9


@pytest.mark.parametrize("wrap", [minidp.DataParallel, DistributedDataParallel])
def test_a_step_is_held_against_its_own_gradients(bound, lone_group, wrap):
    """A wire of no time: the bound is the moment of the last gradient."""

    wire = Wire()
    wire.payload_bytes_per_s = 1e30
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model = wrap(net)
    watcher = bound.BoundWatcher(model, wire)
    ends, lasts = [], []
    for _ in range(4):
        start = time.perf_counter_ns()
        model(torch.ones(8, 64)).sum().backward()
        ends.append((time.perf_counter_ns() - start) / 1e9)
        watcher.end_step(start)
        lasts.append((max(watcher._ready_ns) - start) / 1e9)
    assert watcher.result().tolist() == lasts
    assert all(0 < last < end for last, end in zip(lasts, ends, strict=True))
