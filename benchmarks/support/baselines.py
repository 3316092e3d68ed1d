"""What is compared: minidp and torch's DDP with any options, and two baselines."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minidp
from support.rounds import Implementation, Wrap

BARE = "no communication"
AFTER = "no overlap"
TORCH, TORCH_AGAIN = "torch", "torch again"
AUTO = "minidp auto"
LAST_CAP = {"DDP_SET_LAST_BUCKET_CAP": "1"}  # torch reads it when it rebuilds buckets
SETTLING = 52  # steps until the layout that bucket_cap_mb="auto" chose is in use


def theirs(**options: Any) -> Wrap:
    """Return a function that wraps a module in torch's DDP."""
    return functools.partial(DistributedDataParallel, **options)


def ours(**options: Any) -> Wrap:
    """Return a function that wraps a module in minidp's `DataParallel`."""
    return functools.partial(minidp.DataParallel, **options)


class OverItems(nn.Module):
    """``average_over="items"``, 8 items per rank: the bits of the plain mean."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.ddp: Any = minidp.DataParallel(module, average_over="items")

    def forward(self, *data: Any) -> torch.Tensor:
        """Return the loss of 8 items, weighed."""
        loss: torch.Tensor = self.ddp.weigh_loss(self.ddp(*data), 8)
        return loss


def _same_module(module: nn.Module) -> nn.Module:
    return module


def bare(reference: str | None = None) -> Implementation:
    """Measure the model without a wrapper: each rank keeps its own gradients."""
    return Implementation(BARE, _same_module, reference, averages=False)


class AfterBackward(nn.Module):
    """Averages all gradients in one all-reduce; call `finish_step` after the backward.

    Broadcasts nothing: ``module`` must be the same on all ranks already.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._scale = 1 / dist.get_world_size()
        sizes = [param.numel() for param in module.parameters()]
        self._flat = torch.empty(sum(sizes), device=next(module.parameters()).device)
        self._parts = self._flat.split(sizes)

    def forward(self, *data: torch.Tensor) -> Any:
        """Return the module's output."""
        return self.module(*data)

    def finish_step(self) -> None:
        """Collective: average the gradients of the backward."""
        params = list(self.module.parameters())
        for part, param in zip(self._parts, params, strict=True):
            torch.mul(param.grad.view(-1), self._scale, out=part)
        dist.all_reduce(self._flat)
        for part, param in zip(self._parts, params, strict=True):
            param.grad.view(-1).copy_(part)


def torch_knows(options: Iterable[str]) -> bool:
    """Return whether this torch's DDP takes all these options."""
    known = inspect.signature(DistributedDataParallel).parameters
    return known.keys() >= set(options)


def against_torch(
    name: str, wrap: Wrap, world_size: int, **more: Any
) -> Implementation:
    """Make an implementation whose gradients are compared with torch's default.

    A sum of two is the same in any order, so with two ranks every bit must agree. From
    three ranks on, the order depends on where an element lies in its bucket.
    """
    is_same_layout = name in (TORCH, TORCH_AGAIN, "minidp")
    is_exact = world_size <= 2 or is_same_layout
    return Implementation(name, wrap, TORCH, is_exact=is_exact, **more)


def auto(world_size: int, **options: Any) -> Implementation:
    """Measure ``bucket_cap_mb="auto"``, after the untimed steps in which it chooses."""
    wrap = ours(bucket_cap_mb="auto", **options)
    return against_torch(AUTO, wrap, world_size, settling=SETTLING)
