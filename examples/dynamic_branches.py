r"""Forwards that skip layers, others on every rank: find_unused_parameters.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/dynamic_branches.py [--without]

Stochastic depth: in each step every rank leaves out layers at random. DDP waits for a
gradient of each parameter, unless it may look for those that will get none. --without
leaves the option out, to see the error. Gloo on CPU; NCCL with a GPU per process.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from minidp import DataParallel as DDP


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


class SometimesShallow(nn.Module):
    """Blocks beside a shortcut; in training each is skipped half of the time."""

    def __init__(self, depth: int, seed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
            for _ in range(depth)
        )
        self.head = nn.Linear(32, 4)
        self.dice = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 32] -> [batch, 4]."""
        for block in self.blocks:
            if torch.rand((), generator=self.dice) < 0.5:
                x = x + block(x)
        return self.head(x)


def train(device: torch.device, steps: int, *, find_unused: bool) -> None:
    """Train; rank 0 reports."""
    torch.manual_seed(0)
    net = SometimesShallow(depth=4, seed=dist.get_rank()).to(device)
    # Costs a walk through the graph after a step in which something was left out. If
    # always the same is left out, static_graph=True is cheaper; if nothing, neither.
    model = DDP(net, find_unused_parameters=find_unused)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    unused = 0
    for step in range(1, steps + 1):
        x = torch.randn(64, 32, generator=generator).to(device)
        y = x[:, :4].argmax(dim=1)
        optimizer.zero_grad()  # sets .grad to None, and that is what stays if ...
        loss = cross_entropy(model(x), y)
        loss.backward()
        # ... no rank has used a block: the optimizer leaves it alone, its momentum as
        # well. If some ranks did, the others count as zeros in the average, everywhere.
        unused += sum(block[0].weight.grad is None for block in net.blocks)
        optimizer.step()
        if dist.get_rank() == 0 and step % (steps // 4) == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    counts = [unused] * dist.get_world_size()
    dist.all_gather_object(counts, unused)
    assert len(set(counts)) == 1, f"ranks differ in what nobody used: {counts}"
    if dist.get_rank() == 0:
        print(f"blocks that no rank used: {unused} of {len(net.blocks) * steps}")


def main() -> None:
    """Join, train, leave."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--without", action="store_true", help="the option: an error")
    parser.add_argument("--smoke", action="store_true", help="20 steps, not 400")
    args = parser.parse_args()
    device, steps = join_group(), 20 if args.smoke else 400
    train(device, steps, find_unused=not args.without)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
