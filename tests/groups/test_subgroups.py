"""Wrappers on some of the ranks."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidp import DataParallel
from minidp.errors import CollectiveError
from tests.support.both import Scalars, history_of, same, values, wrapped, x_of
from tests.support.ranks import as_in_torch, on_ranks


def train_on(ctx, group):
    torch.manual_seed(ctx.rank)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    ddp = DataParallel(net, process_group=group, bucket_cap_mb=0)
    history = history_of(ddp, lambda n: ddp(torch.randn(4, 3) + n).pow(2).sum(), 4)
    return history[-1], [p.detach().clone() for p in ddp.parameters()]


@on_ranks((1, 2))
def test_subgroup_that_lacks_rank_0(ctx):
    return train_on(ctx, ctx.group)


def train_on_pair(ctx):
    return train_on(ctx, ctx.subgroups[(0, 1) if ctx.rank < 2 else (2, 3)])


def test_two_disjoint_groups_train_at_once(pool):
    results = pool.run(train_on_pair, 4)
    assert same(results[0], results[1])
    assert same(results[2], results[3])
    assert not same(results[0], results[2])


@as_in_torch(3)
def test_update_process_group(ctx, wrap):
    """From three ranks to two of them, the other way round."""
    ddp = wrap(Scalars(2))
    ddp(x_of(ctx)).backward()
    ddp(x_of(ctx)).backward()
    if ctx.rank == 0:
        return values(ddp)
    ddp._update_process_group(ctx.subgroups[(1, 2)])
    for _ in range(3):
        ddp.zero_grad()
        ddp(x_of(ctx)).backward()
    found = values(ddp), ddp._has_rebuilt_buckets
    assert found[0] == [2.5, 2.5]
    for uses in ([0, 1], [0]):
        ddp._check_reducer_finalized()
        ddp(x_of(ctx), uses).backward()
    with pytest.raises(RuntimeError, match="did not receive grad for rank") as caught:
        ddp.reducer._check_reducer_finalized()
    if isinstance(ddp, DataParallel):  # the rank in the new group
        assert str(caught.value).startswith(f"[rank {ctx.rank - 1}]")
    return found


@on_ranks(3, fresh={})
def test_who_has_moved_is_named_where_it_was(ctx):
    """Its heart has stopped there; it is not dead."""
    pair = dist.new_group([1, 2], timeout=timedelta(seconds=10))
    ddp = wrapped(ctx, Scalars(2), hang_timeout=4.0)
    ddp(x_of(ctx)).backward()
    if ctx.rank == 0:
        with pytest.raises(CollectiveError, match="Missing: rank 1, 2") as caught:
            ddp(x_of(ctx)).backward()
        assert "Rank 1 gave up: it has moved to another process" in str(caught.value)
        return
    ddp._update_process_group(pair)
    ddp(x_of(ctx)).backward()


@on_ranks(3)
def test_a_rank_that_stays_behind_is_not_missed_in_the_new_group(ctx):
    """Its wrapper dies after the others have moved, and later one of them is late."""
    ddp = wrapped(ctx, Scalars(2), hang_timeout=20.0)
    ddp(x_of(ctx)).backward()
    if ctx.rank == 0:
        del ddp
        gc.collect()
        return
    ddp._update_process_group(ctx.subgroups[(1, 2)])
    for k in range(20):
        if k == 19 and ctx.rank == 1:
            threading.Event().wait(2.5)
        ddp.zero_grad()
        ddp(x_of(ctx)).backward()
    assert values(ddp) == [2.5, 2.5]
