r"""One script on one node, on two, and under SLURM: torchrun with c10d rendezvous.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/torchrun_ddp.py

Two nodes: the same command on both, within a minute. HEAD is one of them by the name
that `hostname` prints there; it keeps the rendezvous, and the other must reach it.

    python -m torch.distributed.run --nnodes 2 --nproc-per-node 2 \
        --rdzv-id any_name --rdzv-backend c10d --rdzv-endpoint HEAD:29400 \
        examples/torchrun_ddp.py

SLURM: `sbatch examples/two_nodes.sbatch` finds HEAD and runs that on every node.

The last demo of PyTorch's "Getting Started with DDP". Gloo on CPU; NCCL if each process
has a GPU of its own.
"""

import argparse
import os
import socket
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from minidp import DataParallel as DDP


def join_group() -> torch.device:
    """Join the launcher's process group; return this process's device."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"Started without a launcher.\n\n{__doc__}")
    # torchrun has decided who is who, and says so in the environment. Ranks count over
    # all nodes; which GPU is ours depends on the number within this node.
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # or all ranks would meet on GPU 0
    dist.init_process_group(dist.get_default_backend_for_device(device))
    return device


def train(device: torch.device, steps: int) -> tuple[list[float], list[float]]:
    """Return this rank's losses, and the sum of each of its parameters."""
    torch.manual_seed(dist.get_rank())  # unequal on purpose: DDP hands out rank 0's net
    net = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)).to(device)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = torch.randn(20, 10, device=device), torch.randn(20, 5, device=device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.double().sum().item() for p in model.parameters()]


def main() -> None:
    """Train, and let rank 0 say who took part and whether all agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="5 steps, not 100")
    steps = 5 if parser.parse_args().smoke else 100
    device = join_group()
    losses, sums = train(device, steps)
    mine = (socket.gethostname(), device, losses, sums)
    everyones = [mine] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    if dist.get_rank() == 0:
        for rank, (host, where, (first, *_, last), _) in enumerate(everyones):
            print(f"rank {rank} on {host}, {where}: loss {first:.4f} -> {last:.4f}")
        nodes = len({host for host, *_ in everyones})
        print(f"ranks: {len(everyones)}, nodes: {nodes}")
        agree = all(theirs == sums for *_, theirs in everyones)
        print(f"equal weights on all ranks: {'yes' if agree else 'NO'}")
    dist.destroy_process_group()
    assert all(theirs == sums for *_, theirs in everyones), "the replicas differ"


if __name__ == "__main__":
    main()
