"""Copy gradients to a bucket's buffer, and know which of them lie in it already.

The arithmetic is torch's: a fresh gradient is *multiplied by the reciprocal* of the
divisor, one that is its bucket view is *truly divided*. On CPU the results differ in
the last bit if the divisor is no power of two. The native kernels give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from minidp import native

# For map(): these run once per gradient.
_dtype_of = attrgetter("dtype")
_layout_of = attrgetter("layout")


def multiply_into(view: Tensor, grad: Tensor, divisor: int) -> None:
    """Compute ``view = grad * (1 / divisor)``, in one pass over the memory."""
    if divisor == 1 and grad.is_complex():
        view.copy_(grad)  # the product would make NaN of inf + 1j
    else:
        # Also by 1: a copy_ of some MiB is one memcpy, which measured 10 % slower.
        torch.mul(grad, 1.0 / divisor, out=view)


def divide(values: Tensor, divisor: int) -> None:
    """Compute ``values /= divisor`` in place; the values may be sparse."""
    if divisor != 1:
        values.div_(divisor)


def rescale(values: Tensor, factor: float | Tensor) -> None:
    """Compute ``values *= factor`` in place, without waiting for a GPU.

    Args:
        values: Real values, dense or sparse. Those of 16 bits are multiplied in 32 bits
            and then rounded.
        factor: A number, or a tensor with one, of any device and dtype, which the host
            does not read.
    """
    if values.is_sparse:
        values = values._values()  # so that what is coalesced stays so
    if isinstance(factor, float):
        if factor != 1.0:
            values.mul_(factor)
        return
    wide = torch.float64 if values.dtype.to_real() is torch.float64 else torch.float32
    # One element, but no scalar: that would be rounded to 16 bits first.
    one = factor.to(values.device, wide, non_blocking=True).reshape(1)
    torch.mul(values, one, out=values)


def as_real(values: Tensor) -> Tensor:
    """Return ``values``, as a real view of one dimension if they are complex.

    Backends cannot add complex numbers.
    """
    return torch.view_as_real(values).flatten() if values.is_complex() else values


class CopyPlan:
    """How to fill one bucket with the fewest kernel calls.

    A bucket of many small gradients is filled by a few kernels, not by one for each.

    Args:
        values: The buffer, of one dimension.
        views: A view of it for each slot, in the shape of the parameter. Together they
            cover the buffer.
        is_large: For each slot, whether its grad hook may have filled it already.
    """

    def __init__(
        self, values: Tensor, views: list[Tensor], is_large: Sequence[bool]
    ) -> None:
        self._values = values
        self._views = views
        self._numels = [view.numel() for view in views]
        self._is_row = all(view.dim() == 1 for view in views)
        pairs = list(zip(views, is_large, strict=True))
        # What is left if hooks have copied all large slots, and its memory in as few
        # pieces as possible. It is known by identity, because other slots may be as
        # many and as large.
        self._small_ids = [id(view) for view, large in pairs if not large]
        self._small_runs = _runs(values, [(v.numel(), large) for v, large in pairs])

    def may_fit(self, views: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
        """Return whether all gradients have the dtype and the size of their views.

        Shapes are not compared here.
        """
        is_all = views is self._views
        numels = self._numels if is_all else list(map(Tensor.numel, views))
        is_same_dtype = set(map(_dtype_of, grads)) <= {self._values.dtype}
        return is_same_dtype and list(map(Tensor.numel, grads)) == numels

    def fill(self, views: list[Tensor], grads: list[Tensor], divisor: int) -> None:
        """Compute ``view = grad * (1 / divisor)`` for each pair.

        Raises:
            ValueError, RuntimeError: The shape of a gradient does not fit its view.
        """
        if not grads:
            return
        is_all = len(grads) == len(self._views)
        is_rest = not is_all and list(map(id, views)) == self._small_ids
        runs = [self._values] if is_all else self._small_runs
        # A copy for all and a product for each run, if these are not more kernels.
        if not (is_all or is_rest) or len(grads) <= len(runs):
            for view, grad in zip(views, grads, strict=True):
                if view.shape != grad.shape:
                    raise ValueError("torch.mul would resize the view")
                multiply_into(view, grad, divisor)
            return
        if is_all and self._is_row:
            torch.cat(grads, out=self._values)  # biases, norms: three times as fast
        else:
            torch._foreach_copy_(views, grads)
        if divisor != 1:  # a call per run, not per parameter
            for run in runs:
                run.mul_(1.0 / divisor)


def neighbours(slots: Iterable[int]) -> Iterator[range]:
    """Return slots, which are in ascending order, in runs of consecutive numbers.

    Slots have no padding between them, so that one kernel can serve a run.
    """
    for _, run in groupby(enumerate(slots), lambda pair: pair[1] - pair[0]):
        numbers = [slot for _, slot in run]
        yield range(numbers[0], numbers[-1] + 1)


def _runs(values: Tensor, slots: Iterable[tuple[int, bool]]) -> list[Tensor]:
    """Return what lies between large slots, in as few views as possible.

    Args:
        values: The buffer.
        slots: For each slot the number of its elements, and whether it is large.
    """
    runs, start = [], 0
    for is_large, group in groupby(slots, itemgetter(1)):
        end = start + sum(numel for numel, _ in group)
        if not is_large and end > start:
            runs.append(values[start:end])
        start = end
    return runs


class Memory:
    """The memory of one bucket's buffer, which tells which gradients lie in it.

    It reads the address of the buffer each time, because a comm hook may call
    ``resize_``, which moves the buffer. A gradient may then be allocated at the old
    address.
    """

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._nbytes = buffer.nbytes

    def owns(self, grad: object) -> bool:
        """Return whether an object is a strided tensor that lies in the buffer."""
        return (
            isinstance(grad, Tensor)
            and grad.layout is torch.strided
            and 0 <= grad.data_ptr() - self._buffer.data_ptr() < self._nbytes
        )

    def may_own_any(self, grads: Sequence[Tensor]) -> bool:
        """Return whether some gradient may lie in the buffer.

        This is faster than to ask for each of them. True may be wrong, False is not.
        """
        if set(map(_layout_of, grads)) != {torch.strided}:
            return True  # only strided tensors have an address
        start = self._buffer.data_ptr()
        addresses = range(start, start + self._nbytes)
        return any(map(addresses.__contains__, map(Tensor.data_ptr, grads)))


Tensors = Sequence[Tensor | None]


def add_natively(left: Tensors, right: Tensors, to: Tensors | None = None) -> bool:
    """Compute ``to[k] = left[k] + right[k]`` by the extension; by default to ``left``.

    Returns:
        Whether it was done. Nothing was, if the extension is not loaded, or unless all
        are there, dense, on the CPU, of one real dtype, and those of each sum have one
        shape and lie in memory in the same order.
    """
    library = native.library()
    if library is None:
        return False
    return bool(library.add(left if to is None else to, left, right))


def copy_each(to: list[Tensor], values: list[Tensor]) -> None:
    """Copy ``values[k]`` to ``to[k]``, by the extension if it can, without a history.

    Each pair has one shape. What does not fit into the cache goes past it.
    """
    extension = extension_for(to)
    if extension is not None:
        with suppress(ValueError):  # another dtype or layout: torch converts it
            extension.unflatten(to, values)
            return
    with torch.no_grad():
        torch._foreach_copy_(to, values)


# -- the native extension --------------------------------------------------------------


def extension_for(tensors: Iterable[Tensor]) -> Any | None:
    """Return the native extension if it can copy all of these tensors, else None.

    It copies between tensors on the CPU, and on a device for which it has a kernel (see
    ``csrc/README.md``). The first call of the process loads it.

    Raises:
        NativeError: MINIDP_NATIVE=1, and the extension cannot be loaded.
    """
    library = native.library()
    if library is None:
        return None
    devices = {tensor.device.type for tensor in tensors} - {"cpu"}
    return library if devices <= {library.kernels_for} else None
