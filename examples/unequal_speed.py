r"""Ranks of unequal speed: batches in proportion to speed, and the same loss curve.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/unequal_speed.py

Rank 1 is slowed down, as an older GPU would be. First all ranks take equal batches, and
the fast one waits. Then each rank measures how long a sample takes it, and takes its
share of a global batch that stays the same. `average_over="items"` makes the gradient
the mean over all samples, however they are split.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from minidp import DataParallel as DDP


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


def measure_speeds(model: DDP, x: torch.Tensor) -> list[float]:
    """Return each rank's samples per second: alone, without waiting for others."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        with model.no_sync():
            mse_loss(model(x), x[:, :4]).backward()
        times.append(time.perf_counter() - begin)
    model.zero_grad()
    speeds = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(speeds, torch.tensor(len(x) / min(times)))
    return [speed.item() for speed in speeds]


def train(
    arguments: argparse.Namespace, split: str
) -> tuple[list[int], list[float], float]:
    """Train from the same beginning; return losses, and seconds per step."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 4))
    factor = arguments.slow if rank == 1 else 1
    model = DDP(Slowed(net, factor), average_over="items")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    parts = [arguments.batch // dist.get_world_size()] * dist.get_world_size()
    if split == "in proportion":
        speeds = measure_speeds(model, torch.randn(parts[0], 256))
        parts = shares(speeds, arguments.batch)
    random = torch.Generator().manual_seed(1)  # all ranks draw the global batch
    losses, times = [], []
    for _ in range(arguments.steps):
        x = torch.randn(arguments.batch, 256, generator=random).split(parts)[rank]
        begin = time.perf_counter()
        loss = mse_loss(model(x), x[:, :4])
        model.weigh_loss(loss, len(x)).backward()  # the mean over all samples
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
        losses.append(model.item_totals.mean_loss.item())  # of the global batch
    return parts, losses, sorted(times)[len(times) // 2]


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
    found = {split: train(arguments, split) for split in ("equal", "in proportion")}
    if dist.get_rank() == 0:
        for split, (parts, losses, seconds) in found.items():
            curve = " ".join(f"{loss:.4f}" for loss in losses[:: len(losses) // 4])
            print(f"{split:14}batches {parts}: {seconds * 1e3:6.1f} ms a step")
            print(f"{'':14}loss {curve}")
        (_, first, slow), (_, second, fast) = found.values()
        apart = max(abs(a / b - 1) for a, b in zip(first, second, strict=True))
        print(f"step time {fast / slow:.2f} of that with equal batches")
        print(f"losses differ by {apart:.1e} at most: rounding")
        assert apart < 1e-3
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
