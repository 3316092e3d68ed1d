"""One bucket: its memory, and how gradients get in and out.

    entries --flatten--> buffer --launch--> all ranks --complete--> buffer
                                                 .grad <--unflatten--'

The alias rules of ``gradient_as_bucket_view`` live here and nowhere else. With it,
after a synchronised backward ``param.grad is view``: the next backward accumulates
straight into the buffer, and only divides. ``zero_grad(set_to_none=True)`` cuts that
tie, a later backward ties it again to the same memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, cast

import torch

from . import _ops
from ._collectives import all_reduce
from ._countdown import Entry, Mark, is_copied_at_once
from ._layout import BucketPlan
from ._streams import streams_for
from .errors import GradientError, InternalError, explain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


class BucketState(Enum):
    """Lifecycle: FILLING -> FULL -> IN_FLIGHT -> FILLING."""

    FILLING = "filling"  # slots are pending
    FULL = "full"  # flattened; waits for its turn to be launched
    IN_FLIGHT = "in flight"  # the collective is enqueued, nobody has waited for it


_NEXT = {
    BucketState.FILLING: BucketState.FULL,
    BucketState.FULL: BucketState.IN_FLIGHT,
    BucketState.IN_FLIGHT: BucketState.FILLING,
}


class Bucket:
    """What dense and sparse buckets share: identity, state, launch and wait."""

    def __init__(
        self,
        plan: BucketPlan,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        rank: int,
    ) -> None:
        self.plan = plan
        self.params = tuple(params[i] for i in plan.indices)
        self.names = tuple(names[i] for i in plan.indices)
        self.position = {i: k for k, i in enumerate(plan.indices)}
        self.state = BucketState.FILLING
        self.streams = streams_for(plan.device)
        self._rank = rank
        self._work: Work | None = None

    def advance(self, state: BucketState) -> None:
        """Move to the next state; any other move is a mistake of ours."""
        if _NEXT[self.state] is not state:
            raise InternalError(
                f"[rank {self._rank}] bucket of {self.names[0]}: "
                f"{self.state.name} -> {state.name} is not allowed."
            )
        self.state = state

    def launch(self, group: ProcessGroup) -> Work:
        """Start the all-reduce; `complete` waits for it."""
        self.advance(BucketState.IN_FLIGHT)
        with self.streams.launching():
            self._work = all_reduce(self._payload(), group)
        return self._work

    def complete(self) -> None:
        """Wait for the collective (on CUDA: order the current stream after it)."""
        if self._work is None:
            raise InternalError(f"[rank {self._rank}] nothing to wait for.")
        self._work.wait()
        self._work = None
        self.advance(BucketState.FILLING)

    def _payload(self) -> torch.Tensor:
        raise NotImplementedError

    def _misfit(self, name: str, expected: str, found: str) -> GradientError:
        return GradientError(
            explain(
                self._rank,
                "A gradient does not fit its bucket.",
                names=[name],
                expected=expected,
                found=found,
                remedy="do not change dtype, shape or layout of a parameter or of its "
                ".grad after wrapping; wrap the module again instead",
            )
        )


class DenseBucket(Bucket):
    """Gradients of one dtype on one device in one flat buffer.

    Args:
        plan: the slots.
        params: all managed parameters, by parameter index.
        names: their dotted names.
        rank: group rank, for errors.
        as_view: whether ``.grad`` shall be a view of the buffer.
    """

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
        self._as_view = as_view
        is_complex = plan.dtype.is_complex
        # Complex gradients travel as interleaved reals: backends cannot add complex.
        self.buffer = torch.empty(  # 1D
            plan.numel * (2 if is_complex else 1),
            dtype=plan.dtype.to_real() if is_complex else plan.dtype,
            device=plan.device,
        )
        values = self.buffer
        if is_complex:
            values = torch.view_as_complex(self.buffer.view(-1, 2))
        self._values = values  # 1D, in the parameters' dtype
        self.views = [  # ND each
            values.as_strided(slot.shape, slot.stride, slot.offset)
            for slot in plan.slots
        ]
        self._runs = self._small_runs()
        self._small_numel = sum(run.numel() for run in self._runs)
        start = self.buffer.data_ptr()
        self._addresses = range(start, start + self.buffer.nbytes)
        self._saved: dict[int, torch.Tensor] = {}
        self._tracked: dict[int, torch.Tensor] = {}

    def _small_runs(self) -> list[torch.Tensor]:
        """The buffer without the slots that `copy_now` fills, as 1D pieces."""
        runs = []
        start = end = 0
        for slot, param in zip(self.plan.slots, self.params, strict=True):
            if is_copied_at_once(param):
                if end > start:
                    runs.append(self._values[start:end])
                start = slot.offset + slot.numel
            end = slot.offset + slot.numel
        if end > start:
            runs.append(self._values[start:end])
        return runs

    def _payload(self) -> torch.Tensor:
        return self.buffer

    def _owns(self, grad: Entry) -> bool:
        """Whether a gradient lies in this bucket's buffer."""
        return isinstance(grad, torch.Tensor) and grad.data_ptr() in self._addresses

    def copy_now(self, k: int, grad: torch.Tensor, divisor: int) -> Entry:
        """Fill slot ``k`` before the bucket is full; returns the entry to keep."""
        view = self.views[k]
        if (
            grad is view
            or (self._as_view and self._owns(grad))
            or torch.is_grad_enabled()
            or grad.dtype is not self.plan.dtype
            or grad.shape != view.shape
            or grad.layout is not torch.strided
        ):
            return grad  # `flatten` deals with it
        _ops.scale_into(view, grad, 1.0 / divisor)
        if self._as_view:
            self.params[k].grad = view  # lets go of the gradient's own memory
        return Mark.COPIED

    def flatten(
        self, entries: Sequence[Entry], divisor: int, undecided: Collection[int] = ()
    ) -> None:
        """Bring every slot into the buffer, divided; the bucket is then FULL.

        Args:
            entries: per slot a gradient, None (contributes zeros) or COPIED.
            divisor: number of ranks that contribute.
            undecided: slots whose parameter may turn out to be unused on all ranks:
                what the buffer holds of their ``.grad`` is saved for `unflatten`.
        """
        self.streams.gather(entries)
        if not self._as_view and set(map(type, entries)) == {torch.Tensor}:
            # The everyday case.
            views, fresh = self.views, cast("list[torch.Tensor]", list(entries))
            aliased: list[torch.Tensor] = []
        else:
            views, fresh, aliased = self._sort(entries, undecided)
        self._check(views, fresh)
        if torch.is_grad_enabled() and any(g.requires_grad for g in fresh + aliased):
            self._flatten_tracked(entries, divisor)
        else:
            self._flatten_fresh(views, fresh, divisor)
            for values in [self._values] if len(aliased) == len(entries) else aliased:
                _ops.divide(values, divisor)
        self.advance(BucketState.FULL)

    def _sort(
        self, entries: Sequence[Entry], undecided: Collection[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Views and gradients to copy, and gradients that are in place already."""
        views: list[torch.Tensor] = []
        fresh: list[torch.Tensor] = []
        aliased: list[torch.Tensor] = []
        for k, (view, grad) in enumerate(zip(self.views, entries, strict=True)):
            if grad is view or (self._as_view and self._owns(grad)):
                if k in undecided:
                    self._saved[k] = view.clone()
                aliased.append(view)
            elif grad is None:
                view.zero_()
            elif isinstance(grad, torch.Tensor):
                views.append(view)
                fresh.append(grad)
        return views, fresh, aliased

    def _flatten_fresh(
        self, views: list[torch.Tensor], grads: list[torch.Tensor], divisor: int
    ) -> None:
        if not grads:
            return
        scale = 1.0 / divisor
        if len(grads) == len(self.views):
            _ops.flatten(views, grads, scale, [self._values])
        elif sum(map(torch.Tensor.numel, views)) == self._small_numel:
            _ops.flatten(views, grads, scale, self._runs)
        else:
            for view, grad in zip(views, grads, strict=True):
                _ops.scale_into(view, grad, scale)

    def _check(self, views: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """A copy would convert, broadcast or densify without a word."""
        if (
            {grad.dtype for grad in grads} <= {self.plan.dtype}
            and {grad.layout for grad in grads} <= {torch.strided}
            and sum(map(torch.Tensor.numel, grads))
            == sum(map(torch.Tensor.numel, views))
        ):
            return
        for view, grad in zip(views, grads, strict=True):
            expected = (view.dtype, view.layout, tuple(view.shape))
            found = (grad.dtype, grad.layout, tuple(grad.shape))
            if expected != found:
                k = next(k for k, mine in enumerate(self.views) if mine is view)
                raise self._misfit(
                    self.names[k],
                    "{}, {}, shape {}".format(*expected),
                    "{}, {}, shape {}".format(*found),
                )

    def _flatten_tracked(self, entries: Sequence[Entry], divisor: int) -> None:
        """``backward(create_graph=True)``: gradients that themselves require grad.

        Their scaled copies stay outside the buffer, so that the history of this
        backward does not hang on memory that the next one writes.
        """
        for k, grad in enumerate(entries):
            if isinstance(grad, torch.Tensor):
                self._tracked[k] = grad * (1.0 / divisor)
                self.views[k].copy_(self._tracked[k].detach())

    def unflatten(self, kept: Collection[int] = ()) -> None:
        """Put the reduced values into ``.grad``, except for the slots in ``kept``."""
        for k in kept:
            if k in self._saved:
                self.views[k].copy_(self._saved[k])
        grads = [param.grad for param in self.params]
        if self._as_view and not self._tracked:
            for k, (view, grad) in enumerate(zip(self.views, grads, strict=True)):
                if grad is not view and k not in kept:
                    self.params[k].grad = view
        elif kept or self._tracked or set(map(type, grads)) != {torch.Tensor}:
            for k in range(len(grads)):
                if k not in kept:
                    self._unflatten_slot(k)
        else:
            _ops.unflatten(grads, self.views)  # type: ignore[arg-type]
        self._saved.clear()
        self._tracked.clear()

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
            grad.detach().copy_(view)

    def move_grads_to(self, views: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Copy gradients that are views of this buffer into the views of a new one."""
        for param, view in zip(self.params, self.views, strict=True):
            grad = param.grad
            if grad is not None and (grad is view or self._owns(grad)):
                with torch.no_grad():
                    views[param].copy_(grad)
                param.grad = views[param]


class SparseBucket(Bucket):
    """One sparse gradient: the payload is the user's ``.grad`` itself."""

    views: tuple[torch.Tensor, ...] = ()

    def copy_now(self, k: int, grad: torch.Tensor, divisor: int) -> Entry:
        """A sparse gradient is never copied."""
        return grad

    def flatten(
        self, entries: Sequence[Entry], divisor: int, undecided: Collection[int] = ()
    ) -> None:
        """Divide in place; a missing gradient contributes an empty one."""
        grad = entries[0]
        param = self.params[0]
        if not isinstance(grad, torch.Tensor):
            grad = torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64, device=param.device),
                torch.empty((0, *param.shape[1:]), dtype=param.dtype),
                param.shape,
                device=param.device,
                is_coalesced=True,
            )
        elif grad.layout is not torch.sparse_coo:
            raise self._misfit(
                self.names[0],
                "a sparse COO gradient (the embedding has sparse=True)",
                f"a gradient of layout {grad.layout}",
            )
        self._before = grad.clone() if undecided else None
        with torch.no_grad():
            _ops.divide(grad, divisor)
        self._grad = grad
        self.advance(BucketState.FULL)

    def _payload(self) -> torch.Tensor:
        return self._grad

    def unflatten(self, kept: Collection[int] = ()) -> None:
        """Put the reduced gradient into ``.grad``."""
        param = self.params[0]
        grad, before = self._grad, self._before
        del self._grad, self._before
        if kept:
            if before is not None and param.grad is not None:
                param.grad = before
        elif param.grad is None:
            param.grad = grad
        elif param.grad is not grad:
            with torch.no_grad():
                param.grad.copy_(grad)

    def move_grads_to(self, views: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Nothing to move: the gradient is the user's own."""


AnyBucket = DenseBucket | SparseBucket


def make_bucket(
    plan: BucketPlan,
    params: Sequence[torch.nn.Parameter],
    names: Sequence[str],
    rank: int,
    *,
    as_view: bool,
) -> AnyBucket:
    """The bucket for a plan.

    Args:
        plan: the slots.
        params: all managed parameters, by parameter index.
        names: their dotted names.
        rank: group rank, for errors.
        as_view: ``gradient_as_bucket_view``.
    """
    if plan.sparse:
        return SparseBucket(plan, params, names, rank)
    return DenseBucket(plan, params, names, rank, as_view=as_view)
