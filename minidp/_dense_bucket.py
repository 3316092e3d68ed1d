"""A dense bucket: gradients of one dtype on one device in one flat buffer.

The alias rules of ``gradient_as_bucket_view`` live here and nowhere else. With it,
after a synchronised backward ``param.grad is view``: the next backward accumulates
straight into the buffer, and only divides. ``zero_grad(set_to_none=True)`` cuts that
tie, a later backward ties it again to the same memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any, cast

import torch

from . import _ops
from ._arrivals import Entry, Mark, is_copied_at_once
from ._bucket import Bucket, BucketState, Division
from ._fit import Fit, can_tie
from ._layout import BucketPlan

# For map(): these run once per gradient.
_layout_of = attrgetter("layout")
_data_ptr = torch.Tensor.data_ptr


class Memory:
    """The addresses of a buffer: tells which gradients lie in it.

    They are asked for each time: a comm hook may call ``resize_`` on the buffer, which
    moves it, and the old addresses may then be those of somebody's gradient.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._nbytes = buffer.nbytes

    def owns(self, grad: Entry) -> bool:
        """Whether a gradient lies in the buffer."""
        return (
            isinstance(grad, torch.Tensor)
            and grad.layout is torch.strided
            and 0 <= grad.data_ptr() - self._buffer.data_ptr() < self._nbytes
        )

    def owns_any(self, grads: Sequence[torch.Tensor]) -> bool:
        """Whether any may lie in the buffer; `owns` then tells which."""
        if set(map(_layout_of, grads)) != {torch.strided}:
            return True  # only strided tensors have an address
        start = self._buffer.data_ptr()
        addresses = range(start, start + self._nbytes)
        return any(map(addresses.__contains__, map(_data_ptr, grads)))


class DenseBucket(Bucket):
    """See the module; ``as_view`` is ``gradient_as_bucket_view``."""

    def __init__(
        self,
        plan: BucketPlan,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        rank: int,
        *,
        as_view: bool,
    ) -> None:
        super().__init__(plan, params, names, rank)
        self._may_be_view = self._as_view = as_view
        # 1D, 1D, ND each; all on the same memory
        self.buffer, values, self.views = _allocate(plan)
        self._values = values
        self._fit = Fit(plan, self.views)
        is_large = [is_copied_at_once(param) for param in self.params]
        self._copy_plan = _ops.CopyPlan(values, self.views, is_large)
        self.slots = _ops.slots(self.params, self.views, values, as_view=as_view)
        if self.slots and values.is_cpu:  # on CUDA one launch per bucket beats caches
            self.large = [k for k, large in enumerate(is_large) if large]
        self._memory = Memory(self.buffer)
        self._saved: dict[int, torch.Tensor] = {}
        self._tracked: dict[int, torch.Tensor] = {}
        self._arrived: Sequence[Entry] = ()
        self._is_apart = False

    @property
    def payload(self) -> torch.Tensor:
        """The buffer; 1-D, real."""
        return self.buffer

    def copy_now(self, k: int, grad: torch.Tensor, division: Division) -> Entry:
        """Copy, unless `flatten` has to look at this gradient first."""
        view = self.views[k]
        if (
            grad is view
            or (self._as_view and self._memory.owns(grad))
            or torch.is_grad_enabled()
            or not self._fit.allows(view, grad)
        ):
            return grad
        _ops.scale_into(view, grad, 1.0 / division.at_copy)
        if self._as_view:
            self.params[k].grad = view  # lets go of the gradient's own memory
        return Mark.COPIED

    def flatten(
        self,
        entries: Sequence[Entry],
        division: Division,
        undecided: Collection[int] = (),
    ) -> None:
        """Copy and scale what is not in the buffer yet, divide what is."""
        self.streams.gather(entries)
        self._arrived = entries
        is_decided = not (undecided and self._as_view)
        slots = self.slots if is_decided and not self._is_apart else None
        if not (slots and slots.flatten(entries, division.at_copy)):
            self._flatten_carefully(tuple(entries), division, undecided)
        _ops.divide(self.buffer, division.of_buffer)
        self.advance(BucketState.FULL)

    def _flatten_carefully(
        self,
        entries: tuple[Entry, ...],
        division: Division,
        undecided: Collection[int],
    ) -> None:
        aliased: list[torch.Tensor] = []
        grads = cast("list[torch.Tensor]", list(entries))
        if set(map(type, entries)) == {torch.Tensor} and not (
            self._as_view and self._memory.owns_any(grads)
        ):
            # The everyday case: every gradient is there, and still the user's own.
            views, fresh = self.views, grads
        else:
            views, fresh, aliased = self._sort(entries, undecided)
        if not self._fit.is_likely(views, fresh):
            self._name_misfit(views, fresh)
        if torch.is_grad_enabled() and any(g.requires_grad for g in fresh + aliased):
            self._flatten_tracked(entries, division)
        else:
            try:
                self._copy_plan.flatten(views, fresh, 1.0 / division.at_copy)
            except (RuntimeError, ValueError):
                self._name_misfit(views, fresh)
                raise
            for values in [self._values] if len(aliased) == len(entries) else aliased:
                _ops.divide(values, division.at_copy)

    def _sort(
        self, entries: Sequence[Entry], undecided: Collection[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Views and gradients to copy, and gradients that are in place already."""
        views: list[torch.Tensor] = []
        fresh: list[torch.Tensor] = []
        aliased: list[torch.Tensor] = []
        for k, (view, grad) in enumerate(zip(self.views, entries, strict=True)):
            if grad is view or (self._as_view and self._memory.owns(grad)):
                if k in undecided:
                    self._saved[k] = view.clone()
                aliased.append(view)
            elif grad is None:
                if k in undecided and self._memory.owns(self.params[k].grad):
                    self._saved[k] = view.clone()  # a shadow: .grad did not arrive
                view.zero_()
            elif isinstance(grad, torch.Tensor):
                views.append(view)
                fresh.append(grad)
        return views, fresh, aliased

    def _name_misfit(
        self, views: list[torch.Tensor], grads: list[torch.Tensor]
    ) -> None:
        misfit = self._fit.first_misfit(views, grads)
        if misfit is not None:
            k, expected, found = misfit
            raise self._misfit(self.names[k], expected, found)

    def _flatten_tracked(self, entries: Sequence[Entry], division: Division) -> None:
        """``create_graph=True``: gradients that themselves require grad.

        Their scaled copies stay outside the buffer: the next backward writes that.
        """
        for k, grad in enumerate(entries):
            if isinstance(grad, torch.Tensor):
                self._tracked[k] = grad * (1.0 / division.total)
                _ops.scale_into(self.views[k], grad.detach(), 1.0 / division.at_copy)

    def unflatten(
        self,
        kept: Collection[int] = (),
        into: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Copy out, or point ``.grad`` at the buffer; restore what is kept."""
        for k in kept:
            if k in self._saved:
                self.views[k].copy_(self._saved[k])
        if into is not None:
            _copy_into(into, self.views)
        elif not (self.slots and self._unflatten_natively(self.slots, kept)):
            self._unflatten_carefully(kept)
        self._saved.clear()
        self._tracked.clear()
        self._arrived = ()

    def _unflatten_natively(self, slots: Any, kept: Collection[int]) -> bool:
        if kept or self._tracked or not self._arrived:
            slots.forget_copies()
            return False
        return _copy_out(slots, self._arrived, is_alone=self._is_alone)

    def _unflatten_carefully(self, kept: Collection[int]) -> None:
        grads = [param.grad for param in self.params]
        if self._as_view and not self._tracked:
            self._point_at_views(grads, kept)
        elif kept or self._tracked or set(map(type, grads)) != {torch.Tensor}:
            for k in range(len(grads)):
                if k not in kept:
                    self._unflatten_slot(k)
        else:
            with contextlib.suppress(RuntimeError):
                _ops.unflatten(grads, self.views)  # type: ignore[arg-type]
                return
            list(map(self._unflatten_slot, range(len(grads))))

    def _point_at_views(
        self, grads: Sequence[torch.Tensor | None], kept: Collection[int]
    ) -> None:
        for k, (view, grad) in enumerate(zip(self.views, grads, strict=True)):
            if grad is view or k in kept:
                continue
            arrived = self._arrived[k]
            if grad is not None and arrived is not None and grad is not arrived:
                expected = "the bucket's view, or the gradient that arrived"
                raise self._misfit(self.names[k], expected, *_not_our_view(grad))
            self.params[k].grad = view

    def _unflatten_slot(self, k: int) -> None:
        param, view = self.params[k], self.views[k]
        grad = param.grad
        if grad is None or (self._as_view and k in self._tracked and grad is view):
            grad = torch.empty_like(view)
            param.grad = grad
        if k in self._tracked:
            with torch.enable_grad():
                grad.copy_(self._tracked[k])  # gives .grad its history
        with torch.no_grad():
            try:
                grad.detach().copy_(view)
            except RuntimeError:  # a hook put an expanded tensor there
                param.grad = torch.empty_like(view).copy_(view)

    def set_apart(self, *, apart: bool) -> None:
        """See `Bucket`."""
        self._is_apart = apart
        self._as_view = self._may_be_view and not apart
        for param in self.params if apart and self._may_be_view else ():
            grad = param.grad
            if grad is not None and self._memory.owns(grad):
                param.grad = grad.clone()

    def tie_grads(self) -> None:
        """See `Bucket`."""
        for param, view in zip(self.params, self.views, strict=True):
            grad = param.grad
            if grad is not None and can_tie(param, view):
                param.grad = view.copy_(grad)


def _copy_into(
    grads: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor]
) -> None:
    with torch.no_grad():
        for grad, view in zip(grads, views, strict=True):
            if grad is not None:
                grad.copy_(view)


def _copy_out(slots: Any, arrived: Sequence[Entry], *, is_alone: bool) -> bool:
    try:
        return bool(slots.unflatten(arrived, is_alone=is_alone))
    except RuntimeError:  # a gradient overlaps itself: one by one
        slots.forget_copies()
        return False


def _allocate(
    plan: BucketPlan,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """What travels, the same memory in the parameters' dtype, and its slots."""
    values = torch.empty(plan.numel, dtype=plan.dtype, device=plan.device)
    views = [values.as_strided(s.shape, s.stride, s.offset) for s in plan.slots]
    if not plan.dtype.is_complex:
        return values, values, views
    # Complex gradients travel as interleaved reals: backends cannot add complex.
    return torch.view_as_real(values).flatten(), values, views


def _not_our_view(grad: torch.Tensor) -> tuple[str, str]:
    """Where a ``.grad`` may have come from, and what to do about that."""
    found = "a .grad that is not the expected DDP bucket view, but "
    is_strided = grad.layout is torch.strided
    if not is_strided or grad.untyped_storage().nbytes() == grad.nbytes:
        found += "a tensor that was put there during the backward"
        return found, "do not replace .grad in hooks"
    found += "a part of another buffer: of another live wrapper of this module"
    return found, (
        "let go of the old wrapper before wrapping again, or pass "
        "gradient_as_bucket_view=True to one of them only"
    )
