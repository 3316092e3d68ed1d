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


class Branches(nn.Module):
    """Two layers, one in each forward: they have different owners."""

    def __init__(self, *, has_one=False):
        super().__init__()
        self.left = nn.Linear(4, 4, bias=False)
        self.right = self.left if has_one else nn.Linear(4, 4, bias=False)

    def forward(self, x, *, goes_left):
        return self.left(x) if goes_left else self.right(x)


def train_branches(ctx, ours, branches, *, fused, clips, to_none):
    torch.manual_seed(0)
    net = Branches(has_one=branches == "one")
    kind = DataParallel if ours else DistributedDataParallel
    ddp = kind(net, process_group=ctx.group, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01, fused=fused)
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=3)
    if ours:
        ddp.sharded_step(optimizer, grad_scaler=scaler)
    seen = []
    for step in range(8):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        loss = ddp(x * (1 + ctx.rank), goes_left=step % 3 != 1).square().mean()
        scaler.scale(loss * (torch.inf if step in (2, 4) else 1.0)).backward()
        if clips:
            scaler.unscale_(optimizer)
            clip = ddp.clip_grad_norm_ if ours else clip_of(ddp)
            seen.append(clip(0.1).nan_to_num(-1.0))
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
        optimizer.zero_grad(set_to_none=to_none)
    return [p.detach().clone() for p in net.parameters()], seen


def clip_of(ddp):
    return lambda max_norm: clip_grad_norm_(ddp.parameters(), max_norm)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(("fused", "clips"), [(False, False), (False, True), (True, 0)])
@pytest.mark.parametrize("branches", ["two", "one"])
@on_ranks(2)
def test_a_share_without_gradients(ctx, branches, fused, clips, to_none):
    """One rank has no gradient in a step, or owns no parameter at all."""
    how = {"fused": fused, "clips": clips, "to_none": to_none}
    theirs = train_branches(ctx, False, branches, **how)
    ours = train_branches(ctx, True, branches, **how)
    assert same(theirs, ours)
    return ours
