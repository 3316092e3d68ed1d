"""`GradBucket`: what a comm hook may see of a bucket; the interface is torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ._layout import BucketPlan, Slot, row_major_stride

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Turn:
    """When and with whom a bucket travels."""

    index: int  # the bucket's number; buckets come in this order
    is_last: bool  # no bucket follows in this backward
    divisor: int  # ranks to average over
    group: ProcessGroup


class GradBucket:
    """One full bucket, on its way to the other ranks.

    Its gradients are this rank's own, *not divided* by anything; zeros stand for
    gradients that are missing. A comm hook averages, or does what it likes.

    Args:
        plan: the slots.
        buffer: the flat buffer (1-D, real), or the sparse gradient.
        params: the bucket's parameters, in slot order.
        turn: when and with whom it travels.
    """

    def __init__(
        self,
        plan: BucketPlan,
        buffer: torch.Tensor,
        params: Sequence[torch.Tensor],
        turn: Turn,
    ) -> None:
        self._plan = plan
        self._buffer = buffer
        self._params = params
        self._turn = turn

    def index(self) -> int:
        """The bucket's number, from 0; the same on every rank."""
        return self._turn.index

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward."""
        return self._turn.is_last

    def buffer(self) -> torch.Tensor:
        """All gradients, flat (1-D).

        Complex gradients are interleaved reals (real part, imaginary part, ...). A
        sparse bucket gives its one COO gradient.
        """
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace what `buffer` and `gradients` give, for the rest of a chain of hooks.

        It does not change the gradients: what the hook's future brings does.

        Args:
            buffer: as many elements; any dtype and device.
        """
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """One view of the buffer per parameter: in its shape, with its strides.

        A view of a channels_last parameter is channels_last, one of a complex parameter
        is complex.
        """
        if self._plan.sparse:
            return [self._buffer]
        values = self._buffer
        if self._plan.dtype.is_complex and not values.is_complex():
            values = torch.view_as_complex(values.view(-1, 2))
        return [_window(values, slot) for slot in self._plan.slots]

    def in_row_major(self) -> GradBucket:
        """A copy whose gradients are row-major contiguous; itself if they are already.

        Not in torch's interface.
        """
        grads = self.gradients()
        if self._plan.sparse or all(grad.is_contiguous() for grad in grads):
            return self
        slots = tuple(
            replace(slot, stride=row_major_stride(slot.shape))
            for slot in self._plan.slots
        )
        plan = replace(self._plan, slots=slots)
        values = torch.cat([grad.reshape(-1) for grad in grads])
        if values.is_complex():
            values = torch.view_as_real(values).flatten()
        return GradBucket(plan, values, self._params, self._turn)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients`."""
        return list(self._params)

    def divisor(self) -> int:
        """How many ranks to average over.

        The world size; inside ``join(divide_by_initial_world_size=False)`` the number
        of ranks that have not run out of inputs. Not in torch's interface.
        """
        return self._turn.divisor

    def process_group(self) -> ProcessGroup:
        """The ranks that reduce together. Not in torch's interface."""
        return self._turn.group


def _window(values: torch.Tensor, slot: Slot) -> torch.Tensor:
    return values.as_strided(
        slot.shape, slot.stride, values.storage_offset() + slot.offset
    )
