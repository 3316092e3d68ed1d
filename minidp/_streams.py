"""On which CUDA streams a bucket's gradients were written, and who has to wait.

The engine runs a parameter's AccumulateGrad node, and our hook after it, on the stream
of the forward. If a model uses several streams, the gradients of one bucket are written
on several; whoever flattens must wait for all of them, and whoever launches (maybe the
autograd thread of another device) must launch on the stream that flattened.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch


def raw_stream(device_index: int) -> int:
    """Handle of the calling thread's current CUDA stream on a device."""
    return int(torch._C._cuda_getCurrentRawStream(device_index))


class BucketStreams:
    """The streams of one bucket on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.written_on: set[int] = set()  # filled by the grad hooks
        self._flattened_on: torch.cuda.Stream | None = None

    def gather(self, grads: Iterable[object]) -> None:
        """Order the current stream after every stream that wrote a gradient."""
        current = torch.cuda.current_stream(self._device)
        others = self.written_on - {current.cuda_stream}
        for handle in others:
            current.wait_stream(torch.cuda.ExternalStream(handle, self._device))
        if others:
            for grad in grads:
                if isinstance(grad, torch.Tensor):
                    # Else the allocator may reuse a gradient that we still read.
                    grad.record_stream(current)
        self.written_on.clear()
        self._flattened_on = current

    def launching(self) -> AbstractContextManager[object]:
        """The context in which to launch: the stream that flattened."""
        return torch.cuda.stream(self._flattened_on)


class NoStreams:
    """The same face for devices without streams."""

    written_on: set[int] = set()  # noqa: RUF012 -- never filled

    def gather(self, grads: Iterable[object]) -> None:
        """Nothing to wait for."""

    def launching(self) -> AbstractContextManager[object]:
        """No context needed."""
        return nullcontext()


def streams_for(device: torch.device) -> BucketStreams | NoStreams:
    """Stream bookkeeping for a bucket on ``device``."""
    return BucketStreams(device) if device.type == "cuda" else NoStreams()
