"""A bucket of which each rank gets the averages of its own parameters only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minidp import accelerator
from minidp.core import DenseBucket, Slots
from minidp.errors import GradientError, explain
from minidp.layout import BucketPlan
from minidp.shared_memory import SharedBuffer

from .owners import Owners, Stretch


class Room:
    """A flat buffer through which values of parameters travel.

    Args:
        plan: The bucket.
        flat: The buffer.
        views: The view of each slot.
        has_grads: Whether ``.grad`` of own parameters lies there, and must stay.
    """

    is_home = False  # whether the parameters themselves lie there

    def __init__(
        self,
        plan: BucketPlan,
        flat: Tensor,
        views: Sequence[Tensor],
        *,
        has_grads: bool = False,
    ) -> None:
        self.views = views
        self._plan, self._flat, self._has_grads = plan, flat, has_grads

    def real(self, stretch: Stretch) -> Tensor:
        """Return a stretch of the buffer, of one dimension and real."""
        return as_real(self._flat[stretch.start : stretch.stop])

    def arrived(self, rank: int, stretch: Stretch) -> list[Tensor]:
        """Return a view for each slot of another rank's stretch."""
        return [self.views[k] for k in stretch.slots]

    def own(self, stretch: Stretch) -> tuple[list[Tensor], Tensor]:
        """Return a view for each slot of a stretch of this rank, and all as one."""
        if not self._has_grads:
            return [self.views[k] for k in stretch.slots], self.real(stretch)
        flat = self._flat.new_empty(stretch.numel)
        slots = [self._plan.slots[k] for k in stretch.slots]
        views = [
            flat.as_strided(s.shape, s.stride, s.offset - stretch.start) for s in slots
        ]
        return views, as_real(flat)


def as_real(flat: Tensor) -> Tensor:
    """Return the memory of a tensor of one dimension as real numbers."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


class ShardedBucket(DenseBucket):
    """A bucket whose averages go to the owners of the parameters.

    On the other ranks ``.grad`` is None afterwards, so that an optimizer skips these
    parameters, and keeps no state of them. Gradients that no rank has used stay as they
    are.

    Args:
        owners: Who owns which parameter.
        plan: The slots, sorted by owner.
        more: The other arguments of `DenseBucket`.
        adds_sums: Whether this rank adds something to a full bucket (`add_earlier_sums`
            of `Averaging`), so that own gradients must be there, too.
    """

    def __init__(
        self, owners: Owners, plan: BucketPlan, *more: Any, adds_sums: bool = False
    ) -> None:
        super().__init__(plan, *more)
        self._owners, self._adds_sums = owners, adds_sums
        self._given: Room | None = None  # views of shared memory, made when needed
        self._stretches: dict[int | None, list[Stretch]] = {}
        self._stretch = self.stretches()[self.communicator.rank]
        self.own = self._stretch.slots
        self.foreign = [k for k in range(len(self.params)) if k not in self.own]
        # Whether the extension leaves own gradients in ``.grad`` until they are summed,
        # and frees each one of others as soon as it is in shared memory.
        self._is_divided = False
        self._divide()

    def _divide(self) -> None:
        """Let the extension tell own gradients from others, if it copies them."""
        if self.native is None or self.shared is None or self._as_view:
            return
        self._is_divided = True
        self.native.divide(self.own.start, self.own.stop)
        self.copied_at_once = self.foreign

    def stretches(self, stepper: int | None = None) -> list[Stretch]:
        """Return what each rank owns, of one optimizer or of all (`Owners`)."""
        if stepper not in self._stretches:
            self._stretches[stepper] = self._owners.stretches(self.plan, stepper)
        return self._stretches[stepper]

    def copy_in(self, *arguments: Any, **options: Any) -> None:
        """Copy gradients to the buffer; see `Bucket`."""
        super().copy_in(*arguments, **options)
        if self._adds_sums:
            self.bring_the_rest()

    def values(self, stretch: Stretch) -> list[Tensor]:
        """Return what a stretch has: parameters."""
        return [self.params[k] for k in stretch.slots]

    def offer_grads(self, shared: SharedBuffer) -> None:
        """Let `wait` write the averages of this rank's share straight to ``.grad``."""
        native, own = self.native, self.own
        takes = native and self._arrived and own
        if takes and native is not None:
            takes = native.offer_share(own.start, own.stop, self.scale)
        shared.into = native if takes else None

    def settle(self) -> None:
        """Bring own gradients to the buffer whose memory is not theirs alone.

        It must be called for all buckets before the first one is summed, because a sum
        that is written to ``.grad`` may be written to another gradient, too.

        Raises:
            GradientError: One was changed in place since the bucket is full.
        """
        if not self._is_divided or self.native is None:
            return
        changed = self.native.settle()
        if changed >= 0:
            raise GradientError(
                explain(
                    self.communicator.rank,
                    "A gradient was changed in place while its backward was still "
                    "running, after its bucket was on its way to the other ranks.",
                    names=[self.names[changed]],
                    remedy="change it in a hook of its own parameter "
                    "(register_post_accumulate_grad_hook), or after the backward",
                )
            )

    def bring_the_rest(self) -> None:
        """Bring own gradients to the buffer, too."""
        if self.native is not None:
            self.native.complete()

    def wait(self, doing: str) -> None:
        """Wait for the sums of this rank's share; see `Bucket`."""
        if self.shared is not None and self.shared.into is None:
            self.bring_the_rest()
        super().wait(doing)

    def _averaged_part(self) -> Tensor:
        # Other ranks may still read the rest from shared memory.
        per_element = len(self.payload) // max(self.plan.numel, 1)
        start, stop = self._stretch.start, self._stretch.stop
        return self.payload[start * per_element : stop * per_element]

    def _restore(self, untouched: Slots) -> None:
        super()._restore([k for k in untouched if k in self.own])

    def _write_natively(self, untouched: Slots) -> bool:
        native, shared = self.native, self.shared
        if native is None:
            return False
        if shared is not None and shared.into is not None:
            shared.into = None
            if native.has_taken_share():
                return True
            if native.is_scaled:
                self.scale = 1.0
        native.forget_tiles()
        return False

    def write_averages(self, untouched: Slots) -> None:  # noqa: D102
        super().write_averages({*untouched, *self.foreign})
        for k in self.foreign:
            if k not in untouched:
                if self.streams is not None:  # the user may have made it
                    accelerator.use_here(self.params[k].grad)
                self.params[k].grad = None

    def room(self) -> Room:
        """Return memory for values of parameters on their way back."""
        if self._is_lazy:  # there is a buffer in a backward only
            plan = self.plan
            flat = torch.empty(plan.numel, dtype=plan.dtype, device=plan.device)
            views = [
                flat.as_strided(s.shape, s.stride, s.offset) for s in self.plan.slots
            ]
            return Room(self.plan, flat, views)
        if self.streams is not None:  # the step may run on another stream
            self.streams.use_buffer(self.payload)
        return Room(self.plan, self._values, self.views, has_grads=self._as_view)

    def given_room(self, shared: SharedBuffer) -> Room:
        """Return the memory in which each rank gives the values of its share."""
        if self._given is None:
            dtype, size = self.plan.dtype, self.communicator.size
            rows = [shared.given(rank).view(dtype) for rank in range(size)]
            views = []
            for slot in self.plan.slots:
                row = rows[self._owners.of[slot.param_index]]
                views.append(row.as_strided(slot.shape, slot.stride, slot.offset))
            self._given = Room(self.plan, rows[self.communicator.rank], views)
        return self._given

    def _write_in_python(self, untouched: Slots) -> None:
        own = [k for k in self.own if k not in untouched]
        grads = [self.params[k].grad for k in own]
        if self._as_view or set(map(type, grads)) != {Tensor}:
            super()._write_in_python(untouched)
            return
        self._rescale()
        try:
            torch._foreach_copy_(grads, [self.views[k] for k in own])  # type: ignore[arg-type]
        except RuntimeError:  # a gradient overlaps itself, or is lazily negated
            super()._write_in_python(untouched)
