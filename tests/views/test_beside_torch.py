"""Gradients that are views of their buckets: addresses, copies and bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minidp import DataParallel
from tests.support.both import grads, same, wrapped
from tests.support.ranks import on_ranks


# Torch 2.12 says so, though there is one cycle.
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
@pytest.mark.parametrize("batched", [False, True])
def test_gradients_are_copied_back_in_one_call(lone_group, batched):
    """Per bucket, as torch 2.15 does with ``batched_grad_copy``; here in any case."""
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(20)])
    ddp = DataParallel(net, batched_grad_copy=batched)
    ddp(torch.ones(1, 3)).sum().backward()
    loss = ddp(torch.ones(1, 3)).sum()
    with torch.profiler.profile() as profile:
        loss.backward()
    copies = [event for event in profile.events() if "copy" in event.name]
    together = [each for each in copies if each.name == "aten::_foreach_copy_"]
    alone = [each for each in copies if each.cpu_parent not in together]
    assert len(together) <= 2  # into the bucket, and back
    assert len([each for each in alone if each not in together]) < 5


def test_gradients_are_views_with_stable_addresses(lone_group):
    conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    net = nn.Sequential(conv, nn.Flatten())
    ddp, addresses = DataParallel(net, gradient_as_bucket_view=True), []
    for step in range(4):
        ddp.zero_grad(set_to_none=step % 2 == 0)
        ddp(torch.randn(1, 2, 3, 3)).sum().backward()
        bucket, weight = ddp._reducer.queue.buckets[0], conv.weight
        for p, view in zip(bucket.params, bucket.views, strict=True):
            assert p.grad is view
        assert weight.grad.stride() == weight.stride()
        addresses.append(weight.grad.data_ptr())
    assert len(set(addresses[1:])) == 1  # buckets are rebuilt after the first


@on_ranks(3)
def test_globally_unused_gradient_views_do_not_drift(ctx):
    """Torch re-averages them in place, which changes bits at three ranks."""
    net = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    ddp = wrapped(ctx, net, **options)
    x = torch.randn(2, 50, generator=torch.Generator().manual_seed(ctx.rank))
    ddp(x).pow(2).sum().backward()
    before = grads(net[1])
    net[1].forward = lambda y: y
    for _ in range(3):
        ddp(x).pow(2).sum().backward()
    assert same(before, grads(net[1]))
