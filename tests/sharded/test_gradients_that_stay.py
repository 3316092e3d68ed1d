"""Own gradients are added up in ``.grad``: what else might read or write there?

The extension does so in shared memory. Everywhere else the same must come out.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel
from minidp.errors import GradientError, NonFiniteGradientError
from tests.support.ranks import on_ranks

SMALL = {"bucket_cap_mb": 0.0001}  # a bucket for each parameter


class Sums(nn.Module):
    """Both gradients of a sum are one tensor, and have one owner: `a` and `c`."""

    def __init__(self, *, views=False):
        super().__init__()
        self.views = views
        self.a, self.b, self.c, self.d = (
            nn.Parameter(torch.full((6, 10), float(k))) for k in range(4)
        )

    def forward(self, x):
        if self.views:
            a, b, c, d = (p.view(-1) for p in (self.a, self.b, self.c, self.d))
            x = x.view(-1)
        else:
            a, b, c, d = self.a, self.b, self.c, self.d
        return (((a + c) * x).sum() + ((b + d) * x * x).sum()).square()


def divided(ctx, net, **options):
    ddp = DataParallel(net, process_group=ctx.group, **options)
    optimizer = torch.optim.SGD(net.parameters(), 0.001, momentum=0.9)
    ddp.sharded_step(optimizer)
    return ddp, optimizer


def inputs(ctx, step):
    generator = torch.Generator().manual_seed(10 * step + ctx.rank)
    return torch.randn(6, 10, generator=generator)


def adds_up_in_place(ddp):
    bucket = ddp._reducer.queue.buckets[0]
    return bucket.native is not None and bucket.shared is not None


@pytest.mark.parametrize("options", [{}, SMALL], ids=["one", "many"])
@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_gradients_in_one_memory(ctx, views, options):
    nets = Sums(views=views), Sums(views=views)
    theirs = DistributedDataParallel(nets[0], process_group=ctx.group)
    ours, optimizer = divided(ctx, nets[1], **options)
    other = torch.optim.SGD(nets[0].parameters(), 0.001, momentum=0.9)
    for step in range(4):
        for ddp, each in ((theirs, other), (ours, optimizer)):
            ddp(inputs(ctx, step)).backward()
            each.step()
            each.zero_grad()
    for mine, wanted in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("options", [{}, SMALL], ids=["one", "many"])
@on_ranks(2)
def test_a_pause_in_which_gradients_are_zeroed(ctx, options):
    """The second backward brings the rest. What came before has been sent already."""
    found = []
    for is_divided in (False, True):
        net = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
        for k, param in enumerate(net.parameters()):
            nn.init.constant_(param, 0.1 * k)
        net.forward = lambda x, net=net: (net[2](net[3](x)), net[0](net[1](x)))
        if is_divided:
            ddp, optimizer = divided(ctx, net, **options)
        else:
            ddp = DataParallel(net, process_group=ctx.group, **options)
            optimizer = torch.optim.SGD(net.parameters(), 0.001, momentum=0.9)
        for step in range(4):
            x = inputs(ctx, step)[:, :5]
            first, second = ddp(x)
            first.square().sum().backward()
            with torch.no_grad():
                for param in net.parameters():
                    if param.grad is not None:
                        param.grad.zero_()
            second.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([param.detach().clone() for param in net.parameters()])
    for plain, mine in zip(*found, strict=True):
        assert torch.equal(plain, mine)


@on_ranks(2)
def test_a_gradient_that_is_changed_on_its_way(ctx):
    net = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    ddp, optimizer = divided(ctx, net, **SMALL)
    for step in range(2):
        ddp(inputs(ctx, step)[:, :5]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if not adds_up_in_place(ddp):
        return  # the buffer has it already

    def change(_):
        for param in net[2:].parameters():  # of both ranks
            if param.grad is not None:
                param.grad.mul_(2)

    net[0].weight.register_hook(change)
    with pytest.raises(
        GradientError, match=r"changed in place while.*Parameters: [23]\."
    ):
        ddp(inputs(ctx, 2)[:, :5]).sum().backward()


@on_ranks(2)
def test_a_nan_in_the_own_share_is_found(ctx):
    ddp, optimizer = divided(ctx, Sums(), check_finite_grads=True)
    for step in range(2):
        ddp(inputs(ctx, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    x = inputs(ctx, 2)
    x[0, 0] = torch.nan
    with pytest.raises(NonFiniteGradientError, match="Parameters: b, d, a, c"):
        ddp(x).backward()


@on_ranks(2)
def test_gradients_of_others_are_freed_in_the_backward(ctx):
    """What belongs to other ranks is in shared memory when its hook is over."""
    net = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(4)))
    ddp, optimizer = divided(ctx, net)
    for step in range(2):
        ddp(inputs(ctx, step)[:, :5]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    grads, alive = {}, []

    def note(k):
        def hook(param):
            grads[k] = weakref.ref(param.grad)

        return hook

    for k, layer in enumerate(net):
        layer.weight.register_post_accumulate_grad_hook(note(k))
    net[0].weight.register_hook(
        lambda _: alive.extend(k for k, grad in grads.items() if grad() is not None)
    )
    ddp(inputs(ctx, 2)[:, :5]).sum().backward()
    own = [k for k, layer in enumerate(net) if layer.weight.grad is not None and k]
    assert sorted(alive) == (own if adds_up_in_place(ddp) else [1, 2, 3])
    assert len(own) in (1, 2)
