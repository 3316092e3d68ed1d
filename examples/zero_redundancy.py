r"""Optimizer state on one rank each, not on all: sharded_step.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/zero_redundancy.py

Adam keeps two numbers for each weight, and under DDP every rank keeps the same ones.
Here a rank keeps those of its share of the weights, steps these, and hands them to the
others: with model.sharded_step(optimizer), and with torch's ZeroRedundancyOptimizer,
which every DDP can have. Gloo on CPU; NCCL if each process has a GPU of its own.
"""

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import mse_loss
from torch.optim import Adam, Optimizer

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


def state_nbytes(optimizer: Optimizer) -> int:
    """Bytes that the optimizer keeps on this rank."""
    states = optimizer.state.values()
    return sum(t.nbytes for s in states for t in s.values() if isinstance(t, Tensor))


KINDS = ("plain", "sharded_step", "ZeroRedundancyOptimizer")


def train(device: torch.device, steps: int, kind: str) -> tuple[DDP, Optimizer]:
    """Train a new model; return it, and its optimizer."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) if i % 2 == 0 else nn.Tanh() for i in range(15)]
    model = DDP(nn.Sequential(*layers).to(device))
    optimizer: Optimizer = Adam(model.parameters(), lr=1e-3)
    if kind == "ZeroRedundancyOptimizer":
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=Adam, lr=1e-3
        )
    if kind == "sharded_step":
        model.sharded_step(optimizer)  # this line is all
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(64, 64, generator=generator).to(device)
        optimizer.zero_grad()
        loss = mse_loss(model(x), x.roll(1, dims=1))
        loss.backward()
        optimizer.step()
    sizes = [0] * dist.get_world_size()
    own = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else None
    dist.all_gather_object(sizes, state_nbytes(own or optimizer))
    if dist.get_rank() == 0:
        print(f"{kind:24}loss {loss.item():.4f}, state on the ranks: {sizes} bytes")
    return model, optimizer


def whole_state(model: DDP, optimizer: Optimizer) -> dict[str, Any] | None:
    """Collect what torch.save would get, on rank 0. All ranks call it."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return model.whole_optimizer_state(optimizer)
    optimizer.consolidate_state_dict(to=0)
    state: dict[str, Any] = optimizer.state_dict() if dist.get_rank() == 0 else {}
    return state or None


def main() -> None:
    """Train with each of them, compare, and make a checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="5 steps, not 100")
    steps = 5 if parser.parse_args().smoke else 100
    device = join_group()
    weights: list[Tensor] = []
    for kind in KINDS:
        model, optimizer = train(device, steps, kind)
        weights = weights or list(model.parameters())
        torch.testing.assert_close(list(model.parameters()), weights)
        state = whole_state(model, optimizer)
        if state is not None:
            assert len(state["state"]) == len(weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
