"""The state of an optimizer is saved whole or by shares, and loaded by any ranks."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from minidp import DataParallel
from minidp.errors import ShardedStepError
from tests.support.both import same
from tests.support.ranks import on_ranks


def made(ctx, state=None, *, loads_first=False, divides=True, group=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 4))
    ddp = DataParallel(net, process_group=group or ctx.group)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    if state is not None:
        net.load_state_dict(state[0])
        if loads_first:
            optimizer.load_state_dict(copy.deepcopy(state[1]))
    if divides:
        ddp.sharded_step(optimizer)
    if state is not None and not loads_first:
        optimizer.load_state_dict(copy.deepcopy(state[1]))
    return ddp, optimizer


def train(ctx, ddp, optimizer, steps):
    for step in steps:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        ddp(x).square().mean().backward()  # the same on all ranks
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in ddp.parameters()]


def everybody(ctx, state):
    """Give all ranks what rank 0 would have written to a file."""
    file = io.BytesIO()
    torch.save(state, file)
    found = [file.getvalue()]
    torch.distributed.broadcast_object_list(found, 0, group=ctx.group)
    return torch.load(io.BytesIO(found[0]))


@pytest.mark.parametrize("loads_first", [False, True])
@on_ranks(2, 3)
def test_the_whole_state_is_that_of_a_plain_loop(ctx, loads_first):
    plain, its = made(ctx, divides=False)
    train(ctx, plain, its, range(3))
    ddp, optimizer = made(ctx)
    train(ctx, ddp, optimizer, range(3))
    state = ddp.whole_optimizer_state(optimizer)
    assert (state is None) == (ctx.rank != 0)
    if state is not None:
        assert [*state] == [*its.state_dict()]
        assert same(state["state"], its.state_dict()["state"])
        assert same(state["param_groups"], its.state_dict()["param_groups"])
    state = everybody(ctx, [ddp.module.state_dict(), state])
    end = train(ctx, ddp, optimizer, range(3, 6))
    assert same(
        end, train(ctx, *made(ctx, state, loads_first=loads_first), range(3, 6))
    )
    assert same(end, train(ctx, *made(ctx, state, divides=False), range(3, 6)))
    alone = made(ctx, state, group=ctx.subgroups[0,]) if ctx.rank == 0 else None
    if alone is not None:  # on another number of ranks
        assert same(end, train(ctx, *alone, range(3, 6)))
    assert len(optimizer.state) == sum(o == ctx.rank for o in ddp._sharded.owners.of)
    return end


@on_ranks(2)
def test_each_rank_loads_its_own_share(ctx):
    ddp, optimizer = made(ctx)
    train(ctx, ddp, optimizer, range(3))
    state = copy.deepcopy([ddp.module.state_dict(), optimizer.state_dict()])
    end = train(ctx, ddp, optimizer, range(3, 6))
    assert same(end, train(ctx, *made(ctx, state), range(3, 6)))
    return end


@on_ranks(2)
def test_the_share_of_another_rank_is_refused(ctx):
    ddp, optimizer = made(ctx)
    train(ctx, ddp, optimizer, range(1))
    state = everybody(ctx, [ddp.module.state_dict(), optimizer.state_dict()])
    if ctx.rank == 1:
        with pytest.raises(ShardedStepError, match="the share of rank 0 of 2"):
            optimizer.load_state_dict(state[1])


@on_ranks(2)
def test_a_plain_optimizer_does_not_load_a_share(ctx):
    """Half of the state would be missing there, and torch does not look for it."""
    ddp, optimizer = made(ctx)
    train(ctx, ddp, optimizer, range(1))
    plain = torch.optim.AdamW([p.detach() for p in ddp.parameters()])
    with pytest.raises(ValueError, match="doesn't match the size"):
        plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not plain.state
