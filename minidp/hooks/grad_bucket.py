"""`GradBucket`: a bucket as comm hooks see it, with the methods of torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from minidp.comm import ProcessGroup
from minidp.layout import BucketPlan, row_major_stride


@dataclass(frozen=True)
class BucketInfo:
    """What a `GradBucket` tells besides its gradients."""

    index: int  # the bucket's number, which is its place in launch order
    is_last: bool  # no bucket follows in this backward
    divisor: int  # the number of ranks over which to average
    group: ProcessGroup


class GradBucket:
    """A full bucket, as a comm hook gets it: gradients, parameters and process group.

    The gradients are those of this rank, and they are *not divided* by anything:
    averaging is the task of the hook. A parameter that has no gradient in this backward
    gives its present ``.grad``, or zeros if that is None.

    The methods are those of torch's ``dist.GradBucket``, and three more: `divisor`,
    `process_group` and `in_row_major`. A new object is made for each call of a hook; it
    copies nothing.
    """

    def __init__(
        self,
        plan: BucketPlan,
        buffer: torch.Tensor,
        params: Sequence[torch.Tensor],
        info: BucketInfo,
    ) -> None:
        self._plan = plan
        self._buffer = buffer
        self._params = params
        self._info = info

    def index(self) -> int:
        """Return the bucket's number in launch order, from 0, equal on all ranks."""
        return self._info.index

    def is_last(self) -> bool:
        """Return whether the hook is called for no later bucket of this backward."""
        return self._info.is_last

    def buffer(self) -> torch.Tensor:
        """Return all gradients as one flat tensor, which is the bucket's own memory.

        Its shape is (elements,), and it is real: complex gradients are real and
        imaginary parts in turn. A sparse bucket returns its one COO gradient.
        """
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace what `buffer` and `gradients` return, for a hook that this one calls.

        Nothing is copied or checked; only the value of the hook's future changes
        gradients of parameters.

        Args:
            buffer: A tensor of as many elements as the old one, of any dtype and on any
                device.
        """
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return a view of the buffer for each parameter, with its shape and strides.

        A view is complex or ``channels_last`` if its parameter is. A sparse bucket
        returns a list of its one COO gradient.
        """
        if self._plan.sparse:
            return [self._buffer]
        values = self._buffer
        if self._plan.dtype.is_complex and not values.is_complex():
            values = torch.view_as_complex(values.view(-1, 2))
        start = values.storage_offset()
        slots = self._plan.slots
        return [values.as_strided(s.shape, s.stride, start + s.offset) for s in slots]

    def in_row_major(self) -> GradBucket:
        """Return a bucket whose gradients are contiguous.

        It is this one if they are so already, or if it is sparse. Otherwise it has
        copies of them in a new buffer.
        """
        grads, slots = self.gradients(), self._plan.slots
        if self._plan.sparse or all(grad.is_contiguous() for grad in grads):
            return self
        plain = [replace(slot, stride=row_major_stride(slot.shape)) for slot in slots]
        values = torch.cat([grad.reshape(-1) for grad in grads])
        if values.is_complex():
            values = torch.view_as_real(values).flatten()
        plan = replace(self._plan, slots=tuple(plain))
        return GradBucket(plan, values, self._params, self._info)

    def parameters(self) -> list[torch.Tensor]:
        """Return the bucket's parameters, in the order of `gradients`."""
        return list(self._params)

    def divisor(self) -> int:
        """Return by what a hook has to divide the sum over all ranks.

        It is the number of ranks. Inside ``join(divide_by_initial_world_size=False)``
        it is the number of ranks that still have inputs.
        """
        return self._info.divisor

    def process_group(self) -> ProcessGroup:
        """Return the process group over which the wrapper averages."""
        return self._info.group
