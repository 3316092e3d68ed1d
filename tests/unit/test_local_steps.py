"""Steps inside no_sync() that nobody makes up for: said once, or never."""

from __future__ import annotations

import gc
import logging
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidp import DataParallel, _local_steps


class Caught(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def train(ctx, steps, average_every=0, policy="raise"):
    """Warnings while it trains, and what is logged when the object goes."""
    before, _local_steps.PATIENCE = _local_steps.PATIENCE, 6
    try:
        return _train(ctx, steps, average_every, policy)
    finally:
        _local_steps.PATIENCE = before


def _train(ctx, steps, average_every, policy):
    torch.manual_seed(0)
    ddp = DataParallel(nn.Linear(2, 2), process_group=ctx.group, unsynced=policy)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(ctx.rank)
    log = Caught()
    logging.getLogger("minidp").addHandler(log)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(steps):
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(torch.randn(3, 2)).sum().backward()
                optimizer.step()
            if average_every and (k + 1) % average_every == 0:
                for param in ddp.parameters():
                    dist.all_reduce(param.data, group=ctx.group)
                    param.data = param.data / 2  # as Accelerate's LocalSGD does
    del ddp, optimizer
    gc.collect()
    logging.getLogger("minidp").removeHandler(log)
    return [(str(w.message), w.filename) for w in caught], log.texts


TEXT = (
    "[rank {}] An optimizer stepped inside no_sync(), with gradients that stayed local "
    "(steps: {}), and nobody averaged "
)


def test_everything_indented(pool):
    for rank, (((text, file),), logged) in enumerate(pool.run(train, 2, 9)):
        assert text.startswith(TEXT.format(rank, 6))
        assert file == __file__
        assert logged == []  # it was said


def test_the_end_of_a_short_run(pool):
    for rank, (warned, (logged,)) in enumerate(pool.run(train, 2, 3)):
        assert warned == []
        assert logged.startswith(TEXT.format(rank, 3))


@pytest.mark.parametrize(("steps", "every"), [(9, 3), (9, 5), (4, 3), (8, 1)])
def test_somebody_averages(pool, steps, every):
    assert pool.run(train, 2, steps, every) == [([], [])] * 2


def test_ignored(pool):
    assert pool.run(train, 2, 9, 0, "ignore") == [([], [])] * 2


def test_one_rank_alone(lone_group):
    class Alone:
        group, rank = lone_group, 0

    assert train(Alone, 9) == ([], [])


def accumulates(ctx):
    """Steps outside, and a penalty's step inside, with gradients of nobody."""
    ddp = DataParallel(nn.Linear(2, 2), process_group=ctx.group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    log = Caught()
    logging.getLogger("minidp").addHandler(log)
    for _ in range(3):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(torch.ones(3, 2)).sum().backward()
        ddp(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        with ddp.no_sync():
            optimizer.step()  # averaged gradients once more
    del ddp, optimizer
    gc.collect()
    logging.getLogger("minidp").removeHandler(log)
    return log.texts


def test_averaged_gradients_may_step_anywhere(pool):
    assert pool.run(accumulates, 2) == [[], []]


def told_before(ctx):
    """The synchronised backward has compared the replicas, and warned."""
    ddp = DataParallel(nn.Linear(2, 2), process_group=ctx.group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    log = Caught()
    logging.getLogger("minidp").addHandler(log)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with ddp.no_sync():
                ddp(torch.full((3, 2), ctx.rank + 1.0)).sum().backward()
                optimizer.step()
            ddp(torch.ones(3, 2)).sum().backward()
            optimizer.step()
        with ddp.no_sync():
            ddp(torch.ones(3, 2)).sum().backward()
            optimizer.step()
    del ddp, optimizer
    gc.collect()
    logging.getLogger("minidp").removeHandler(log)
    return [str(w.message).partition(" Parameters")[0] for w in caught], log.texts


def test_it_is_not_said_twice(pool):
    assert pool.run(told_before, 2) == [(["[rank 0]"], []), (["[rank 1]"], [])]
