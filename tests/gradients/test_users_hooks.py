"""Hooks of the user on parameters and on nodes of the graph, before and after ours."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.both import MODES, Scalars, history_of, modes, x_of
from tests.support.ranks import as_in_torch

HOOKS = [("", "n"), ("n", ""), ("tp", "tp"), ("p", "pn"), ("tn", "tp"), ("", "nn")]


# With views a late node hook would write to a buffer that is on its way, in torch too.
HOOKS_AND_MODES = [
    (before, after, mode)
    for (before, after), mode in itertools.product(HOOKS, MODES)
    if "n" not in after or "gradient_as_bucket_view" not in mode
]


@as_in_torch(3)
@pytest.mark.parametrize(("before", "after", "mode"), HOOKS_AND_MODES)
def test_hooked(ctx, wrap, before, after, mode):
    """Large and small gradients, scaled by tensor, post-accumulate and node hooks."""
    module = nn.Sequential(nn.Linear(3, 130), nn.Linear(130, 130))
    keep: list[Any] = []

    def install(kinds: str, factor: float) -> None:
        def scale(p: nn.Parameter) -> None:
            p.grad.mul_(factor)

        for param in module.parameters():
            node = torch.autograd.graph.get_gradient_edge(param).node
            for kind in kinds:
                if kind == "t":
                    param.register_hook(lambda g: g * factor)
                if kind == "p":
                    param.register_post_accumulate_grad_hook(scale)
                if kind == "n":
                    keep.append(node)
                    node.register_hook(lambda _i, _o, p=param: scale(p))

    install(before, 3.0)
    ddp = wrap(module, **mode)
    install(after, 5.0)
    return history_of(ddp, lambda n: ddp(torch.ones(2, 3) * (ctx.rank + 1 + n)).sum())


@as_in_torch(2)
@modes
def test_nulled(ctx, wrap, mode):
    ddp = wrap(Scalars(3), **mode)
    if ctx.rank == 1:
        victim = ddp.module.w[1]
        victim.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return history_of(ddp, lambda _: ddp(x_of(ctx)).sum())
