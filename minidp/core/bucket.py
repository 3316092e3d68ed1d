"""Copy the gradients of one bucket into a payload, reduce it, and copy them out.

::

    entries --flatten--> payload --launch--> all ranks --wait--> payload
                                                  .grad <--unflatten--'

    FILLING -----------> FULL -------------> IN_FLIGHT ------------> FILLING

The payload is a flat buffer, or one sparse gradient. In shared memory the sum may be
written to ``.grad`` already (`DenseBucket.offer_grads`). Only this file has the rules
of ``gradient_as_bucket_view``: ``param.grad is view`` after a synchronised backward, so
that the next one accumulates into the buffer and `DenseBucket.flatten` only divides.
``zero_grad(set_to_none=True)`` breaks the alias; a later backward restores it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import Enum
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from minidp import comm
from minidp.config import ReducerConfig
from minidp.errors import InternalError, misfit
from minidp.layout import BucketPlan

from . import kernels
from .averaging import DivideFactors
from .grad_hooks import Entry, GradState, is_copied_at_once


class BucketState(Enum):
    """Name the states of a bucket, each followed by the next, the last by the first."""

    FILLING = "filling"  # gradients are missing, or averages wait to be copied out
    FULL = "full"  # flattened; waits for its turn to be launched
    IN_FLIGHT = "in flight"  # the collective is enqueued, nobody has waited for it
    __hash__ = object.__hash__  # Enum's is a Python function: slow


Entries = Sequence[Entry]  # per slot
Slots = Collection[int]  # numbers of slots in a bucket
_NO_STREAM: AbstractContextManager[object] = nullcontext()
_FOLLOWING = dict(pairwise([*BucketState, BucketState.FILLING]))


class Bucket(ABC):
    """Hold the gradients that one collective reduces.

    ``plan`` has the indices of its parameters among all ``params`` and ``names``.
    """

    payload: Tensor  # what is reduced: the flat buffer, or the sparse gradient
    tail: Tensor  # the end of the flat buffer, which belongs to no slot

    def __init__(
        self,
        plan: BucketPlan,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        communicator: comm.Communicator,
        config: ReducerConfig,
    ) -> None:
        self.plan = plan
        self.params = tuple(params[i] for i in plan.indices)
        self.names = tuple(names[i] for i in plan.indices)
        self.position = {i: k for k, i in enumerate(plan.indices)}
        self.views: list[Tensor] = []  # one per slot; none if sparse
        self.native: Any | None = None  # the extension's copies, where it has them
        self.copied_by_hook: list[int] = []  # slots that native hooks fill
        self.state = BucketState.FILLING
        is_cuda = plan.device.type == "cuda"
        self.streams = kernels.BucketStreams(plan.device) if is_cuda else None
        self.communicator = communicator
        self.config = config
        self.work: comm.Work | None = None  # the collective in flight
        self.shared: comm.SharedBuffer | None = None  # the buffer, if all ranks map it
        self.is_alone = False  # it changes no value, because the group has one rank
        # Averages are multiplied by it, once: by `wait`, the extension or `_rescale`.
        self.factor: float | Tensor = 1.0

    def copy_now(self, k: int, grad: Tensor, divisor: int) -> Entry:
        """Return ``grad`` uncopied; a dense bucket may copy it and return COPIED."""
        return grad

    @abstractmethod
    def flatten(
        self, entries: Entries, factors: DivideFactors, undecided: Slots = ()
    ) -> None:
        """Bring every slot into the payload, divided; the bucket is then FULL.

        ``entries``: per slot a gradient, None (contributes zeros) or COPIED.
        ``undecided``: slots whose parameter may turn out to be unused on all ranks. If
        ``.grad`` lies in the buffer, its values are saved for `unflatten`.
        GradientError for a gradient of another dtype, layout, shape or device.
        """

    def all_reduce(self) -> comm.Work:
        """Start to sum the payload over all ranks; enter IN_FLIGHT; return `work`."""
        communicator = self.communicator
        self._advance(BucketState.IN_FLIGHT)
        self.is_alone = communicator.size == 1 and not communicator.is_python
        with self.on_stream():
            if self.shared is None:
                self.work = comm.all_reduce(self.payload, communicator.group)
            else:
                self.work = self.shared.all_reduce()
        return self.work

    def run_hook(self, hook: comm.CommHook, turn: comm.Turn) -> comm.Work:
        """Start a comm hook on the payload; enter IN_FLIGHT; return `work`."""
        self._advance(BucketState.IN_FLIGHT)
        self.is_alone = False
        shown = comm.GradBucket(self.plan, self.payload, self.params, turn)
        with self.on_stream():
            self.work = hook.start(shown, self.names, self.communicator.rank)
        return self.work

    def on_stream(self) -> AbstractContextManager[object]:
        """Return a context that selects the CUDA stream that filled the payload."""
        return _NO_STREAM if self.streams is None else self.streams.launching()

    def receive(self, result: object) -> None:
        """Take the result of `work`, which is done: copy a tensor; enter FILLING."""
        if isinstance(result, Tensor) and result is not self.payload:
            with torch.no_grad():
                self.payload.copy_(result)
        self.work = None
        self._advance(BucketState.FILLING)

    @abstractmethod
    def unflatten(
        self, kept: Slots = (), into: Sequence[Tensor | None] | None = None
    ) -> None:
        """Write averages to ``.grad``, or to the tensors ``into``, not ``kept`` slots.

        ``into``, per slot, after ``set_apart(apart=True)``. With bucket views ``.grad``
        becomes the view; ``kept`` views get the values that `flatten` saved.
        """

    def set_apart(self, *, apart: bool) -> None:  # noqa: B027 -- sparse: no views
        """Say if gradients are in an RPC context, or (``apart`` False) in ``.grad``."""

    def alias_grads_to_views(self) -> None:  # noqa: B027 -- sparse: no views
        """Copy each ``.grad`` into this new bucket, and make it a view of that."""

    def _advance(self, state: BucketState) -> None:
        if _FOLLOWING[self.state] is not state:
            raise InternalError(
                f"[rank {self.communicator.rank}] bucket of {self.names[0]}: "
                f"{self.state.name} -> {state.name} is not allowed."
            )
        self.state = state


class DenseBucket(Bucket):
    """Reduce gradients of one dtype and device through a flat buffer."""

    def __init__(
        self,
        plan: BucketPlan,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        communicator: comm.Communicator,
        config: ReducerConfig,
        shared: comm.SharedBuffer | None = None,
    ) -> None:
        super().__init__(plan, params, names, communicator, config)
        self._as_view = as_view = config.gradient_as_bucket_view
        self.shared = shared
        # One memory: in the parameters' dtype, as a view per slot, and 1-D real.
        if shared is None:
            values = torch.empty(plan.length, dtype=plan.dtype, device=plan.device)
        else:
            values = shared.values.view(plan.dtype)
        self.payload, self.tail = map(kernels.as_real, (values, values[plan.numel :]))
        self._values = values = values[: plan.numel]
        self.views = [
            values.as_strided(s.shape, s.stride, s.offset) for s in plan.slots
        ]
        self._memory = kernels.Memory(self.payload)
        is_large = [is_copied_at_once(param) for param in self.params]
        self._copy_plan = kernels.CopyPlan(values, self.views, is_large)
        if (extension := kernels.extension_for([values])) is not None:
            mine = list(self.params)
            self.native = extension.Slots(mine, self.views, values, as_view=as_view)
            if values.is_cpu:  # CUDA: one kernel for all
                self.copied_by_hook = [*range(len(self.params))]
        self._saved: dict[int, Tensor] = {}  # per slot, .grad to restore if unused
        self._tracked: dict[int, Tensor] = {}  # per slot, divided gradient with history
        self._arrived: Sequence[Entry] = ()
        self._is_apart = False

    # -- copy in -----------------------------------------------------------------------

    def copy_now(self, k: int, grad: Tensor, divisor: int) -> Entry:
        """Copy ``grad``, divided, to slot ``k``, return COPIED; or return it as it is.

        As it is if it does not fit, lies in the buffer, or grad mode is on. With bucket
        views, ``.grad`` becomes the view now.
        """
        view = self.views[k]
        fits = grad.layout is torch.strided and grad.dtype is view.dtype
        is_here = grad is view or (self._as_view and self._memory.owns(grad))
        if not fits or grad.shape != view.shape or is_here or torch.is_grad_enabled():
            return grad
        kernels.multiply_into(view, grad, divisor)
        if self._as_view:
            self.params[k].grad = view  # frees the gradient's own memory
        return GradState.COPIED

    def flatten(  # noqa: D102
        self, entries: Entries, factors: DivideFactors, undecided: Slots = ()
    ) -> None:
        if self.streams is not None:
            self.streams.gather(entries)
        self._arrived = entries
        is_usual = not self._is_apart and not (undecided and self._as_view)
        native = self.native if is_usual else None
        if not (native and native.flatten(entries, factors.pre)):
            self._flatten_in_python(tuple(entries), factors.pre, undecided)
        if factors.post != 1:
            kernels.divide(self.payload, factors.post)
            reciprocal = 1.0 / factors.post
            self._tracked = {k: g * reciprocal for k, g in self._tracked.items()}
        self._advance(BucketState.FULL)

    def _flatten_in_python(
        self, entries: tuple[Entry, ...], divisor: int, undecided: Slots
    ) -> None:
        views, grads, in_place = self._classify(entries, undecided)
        if not self._copy_plan.may_fit(views, grads):
            self._check_fit(views, grads)
        if torch.is_grad_enabled() and any(g.requires_grad for g in grads + in_place):
            # create_graph=True: scaled copies with a history stay outside the buffer.
            for k, grad in enumerate(entries):
                if isinstance(grad, Tensor):
                    self._tracked[k] = grad * (1.0 / divisor)
                    kernels.multiply_into(self.views[k], grad.detach(), divisor)
            return
        try:
            self._copy_plan.flatten(views, grads, divisor)
        except (RuntimeError, ValueError):
            self._check_fit(views, grads)
            raise
        for values in [self._values] if len(in_place) == len(entries) else in_place:
            kernels.divide(values, divisor)

    def _classify(
        self, entries: tuple[Entry, ...], undecided: Slots
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return views to fill, a gradient for each, and views that hold theirs.

        A COPIED entry is in no result. Slots without gradient are set to zeros;
        undecided ones whose ``.grad`` lies in the buffer are saved before.
        """
        everything = cast("list[Tensor]", list(entries))
        if set(map(type, entries)) == {Tensor} and not (
            self._as_view and self._memory.may_own_any(everything)
        ):
            return self.views, everything, []  # the usual case
        views, grads, in_place = [], [], []
        for k, (view, grad) in enumerate(zip(self.views, entries, strict=True)):
            is_here = grad is view or (self._as_view and self._memory.owns(grad))
            # Without a gradient, .grad may still be this view: a rank without inputs.
            if k in undecided and (
                is_here or (grad is None and self._memory.owns(self.params[k].grad))
            ):
                self._saved[k] = view.clone()
            if is_here:
                in_place.append(view)
            elif grad is None:
                view.zero_()
            elif isinstance(grad, Tensor):
                views.append(view)
                grads.append(grad)
        return views, grads, in_place

    def _check_fit(self, views: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Raise GradientError if a gradient's dtype, layout, shape, device differs."""
        for view, grad in zip(views, grads, strict=True):
            expected, found = (
                f"{t.dtype}, {t.layout}, shape {tuple(t.shape)}, on {t.device}"
                for t in (view, grad)
            )
            if expected != found:
                k = next(k for k, mine in enumerate(self.views) if mine is view)
                raise misfit(self.communicator.rank, self.names[k], expected, found)

    # -- copy out ----------------------------------------------------------------------

    def offer_grads(self, shared: comm.SharedBuffer) -> None:
        """Let the sum in ``shared`` memory write averages to ``.grad``, if C++ can.

        Not if it has a history, or the bucket a tail. `unflatten` all slots then.
        """
        native = None if self._tracked or self.plan.tail else self.native
        takes = native and self._arrived and native.offer_tiles(self.factor)
        shared.into = native if takes else None

    def unflatten(  # noqa: D102
        self, kept: Slots = (), into: Sequence[Tensor | None] | None = None
    ) -> None:
        if self._as_view or into is not None or isinstance(self.factor, Tensor):
            self._rescale()  # else the extension may multiply on the way
        for k in kept:
            if k in self._saved:
                self.views[k].copy_(self._saved[k])
        if into is not None:
            for grad, view in zip(into, self.views, strict=True):
                if grad is not None:
                    grad.detach().copy_(view)
        elif not self._unflatten_natively(kept):
            self._unflatten_in_python(kept)
        self._saved.clear()
        self._tracked.clear()
        self._arrived = ()

    def _rescale(self) -> None:
        """Multiply the payload by `factor`, which is then 1."""
        factor, self.factor = self.factor, 1.0
        if isinstance(factor, Tensor) or factor != 1.0:
            kernels.rescale(self.payload, factor)
            self._tracked = {k: grad * factor for k, grad in self._tracked.items()}

    def _unflatten_natively(self, kept: Slots) -> bool:
        """Do all of `unflatten` in C++; False if Python must do it."""
        if self.native is None:
            return False
        if not kept and not self._tracked and self._arrived:
            arrived, is_alone = self._arrived, self.is_alone
            with suppress(RuntimeError):  # a gradient overlaps itself
                if self.native.unflatten(arrived, is_alone=is_alone, scale=self.factor):
                    return True
            if self.native.is_scaled:  # `wait` has multiplied, but could not write
                self.factor = 1.0
        self.native.forget_copies()
        return False

    def _unflatten_in_python(self, kept: Slots) -> None:
        self._rescale()
        grads = [param.grad for param in self.params]
        if self._as_view and not self._tracked:
            self._point_at_views(grads, kept)
            return
        if not kept and not self._tracked and set(map(type, grads)) == {Tensor}:
            # Raises for gradients that are lazily negated, for example.
            with suppress(RuntimeError):
                torch._foreach_copy_(cast("list[Tensor]", grads), self.views)
                return
        for k in sorted({*range(len(grads))} - {*kept}):
            self._unflatten_slot(k)

    def _point_at_views(self, grads: Sequence[Tensor | None], kept: Slots) -> None:
        for k, (view, grad) in enumerate(zip(self.views, grads, strict=True)):
            if grad is view or k in kept:
                continue
            arrived = self._arrived[k]
            if grad is not None and arrived is not None and grad is not arrived:
                raise misfit(
                    self.communicator.rank,
                    self.names[k],
                    "the bucket's view, or the gradient that arrived",
                    "a .grad that is not the expected DDP bucket view",
                    "do not replace .grad in hooks; if another live wrapper of this "
                    "module put its view there, let go of it before wrapping again, or "
                    "pass gradient_as_bucket_view=True to one of them only",
                )
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

    def set_apart(self, *, apart: bool) -> None:  # noqa: D102
        # There are no views then: a ``.grad`` that lies in the buffer becomes a copy.
        may_be_view = self.config.gradient_as_bucket_view
        self._is_apart, self._as_view = apart, may_be_view and not apart
        for param in self.params if apart and may_be_view else ():
            grad = param.grad
            if grad is not None and self._memory.owns(grad):
                param.grad = grad.clone()

    def alias_grads_to_views(self) -> None:
        """Copy each ``.grad`` into its view and make it the view, as torch does.

        Leaves out gradients with a history, and those that differ in dtype, layout,
        device or shape from the parameter or the view (`flatten` rejects misfits).
        """
        for param, view in zip(self.params, self.views, strict=True):
            grad = param.grad
            if grad is None or grad.requires_grad:
                continue
            kinds = {
                (t.dtype, t.layout, t.device, t.shape) for t in (param, grad, view)
            }
            if len(kinds) == 1:
                param.grad = view.copy_(grad)
