r"""Write a comm hook of your own, and put it together with those of minidp.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/custom_comm_hook.py

A comm hook says how the gradients of a bucket are averaged. `clip_wrapper` clips what
any other hook averages; `LargestGradient` looks at the average on its way back. A net
learns which points lie in a sphere, on CPUs (Gloo) or a GPU for each process (NCCL).
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


def join_group() -> torch.device:
    """Join the launcher's process group; return this process's device."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"Started without a launcher.\n\n{__doc__}")
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # or all ranks would meet on GPU 0
    dist.init_process_group(dist.get_default_backend_for_device(device))
    return device


def clip_wrapper(max_norm: float, hook: Hook) -> Hook:
    """Clip this rank's share of a bucket, then let ``hook`` average it."""

    def clipped(state: Any, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()  # this rank's gradients, flat, not divided
        buffer.mul_((max_norm / buffer.norm()).clamp(max=1.0))  # before it travels
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
        "1/4, clipped": (comm_hooks.Int8State(), clip_wrapper(0.5, quarter)),
    }


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points in three dimensions; 1.0 for those inside the sphere."""
    points = torch.randn(256, 3, generator=generator, device=generator.device)
    return points, (points.norm(dim=1, keepdim=True) < 1.5).float()


def train(state: Any, hook: Hook, steps: int, device: torch.device) -> Tensor:
    """Return this rank's last loss, and its accuracy on new points."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    model = minidp.DataParallel(net)
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    for _ in range(steps):
        points, inside = batch(generator)
        optimizer.zero_grad()
        (loss := cross_entropy(model(points), inside)).backward()
        optimizer.step()
    points, inside = batch(generator)
    accuracy = ((net(points) > 0) == (inside > 0)).float().mean()
    return torch.stack([loss.detach(), accuracy])


def main() -> int:
    """Train once per way to average; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="20 steps, any accuracy")
    steps = 20 if parser.parse_args().smoke else 300
    device, worst = join_group(), 1.0
    for name, (state, hook) in ways_to_average().items():
        found = train(state, hook, steps, device) / dist.get_world_size()
        dist.all_reduce(found)
        worst = min(worst, found[1].item())
        if dist.get_rank() == 0:
            print("{:20}  loss {:.4f}  accuracy {:.1%}".format(name, *found.tolist()))
    dist.destroy_process_group()
    return 0 if steps < 300 or worst > 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
