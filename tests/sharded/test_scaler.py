"""With a GradScaler all ranks skip a step if one of them has to, as on torch's DDP."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from minidp import DataParallel
from minidp.errors import ShardedStepError
from tests.support.both import same
from tests.support.ranks import on_ranks


def train(ctx, ours, *, fused, clips):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 4))
    kind = DataParallel if ours else DistributedDataParallel
    ddp = kind(net, process_group=ctx.group)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01, fused=fused)
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=3)
    if ours:
        ddp.sharded_step(optimizer, grad_scaler=scaler)
    scales = []
    for step in range(8):
        generator = torch.Generator().manual_seed(10 * step + ctx.rank)
        x = torch.randn(3, 4, generator=generator)
        loss = ddp(x).square().mean()
        overflows = step in (1, 4) and ctx.rank == step % 2
        factor = torch.inf if overflows else 1.0  # of one parameter only
        handle = net[-1].weight.register_hook(lambda grad, f=factor: grad * f)
        scaler.scale(loss).backward()
        handle.remove()
        if clips:
            scaler.unscale_(optimizer)
            if ours:
                ddp.clip_grad_norm_(0.1)
            else:
                clip_grad_norm_(ddp.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()], scales


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@on_ranks(2)
def test_steps_are_skipped_together(ctx, fused, clips):
    theirs = train(ctx, False, fused=fused, clips=clips)
    ours = train(ctx, True, fused=fused, clips=clips)
    assert same(theirs, ours)
    assert ours[1] == [256.0, 128.0, 128.0, 128.0, 64.0, 64.0, 64.0, 128.0]
    return ours


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_clipping_by_one_share_is_still_found(ctx, fused):
    net = nn.Linear(4, 4)
    ddp = DataParallel(net, process_group=ctx.group)
    optimizer = torch.optim.AdamW(net.parameters(), fused=fused)
    scaler = GradScaler("cpu")
    ddp.sharded_step(optimizer, grad_scaler=scaler)
    scaler.scale(ddp(torch.ones(1, 4)).sum()).backward()
    if not fused:
        scaler.unscale_(optimizer)
    clip_grad_norm_(ddp.parameters(), 1.0)
    with pytest.raises(ShardedStepError, match=r"model\.clip_grad_norm_"):
        scaler.step(optimizer)


@on_ranks(2)
def test_a_scaler_of_which_nobody_knows(ctx):
    """A fused step skips itself on one rank; another step is left out there."""
    for fused in (True, False):
        net = nn.Linear(4, 4)
        ddp = DataParallel(net, process_group=ctx.group, hang_timeout=10.0)
        optimizer = torch.optim.AdamW(net.parameters(), fused=fused)
        ddp.sharded_step(optimizer)
        scaler = GradScaler("cpu")
        scaler.scale(ddp(torch.ones(1, 4)).sum()).backward()
        for grad in (net.weight.grad, net.bias.grad):
            if grad is not None and ctx.rank:
                grad.data.fill_(torch.inf)
        with pytest.raises(ShardedStepError, match="grad_scaler=scaler"):
            scaler.step(optimizer) or ddp(torch.ones(1, 4)).sum().backward()


@on_ranks(2)
def test_a_rank_without_parameters_is_refused(ctx):
    net = nn.Linear(4, 4, bias=False)
    ddp = DataParallel(net, process_group=ctx.group)
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(ValueError, match="owns no parameter"):
        ddp.sharded_step(optimizer, grad_scaler=GradScaler("cpu"))
