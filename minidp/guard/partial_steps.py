"""Step an optimizer on a part of its parameters, for example on those of one bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from .step_hooks import needs_closure


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


def check_partial(optimizer: Any, clip_grad_norm: float | None) -> None:
    """Check that an optimizer can step inside the backward, and clip before.

    Raises:
        TypeError: It is no Optimizer, its step needs a closure, or it communicates.
        ValueError: The norm is not positive.
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
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise ValueError(f"clip_grad_norm must be positive, got {clip_grad_norm}.")
