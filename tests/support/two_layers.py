"""A module that may leave a layer out, and whether it trains with right averages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minidp import DataParallel
from tests.support.both import grads, wrapped


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, skip: bool = False) -> torch.Tensor:
        y: torch.Tensor = self.a(x)
        return y if skip else self.b(y)


def make(ctx: Any, **options: Any) -> DataParallel:
    return wrapped(ctx, TwoLayers(), **options)


def backward(ddp: DataParallel, *, skip: bool = False) -> None:
    ddp(torch.ones(1, 4), skip=skip).sum().backward()


def trains(ctx: Any, ddp: DataParallel) -> bool:
    """Whether the gradients of the next steps are the mean over ranks."""
    right = True
    for step in range(3):
        ddp.zero_grad()
        ddp(torch.ones(1, 4) * (ctx.rank + 1 + step)).sum().backward()
        oracle = TwoLayers()
        oracle.load_state_dict(ddp.module.state_dict())
        for rank in range(ctx.world_size):
            oracle(torch.ones(1, 4) * (rank + 1 + step)).sum().backward()
        for mine, sums in zip(grads(ddp), grads(oracle), strict=True):
            assert mine is not None
            assert sums is not None
            right &= torch.allclose(mine, sums / ctx.world_size)
    return right
