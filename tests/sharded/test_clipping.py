"""`clip_grad_norm_` of divided steps has the bits of torch's, and needs all ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from minidp import DataParallel
from minidp.errors import ShardedStepError
from tests.support.both import same
from tests.support.ranks import on_ranks


class Mixed(nn.Module):
    """Layers of several dtypes, and one of float64 that is not always used."""

    def __init__(self):
        super().__init__()
        self.usual = nn.Linear(4, 6)
        self.short = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.long = nn.Linear(6, 6, dtype=torch.float64)
        self.wave = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.last = nn.Linear(6, 4)

    def forward(self, x, *, with_double):
        x = torch.tanh(self.usual(x))
        x = x + self.short(x.bfloat16()).float() + (x * self.wave).abs()
        if with_double:
            x = x + self.long(x.double()).float()
        return self.last(x)


def clip(ddp, *args, **kwargs):
    if isinstance(ddp, DataParallel):
        return ddp.clip_grad_norm_(*args, **kwargs)
    return clip_grad_norm_(ddp.parameters(), *args, **kwargs)


def train(ctx, kind, norm_type, foreach):
    torch.manual_seed(0)
    ddp = kind(Mixed(), process_group=ctx.group, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    if kind is DataParallel:
        ddp.sharded_step(optimizer)
    norms = []
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + ctx.rank)
        x = torch.randn(5, 4, generator=generator)
        ddp(x, with_double=step % 2 == 1).square().mean().backward()
        norms.append(clip(ddp, 0.1 if step else 1e9, norm_type, False, foreach))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in ddp.parameters()], norms


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1, math.inf, "inf", 3.0, 0.5])
@on_ranks(2)
def test_bits_with_several_dtypes(ctx, norm_type, foreach):
    theirs = train(ctx, DistributedDataParallel, norm_type, foreach)
    ours = train(ctx, DataParallel, norm_type, foreach)
    assert same(theirs, ours)
    return ours


def made(ctx, net=None):
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    ddp = DataParallel(net, process_group=ctx.group, hang_timeout=10.0)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    ddp.sharded_step(optimizer)
    return ddp, optimizer


def backward(ctx, ddp, seed=0):
    generator = torch.Generator().manual_seed(10 * seed + ctx.rank)
    ddp(torch.randn(3, 4, generator=generator)).square().mean().backward()


def params_of(ddp):
    return [p.detach().clone() for p in ddp.parameters()]


def goes_on(ctx, ddp, optimizer):
    ddp.reset()
    optimizer.zero_grad()
    backward(ctx, ddp, 7)
    ddp.clip_grad_norm_(0.1)
    optimizer.step()
    return params_of(ddp)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("instead", ["step", "backward"])
@on_ranks(2)
def test_one_rank_that_clips_alone(ctx, steps, instead):
    ddp, optimizer = made(ctx)
    for number in range(steps):
        backward(ctx, ddp, number)
        optimizer.step()
        optimizer.zero_grad()
    before = params_of(ddp)
    backward(ctx, ddp, 5)

    def acts():
        if ctx.rank == 0:
            ddp.clip_grad_norm_(0.1)
        elif instead == "step":
            optimizer.step()
        else:
            optimizer.zero_grad()
            backward(ctx, ddp, 6)

    with pytest.raises(ShardedStepError, match="others do not") as error:
        acts()
    does = "steps" if instead == "step" else "does not"
    assert f"rank 1 {does}" in str(error.value)
    assert "rank 0 clips" in str(error.value)
    assert all(map(torch.equal, before, params_of(ddp)))
    return goes_on(ctx, ddp, optimizer)


@on_ranks(2)
def test_ranks_that_clip_to_different_norms(ctx):
    ddp, optimizer = made(ctx)
    backward(ctx, ddp)
    with pytest.raises(ShardedStepError, match="unequal arguments"):
        ddp.clip_grad_norm_(1.0 + ctx.rank)
    return goes_on(ctx, ddp, optimizer)


@on_ranks(2)
def test_local_gradients_are_not_clipped_by_it(ctx):
    ddp, optimizer = made(ctx)
    with ddp.no_sync():
        backward(ctx, ddp)
        with pytest.raises(ShardedStepError, match="No rank clips, because"):
            ddp.clip_grad_norm_(1.0)
    return goes_on(ctx, ddp, optimizer)


class WithEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) + self.empty.sum()


@on_ranks(2)
def test_a_norm_that_torch_cannot_calculate(ctx):
    """One rank has the empty gradient; both raise, and may go on as with torch."""
    ddp, optimizer = made(ctx, WithEmpty())
    backward(ctx, ddp)
    with pytest.raises(RuntimeError, match="cannot be calculated"):
        ddp.clip_grad_norm_(1.0, math.inf)
    ddp.clip_grad_norm_(1.0)
    optimizer.step()
    return params_of(ddp)


@on_ranks(2)
def test_a_norm_that_is_not_finite(ctx):
    ddp, optimizer = made(ctx)
    (ddp(torch.ones(1, 4)).sum() * torch.inf).backward()
    with pytest.raises(RuntimeError, match="total norm of order"):
        ddp.clip_grad_norm_(1.0, error_if_nonfinite=True)
    optimizer.zero_grad()
    backward(ctx, ddp)
    ddp.clip_grad_norm_(1.0, error_if_nonfinite=True)
    optimizer.step()
    return params_of(ddp)
