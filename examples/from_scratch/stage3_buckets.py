"""Stage 3: put many gradients in one message.

    python examples/from_scratch/stage3_buckets.py

A message costs a fixed time, and a time for its bytes. Twenty small ones pay the fixed
time twenty times. So gradients are copied into flat buffers, and each buffer travels as
one message::

    bucket 0   | blocks.7.bias | head.weight | head.bias |
    bucket 1   | blocks.5.bias | blocks.6.weight | blocks.6.bias | blocks.7.weight |
    ...          a view for each parameter, in its shape

To look at buckets alone, this stage starts them after the backward again, as stage 1.

What is gained: 5 messages instead of 20.

What is still wrong: nothing is hidden behind the backward. And each gradient is copied
in and out.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stage1_after_backward as stage1
from common import run

BUCKET_MB = 0.5  # torch: 25. Ours is small because our net is


class Bucket:
    """Some gradients that travel in one message: a flat buffer, and a view for each."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        # (Real ones have one dtype and one device: others need buckets of their own.)
        self.buffer = torch.zeros(sum(param.numel() for param in params))
        pieces = self.buffer.split([param.numel() for param in params])
        pairs = zip(pieces, params, strict=True)
        self.views = [piece.view_as(param) for piece, param in pairs]

    def copy_in(self) -> None:
        """Copy the gradients into the buffer, divided by the number of ranks."""
        for param, view in zip(self.params, self.views, strict=True):
            torch.mul(param.grad, 1 / dist.get_world_size(), out=view)

    def launch(self) -> None:
        """Start to add up the buffers of all ranks."""
        self.work = dist.all_reduce(self.buffer, async_op=True)

    def finish(self) -> None:
        """Wait for the sum, and copy it out."""
        self.work.wait()
        for param, view in zip(self.params, self.views, strict=True):
            param.grad.copy_(view)


def plan(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return groups of parameters for the buckets, in the order to launch them.

    A group is closed when it has `BUCKET_MB`. Every rank computes the same groups, from
    shapes alone.
    """
    groups: list[list[Tensor]] = [[]]
    num_bytes = 0
    for param in params:
        if num_bytes >= BUCKET_MB * 2**20:
            groups.append([])
            num_bytes = 0
        groups[-1].append(param)
        num_bytes += param.nbytes
    # Parameters are registered from the first layer on, their gradients come from the
    # last layer on: launch the last group first.
    return groups[::-1]


class DDP(stage1.DDP):
    """Average gradients in buckets, after the backward."""

    Bucket = Bucket

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.buckets = [self.Bucket(group) for group in plan(module.parameters())]

    def after_backward(self) -> None:
        """Launch all buckets, then wait for each."""
        for bucket in self.buckets:
            bucket.copy_in()
            bucket.launch()
        for bucket in self.buckets:
            bucket.finish()


if __name__ == "__main__":
    run(DDP, same_messages={"bucket_cap_mb": BUCKET_MB, "find_unused_parameters": True})
