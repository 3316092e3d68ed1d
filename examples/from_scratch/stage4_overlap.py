"""Stage 4: launch each bucket while the backward runs, in one order on all ranks.

    python examples/from_scratch/stage4_overlap.py

Stages 2 and 3 together: hooks count the gradients of each bucket, and a full bucket is
launched at once::

    backward   |--layer 3--|--layer 2--|--layer 1--|--layer 0--|
    bucket 0    fills . . . full ==== on the wire ====
    bucket 1                 fills . . . . . . . . full ==== on the wire ====

At once, with one exception. Ranks tell collectives apart only by their order: the
second all-reduce of this rank is added to the second of the others, whatever is in it.
But each rank's backward fills buckets in an order of its own, if its forward took
another way, or if autograd runs threads. So a full bucket waits until all buckets
before it are launched::

    rank 0   fills 0, then 1   launches 0, 1
    rank 1   fills 1, then 0   launches 0, 1       1 had to wait for 0

`stage4_wrong_order.py` leaves that out, and gets wrong gradients without an error.

What is gained: few messages, and most of them are hidden. `backward()` also finishes
by itself, so that the training loop is the one for torch's DDP.

What is still wrong: a parameter without a gradient leaves its bucket unfilled, several
backwards per step communicate each time, and gradients are copied in and out.
"""

from torch import Tensor, nn
from torch.autograd import Variable

import stage3_buckets as stage3
from common import run


class DDP(stage3.DDP):
    """Average gradients in buckets, while the backward runs."""

    after_backward = None  # nothing is left to do

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.bucket_of = {param: b for b in self.buckets for param in b.params}
        self.get_ready()
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(self.on_gradient)

    def get_ready(self) -> None:
        """Prepare for the next backward."""
        self.num_missing = {bucket: len(bucket.params) for bucket in self.buckets}
        self.num_launched = 0
        self.has_begun = False

    def on_gradient(self, param: Tensor) -> None:
        """Count a gradient; launch what can be launched."""
        if not self.has_begun:
            self.has_begun = True
            # Autograd calls `finish` when this backward ends, before `backward()`
            # returns. (The name is private, and there is no other: torch's DDP and FSDP
            # use it, too.)
            Variable._execution_engine.queue_callback(self.finish)
        self.num_missing[self.bucket_of[param]] -= 1
        self.launch_full_buckets()

    def launch_full_buckets(self) -> None:
        """Launch full buckets, but none before its predecessors."""
        for bucket in self.buckets[self.num_launched :]:
            if self.num_missing[bucket]:
                break
            self.launch(bucket)

    def launch(self, bucket: stage3.Bucket) -> None:
        """Send a bucket on its way."""
        bucket.copy_in()
        bucket.launch()
        self.num_launched += 1

    def finish(self) -> None:
        """Wait for each bucket."""
        if self.num_launched < len(self.buckets):
            raise RuntimeError("gradients are missing: see stage 5")
        for bucket in self.buckets:
            bucket.finish()
        self.get_ready()


if __name__ == "__main__":
    options = {"bucket_cap_mb": stage3.BUCKET_MB, "find_unused_parameters": True}
    run(DDP, same_messages=options)
