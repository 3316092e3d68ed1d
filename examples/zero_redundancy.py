r"""Optimizer state on one rank each, not on all: ZeroRedundancyOptimizer.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/zero_redundancy.py

Adam keeps two numbers for each weight, and under DDP every rank keeps the same ones.
Here a rank keeps those of its share of the weights, steps these, and hands them to the
others. Gloo on CPU; NCCL if each process has a GPU of its own.
"""

import argparse
import os
import sys

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


def train(
    device: torch.device, steps: int, *, sharded: bool
) -> tuple[Optimizer, list[Tensor]]:
    """Return the optimizer, and the weights at the end."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) if i % 2 == 0 else nn.Tanh() for i in range(15)]
    model = DDP(nn.Sequential(*layers).to(device))
    optimizer: Optimizer = (
        ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam, lr=1e-3)
        if sharded
        else Adam(model.parameters(), lr=1e-3)
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(64, 64, generator=generator).to(device)
        optimizer.zero_grad()
        loss = mse_loss(model(x), x.roll(1, dims=1))
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"{'sharded' if sharded else 'plain':8}loss {loss.item():.4f}")
    return optimizer, list(model.parameters())


def main() -> None:
    """Train with both, compare, and make a checkpoint of the sharded one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="5 steps, not 100")
    steps = 5 if parser.parse_args().smoke else 100
    device = join_group()
    plain, weights = train(device, steps, sharded=False)
    sharded, same_weights = train(device, steps, sharded=True)
    torch.testing.assert_close(same_weights, weights)
    sizes = [0] * dist.get_world_size()
    dist.all_gather_object(sizes, state_nbytes(sharded.optim))
    # A checkpoint needs the states of all ranks. Collective, so not inside the `if`.
    sharded.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        print(
            f"state on each rank: plain {state_nbytes(plain):,}, sharded {sizes} bytes"
        )
        whole = sharded.state_dict()  # what torch.save would get, on rank 0 alone
        assert len(whole["state"]) == len(weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
