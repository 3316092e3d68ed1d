"""A few steps of training with any kind of optimizer, and what ranks have after it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    # One step changes weights by less than what rounding may explain.
    "adam": lambda params: torch.optim.Adam(params, lr=1e-5, amsgrad=True),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=1),
}


class Own(torch.optim.Optimizer):
    """A class that minidp knows nothing of: momentum, at a rate that may be 0."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        closure()
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["m"] = state.get("m", 0) + param.grad
                param -= group["lr"] * state["m"]


class Breaks(torch.optim.SGD):
    """SGD whose step raises an error while ``is_broken``."""

    is_broken = False

    def step(self, closure: Any = None) -> Any:
        if self.is_broken:
            raise ValueError("out of luck")
        return super().step(closure)


def made(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def loss_of(net: Any, seed: int) -> torch.Tensor:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    loss: torch.Tensor = net(x).square().mean()
    return loss


def step(
    ctx: Any, net: Any, optimizer: Any, number: int = 0, *, raises: bool = False
) -> None:
    optimizer.zero_grad()
    loss = loss_of(net, 10 * number + ctx.rank)
    loss.backward()
    if raises:
        return
    optimizer.step(lambda: torch.zeros(()))  # LBFGS needs a loss: equal on all ranks


def state_of(net: nn.Module, optimizer: Any = None) -> Any:
    """Return copies of parameters and of the optimizer's state."""
    found = [param.detach().clone() for param in net.parameters()]
    inner = {} if optimizer is None else copy.deepcopy(optimizer.state_dict())
    return [found, inner]


def told(call: Any) -> list[str]:
    """Return the warnings of ``call()`` that name a rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [text for each in caught if "[rank" in (text := str(each.message))]
