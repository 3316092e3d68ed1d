"""Define `GradBucket`, a bucket as comm hooks see it, with the methods of torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from minidp.comm import ProcessGroup
from minidp.layout import BucketPlan, row_major_stride


@dataclass(frozen=True)
class Turn:
    """Hold what a `GradBucket` also tells: number, if it is last, divisor, group."""

    index: int  # the bucket's number, which is its place in launch order
    is_last: bool  # no bucket follows in this backward
    divisor: int  # number of ranks to average over
    group: ProcessGroup


class GradBucket:
    """Give a comm hook the gradients, parameters and group of one full bucket.

    Made for each call of a hook; copies nothing. Gradients are this rank's own, *not
    divided* by anything: averaging is the hook's task. A parameter without a gradient
    in this backward gives its present ``.grad``, or zeros if that is None.
    ``divisor()``, ``process_group()``, ``in_row_major()`` are not torch's. The buffer
    is flat (1-D, real), or the one sparse gradient.
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
        """Return the bucket's number, from 0, in launch order; equal on all ranks."""
        return self._turn.index

    def is_last(self) -> bool:
        """Return whether the hook is called for no later bucket of this backward."""
        return self._turn.is_last

    def buffer(self) -> torch.Tensor:
        """Return all gradients as one flat (1-D) tensor: the bucket's memory, no copy.

        Complex gradients are interleaved reals (real part, imaginary part, ...). A
        sparse bucket returns its one COO gradient.
        """
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace what `buffer` and `gradients` return, for a hook that this one calls.

        Copies nothing, checks nothing. Only the value of the hook's future changes the
        parameters' gradients. The new buffer must have as many elements as the old one;
        any dtype and device.
        """
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return a view of the buffer per parameter, with its shape and strides.

        They are channels_last or complex if the parameter is. Of a sparse bucket: a
        list of its one COO gradient.
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
        """Return a new bucket whose gradients are contiguous copies, in a new buffer.

        Return ``self`` if all are contiguous, or the bucket is sparse.
        """
        grads, slots = self.gradients(), self._plan.slots
        if self._plan.sparse or all(grad.is_contiguous() for grad in grads):
            return self
        plain = [replace(slot, stride=row_major_stride(slot.shape)) for slot in slots]
        values = torch.cat([grad.reshape(-1) for grad in grads])
        if values.is_complex():
            values = torch.view_as_real(values).flatten()
        plan = replace(self._plan, slots=tuple(plain))
        return GradBucket(plan, values, self._params, self._turn)

    def parameters(self) -> list[torch.Tensor]:
        """Return the bucket's parameters, in the order of `gradients`."""
        return list(self._params)

    def divisor(self) -> int:
        """Return the number of ranks to average over.

        In ``join(divide_by_initial_world_size=False)``: ranks that still have inputs.
        Over items 1 (`ItemCounts`): gradients are divided already.
        """
        return self._turn.divisor

    def process_group(self) -> ProcessGroup:
        """Return the process group over which the wrapper averages."""
        return self._turn.group
