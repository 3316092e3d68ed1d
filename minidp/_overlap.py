"""Optimizer steps inside the backward: each bucket's, as soon as it is reduced.

    bucket 0   ...... all-reduce | copy out | step
    bucket 1   ........... all-reduce ......... | copy out | step

The steps of the first buckets run while the last ones are still on their way. A step
sees the optimizer as it is, but for parameter groups that hold the bucket's parameters
only; state, hooks and learning rate schedulers stay the optimizer's own. Step hooks run
once per bucket. What the optimizer holds besides (parameters on the ignore list) steps
at the end.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import Optimizer

from .errors import MiniDPError, explain


class Observer(Protocol):
    """Is told when gradients are reduced."""

    uses_grads: bool  # reads or changes what is in ``.grad``

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """The averages of one bucket are in ``.grad``, for what any rank used.

        Buckets come in index order, also those that did not travel.
        """

    def finished(self) -> None:
        """Those of every bucket are."""


class StepInBackward:
    """One optimizer's steps.

    Args:
        optimizer: any that keeps its state per parameter.
        excuses: with the guard, for while it steps.
        clip_grad_norm: clip all gradients together to this norm first. Their norm is
            known when the last bucket is reduced, so there is one step then.

    Raises:
        TypeError: the optimizer cannot step on a part of its parameters.
        ValueError: a norm that is not positive.
    """

    uses_grads = True

    def __init__(
        self,
        optimizer: Optimizer,
        excuses: Excuses,
        clip_grad_norm: float | None = None,
    ) -> None:
        _check(optimizer)
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be positive, got {clip_grad_norm}.")
        self.optimizer = optimizer
        self._excuses = excuses
        self._max_norm = clip_grad_norm
        self._reduced: set[int] = set()  # ids of parameters that are in a bucket

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """Step on the parameters of one bucket."""
        if self._max_norm is None:
            self._reduced.update(map(id, params))
            self._step_on(params)

    def finished(self) -> None:
        """Step on what had to wait, and on what is in no bucket."""
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self._max_norm is None:
            self._step_on([p for p in held if id(p) not in self._reduced])
            return
        clip_grad_norm_(held, self._max_norm)
        with self._excuses.excused(self.optimizer):
            self.optimizer.step()

    def _step_on(self, params: Sequence[nn.Parameter]) -> None:
        with self._excuses.excused(self.optimizer):
            step_on(self.optimizer, params)


class Excuses:
    """Optimizers that may step just now, because their gradients are averaged.

    Args:
        rank: group rank, for errors.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._stepping: set[int] = set()  # ids

    def __contains__(self, optimizer: Optimizer) -> bool:
        return id(optimizer) in self._stepping

    @contextmanager
    def excused(self, optimizer: Optimizer) -> Iterator[None]:
        """What steps inside may do so in a backward.

        Raises:
            MiniDPError: the step raised.
        """
        self._stepping.add(id(optimizer))
        try:
            yield
        except Exception as error:
            name = type(optimizer).__name__
            raise MiniDPError(
                explain(
                    self.rank,
                    f"{name}.step() raised {type(error).__name__} inside the backward: "
                    f"{error}",
                    remedy="call reset() on all ranks, and load parameters and "
                    "optimizer from a checkpoint: some may have stepped, some not",
                )
            ) from error
        finally:
            self._stepping.discard(id(optimizer))


def step_on(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
    """``optimizer.step()`` as if it held only ``params``.

    Raises:
        TypeError: the step wrote to a parameter group: it counts steps, and would count
            one per bucket.
    """
    wanted = set(map(id, params))
    everything = optimizer.param_groups
    parts = [
        {**group, "params": [p for p in group["params"] if id(p) in wanted]}
        for group in everything
    ]
    before = [dict(part) for part in parts]
    optimizer.param_groups = [part for part in parts if part["params"]]
    try:
        if optimizer.param_groups:
            optimizer.step()
    finally:
        optimizer.param_groups = everything
    for part, old in zip(parts, before, strict=True):
        changed = [k for k, v in part.items() if k not in old or v is not old[k]]
        if changed:
            raise TypeError(
                f"{type(optimizer).__name__}.step() writes {', '.join(changed)} to its "
                "parameter groups, so it cannot step bucket by bucket: pass "
                "clip_grad_norm=float('inf') to step once, at the end."
            )


def _check(optimizer: Any) -> None:
    """Refuse what would need all parameters at once."""
    if not isinstance(optimizer, Optimizer):
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
