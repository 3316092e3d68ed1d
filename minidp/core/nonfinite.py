"""Reject NaN and infinity before they are averaged (``check_finite_grads``)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from minidp.errors import NonFiniteGradientError, explain

BEFORE = "(before it was averaged: the other ranks do not have it)."
AFTER = "after the comm hook; what this rank passed to it was finite."


def refuse_nonfinite(
    payload: Tensor, parts: Mapping[str, Tensor], rank: int, step: int, when: str
) -> None:
    """Raise an error if a bucket holds NaN or infinity. This waits for a GPU.

    Args:
        payload: The flat buffer, or the sparse gradient.
        parts: The gradients in it, by the names of their parameters.
        rank: This rank, for the error.
        step: The number of the backward, for the error.
        when: What the payload is, for the error: BEFORE (local gradients) or AFTER (the
            result of a comm hook).

    Raises:
        NonFiniteGradientError: Some value is not finite.
    """
    if _is_surely_finite(_values_of(payload)):
        return
    names, found = [], ""
    for name, values in parts.items():
        part = _values_of(values)
        bad = part[~part.isfinite()]
        if bad.numel():
            names.append(name)
            count = f"{bad.numel()} of its {part.numel()} elements"
            found = found or f"{bad[0].item()} in {name}, {count}"
    if names:
        raise NonFiniteGradientError(
            explain(
                rank,
                f"A gradient of step {step} is not finite {when}",
                names=names,
                expected="finite gradients (check_finite_grads=True)",
                found=found,
                remedy="look at this rank's inputs and loss (torch.autograd."
                "detect_anomaly() finds the operation); call reset() on all ranks, and "
                "zero_grad(). A GradScaler counts on such gradients: use one of the "
                "two",
            )
        )


def _values_of(tensor: Tensor) -> Tensor:
    """Return a detached view of the stored values, in which complex ones are real."""
    values = (tensor._values() if tensor.is_sparse else tensor).detach()
    return torch.view_as_real(values) if values.is_complex() else values


def _is_surely_finite(values: Tensor) -> bool:
    """Return whether the sum of the values is finite, because then all of them are.

    False proves nothing, because the sum of finite values may overflow.
    """
    wide = torch.float64 if values.dtype is torch.float64 else torch.float32
    return math.isfinite(values.sum(dtype=wide).item())
