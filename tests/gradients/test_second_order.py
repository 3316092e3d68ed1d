"""Gradients of gradients: ``create_graph`` and penalties."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.both import grads, modes, on_both, same, wrapped
from tests.support.ranks import on_ranks


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("view", [False, True])
def test_create_graph(ctx, view):
    """First and second order; torch fails as soon as two gradients share a bucket."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    alone = copy.deepcopy(net)
    ddp = wrapped(ctx, net, gradient_as_bucket_view=view, init_sync=False)
    size, history = ctx.world_size, []

    def local(x: torch.Tensor, **options: bool) -> Any:
        loss = alone(x).pow(2).sum()
        return torch.autograd.grad(loss, alone.parameters(), **options)

    def second_of(first: Any, module: nn.Module, divisor: int) -> Any:
        total = sum((g * w).sum() for g, w in zip(first, weights, strict=True))
        params = list(module.parameters())
        return torch.autograd.grad(total / divisor, params, allow_unused=True)

    for step in range(3):
        x = torch.linspace(-1, 1, 6).reshape(2, 3)
        inputs = [x * (rank + 1 + step) for rank in range(size)]
        ddp(inputs[ctx.rank]).pow(2).sum().backward(create_graph=True)
        mean = [sum(g) / size for g in zip(*map(local, inputs), strict=True)]
        averaged = [p.grad for p in ddp.parameters()]
        # The history of an averaged gradient is this rank's alone, scaled.
        own = local(inputs[ctx.rank], create_graph=True)
        weights = [m.detach() for m in mean]
        second, oracle = second_of(averaged, ddp, 1), second_of(own, alone, size)
        for found, expected in zip((*averaged, *second), (*mean, *oracle), strict=True):
            if expected is not None:
                torch.testing.assert_close(found.detach(), expected)
        history.append([g.detach().clone() for g in averaged])
        for p in ddp.parameters():
            p.grad = None
    return history


def penalised(ctx, wrap, mode, ranks):
    ddp = wrap(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), **mode)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    history = []
    for step in range(3):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 6).reshape(2, 3) * (ctx.rank + 1 + step)
        x.requires_grad_()
        out = ddp(x)
        loss = out.mean()
        if ctx.rank in ranks:
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = loss + slope.pow(2).sum()
        loss.backward()
        history.append(grads(ddp))
        optimizer.step()
    return history


@on_ranks(2)
@modes
@pytest.mark.parametrize("ranks", [[0, 1], [0]])
def test_gradient_penalty(ctx, mode, ranks):
    """``torch.autograd.grad`` through the outputs is no backward of ours."""
    if "static_graph" in mode:  # torch drifts, and desynchronises its collectives
        return penalised(ctx, partial(wrapped, ctx), mode, ranks)
    theirs, ours = on_both(ctx, penalised, mode, ranks)
    assert same(theirs, ours)
    assert isinstance(ours, list)
    return ours
