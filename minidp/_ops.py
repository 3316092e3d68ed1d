"""Flatten and unflatten: the copies between gradients and a bucket's buffer.

These are the readable reference kernels and the specification of the arithmetic, which
is torch's: a fresh gradient is *multiplied by the reciprocal* of the divisor, one that
already is its bucket view is *truly divided*. On CPU the two differ in the last bit
when the divisor is no power of two, so the choice is not free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from . import native


def kernels_for(tensors: Iterable[torch.Tensor]) -> Any | None:
    """The native extension, if this process has it and it serves these tensors.

    Raises:
        NativeError: MINIDP_NATIVE=1, and it cannot be had.
    """
    library = native.library()
    if library is None:
        return None
    devices = {tensor.device.type for tensor in tensors}
    if devices <= {"cpu"}:
        return library
    # No test has run the CUDA kernels yet: only for who asks for them by name.
    is_asked_for = native.status().mode == "1" and library.has_cuda
    return library if is_asked_for and devices <= {"cpu", "cuda"} else None


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
    kernels = kernels_for(views[:1])  # a bucket lives on one device
    if kernels is not None:
        kernels.flatten(views, grads, scale)
        return
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
    if scale == 1.0 and grad.is_complex():
        view.copy_(grad)  # the product would make NaN of inf + 1j
    else:
        # Also by 1: a copy_ of some MiB is one memcpy, which measured 10 % slower.
        torch.mul(grad, scale, out=view)


def divide(values: torch.Tensor, divisor: int) -> None:
    """``values /= divisor`` for gradients that already are their bucket views."""
    if divisor != 1:
        values.div_(divisor)


def unflatten(grads: list[torch.Tensor], views: list[torch.Tensor]) -> None:
    """``grads[k] = views[k]`` for all k."""
    kernels = kernels_for(views[:1])
    if kernels is not None:
        kernels.unflatten(grads, views)
        return
    try:
        torch._foreach_copy_(grads, views)
    except RuntimeError:  # it takes no lazily negated gradients, for example
        for grad, view in zip(grads, views, strict=True):
            grad.copy_(view)


class CopyPlan:
    """Flattens one bucket in few kernel calls, with the functions above.

    Args:
        values: the buffer, 1-D.
        views: N-D windows that tile it.
        is_large: per slot, whether it may have been filled before.
    """

    def __init__(
        self,
        values: torch.Tensor,
        views: list[torch.Tensor],
        is_large: Sequence[bool],
    ) -> None:
        self._values = values
        self._views = views
        self._is_row = all(view.dim() == 1 for view in views)
        pairs = list(zip(views, is_large, strict=True))
        self._small_runs = _runs(values, [(v.numel(), large) for v, large in pairs])
        # Which slots the runs cover (a count of elements would not tell).
        self._small_ids = [id(view) for view, large in pairs if not large]

    def flatten(
        self, views: list[torch.Tensor], grads: list[torch.Tensor], scale: float
    ) -> None:
        """``views[k] = grads[k] * scale``; ``views`` are all of the bucket or some."""
        if not grads:
            return
        if len(grads) == len(self._views):
            if self._is_row:
                flatten_row(self._values, grads, scale)
            else:
                flatten(views, grads, scale, [self._values])
        elif list(map(id, views)) == self._small_ids:
            flatten(views, grads, scale, self._small_runs)
        else:
            for view, grad in zip(views, grads, strict=True):
                scale_into(view, grad, scale)


def _runs(
    values: torch.Tensor, slots: Sequence[tuple[int, bool]]
) -> list[torch.Tensor]:
    """The buffer without its large slots, as 1-D pieces."""
    runs = []
    start = end = 0
    for numel, is_large in slots:
        if is_large:
            runs.append(values[start:end])
            start = end + numel
        end += numel
    runs.append(values[start:end])
    return [run for run in runs if run.numel() > 0]


def slots(
    params: Sequence[torch.Tensor],
    views: list[torch.Tensor],
    values: torch.Tensor,
    *,
    as_view: bool,
) -> Any | None:
    """Native kernels for the everyday case of a dense bucket, or None.

    Args:
        params: the bucket's parameters; the kernels read and set their ``.grad``.
        views: one window on ``values`` for each.
        values: the buffer, 1-D.
        as_view: whether ``.grad`` shall be the view (``gradient_as_bucket_view``).
    """
    kernels = kernels_for([values])
    if kernels is None:
        return None
    return kernels.Slots(list(params), views, values, as_view=as_view)
