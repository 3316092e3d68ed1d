"""Parameters that two wrappers share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.both import error_of, grads, wrapped
from tests.support.ranks import as_in_torch, on_ranks


class Head(nn.Module):
    """Has a layer of its own, and one that it may share with another `Head`."""

    def __init__(self, shared: nn.Module, *, comes_first: bool) -> None:
        super().__init__()
        layers = {"own": nn.Linear(16, 4), "shared": shared}
        for name in sorted(layers, reverse=comes_first):
            self.add_module(name, layers[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(torch.tanh(self.shared(x)))


STATIC = {"static_graph": True}


PAIRS = [
    ({}, STATIC),
    (STATIC, {}),
    (STATIC, STATIC),
    (STATIC, {"find_unused_parameters": True}),
    ({}, {"find_unused_parameters": True}),
]


@as_in_torch(3)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("swaps_wraps", [False, True])
@pytest.mark.parametrize("swaps_forwards", [False, True])
def test_one_backward_of_two_wrappers(ctx, wrap, pair, swaps_wraps, swaps_forwards):
    """Each averages the shared layer; which of them writes ``.grad`` last, shows.

    The layer lies in other places of their buckets, so that three ranks add up its
    elements in another order.
    """
    shared = nn.Linear(8, 16)
    heads = [Head(shared, comes_first=is_first) for is_first in (True, False)]
    wrapped: list[Any] = [None, None]
    for k in (1, 0) if swaps_wraps else (0, 1):
        wrapped[k] = wrap(heads[k], **pair[k])
    random = torch.Generator().manual_seed(ctx.rank)
    history = []
    for _ in range(3):
        losses = [torch.zeros(())] * 2
        for k in (1, 0) if swaps_forwards else (0, 1):
            wrapped[k].zero_grad()
            x = torch.randn(5, 8, generator=random)
            losses[k] = wrapped[k](x).square().mean()
        sum(losses).backward()
        history.append([grads(head) for head in heads])
    return history


VIEWS = {"gradient_as_bucket_view": True}


@on_ranks(2)
@pytest.mark.parametrize(
    "pair", [({}, VIEWS), (VIEWS, VIEWS), (VIEWS, STATIC)], ids=str
)
@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("is_one", [True, False], ids=["one backward", "two"])
def test_views_of_two_wrappers(ctx, pair, swaps, is_one):
    """Garbage with torch's DDP, if one backward has both; right in a backward each."""
    shared = nn.Linear(8, 16)
    heads = [Head(shared, comes_first=is_first) for is_first in (True, False)]
    pairs = list(zip(heads, pair, strict=True))
    models = [wrapped(ctx, head, **mode) for head, mode in pairs[:: -1 if swaps else 1]]
    x = torch.randn(5, 8)
    losses = [lambda model=model: model(x).square().mean() for model in models]
    if is_one:
        error = error_of(lambda: sum(loss() for loss in losses).backward())
        assert error.startswith(
            f"GradientError: [rank {ctx.rank}] Two wrappers averaged"
        )
        assert "Parameters: shared.weight, shared.bias." in error
        for model in models:
            model.reset()
            model.zero_grad()
    if pair[0] != {}:
        return  # torch refuses two that have views
    alone = copy.deepcopy(nn.ModuleList(heads))
    for _ in range(3):
        alone.zero_grad()
        for model in models:
            model.zero_grad()
        for loss in losses:
            loss().backward()
        sum(head(x).square().mean() for head in alone).backward()
        for ours, theirs in zip(heads, alone, strict=True):
            for a, b in zip(grads(ours), grads(theirs), strict=True):
                assert torch.allclose(a, b)
