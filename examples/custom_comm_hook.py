r"""Write a comm hook of your own, and put it together with those of minidp.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/custom_comm_hook.py

A comm hook says how the gradients of a bucket are averaged. `clip_wrapper` below clips
each rank's share before it travels, so that no rank outvotes the others. How they are
averaged is none of its business: it wraps any other hook. `LargestGradient` looks at
the average on its way back.

A net learns which points lie inside a sphere, once per way to average. Gloo on CPU.
"""

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import minidp
from minidp import GradBucket, comm_hooks
from minidp.comm_hooks import Hook

ROW = "{:20}  loss {:.4f}  accuracy {:.1%}"


def clip_wrapper(max_norm: float, hook: Hook) -> Hook:
    """Clip this rank's share of a bucket, then let ``hook`` average it."""

    def clipped(state: Any, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()  # this rank's gradients, flat, not divided
        norm = torch.linalg.vector_norm(buffer)
        buffer.mul_((max_norm / norm).clamp(max=1.0))  # in place, before it travels
        return hook(state, bucket)  # a future: nobody waits here

    return clipped


class LargestGradient:
    """A hook may remember things: the largest gradient that was ever averaged."""

    value = 0.0

    def __call__(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """Average as usual, and look at the result."""

        def note(done: Future[Tensor]) -> Tensor:
            mean = done.value()  # raises what the averaging raised
            self.value = max(self.value, mean.abs().max().item())
            return mean  # what the gradients become

        return comm_hooks.all_reduce_hook(state, bucket).then(note)


def ways_to_average() -> dict[str, tuple[Any, Hook]]:
    """Name -> state and hook; the shares of bytes are those on two ranks."""
    half, quarter = comm_hooks.fp32_accumulate_hook, comm_hooks.int8_error_feedback_hook
    return {
        "all-reduce": (None, comm_hooks.all_reduce_hook),
        "watched": (None, LargestGradient()),
        "clipped": (None, clip_wrapper(0.5, comm_hooks.all_reduce_hook)),
        "1/2 of the bytes": (comm_hooks.Fp32State(), half),
        "1/2, clipped": (comm_hooks.Fp32State(), clip_wrapper(0.5, half)),
        "1/4, clipped": (comm_hooks.Int8State(), clip_wrapper(0.5, quarter)),
    }


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points in three dimensions; 1.0 for those inside the sphere."""
    points = torch.randn(256, 3, generator=generator)
    return points, (points.norm(dim=1, keepdim=True) < 1.5).float()


def train(state: Any, hook: Hook, steps: int) -> tuple[float, float]:
    """Return this rank's last loss, and its accuracy on new points."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    model = minidp.DataParallel(net)
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        points, inside = batch(generator)
        optimizer.zero_grad()
        loss = cross_entropy(model(points), inside)
        loss.backward()
        optimizer.step()
    points, inside = batch(generator)
    accuracy = ((net(points) > 0) == (inside > 0)).float().mean()
    return loss.item(), accuracy.item()


def main() -> int:
    """Train once per way to average; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="20 steps, any accuracy")
    steps = 20 if parser.parse_args().smoke else 300
    alone = {"init_method": "tcp://127.0.0.1:0", "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **({} if "RANK" in os.environ else alone))
    worst = 1.0
    for name, (state, hook) in ways_to_average().items():
        found = torch.tensor(train(state, hook, steps)) / dist.get_world_size()
        dist.all_reduce(found)
        worst = min(worst, found[1].item())
        if dist.get_rank() == 0:
            print(ROW.format(name, *found.tolist()))
    dist.destroy_process_group()
    return 0 if steps < 300 or worst > 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
