"""The state of divided parameters: each rank has rows, and a checkpoint has all."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from minidp import DataParallel
from minidp.errors import ShardedStepError
from tests.sharded.test_checkpoints import everybody
from tests.sharded.test_distributed_checkpoints import (
    folder_of,
    load,
    save,
    state_of,
    train,
)
from tests.support.both import same
from tests.support.combined import combined
from tests.support.ranks import on_ranks

OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.01),
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1, initial_accumulator_value=0.1),
    "asgd": lambda ps: torch.optim.ASGD(ps, 0.01),
    "groups": lambda ps: torch.optim.NAdam(
        [{"params": ps[1::2], "lr": 0.1}, {"params": ps[::2], "betas": (0.5, 0.9)}]
    ),
}
SPLIT = {"split_from_mb": 0}


class Net(nn.Module):
    """Of one layer only every other step has gradients, and of another one none."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 7), nn.Linear(7, 4)
        self.sometimes, self.never = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x, number):
        x = self.last(torch.tanh(self.first(x))) * self.scale
        return self.sometimes(x) if number % 2 else x


def made(ctx, name, *, group=None, divides=True, states=None, first=False, **more):
    torch.manual_seed(0)
    net = Net()
    options = {"find_unused_parameters": True, "process_group": group or ctx.group}
    ddp = DataParallel(net, **options)
    optimizer = OPTIMIZERS[name](list(net.parameters()))
    if states is not None:
        net.load_state_dict(states[0])
        if first:
            optimizer.load_state_dict(copy.deepcopy(states[1]))
    if divides:
        ddp.sharded_step(optimizer, **{**SPLIT, **more})
    if states is not None and not first:
        optimizer.load_state_dict(copy.deepcopy(states[1]))
    return ddp, optimizer


@pytest.mark.parametrize(("name", "first"), combined(OPTIMIZERS, [False, True]))
@on_ranks(2, 3)
def test_the_whole_state_is_that_of_a_plain_loop(ctx, name, first):
    ddp, optimizer = made(ctx, name)
    plain, its = made(ctx, name, divides=False)
    if ctx.world_size == 2:
        assert same(train(ddp, optimizer, range(3)), train(plain, its, range(3)))
    else:  # the plain loop adds up in another order
        train(ddp, optimizer, range(3))
    state = ddp.whole_optimizer_state(optimizer, to=1)
    assert (state is None) == (ctx.rank != 1)
    if state is not None and ctx.world_size == 2:
        assert same(state["state"], its.state_dict()["state"])
        assert same(state["param_groups"], its.state_dict()["param_groups"])
    states = [ddp.module.state_dict(), ddp.whole_optimizer_state(optimizer)]
    states = everybody(ctx, states)
    end = train(ddp, optimizer, range(3, 6))
    loaded = {"states": states, "first": first}
    assert same(end, train(*made(ctx, name, **loaded), range(3, 6)))
    whole = made(ctx, name, split_from_mb=None, **loaded)
    assert same(end, train(*whole, range(3, 6)))
    if ctx.rank == 0:  # on another number of ranks
        group = ctx.subgroups[0,]
        for divides in (False, True):
            alone = made(ctx, name, group=group, divides=divides, **loaded)
            found = train(*alone, range(3, 6))
            if ctx.world_size == 2:
                assert same(end, found)
            else:
                torch.testing.assert_close(end, found)
    return end


@on_ranks(2)
def test_each_rank_loads_its_own_share(ctx):
    ddp, optimizer = made(ctx, "adamw")
    train(ddp, optimizer, range(3))
    states = copy.deepcopy([ddp.module.state_dict(), optimizer.state_dict()])
    end = train(ddp, optimizer, range(3, 6))
    assert same(end, train(*made(ctx, "adamw", states=states), range(3, 6)))
    with pytest.raises(ShardedStepError, match="the share of one rank"):
        made(ctx, "adamw", states=states, split_from_mb=None)
    states = everybody(ctx, states)
    if ctx.rank == 1:
        with pytest.raises(ShardedStepError, match="the share of rank 0 of 2"):
            optimizer.load_state_dict(states[1])
    return end


@pytest.mark.parametrize(("name", "where"), combined(OPTIMIZERS, [2, 3]))
@on_ranks()
def test_a_distributed_checkpoint(ctx, tmp_path, name):
    folder = folder_of(ctx, tmp_path)
    ddp, optimizer = made(ctx, name)
    train(ddp, optimizer, range(3))
    optimizer.param_groups[0]["lr"] *= 0.5
    save(ddp, optimizer, folder)
    end = train(ddp, optimizer, range(3, 6))
    for more in (SPLIT, {"split_from_mb": None}, {"divides": False}):
        again = made(ctx, name, **more)
        load(*again, folder)
        found = train(*again, range(3, 6))
        if ctx.world_size == 2 or more is SPLIT:
            assert same(end, found)
        else:
            torch.testing.assert_close(end, found)
        if more is SPLIT:
            assert same(again[1].state_dict(), optimizer.state_dict())
    return end


@pytest.mark.parametrize("name", ["adamw", "groups"])
@on_ranks(3)
def test_a_distributed_checkpoint_on_other_ranks(ctx, tmp_path, name):
    """Saved by two ranks, by three, and by one; loaded by all of these."""
    groups = {1: (0,), 2: (0, 1), 3: (0, 1, 2)}
    folder = folder_of(ctx, tmp_path)
    ends = {}
    for size, ranks in groups.items():
        if ctx.rank in ranks:
            ddp, optimizer = made(ctx, name, group=ctx.subgroups[ranks])
            train(ddp, optimizer, range(3))
            save(ddp, optimizer, f"{folder}{size}")
            ends[size] = train(ddp, optimizer, range(3, 6))
    torch.distributed.barrier(ctx.group)
    for saved in groups:
        for ranks in groups.values():
            if ctx.rank in ranks:
                again = made(ctx, name, group=ctx.subgroups[ranks])
                load(*again, f"{folder}{saved}")
                found = train(*again, range(3, 6))
                if saved in ends:
                    torch.testing.assert_close(found, ends[saved])
                    if len(ranks) == saved:
                        assert same(found, ends[saved])
        torch.distributed.barrier(ctx.group)


@on_ranks(2)
def test_a_checkpoint_that_is_written_while_the_training_goes_on(ctx, tmp_path):
    folder = folder_of(ctx, tmp_path)
    ddp, optimizer = made(ctx, "adamw")
    train(ddp, optimizer, range(3))
    state = state_of(ddp, optimizer)
    group = torch.distributed.new_group([0, 1], use_local_synchronization=True)
    future = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    end = train(ddp, optimizer, range(3, 6))
    future.result(timeout=20)
    again = made(ctx, "adamw")
    load(*again, folder)
    assert same(end, train(*again, range(3, 6)))


class Blocks(torch.optim.Optimizer):
    """Keeps a number of each column, and so is not elementwise."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["columns"] = p.grad.sum(0)


@on_ranks(2)
def test_a_state_that_has_no_rows(ctx):
    net = nn.Linear(4, 6, bias=False)
    ddp = DataParallel(net, process_group=ctx.group)
    optimizer = Blocks(net.parameters())
    ddp.sharded_step(optimizer, elementwise=True, split_from_mb=0)
    ddp(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(ShardedStepError, match="nobody knows how to divide"):
        ddp.whole_optimizer_state(optimizer)
    with pytest.raises(ShardedStepError, match="nobody knows how to divide"):
        ddp.sharded_optimizer_state(optimizer).state_dict()
