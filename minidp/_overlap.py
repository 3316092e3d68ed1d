"""Optimizer steps inside the backward: each bucket's, as soon as it is reduced.

    bucket 0   ...... all-reduce | copy out | step
    bucket 1   ........... all-reduce ......... | copy out | step

The steps of the first buckets run while the last ones are still on their way. A step
sees the optimizer as it is, but for parameter groups that hold the bucket's parameters
only; state, hooks and learning rate schedulers stay the optimizer's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.nn.utils import clip_grad_norm_

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer


class Observer(Protocol):
    """Is told when gradients are reduced."""

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """The gradients of one bucket are in ``.grad``, averaged."""

    def finished(self) -> None:
        """Those of every bucket are."""


class StepInBackward:
    """One optimizer's steps.

    Args:
        optimizer: any that keeps its state per parameter.
        stepping: optimizers that are at it; the guard lets them pass.
        clip_grad_norm: clip all gradients together to this norm first. Their norm is
            known when the last bucket is reduced, so there is one step then.

    Raises:
        TypeError: the optimizer cannot step on a part of its parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        stepping: set[int],
        clip_grad_norm: float | None = None,
    ) -> None:
        _check(optimizer)
        self.optimizer = optimizer
        self._stepping = stepping
        self._max_norm = clip_grad_norm

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """Step on the parameters of one bucket."""
        if self._max_norm is None:
            with excused(self.optimizer, self._stepping):
                step_on(self.optimizer, params)

    def finished(self) -> None:
        """Step on all parameters, if that had to wait."""
        if self._max_norm is None:
            return
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        clip_grad_norm_(held, self._max_norm)
        with excused(self.optimizer, self._stepping):
            self.optimizer.step()


@contextmanager
def excused(optimizer: Optimizer, stepping: set[int]) -> Iterator[None]:
    """What steps inside may do so in a backward."""
    stepping.add(id(optimizer))
    try:
        yield
    finally:
        stepping.discard(id(optimizer))


def step_on(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
    """``optimizer.step()`` as if it held only ``params``."""
    wanted = set(map(id, params))
    everything = optimizer.param_groups
    parts = [
        {**group, "params": [p for p in group["params"] if id(p) in wanted]}
        for group in everything
    ]
    optimizer.param_groups = [part for part in parts if part["params"]]
    try:
        if optimizer.param_groups:
            optimizer.step()
    finally:
        optimizer.param_groups = everything


def _check(optimizer: Any) -> None:
    """Refuse what would need all parameters at once."""
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise TypeError(
            "step_in_backward needs a torch.optim.Optimizer, but got "
            f"{type(optimizer).__name__}."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{type(optimizer).__name__}.step() needs a closure that runs the backward "
            "itself, so it cannot step inside one."
        )
    if hasattr(optimizer, "join_hook"):
        raise TypeError(
            f"{type(optimizer).__name__} communicates in its step, which must not "
            "happen bucket by bucket."
        )
