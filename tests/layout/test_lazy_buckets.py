"""lazy_bucket_allocation: buckets take memory only while a backward needs them.

That no gradient changes: `tests/gradients/`, in random trainings and with each feature.
"""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import torch
from torch import nn

from minidp import DataParallel
from tests.support.both import grads, history_of, same, wrapped
from tests.support.ranks import on_ranks

SIZES = (3, 31, 37, 5)  # nothing else has as many bytes as all these
BYTES = 4 * sum((n + 1) * m for n, m in pairwise(SIZES))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(n, m) for n, m in pairwise(SIZES)])


def buffers() -> int:
    """Count buckets, by the storages that have their size."""
    gc.collect()  # what other tests have left
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    dense = [each for each in tensors if each.layout is torch.strided]
    storages = [each.untyped_storage() for each in dense]
    return len({s.data_ptr() for s in storages if s.nbytes() == BYTES})


@pytest.mark.parametrize("view", [False, True])
def test_where_the_memory_is(lone_group, view):
    """None before a backward and after it, but for gradients that are views."""
    x, modes = torch.ones(2, 3), {"gradient_as_bucket_view": view}
    assert buffers() == 0
    usual = DataParallel(net(), **modes)
    assert buffers() == 1
    del usual
    ddp = DataParallel(net(), lazy_bucket_allocation=True, **modes)
    for step in range(3):
        assert buffers() == 0
        out = ddp(x).sum()
        assert buffers() == 0
        out.backward()
        assert buffers() == view
        ddp.zero_grad(set_to_none=step < 2)
    assert buffers() == view  # zeroed in place: .grad are views of the last buffer
    ddp(x).sum().backward()
    assert buffers() == view  # moved to a new one


@on_ranks(2)
def test_it_survives_what_happens_to_buckets(ctx):
    """A rebuild, a paused backward, reset(), items, and zeros for others' buckets."""
    options = {"lazy_bucket_allocation": True, "average_over": "items"}
    ddp = wrapped(ctx, net(), **options)
    alike = wrapped(ctx, net(), average_over="items")
    x = torch.linspace(-1, 1, 6).reshape(2, 3) * (ctx.rank + 1)
    for _ in range(3):
        for each in (ddp, alike):
            each.zero_grad()
            each.weigh_loss(each(x).mean(), ctx.rank + 1).backward()
        assert same(grads(ddp), grads(alike))
    zeros = ddp.reducer._get_zeros_like_grad_buckets()
    assert sum(each.buffer().numel() for each in zeros) * 4 >= BYTES
    ddp.weigh_loss(ddp(x).mean(), 1)
    ddp.reset()
    ddp.zero_grad()
    alike.zero_grad()
    for each in (ddp, alike):
        each.weigh_loss(each(x).mean(), ctx.rank + 1).backward()
    assert same(grads(ddp), grads(alike))
    return grads(ddp)


@on_ranks(2)
def test_a_hook_that_runs_later_changes_no_average(ctx):
    """A bucket has what was in ``.grad`` when our hook ran, as with usual buckets."""
    x = torch.linspace(-1, 1, 6).reshape(2, 3) * (ctx.rank + 1)
    histories, nodes = [], []

    def enlarge(p: nn.Parameter) -> None:
        p.grad.mul_(5.0)

    for lazy in (False, True):
        ddp = wrapped(ctx, net(), lazy_bucket_allocation=lazy)
        for param in ddp.parameters():
            nodes.append(node := torch.autograd.graph.get_gradient_edge(param).node)
            node.register_hook(lambda _i, _o, p=param: enlarge(p))
        histories.append(history_of(ddp, lambda _, ddp=ddp: ddp(x).sum()))
    assert same(*histories)
