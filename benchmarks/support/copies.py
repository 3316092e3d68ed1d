"""Ways to copy gradients into a bucket's buffer and back, and what they work on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from minidp import _ops
from minidp._arrivals import Callbacks, arrivals_for, is_copied_at_once

DIVISOR = 3  # no power of two: who divides instead of multiplying gets other bits
SCALE = 1.0 / DIVISOR
CEILING = "memcpy"


class Bucket:
    """Gradients, each in memory of its own, and the buffer they go to.

    Args:
        shapes: of the gradients.
        dtype: of all of them.
        device: of all of them.
        library: the native extension, if there is one.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: str,
        library: ModuleType | None,
    ) -> None:
        def fresh(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, device=device).to(dtype)

        self.grads = [fresh(shape) for shape in shapes]
        numels = [grad.numel() for grad in self.grads]
        self.values = fresh((sum(numels),))
        self.other = fresh((sum(numels),))  # what the ceiling copies from or to
        self.rows = [grad.view(-1) for grad in self.grads]
        parts = self.values.split(numels)
        self.views = [
            part.view(shape) for part, shape in zip(parts, shapes, strict=True)
        ]
        self.is_large = [is_copied_at_once(grad) for grad in self.grads]
        self.plan = _ops.CopyPlan(self.values, self.views, self.is_large)
        pairs = list(zip(self.views, self.grads, self.is_large, strict=True))
        self.large = [(view, grad) for view, grad, large in pairs if large]
        small = [(view, grad) for view, grad, large in pairs if not large]
        self.small_views = [view for view, _ in small]
        self.small_grads = [grad for _, grad in small]
        self._is_cuda = device == "cuda"
        if library is not None:
            self._go_native(library)

    def _go_native(self, library: ModuleType) -> None:
        """What a bucket of minidp has with the native extension."""
        params = [torch.nn.Parameter(torch.empty_like(grad)) for grad in self.grads]
        for param, grad in zip(params, self.grads, strict=True):
            param.grad = grad
        self.slots = library.Slots(params, self.views, self.values, as_view=False)
        self.arrivals = arrivals_for(params, Callbacks(print, print))  # never called
        self.arrivals.adopt([range(len(params))])
        self.arrivals.entries[:] = self.grads

    def seconds(self, call: Callable[[Bucket], object], bucket: Bucket) -> float:
        """How long ``call(bucket)`` takes; on a GPU, until the stream is done."""
        if not self._is_cuda:
            start = time.perf_counter()
            call(bucket)
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(bucket)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


@dataclass(frozen=True)
class Way:
    """One way to copy.

    Args:
        name: for tables.
        call: copies.
        filled: what the call writes; None: it is no way to flatten, and not checked.
        expected: what must be there then, bit for bit.
    """

    name: str
    call: Callable[[Bucket], Any]
    filled: Callable[[Bucket], list[torch.Tensor]] | None
    expected: Callable[[Bucket], list[torch.Tensor]]

    def num_wrong(self, bucket: Bucket) -> int | None:
        """How many tensors get wrong bits."""
        if self.filled is None:
            return None
        expected, found = self.expected(bucket), self.filled(bucket)
        for tensor in found:
            tensor.fill_(-7)
        self.call(bucket)
        pairs = zip(found, expected, strict=True)
        return sum(not _same_bits(mine, theirs) for mine, theirs in pairs)


def _same_bits(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    as_bytes = [each.reshape(-1).view(torch.uint8) for each in (mine, theirs)]
    return torch.equal(*as_bytes)


def call_python_kernels() -> None:
    """From now on, ``minidp._ops`` does as if there were no native extension."""
    _ops.kernels_for = lambda _: None


# -- flatten ---------------------------------------------------------------------------


def flatten_ways(library: ModuleType | None) -> list[Way]:
    """All ways to flatten; those in C++ only with the extension."""

    def way(
        name: str, call: Callable[[Bucket], Any], *, is_flatten: bool = True
    ) -> Way:
        return Way(name, call, _views if is_flatten else None, _scaled)

    ways = [
        way(CEILING, lambda b: b.values.copy_(b.other), is_flatten=False),
        way("torch mul_out of one tensor", _mul_whole, is_flatten=False),
        way("torch mul_out loop (DDP)", _mul_loop),
        way("torch foreach_copy_, mul_ (batched)", _foreach_and_mul),
        way("torch cat, mul_", _cat_and_mul),
        way("minidp in Python", _flatten_in_python),
    ]
    if library is not None:
        kernel = library.flatten
        ways += [
            way("native flatten", lambda b: kernel(b.views, b.grads, SCALE)),
            way("native slots", _slots_flatten),
        ]
    return ways


def _views(bucket: Bucket) -> list[torch.Tensor]:
    return bucket.views


def _scaled(bucket: Bucket) -> list[torch.Tensor]:
    return [grad * SCALE for grad in bucket.grads]


def _mul_whole(bucket: Bucket) -> None:
    torch.mul(bucket.other, SCALE, out=bucket.values)


def _mul_loop(bucket: Bucket) -> None:
    for view, grad in zip(bucket.views, bucket.grads, strict=True):
        torch.mul(grad, SCALE, out=view)


def _foreach_and_mul(bucket: Bucket) -> None:
    torch._foreach_copy_(bucket.views, bucket.grads)
    bucket.values.mul_(SCALE)


def _cat_and_mul(bucket: Bucket) -> None:
    torch.cat(bucket.rows, out=bucket.values)
    bucket.values.mul_(SCALE)


def _flatten_in_python(bucket: Bucket) -> None:
    """Large gradients one by one as their hooks do, then the others together."""
    for view, grad in bucket.large:
        _ops.scale_into(view, grad, SCALE)
    bucket.plan.flatten(bucket.small_views, bucket.small_grads, SCALE)


def _slots_flatten(bucket: Bucket) -> None:
    did = bucket.slots.flatten(bucket.arrivals.gather(0), DIVISOR)
    assert did, "not the everyday case"


# -- unflatten -------------------------------------------------------------------------


def unflatten_ways(library: ModuleType | None) -> list[Way]:
    """All ways to unflatten; those in C++ only with the extension."""

    def way(
        name: str, call: Callable[[Bucket], Any], *, is_unflatten: bool = True
    ) -> Way:
        return Way(name, call, _grads if is_unflatten else None, _views)

    ways = [
        way(CEILING, lambda b: b.other.copy_(b.values), is_unflatten=False),
        way("torch copy_ loop (DDP)", _copy_loop),
        way("torch foreach_copy_", lambda b: torch._foreach_copy_(b.grads, b.views)),
        way("minidp in Python", lambda b: _ops.unflatten(b.grads, b.views)),
    ]
    if library is not None:
        kernel = library.unflatten
        ways += [
            way("native unflatten", lambda b: kernel(b.grads, b.views)),
            way("native slots", _slots_unflatten),
        ]
    return ways


def _grads(bucket: Bucket) -> list[torch.Tensor]:
    return bucket.grads


def _copy_loop(bucket: Bucket) -> None:
    for grad, view in zip(bucket.grads, bucket.views, strict=True):
        grad.copy_(view)


def _slots_unflatten(bucket: Bucket) -> None:
    did = bucket.slots.unflatten(bucket.arrivals.gather(0))
    assert did, "not the everyday case"
