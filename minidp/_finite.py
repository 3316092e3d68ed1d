"""``check_finite_grads``: NaN and infinity are named before they are averaged."""

from __future__ import annotations

import math

import torch

from ._bucket import Bucket
from .errors import NonFiniteGradientError, explain

BEFORE = "(before it was averaged: the other ranks do not have it)."
AFTER = "after the comm hook; what this rank gave to it was."


def refuse_nonfinite(bucket: Bucket, rank: int, step: int, when: str) -> None:
    """Look at a full bucket that is about to be launched, or has just come back.

    Args:
        bucket: its payload holds this rank's gradients.
        rank: group rank, for the error.
        step: number of the synchronised backward, from 0.
        when: ends the sentence "... is not finite".

    Raises:
        NonFiniteGradientError: naming the parameters, the first one first.
    """
    values = _values_of(bucket.payload)
    if _may_be_finite(values):
        return
    names, found = [], ""
    # A sparse bucket has one parameter, and no views.
    parts = [(k, _values_of(view)) for k, view in enumerate(bucket.views)]
    for k, part in parts or [(0, values)]:
        bad = part[~part.isfinite()]
        if bad.numel():
            names.append(bucket.names[k])
            found = found or (
                f"{bad[0].item()} in {bucket.names[k]}, {bad.numel()} of its "
                f"{part.numel()} elements"
            )
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


def _values_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_sparse:
        tensor = tensor._values()
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _may_be_finite(values: torch.Tensor) -> bool:
    """One read of the memory: a sum with NaN or infinity in it is not finite.

    A finite sum says that all is well; another one may just have overflowed.
    """
    wide = torch.float64 if values.dtype is torch.float64 else torch.float32
    return math.isfinite(values.sum(dtype=wide).item())
