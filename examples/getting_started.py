r"""Three demos of PyTorch's "Getting Started with DDP": only the import differs.

    python examples/getting_started.py

* basic: `mp.spawn` starts the processes, each trains a replica of one model;
* checkpoint: rank 0 saves, all ranks load, training goes on;
* model parallel: every replica is itself spread over two devices.

The fourth, torchrun, is `torchrun_ddp.py`. Under a launcher, on one node, this script
spawns nothing and takes the processes that are there; it is tested in both ways.

A rank takes its share of the GPUs (NCCL), or else the CPU (Gloo). Without a second
device per rank the first stands in for it: moves between the model's parts do nothing.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from minidp import DataParallel as DDP


class ToyModel(nn.Module):
    """Two layers; all of it where it is moved to, or a layer on each of two devices."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.net1 = nn.Linear(10, 10).to(first)
        self.net2 = nn.Linear(10, 5).to(second)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 10] anywhere -> [batch, 5] on the second device."""
        x = torch.relu(self.net1(x.to(self.first)))
        return self.net2(x.to(self.second))


def train(name: str, model: DDP, steps: int) -> None:
    """Train on random numbers; rank 0 reports, all ranks check that they agree."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # Each rank has data of its own. What makes it one training is that backward()
    # leaves the average over all ranks in .grad.
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, y = (torch.randn(20, n, generator=generator) for n in (10, 5))
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(x)
        loss = mse_loss(outputs, y.to(outputs.device))
        loss.backward()
        optimizer.step()
    sums = [p.double().sum().item() for p in model.parameters()]
    everyones = [sums] * dist.get_world_size()
    dist.all_gather_object(everyones, sums)
    assert all(theirs == sums for theirs in everyones), "the replicas differ"
    if dist.get_rank() == 0:
        print(f"{name:15} loss {loss.item():.4f}, equal on {len(everyones)} ranks")


def demo_checkpoint(device: torch.device, steps: int) -> None:
    """Save on one rank, load on all."""
    model = DDP(ToyModel(device, device))
    train("before saving", model, steps)
    paths = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(paths)
    path = Path(paths[0], "model.pt")
    if dist.get_rank() == 0:  # the replicas are equal: one file is enough
        torch.save(model.state_dict(), path)
    dist.barrier()  # nobody may read before it is written
    model = DDP(ToyModel(device, device))
    # map_location: what was saved from rank 0's GPU must not be loaded onto it by all.
    model.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    train("after loading", model, steps)
    dist.barrier()  # nor may it be removed before all have read it
    if dist.get_rank() == 0:
        path.unlink()
        path.parent.rmdir()


def run(rank: int, world_size: int, meeting_place: str, steps: int) -> None:
    """All demos, in one process of ``world_size``."""
    share = torch.cuda.device_count() // world_size
    devices = [torch.device("cuda", rank * share + i) for i in range(share)]
    if devices:
        torch.cuda.set_device(devices[0])  # or all ranks would meet on GPU 0
    backend = "nccl" if devices else "gloo"
    dist.init_process_group(backend, meeting_place, rank=rank, world_size=world_size)
    first, second = (2 * (devices or [torch.device("cpu")]))[:2]
    train("basic", DDP(ToyModel(first, first)), steps)
    demo_checkpoint(first, steps)
    # device_ids is for models on one device; DDP finds the devices of this one itself.
    train("model parallel", DDP(ToyModel(first, second)), steps)
    dist.destroy_process_group()


def main() -> None:
    """Start the processes, unless a launcher has."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="to spawn (default 2)")
    parser.add_argument("--smoke", action="store_true", help="5 steps each, not 100")
    args = parser.parse_args()
    steps = 5 if args.smoke else 100
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", steps)
        return
    with tempfile.TemporaryDirectory() as directory:
        # The ranks meet through a file: no port that could be in use.
        given = (args.processes, f"file://{directory}/group", steps)
        mp.spawn(run, given, nprocs=args.processes)


if __name__ == "__main__":
    main()
