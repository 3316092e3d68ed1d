"""Stage 2: a hook on every parameter starts its all-reduce while the backward runs.

    python examples/from_scratch/stage2_hook_per_parameter.py

A backward goes from the last layer to the first. The last layer's gradient is complete
long before the first one's: why wait? Autograd calls a hook for each parameter when its
gradient is complete. The hook starts an all-reduce that goes on in the background::

    backward   |--layer 3--|--layer 2--|--layer 1--|--layer 0--|
    network                 g7 g6       g5 g4       g3 g2       g1 g0
                            hidden behind the backward           | exposed

What is gained: messages travel while the processor computes.

What is still wrong: there are as many messages as parameters. A bias of a few bytes
costs a round trip. And they go out in the order in which the hooks run. Here that is
the same on all ranks, by luck: stage 4 shows what happens where it is not.
"""

import torch.distributed as dist
from torch import Tensor, nn

import stage1_after_backward as stage1
from common import run


class DDP(stage1.DDP):
    """Start to average a gradient as soon as it is complete."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.in_flight: list[dist.Work] = []
        for param in module.parameters():
            # The hook must be one of this kind. `param.register_hook` comes too early:
            # before the gradient is added to what `.grad` holds already.
            param.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, param: Tensor) -> None:
        """Start an all-reduce of one gradient, and do not wait for it."""
        # The hook gets the parameter. To all-reduce `param` itself instead of its
        # `.grad` is an easy mistake: weights would be averaged, gradients never.
        # Divide first: once launched, the memory belongs to the network until `wait`.
        param.grad *= 1 / dist.get_world_size()
        self.in_flight.append(dist.all_reduce(param.grad, async_op=True))

    def after_backward(self) -> None:
        """Wait for what is still in flight. Only this part costs time."""
        for work in self.in_flight:
            work.wait()
        self.in_flight.clear()


if __name__ == "__main__":
    run(DDP, same_messages={"bucket_cap_mb": 0, "find_unused_parameters": True})
