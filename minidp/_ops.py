"""Flatten and unflatten: the copies between gradients and a bucket's buffer.

These are the readable reference kernels and the specification of the arithmetic, which
is torch's: a fresh gradient is *multiplied by the reciprocal* of the divisor, one that
already is its bucket view is *truly divided*. On CPU the two differ in the last bit
when the divisor is no power of two, so the choice is not free.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def flatten(
    views: list[torch.Tensor],
    grads: list[torch.Tensor],
    scale: float,
    runs: Sequence[torch.Tensor],
) -> None:
    """``views[k] = grads[k] * scale`` for all k, in few kernel calls.

    Args:
        views: N-D windows on a bucket's buffer.
        grads: same shapes and dtype, any strides.
        scale: the reciprocal of the divisor; 1.0 copies.
        runs: 1-D tensors that tile exactly the memory of ``views``: scaling runs
            instead of views costs a call per run, not per parameter.
    """
    torch._foreach_copy_(views, grads)
    if scale != 1.0:
        for run in runs:
            run.mul_(scale)


def flatten_row(buffer: torch.Tensor, grads: list[torch.Tensor], scale: float) -> None:
    """The same for 1-D gradients that fill a whole buffer, three times as fast.

    Args:
        buffer: 1-D, in the gradients' dtype, as long as all of them together.
        grads: 1-D each (biases, norms).
        scale: as for `flatten`.
    """
    torch.cat(grads, out=buffer)
    if scale != 1.0:
        buffer.mul_(scale)


def scale_into(view: torch.Tensor, grad: torch.Tensor, scale: float) -> None:
    """``view = grad * scale`` for one slot, in one pass over memory."""
    if scale == 1.0:
        view.copy_(grad)
    else:
        torch.mul(grad, scale, out=view)


def divide(values: torch.Tensor, divisor: int) -> None:
    """``values /= divisor`` for gradients that already are their bucket views."""
    if divisor != 1:
        values.div_(divisor)


def unflatten(grads: list[torch.Tensor], views: list[torch.Tensor]) -> None:
    """``grads[k] = views[k]`` for all k."""
    torch._foreach_copy_(grads, views)
