"""Stage 1: all-reduce each gradient after the backward.

    python examples/from_scratch/stage1_after_backward.py

Every rank has the whole net and a batch of its own. After the backward each rank holds
other gradients, those of its own images. The ranks add theirs up and divide by their
number. Now all hold the gradients of one large batch, and every optimizer takes the
same step::

    rank 0   forward | backward | g0 g1 g2 ... | optimizer
    rank 1   forward | backward | g0 g1 g2 ... | optimizer
                                  each an all-reduce, one after the other

This is right, and it is all of data parallelism. The other four stages only make it
faster and easier to use.

What is still wrong: while the backward computes, the network idles; while the network
works, the processor idles. And each of many small messages costs the time of a round
trip, however few bytes it has.
"""

import torch.distributed as dist
from torch import Tensor, nn

from common import run


class DDP(nn.Module):
    """Average the gradients of all ranks when `after_backward` is called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # Equal steps keep replicas equal only if they begin equal.
        for value in module.state_dict().values():
            dist.broadcast(value, src=0)

    def forward(self, *inputs: Tensor, **options: object) -> Tensor:
        """Run the module; a forward is local."""
        return self.module(*inputs, **options)

    def after_backward(self) -> None:
        """Replace every gradient by its average over all ranks."""
        # All ranks loop in the same order: the first all-reduce of one rank meets the
        # first of the others, the second the second. Nothing else tells them apart.
        for param in self.module.parameters():
            dist.all_reduce(param.grad)  # the sum; returns when it is there
            param.grad /= dist.get_world_size()


if __name__ == "__main__":
    # Torch divides first and adds then. With 2 ranks that makes no difference: to halve
    # a float is exact. A third of a float is rounded: with 3 ranks the last bits of
    # this stage are not torch's, even if torch sums the same messages.
    options = {"bucket_cap_mb": 0, "find_unused_parameters": True}
    run(DDP, same_messages=options, is_exact=False)
