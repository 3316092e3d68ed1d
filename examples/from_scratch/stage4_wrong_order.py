"""What goes wrong if each rank launches its buckets in an order of its own.

    python examples/from_scratch/stage4_wrong_order.py             wrong gradients
    python examples/from_scratch/stage4_wrong_order.py --in-order  as stage 4: right

The net has two towers of one size, and rank 1 calls them in the other order. Its
backward therefore fills their buckets in the other order, too. If each rank launches a
bucket when it is full, rank 0's gradients of tower 1 are added to rank 1's gradients of
tower 0. The messages have the same size, so Gloo does not notice, and the net even
learns. The comparison with torch notices.

With buckets of different sizes, or NCCL, ranks may also crash or wait forever.
"""

import sys

import torch.distributed as dist
from torch import Tensor, nn

import stage4_overlap as stage4
from common import run


class TwoTowers(nn.Module):
    """Two layers side by side: a bucket of 512 KiB each, and one for the head."""

    def __init__(self) -> None:
        super().__init__()
        towers = [nn.Linear(64, 2048, bias=False) for _ in range(2)]
        self.towers = nn.ModuleList(towers)
        self.head = nn.Linear(2048, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores; the order of the calls depends on the rank."""
        order = (0, 1) if dist.get_rank() == 0 else (1, 0)
        seen = {number: self.towers[number](images).relu() for number in order}
        return self.head(seen[0] - seen[1])


class DDP(stage4.DDP):
    """Launch a bucket as soon as it is full, whatever the others do."""

    def launch_full_buckets(self) -> None:
        """Launch the bucket that has become full, if any."""
        for bucket, num_missing in self.num_missing.items():
            if num_missing == 0:
                self.num_missing[bucket] = -1  # launched
                self.launch(bucket)


if __name__ == "__main__":
    is_in_order = "--in-order" in sys.argv
    if is_in_order:
        sys.argv.remove("--in-order")
    run(stage4.DDP if is_in_order else DDP, net=TwoTowers)
