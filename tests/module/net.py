"""A module with parameters and buffers, and a step of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.both import grads


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def batch() -> torch.Tensor:
    return torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.5, -1.0]])


def step(ddp: Any) -> list[torch.Tensor | None]:
    """Return the gradients of a backward from zero."""
    ddp.zero_grad()
    ddp(batch()).square().sum().backward()
    return grads(ddp)
