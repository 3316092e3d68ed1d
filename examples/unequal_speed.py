r"""Ranks of unequal speed: batches in proportion to speed, and the same loss curve.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/unequal_speed.py

Rank 1 is slowed down, as an older GPU would be. First all ranks take equal batches, and
the fast one waits. Meanwhile `minidp.watch_speed` measures how long each rank works.
Then each takes its share of a global batch that stays the same. `average_over="items"`
makes the gradient the mean over all samples, however they are split.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from minidp import DataParallel as DDP
from minidp import watch_speed


class Slowed(nn.Module):
    """A net that takes ``factor`` times as long for its forward and backward."""

    def __init__(self, net: nn.Module, factor: int) -> None:
        super().__init__()
        self.net, self.factor = net, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the net as often as the factor says; only the first result counts."""
        out = self.net(x)
        for _ in range(self.factor - 1):
            grad = torch.autograd.grad(self.net(x).sum(), [*self.net.parameters()])
            out = out + 0 * sum(g.sum() for g in grad)
        return out


def shares(speeds: list[float], batch: int) -> list[int]:
    """Split ``batch`` samples in proportion to ``speeds``; at least one for each."""
    parts = [max(1, round(batch * speed / sum(speeds))) for speed in speeds]
    parts[speeds.index(max(speeds))] += batch - sum(parts)
    return parts


def train(
    arguments: argparse.Namespace, parts: list[int]
) -> tuple[list[float], float, list[float]]:
    """Train from the same beginning; return losses, seconds per step, and speeds.

    ``parts``: samples of each rank. Speeds: samples per second that a rank works.
    """
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 4))
    factor = arguments.slow if rank == 1 else 1
    model = DDP(Slowed(net, factor), average_over="items")
    watch = watch_speed(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(1)  # all ranks draw the global batch
    losses, times, work = [], [], []
    for _ in range(arguments.steps):
        x = torch.randn(arguments.batch, 256, generator=random).split(parts)[rank]
        begin = time.perf_counter()
        loss = mse_loss(model(x), x[:, :4])
        model.weigh_loss(loss, len(x)).backward()  # the mean over all samples
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
        losses.append(model.item_totals.mean_loss.item())  # of the global batch
        took = watch.numbers()  # without waiting for other ranks
        work.append(took["forward_s"] + took["backward_s"])
    watch.stop()
    speeds = [torch.zeros(()) for _ in parts]
    dist.all_gather(speeds, torch.tensor(len(x) / min(work)))
    return losses, sorted(times)[len(times) // 2], [s.item() for s in speeds]


def main() -> None:
    """Train with equal batches, then with batches in proportion to speed; compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=512, help="of all ranks")
    parser.add_argument("--slow", type=int, default=3, help="how many times slower")
    parser.add_argument("--smoke", action="store_true", help="seconds, for a test")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.steps, arguments.batch = 8, 128
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    equal = [arguments.batch // ranks] * ranks
    first, slow, speeds = train(arguments, equal)
    in_proportion = shares(speeds, arguments.batch)
    second, fast, _ = train(arguments, in_proportion)
    if dist.get_rank() == 0:
        print(f"samples/s      {[round(speed) for speed in speeds]}")
        for split, parts, losses, seconds in (
            ("equal", equal, first, slow),
            ("in proportion", in_proportion, second, fast),
        ):
            curve = " ".join(f"{loss:.4f}" for loss in losses[:: len(losses) // 4])
            print(f"{split:14} batches {parts}: {seconds * 1e3:6.1f} ms a step")
            print(f"{'':14} loss {curve}")
        apart = max(abs(a / b - 1) for a, b in zip(first, second, strict=True))
        print(f"step time {fast / slow:.2f} of that with equal batches")
        print(f"losses differ by {apart:.1e} at most: rounding")
        assert apart < 1e-3
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
