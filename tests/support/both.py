"""Run the same few lines on torch's DDP and on minidp, in a rank process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel

Wrap = Callable[..., Any]


def on_both(ctx: Any, scenario: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """(torch's, minidp's) result of ``scenario(ctx, wrap, *args)``, or error's text.

    ``wrap(module, **options)`` wraps on the group of ``ctx``.
    """
    results = []
    for wrapper in (DistributedDataParallel, DataParallel):

        def wrap(module: nn.Module, wrapper: Any = wrapper, **options: Any) -> Any:
            return wrapper(module, process_group=ctx.group, **options)

        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                results.append(scenario(ctx, wrap, *args))
            except RuntimeError as error:
                results.append(f"{type(error).__name__}: {error}")
    return results[0], results[1]


def same(a: Any, b: Any) -> bool:
    """Equality bit for bit through lists, tuples and dicts."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


def grads(module: nn.Module) -> list[torch.Tensor | None]:
    """Copies of all gradients."""
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


class Scalars(nn.Module):
    """n parameters of one element; forward sums the used ones times x."""

    def __init__(self, n: int = 1) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(n)])

    def forward(self, x: torch.Tensor, use: Any = None) -> torch.Tensor:
        """``sum(w[i] * x for i in use)``; all by default."""
        chosen = range(len(self.w)) if use is None else use
        total = torch.zeros(1)
        for i in chosen:
            total = total + self.w[i] * x
        return total


def x_of(ctx: Any) -> torch.Tensor:
    """1.0 on rank 0, 2.0 on rank 1, ..."""
    return torch.tensor([float(ctx.rank + 1)])
