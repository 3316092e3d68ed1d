r"""Ranks with more data than others: join().

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/uneven_inputs.py

A backward waits for all ranks: a rank that runs out of batches and leaves would keep
the others waiting. Inside join() it stays, and adds zeros to their averages, until the
last one is done. Nothing is cut off or repeated, as DistributedSampler does to make all
shares equal. Gloo on CPU; NCCL if each process has a GPU of its own.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
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


def train(device: torch.device, epochs: int) -> None:
    """Train; check that all ranks have the same weights afterwards."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_batches = 10 + 5 * rank  # what files happened to be on this rank's disk
    generator = torch.Generator().manual_seed(rank)
    data = torch.randn(num_batches, 32, 8, generator=generator).to(device)
    for epoch in range(1, epochs + 1):
        # Anew for each epoch. By default averages are divided by the world size, as
        # ever: each sample weighs the same. With False, by the number of ranks that
        # still have data: the last steps are as large as the others.
        with model.join(divide_by_initial_world_size=False):
            for x in data:
                optimizer.zero_grad()
                loss = cross_entropy(model(x), x[:, :4].argmax(dim=1))
                loss.backward()
                optimizer.step()
        # After join() all ranks have the weights of one that was there to the end.
        if rank == 0 and epoch % max(1, epochs // 5) == 0:
            print(f"epoch {epoch:2}  loss {loss.item():.4f}")
    mine = (num_batches, [p.double().sum().item() for p in net.parameters()])
    everyones = [mine] * world_size
    dist.all_gather_object(everyones, mine)
    assert all(weights == mine[1] for _, weights in everyones), "the replicas differ"
    if rank == 0:
        counts = [count for count, _ in everyones]
        print(f"batches per rank: {counts}; weights equal on all ranks")


def main() -> None:
    """Join the group, train, leave."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="2 epochs, not 20")
    epochs = 2 if parser.parse_args().smoke else 20
    train(join_group(), epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
