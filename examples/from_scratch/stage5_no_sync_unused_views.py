"""Stage 5: what real training needs: `no_sync`, unused parameters, gradient views.

    python examples/from_scratch/stage5_no_sync_unused_views.py

**no_sync.** Several backwards add up in `.grad` before one optimizer step. To average
after each of them is right, but only the last average is needed. Inside of `no_sync()`
gradients stay local.

**Unused parameters.** Here each rank skips another block in each step. A skipped block
gets no gradient, and its bucket is never full. So when the backward ends, buckets that
were not full are launched, too, with zeros where `.grad` is None. One more small
all-reduce tells which parameters *any* rank used. If none did, `.grad` stays None: an
optimizer that finds zeros instead would still apply its momentum.

**Views.** Once a gradient is in the buffer, `.grad` becomes the view of it there. The
all-reduce writes to `.grad` then, and nothing is copied out. If you keep the gradients
(`zero_grad(set_to_none=False)`), autograd adds to the view, and nothing is copied in.

What is still wrong: a bucket that lacks a gradient holds up all buckets behind it until
the backward ends; and see the README. But the gradients are torch's, bit for bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import stage3_buckets as stage3
import stage4_overlap as stage4
from common import Batch, Replica, run


class Bucket(stage3.Bucket):
    """A bucket whose views become the gradients."""

    def copy_in(self) -> None:
        """Bring the gradients, divided, into the buffer; zeros where there is none."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is None:
                view.zero_()
            elif param.grad is view:  # autograd has written it here
                view /= dist.get_world_size()
            else:
                torch.mul(param.grad, 1 / dist.get_world_size(), out=view)
                param.grad = view

    def finish(self) -> None:
        """Wait for the sum, which arrives in the gradients themselves."""
        self.work.wait()


class DDP(stage4.DDP):
    """Do all of it."""

    Bucket = Bucket

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.syncs = self.syncs_backward = True
        self.index = {param: i for i, param in enumerate(module.parameters())}
        self.used = torch.zeros(len(self.index), dtype=torch.int32)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients local of all forwards inside of this block."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def forward(self, *inputs: Tensor, **options: object) -> Tensor:
        """Run the module; as in torch, where the forward runs decides, not backward."""
        self.syncs_backward = self.syncs
        return super().forward(*inputs, **options)

    def on_gradient(self, param: Tensor) -> None:
        """Note that this rank used a parameter; count its gradient, unless local."""
        self.used[self.index[param]] = 1
        if self.syncs_backward:
            super().on_gradient(param)

    def finish(self) -> None:
        """Launch the rest, learn what others used, wait for everything."""
        for bucket in self.buckets[self.num_launched :]:
            self.launch(bucket)
        dist.all_reduce(self.used)  # how many ranks used each parameter
        super().finish()
        for bucket in self.buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if self.used[self.index[param]]:  # then there is an average
                    param.grad = view
        self.used.zero_()


def accumulate(replica: Replica, batch: Batch, number: int) -> None:
    """Take one training step in two halves; leave out a block."""
    # In every other step all ranks leave out the same block.
    skipped = (number + number % 2 * dist.get_rank()) % 8
    halves = [tensor.chunk(2) for tensor in batch]
    replica.optimizer.zero_grad()
    for i, (images, labels) in enumerate(zip(*halves, strict=True)):
        with replica.model.no_sync() if i == 0 else nullcontext():
            scores = replica.model(images, skipped=skipped)
            (cross_entropy(scores, labels) / 2).backward()
    replica.optimizer.step()


if __name__ == "__main__":
    run(
        DDP,
        step=accumulate,
        torch_options={"find_unused_parameters": True, "gradient_as_bucket_view": True},
        same_messages={"bucket_cap_mb": stage3.BUCKET_MB},
    )
