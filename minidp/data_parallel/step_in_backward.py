"""Optimizer steps inside the backward: that of each bucket as soon as it is reduced.

The optimizer then works while later buckets are still on their way:

    bucket 0   ...... all-reduce | copy out | step
    bucket 1   ........... all-reduce ......... | copy out | step

Meanwhile the parameter groups of the optimizer hold the parameters of one bucket only,
so that its own ``step()`` does not touch others. Step hooks run once for each bucket.
Parameters on the ignore list step at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import Optimizer

from minidp.core import Observer
from minidp.guard import Guard, needs_closure


class StepInBackward(Observer):
    """An observer that steps one optimizer on each bucket that was just reduced.

    Args:
        optimizer: The optimizer.
        guard: Lets these steps pass unchecked.
        clip_grad_norm: With a norm, there is one step on all parameters after the last
            bucket, because a norm needs all gradients.

    Raises:
        TypeError, ValueError: The optimizer cannot step on a part of its parameters, or
            the norm is not positive.
    """

    uses_grads = True

    def __init__(
        self,
        optimizer: Optimizer,
        guard: Guard,
        clip_grad_norm: float | None = None,
    ) -> None:
        _check(optimizer)
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be positive, got {clip_grad_norm}.")
        self.optimizer = optimizer
        self._guard: Guard = weakref.proxy(guard)  # no cycle through the reducer
        self._max_norm = clip_grad_norm
        self._reduced: set[int] = set()  # ids of parameters that are in a bucket

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """Step on the parameters of a bucket that was just reduced, unless it clips.

        An error in the step becomes a MiniDPError (`Guard.allow`).
        """
        if self._max_norm is None:
            self._reduced.update(map(id, params))
            with self._guard.allow(self.optimizer):
                step_on(self.optimizer, params)

    def finished(self) -> None:
        """Step on those parameters of the optimizer that are in no bucket.

        If gradients are clipped, none has stepped yet. So this clips them, and steps on
        all parameters. An error in the step becomes a MiniDPError (`Guard.allow`).
        """
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        with self._guard.allow(self.optimizer):
            if self._max_norm is not None:
                clip_grad_norm_(held, self._max_norm)
                self.optimizer.step()
            else:
                step_on(self.optimizer, [p for p in held if id(p) not in self._reduced])


def step_on(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
    """Step an optimizer on those of the parameters that it holds.

    If it holds none of them, nothing is called. During the step its parameter groups
    have only these parameters, and afterwards they are as before.

    Raises:
        TypeError: The step has written to a parameter group. What it counts there, for
            example its steps, would be counted once for each bucket.
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
    """Check that an optimizer can step inside the backward.

    Raises:
        TypeError: It is no Optimizer, its step needs a closure, or it communicates.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"step_in_backward needs a torch.optim.Optimizer, but got {name}."
        )
    if needs_closure(optimizer):
        raise TypeError(
            f"{name}.step() needs a closure that runs the backward itself, so it "
            "cannot step inside one."
        )
    if hasattr(optimizer, "join_hook"):
        raise TypeError(
            f"{name} communicates in its step, which must not happen bucket by bucket."
        )
