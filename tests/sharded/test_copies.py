"""Copies of a wrapper and its divided optimizer: what may be done with them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel
from minidp.errors import ShardedStepError
from tests.support.both import same
from tests.support.ranks import on_ranks


def adam(ps):
    return torch.optim.Adam(ps, 0.01)


def sgd(ps):
    return torch.optim.SGD(ps, 0.1)


def net_of(seed, layers=3):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(4, 4, bias=layers > 1) for _ in range(layers)))


def step(ctx, ddp, optimizer, seed):
    generator = torch.Generator().manual_seed(10 * seed + ctx.rank)
    ddp(torch.randn(3, 4, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def divided(ctx, make, steps, layers=3):
    ddp = DataParallel(net_of(0, layers), process_group=ctx.group, hang_timeout=10.0)
    optimizer = make(ddp.parameters())
    ddp.sharded_step(optimizer)
    for number in range(steps):
        step(ctx, ddp, optimizer, number)
    return ddp, optimizer


def plain(ctx, make, steps):
    net = net_of(0)
    ddp = DistributedDataParallel(net, process_group=ctx.group)
    optimizer = make(net.parameters())
    for number in range(steps):
        step(ctx, ddp, optimizer, number)
    return params_of(ddp)


def params_of(ddp):
    return [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("layers", [3, 1])  # with one, rank 0 owns everything
@on_ranks(2)
def test_the_step_of_a_copy_is_refused(ctx, layers):
    ddp, optimizer = divided(ctx, adam, 3, layers)
    twin, copied = copy.deepcopy((ddp, optimizer))
    before = params_of(twin)
    with pytest.raises(ShardedStepError, match="A copy of a divided Adam steps"):
        step(ctx, twin, copied, 5)
    assert all(map(torch.equal, before, params_of(twin)))
    step(ctx, ddp, optimizer, 6)  # the original goes on
    return params_of(ddp)


@on_ranks(2)
def test_a_copy_for_an_evaluation(ctx):
    ddp, optimizer = divided(ctx, adam, 3)
    twin, _ = copy.deepcopy((ddp, optimizer))
    if ctx.rank == 0:
        with torch.no_grad():
            assert twin(torch.ones(1, 4)).isfinite().all()
    step(ctx, ddp, optimizer, 3)
    found = params_of(ddp)
    assert same(found, plain(ctx, adam, 4))
    return found


@on_ranks(2)
def test_a_copy_that_is_divided_goes_on(ctx):
    ddp, optimizer = divided(ctx, adam, 3)
    twin, copied = copy.deepcopy((ddp, optimizer))
    twin.sharded_step(copied)
    for number in (3, 4):
        step(ctx, twin, copied, number)
    found = params_of(twin)
    assert same(found, plain(ctx, adam, 5))
    again = copy.deepcopy((twin, copied))
    with pytest.raises(ShardedStepError, match="A copy of a divided Adam steps"):
        step(ctx, *again, 5)
    return found


@on_ranks(2)
def test_a_copy_with_the_whole_state_goes_on(ctx):
    ddp, optimizer = divided(ctx, adam, 3)
    twin, copied = copy.deepcopy((ddp, optimizer))
    states = [ddp.whole_optimizer_state(optimizer, to=rank) for rank in range(2)]
    copied.load_state_dict(states[ctx.rank])
    for number in (3, 4):
        step(ctx, twin, copied, number)
    found = params_of(twin)
    assert same(found, plain(ctx, adam, 5))
    return found


@pytest.mark.parametrize(("make", "steps"), [(sgd, 3), (adam, 0)])
@on_ranks(2)
def test_a_copy_that_lacks_no_state_goes_on(ctx, make, steps):
    ddp, optimizer = divided(ctx, make, steps)
    twin, copied = copy.deepcopy((ddp, optimizer))
    for number in range(steps, steps + 2):
        step(ctx, twin, copied, number)
    found = params_of(twin)
    assert same(found, plain(ctx, make, steps + 2))
    return found


@on_ranks(2)
def test_a_copy_that_is_divided_otherwise(ctx):
    ddp, optimizer = divided(ctx, adam, 3)
    net, copied = copy.deepcopy((ddp.module, optimizer))
    net[2].requires_grad_(False)
    twin = DataParallel(net, process_group=ctx.group)
    with pytest.raises(ShardedStepError, match="copy of a share"):
        twin.sharded_step(copied)


@on_ranks(2)
def test_a_pickled_optimizer(ctx):
    _ddp, optimizer = divided(ctx, adam, 2)
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    copied = torch.load(file, weights_only=False)
    for group in copied.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    with pytest.raises(ShardedStepError, match="A copy of a divided Adam steps"):
        copied.step()


@on_ranks(2)
def test_copies_when_the_wrapper_is_gone(ctx):
    ddp, optimizer = divided(ctx, sgd, 2)
    del ddp
    copied = copy.deepcopy(optimizer)
    assert "minidp_share" not in vars(copied)
