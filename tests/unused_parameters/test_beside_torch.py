"""Parameters that some or all ranks leave out, on torch's DDP and on minidp."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.both import grads, history_of, x_of
from tests.support.ranks import as_in_torch


class Sized(nn.Module):
    """One large layer and small ones with as many elements together."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(128, 128))
        small = [nn.Parameter(torch.ones(64, 64)) for _ in range(4)]
        self.small = nn.ParameterList(small)

    def forward(self, x: torch.Tensor, *, use_large: bool = True) -> torch.Tensor:
        if use_large:
            return (self.large * x).sum()
        return sum((p * x).sum() for p in self.small)


@as_in_torch(2, 3)
@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_large_beside_missing_small(ctx, wrap, option):
    ddp = wrap(Sized(), **{option: True})
    history = history_of(ddp, lambda _: ddp(x_of(ctx)))
    if option != "static_graph":
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(x_of(ctx)).backward()
        ddp(x_of(ctx), use_large=False).backward()
        history.append(grads(ddp))
    return history
