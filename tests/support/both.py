"""Run the same few lines on torch's DDP and on minidp, in a rank process."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel, comm_hooks

# The options that change how a gradient travels.
MODES: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]
modes = pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m) or "default")


class Raised(str):
    """An error as "Class: text", in the place of a result."""


def on_both(ctx: Any, scenario: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Return torch's and minidp's result of ``scenario(ctx, wrap, *args)``.

    ``wrap(module, **options)`` wraps on the group of ``ctx``. A `RuntimeError` is
    returned as `Raised`.
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
                results.append(Raised(f"{type(error).__name__}: {error}"))
    return results[0], results[1]


def wrapped(ctx: Any, module: nn.Module, **options: Any) -> DataParallel[Any]:
    """Wrap a module with minidp on the group of ``ctx``."""
    return DataParallel(module, process_group=ctx.group, **options)


def averages(ddp: DataParallel[Any]) -> list[int]:
    """Return a list that grows with each backward whose gradients are averaged.

    By a comm hook, on the default group.
    """
    seen: list[int] = []

    def hook(state: Any, bucket: Any) -> Any:
        if bucket.is_last():
            seen.append(bucket.index())
        return comm_hooks.all_reduce_hook(state, bucket)

    ddp.register_comm_hook(None, hook)
    return seen


def error_of(call: Callable[[], object]) -> str:
    """Return the error that ``call()`` raises, as "Class: text"; "" if none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def all_die(*references: weakref.ref[Any], seconds: float = 10.0) -> bool:
    """Return whether these objects die; collect garbage for some seconds, if need be.

    The watchdog's thread may just look at an object, which then lives a moment longer.
    """
    deadline = time.monotonic() + seconds
    while any(reference() is not None for reference in references):
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(0.001)
    return True


def same(a: Any, b: Any) -> bool:
    """Whether two nests of lists, tuples, dicts and tensors are equal bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


def grads(module: nn.Module) -> list[torch.Tensor | None]:
    """Return copies of the gradients of all parameters; None where there is none."""
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def history_of(
    module: nn.Module, loss: Callable[[int], torch.Tensor], n: int = 3
) -> list[list[torch.Tensor | None]]:
    """Run ``n`` backwards of ``loss(step)``, each from zero; copy all gradients."""
    history = []
    for step in range(n):
        module.zero_grad()
        loss(step).backward()
        history.append(grads(module))
    return history


def values(module: nn.Module) -> list[float | None]:
    """Return the gradients of parameters that have one element each, as numbers."""
    return [None if g is None else g.item() for g in grads(module)]


class Scale(nn.Module):
    """Has one parameter ``w`` of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``w * x``."""
        return self.w * x


class Chain(nn.Module):
    """Has three parameters, whose gradients arrive in the order c, b, a."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(2)) for _ in range(3))

    def forward(self, x: torch.Tensor, *, skip_b: bool = False) -> torch.Tensor:
        """Return a function of all parameters, or of all but b."""
        middle = (x * self.a).exp()
        return (middle if skip_b else (middle * self.b).exp()) * self.c


class Scalars(nn.Module):
    """Has ``n`` parameters ``w[i]`` of one element."""

    def __init__(self, n: int = 1) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(n)])

    def forward(self, x: torch.Tensor, use: Any = None) -> torch.Tensor:
        """Return ``sum(w[i] * x for i in use)``, of all ``i`` by default."""
        chosen = range(len(self.w)) if use is None else use
        total = torch.zeros(1)
        for i in chosen:
            total = total + self.w[i] * x
        return total


class Two(nn.Module):
    """Has parameters a and b of one element; b's gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, use: str = "ab") -> torch.Tensor:
        """Return ``sum(parameter * x for parameter in use)``."""
        return torch.stack([getattr(self, name) * x for name in use]).sum(0)


def done(value: Any) -> Future[Any]:
    """Return a future that is completed with a value."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def x_of(ctx: Any) -> torch.Tensor:
    """Return the input of a rank: 1.0 on rank 0, 2.0 on rank 1, ..."""
    return torch.tensor([float(ctx.rank + 1)])
