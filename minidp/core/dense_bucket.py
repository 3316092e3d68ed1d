"""Reduce gradients of one dtype and device through a flat buffer, with views into it.

::

    .grad --copy_in--> buffer: | slot 0 | slot 1 | slot 2 | --write_averages--> .grad

This file keeps the promise of ``gradient_as_bucket_view``: ``param.grad is view``
after a synchronised backward, so that the next one accumulates into the buffer and
`copy_in` only divides. ``zero_grad(set_to_none=True)`` breaks the alias; a later
backward restores it. In shared memory the sum may be written to ``.grad`` already
(`DenseBucket.offer_grads`).

With ``lazy_bucket_allocation`` the buffer exists only from the first gradient that is
copied to it until its averages are written. Gradients that are views live on in the
buffer of their backward; the next one makes a new buffer, and moves them there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import cast

import torch
from torch import Tensor

from minidp import accelerator, comm
from minidp.config import ReducerConfig
from minidp.errors import misfit
from minidp.layout import BucketPlan
from minidp.shared_memory import SharedBuffer

from . import kernels
from .averaging import DivideFactors
from .bucket import Bucket, Entries, Slots
from .entries import Entry, GradState, is_copied_at_once
from .observer import Observers


class DenseBucket(Bucket):
    """A bucket whose gradients have one dtype and device, and travel in a flat buffer.

    The buffer is memory of this process, or with ``shared`` memory that all ranks map.
    The other arguments are those of `Bucket`.
    """

    def __init__(
        self,
        plan: BucketPlan,
        params: Mapping[str, torch.nn.Parameter],
        communicator: comm.Communicator,
        config: ReducerConfig,
        observers: Observers,
        shared: SharedBuffer | None = None,
    ) -> None:
        super().__init__(plan, params, communicator, config, observers)
        self._as_view = config.gradient_as_bucket_view
        self.shared = shared
        self._is_lazy = config.lazy_bucket_allocation and shared is None
        self._memory: kernels.Memory | None = None
        # When a lazy buffer was made, on the stream of the hook that has made it.
        self._made: accelerator.After | None = None
        if not self._is_lazy:
            self._allocate()
            self.copied_at_once = self._to_copy_at_once()
        # Of .grad that is to be restored if it turns out to be unused: the slots, which
        # are neighbours, and their values.
        self._saved: list[tuple[range, Tensor]] = []
        self._tracked: dict[int, Tensor] = {}  # per slot, divided gradient with history
        self._arrived: Sequence[Entry] = ()

    # -- the buffer --------------------------------------------------------------------

    def _allocate(self) -> None:
        """Make the flat buffer and all that refers to it."""
        # `payload`, `_values` and `views` share it. The first is real, for the backend,
        # the others have the dtype of the parameters.
        plan, shared = self.plan, self.shared
        if shared is None:
            values = torch.empty(plan.numel, dtype=plan.dtype, device=plan.device)
        else:
            values = shared.values.view(plan.dtype)
        self.payload, self._values = kernels.as_real(values), values
        self.views = [
            values.as_strided(s.shape, s.stride, s.offset) for s in plan.slots
        ]
        self._memory = kernels.Memory(self.payload)
        if self.streams is not None:
            self.streams.made_buffer()
        is_large = [
            is_copied_at_once(param, as_view=self._as_view) for param in self.params
        ]
        self._copy_plan = kernels.CopyPlan(values, self.views, is_large)
        if (extension := kernels.extension_for([values])) is not None:
            mine, views, as_view = list(self.params), self.views, self._as_view
            self.native = extension.Slots(mine, views, values, as_view=as_view)

    def _to_copy_at_once(self) -> list[int]:
        """Return the slots that are copied when their gradient comes, with C++ hooks.

        On a device these are those that hooks in Python copy at once, too.
        """
        if self._values.is_cpu:
            return [] if self.native is None else [*range(len(self.params))]
        as_view = self._as_view
        return [
            k
            for k, param in enumerate(self.params)
            if is_copied_at_once(param, as_view=as_view)
        ]

    def _allocate_for(self, entries: Iterable[tuple[int, Entry]]) -> list[Entry]:
        """Make the buffer during a backward, and return the present entries.

        With gradients as views each ``.grad`` that exists becomes a view of it, as in
        torch. So an entry that was such a ``.grad`` has to be the view, too.

        Args:
            entries: Numbers of slots, and what was recorded of them before.
        """
        before = [param.grad for param in self.params]
        self._allocate()
        if self.streams is not None:
            self._made = accelerator.After(self.plan.device)
        if self._as_view:
            self._move_to_views()
        return [
            self.params[k].grad if entry is not None and entry is before[k] else entry
            for k, entry in entries
        ]

    def _release(self) -> None:
        """Let go of the buffer, so that only gradients that are views keep it alive."""
        self._memory = self.native = self._made = None
        self.views = []
        del self.payload, self._values, self._copy_plan

    def let_go(self) -> None:  # noqa: D102
        if self.streams is not None:
            self.streams.dropping()

    def zeros(self) -> Tensor:
        """Return zeros of the shape and dtype of `payload`, even before that exists."""
        plan = self.plan
        zeros = torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device)
        return kernels.as_real(zeros)

    def _owns(self, grad: object) -> bool:
        return self._memory is not None and self._memory.owns(grad)

    # -- copy in -----------------------------------------------------------------------

    def copy_now(self, k: int, grad: Tensor, divisor: int) -> Entry:
        """Copy a gradient to its slot and return COPIED, or return it for later.

        With gradients as views ``.grad`` is the view afterwards. A gradient is not
        copied if its dtype, layout or shape differ from those of the slot, if it lies
        in the buffer already, or in grad mode (``create_graph=True``).

        Args:
            k: The number of the slot.
            grad: The gradient.
            divisor: By what it is divided.
        """
        if self._memory is None:
            grad = cast("Tensor", self._allocate_for([(k, grad)])[0])
        elif self._made is not None:  # perhaps by a hook on another stream
            self._made.hold_back()
        view = self.views[k]
        fits = grad.layout is torch.strided and grad.dtype is view.dtype
        is_here = grad is view or (self._as_view and self._owns(grad))
        if not fits or grad.shape != view.shape or is_here or torch.is_grad_enabled():
            return grad
        if self.streams is not None:  # the bucket may die before it is full
            self.streams.use_buffer(self.payload)
        kernels.multiply_into(view, grad, divisor)
        if self._as_view:
            if self.streams is not None:
                accelerator.use_here(grad)  # the user may have made it
            self.params[k].grad = view  # frees the gradient's own memory
        return GradState.COPIED

    def copy_in(  # noqa: D102
        self, entries: Entries, factors: DivideFactors, undecided: Slots = ()
    ) -> None:
        if self._memory is None:
            entries = self._allocate_for(enumerate(entries))
        if self.streams is not None:
            self.streams.use_buffer(self.payload)
        self._arrived = entries
        native = None if undecided and self._as_view else self.native
        if not (native and native.flatten(entries, factors.pre)):
            self._copy_in_python(tuple(entries), factors.pre, undecided)
        if factors.post != 1:
            self.bring_the_rest()
            kernels.divide(self.payload, factors.post)
            reciprocal = 1.0 / factors.post
            self._tracked = {k: g * reciprocal for k, g in self._tracked.items()}

    def _copy_in_python(
        self, entries: tuple[Entry, ...], divisor: int, undecided: Slots
    ) -> None:
        views, grads, in_place = self._classify(entries, undecided)
        if not self._copy_plan.may_fit(views, grads):
            self._check_fit(views, grads)
        if torch.is_grad_enabled() and self._have_history(grads, in_place):
            # create_graph=True: scaled copies with a history stay outside the buffer.
            for k, grad in enumerate(entries):
                if isinstance(grad, Tensor):
                    self._tracked[k] = grad * (1.0 / divisor)
                    kernels.multiply_into(self.views[k], grad.detach(), divisor)
            return
        try:
            self._copy_plan.fill(views, grads, divisor)
        except (RuntimeError, ValueError):
            self._check_fit(views, grads)
            raise
        for slots in kernels.neighbours(in_place):
            kernels.divide(self._values_of(slots), divisor)

    def _have_history(self, grads: Sequence[Tensor], in_place: Slots) -> bool:
        return any(grad.requires_grad for grad in grads) or any(
            self.views[k].requires_grad for k in in_place
        )

    def _values_of(self, slots: range) -> Tensor:
        """Return the part of the buffer in which these slots lie, which are neighbours.

        What is done to it takes one kernel for all of them.
        """
        first, last = self.plan.slots[slots[0]], self.plan.slots[slots[-1]]
        return self._values[first.offset : last.offset + last.numel]

    def _classify(
        self, entries: tuple[Entry, ...], undecided: Slots
    ) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """Sort the slots of a full bucket by what is left to do.

        Slots without a gradient are set to zero here. If the ``.grad`` of an
        ``undecided`` one lies in the buffer, its values are saved first.

        Returns:
            The views that are to be filled, the gradient for each of them, and the
            slots whose view is the gradient already. Those that are COPIED are in no
            list.
        """
        everything = cast("list[Tensor]", list(entries))
        if set(map(type, entries)) == {Tensor} and not (
            self._as_view and self._memory and self._memory.may_own_any(everything)
        ):
            return self.views, everything, []  # the usual case
        views, grads = [], []
        in_place: list[int] = []
        empty: list[int] = []
        to_save: list[int] = []
        for k, (view, grad) in enumerate(zip(self.views, entries, strict=True)):
            is_here = grad is view or (self._as_view and self._owns(grad))
            # Without a gradient, .grad may still be this view: a rank without inputs.
            if k in undecided and (
                is_here or (grad is None and self._owns(self.params[k].grad))
            ):
                to_save.append(k)
            if is_here:
                in_place.append(k)
            elif grad is None:
                empty.append(k)
            elif isinstance(grad, Tensor):
                views.append(view)
                grads.append(grad)
        for slots in kernels.neighbours(to_save):
            self._saved.append((slots, self._values_of(slots).clone()))
        for slots in kernels.neighbours(empty):
            self._values_of(slots).zero_()
        return views, grads, in_place

    def _check_fit(self, views: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Raise GradientError if a gradient differs from its view in kind or shape."""
        for view, grad in zip(views, grads, strict=True):
            expected, found = (
                f"{t.dtype}, {t.layout}, shape {tuple(t.shape)}, on {t.device}"
                for t in (view, grad)
            )
            if expected != found:
                k = next(k for k, mine in enumerate(self.views) if mine is view)
                raise misfit(self.communicator.rank, self.names[k], expected, found)

    # -- copy out ----------------------------------------------------------------------

    def offer_grads(self, shared: SharedBuffer) -> None:
        """Let `wait` write averages from shared memory straight to ``.grad``.

        This saves a pass over the memory. Only the extension can do so, and not for
        gradients that have a history. `copy_out` of all slots must follow.

        Args:
            shared: The buffer of this bucket, whose `into` is set.
        """
        native = None if self._tracked else self.native
        takes = native and self._arrived and native.offer_tiles(self.scale)
        shared.into = native if takes else None

    def write_averages(self, untouched: Slots) -> None:  # noqa: D102
        if self.streams is not None:
            self.streams.use_buffer(self.payload)
            # The stream that has flattened the bucket has made them.
            saved = [values for _, values in self._saved]
            accelerator.use_here(*saved, *self._tracked.values())
        if self._as_view or isinstance(self.scale, Tensor):
            self._rescale()  # else the extension may multiply on the way
        self._restore(untouched)
        if not self._write_natively(untouched):
            self._write_in_python(untouched)
        self._tracked.clear()
        self._arrived = ()
        if self._is_lazy:
            self._release()

    def _restore(self, untouched: Slots) -> None:
        """Write the values that were saved of these slots back to the buffer."""
        for saved, values in self._saved:
            start = self.plan.slots[saved[0]].offset
            for slots in kernels.neighbours(k for k in saved if k in untouched):
                part = self._values_of(slots)
                at = self.plan.slots[slots[0]].offset - start
                part.copy_(values[at : at + part.numel()])
        self._saved.clear()

    def _averaged_part(self) -> Tensor:
        """Return the part of the payload that has averages: all of it."""
        return self.payload

    def _rescale(self) -> None:
        """Multiply all averages by `scale`, and set it to 1, so that it acts once."""
        scale, self.scale = self.scale, 1.0
        if isinstance(scale, Tensor) or scale != 1.0:
            kernels.rescale(self._averaged_part(), scale)
            self._tracked = {k: grad * scale for k, grad in self._tracked.items()}

    def _write_natively(self, untouched: Slots) -> bool:
        """Write all averages by the extension; return False if Python has to do it."""
        if self.native is None:
            return False
        if not untouched and not self._tracked and self._arrived:
            with suppress(RuntimeError):  # a gradient overlaps itself
                if self.native.unflatten(self._arrived, scale=self.scale):
                    return True
            if self.native.is_scaled:  # `wait` has multiplied, but could not write
                self.scale = 1.0
        self.native.forget_tiles()
        return False

    def _write_in_python(self, untouched: Slots) -> None:
        self._rescale()
        grads = [param.grad for param in self.params]
        if self._as_view and not self._tracked:
            self._point_at_views(grads, untouched)
            return
        if not untouched and not self._tracked and set(map(type, grads)) == {Tensor}:
            # Raises for gradients that are lazily negated, for example.
            with suppress(RuntimeError):
                torch._foreach_copy_(cast("list[Tensor]", grads), self.views)
                return
        for k in sorted({*range(len(grads))} - {*untouched}):
            self._write_slot(k)

    def _point_at_views(self, grads: Sequence[Tensor | None], untouched: Slots) -> None:
        for k, (view, grad) in enumerate(zip(self.views, grads, strict=True)):
            if grad is view or k in untouched:
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
            if self.streams is not None:
                accelerator.use_here(grad)  # it may have been made by another stream

    def _write_slot(self, k: int) -> None:
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

    def alias_grads_to_views(self) -> None:
        """Copy each ``.grad`` to its view, and make it the view, as torch does.

        Gradients with a history are left out, and so are those that differ in dtype,
        layout, device or shape from the parameter or the view. `copy_in` will refuse
        what does not fit.
        """
        if not self._is_lazy:  # there is no buffer before the backward
            self._move_to_views()

    def _move_to_views(self) -> None:
        for param, view in zip(self.params, self.views, strict=True):
            grad = param.grad
            if grad is None or grad.requires_grad:
                continue
            kinds = {
                (t.dtype, t.layout, t.device, t.shape) for t in (param, grad, view)
            }
            if len(kinds) == 1:
                param.grad = view.copy_(grad)
                if self.streams is not None:  # the old bucket, dropped by this line
                    accelerator.use_here(grad)
