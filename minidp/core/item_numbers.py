"""Read the numbers of items that users give, without waiting for a GPU.

A number may be a tensor on a GPU, because labels are counted there. To read it would
make the host wait for all kernels that are queued, so it stays a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def is_known(tensor: Tensor) -> bool:
    """Return whether the host can read a tensor without waiting for a device."""
    return tensor.is_cpu


def number_of(what: str, value: object) -> Tensor | float:
    """Return a number as a float, or if it is on a GPU as a tensor.

    The tensor is a detached copy, of dtype float64 and shape (), which was not waited
    for.

    Args:
        what: Names the number; the text of an error begins with it.
        value: A number, or a tensor of one element.

    Raises:
        TypeError: The value is no real number.
    """
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex() and not value.is_meta:
            if is_known(value):
                return float(value.item())
            return value.detach().reshape(()).to(torch.float64, copy=True)
        found = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    elif not isinstance(value, bool) and hasattr(type(value), "__float__"):
        try:
            return float(value)  # type: ignore[arg-type]
        except OverflowError:
            return math.inf
    else:
        found = f"{value!r} ({type(value).__name__})"
    raise TypeError(
        f"{what} must be a real number, or a tensor with one, but got {found}."
    )


def total(numbers: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return the sum of floats and 0-D tensors as a float64 tensor on ``device``."""
    on_host = sum(n for n in numbers if isinstance(n, float))
    total = torch.full((), on_host, dtype=torch.float64, device=device)
    for n in numbers:
        if isinstance(n, Tensor):
            total += n.to(device, non_blocking=True)
    return total


def weighted(loss: Tensor, count: object) -> Tensor | None:
    """Return ``loss * count``, which is a sum of losses if ``loss`` is their mean.

    If there are 0 items, the mean is NaN and must not reach the gradients. The result
    is None then, if ``count`` can be read here. On an accelerator it cannot: there the
    product is 0, and gives ``loss`` a gradient of 0, even if the loss is NaN.

    Args:
        loss: The mean loss, a floating-point tensor of one element.
        count: The number of items, or a tensor of it.

    Raises:
        TypeError: ``loss`` or ``count`` is something else.
    """
    is_one = isinstance(loss, Tensor) and loss.numel() == 1
    if not is_one or not loss.is_floating_point():
        is_tensor = isinstance(loss, Tensor)
        found = f"{loss.dtype}, shape {tuple(loss.shape)}" if is_tensor else repr(loss)
        raise TypeError(
            "weigh_loss needs a loss of one floating-point number, a mean, but got "
            f"{found}. What to do: take the mean; or for a sum count_items(n, loss)."
        )
    n = number_of("The number of items", count)
    if isinstance(n, Tensor):
        n = n.to(loss.device, loss.dtype, non_blocking=True)
        product = loss * n.reshape(())
        return torch.where(n == 0, torch.zeros_like(product), product)
    return loss * n if n else None
