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
            current.wait_stream(_stream_of(handle, self._device))
        if others:
            for grad in grads:
                for memory in _memory_of(grad):
                    # Else the allocator may reuse a gradient that we still read.
                    memory.record_stream(current)
        self.written_on.clear()
        self._flattened_on = current

    def launching(self) -> AbstractContextManager[object]:
        """The context in which to launch: the stream that flattened."""
        return torch.cuda.stream(self._flattened_on)


def _stream_of(handle: int, device: torch.device) -> torch.cuda.Stream:
    """The stream with a handle; 0 is the default stream's.

    Torch takes an external handle of 0 for none, and makes a new stream: one that has
    nothing to do, and nothing that anybody could wait for.
    """
    if handle == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device)


def _memory_of(grad: object) -> list[torch.Tensor]:
    """The tensors that own a gradient's memory; none if it is no tensor."""
    if not isinstance(grad, torch.Tensor):
        return []
    if grad.layout is torch.sparse_coo:  # has no stream to record itself
        return [grad._indices(), grad._values()]
    return [grad]


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
