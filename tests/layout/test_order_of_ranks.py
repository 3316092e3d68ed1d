"""Ranks whose gradients come in different orders."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.both import history_of
from tests.support.ranks import as_in_torch


class Ordered(nn.Module):
    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.rand(40)) for _ in order])
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = torch.tanh(x * self.w[i])
        return x.sum()


@as_in_torch(2, 3, 4)
def test_rank_dependent_order(ctx, wrap):
    order = [0, 1, 2, 3, 4] if ctx.rank == 0 else [2, 0, 4, 3, 1]
    ddp = wrap(Ordered(order), bucket_cap_mb=200 / 2**20)
    x = torch.linspace(0.1, 1, 40)
    return history_of(ddp, lambda n: ddp(x * (ctx.rank + n + 1)), 4)
