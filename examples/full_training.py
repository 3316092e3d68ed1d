r"""A training script with all its parts: data, validation, log, checkpoint, resume.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/full_training.py --checkpoint spirals.pt

Stopped in between, the same command goes on after the last epoch that was finished. A
net learns which of two spirals a point is on. Gloo on CPU; NCCL with a GPU per process.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


def spirals(num_points: int) -> TensorDataset:
    """Points in the plane, and on which spiral each is; the same on all ranks."""
    radius, labels = torch.linspace(0.1, 1, num_points), torch.arange(num_points) % 2
    points = torch.polar(radius, 7 * radius + torch.pi * labels)
    return TensorDataset(torch.view_as_real(points), labels)


def train_epoch(model: DDP, batches: DataLoader[Any], optimizer: Optimizer) -> float:
    """Return the mean loss, over all ranks."""
    model.train()
    total = torch.zeros((), device=model.device)
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x.to(model.device)), y.to(model.device))
        loss.backward()
        optimizer.step()
        total += loss.detach()  # item() would wait for the GPU in each step
    dist.all_reduce(total)
    return total.item() / len(batches) / dist.get_world_size()


@torch.no_grad()
def accuracy(model: DDP, data: TensorDataset) -> float:
    """Return the part of the points that is right; each rank looks at a share."""
    model.eval()
    # No DistributedSampler here: to deal out equally it repeats some, which would count
    # twice. And .module, because the wrapper's forward may be collective (it hands out
    # module buffers), while ranks may have more or fewer batches.
    x, y = data[dist.get_rank() :: dist.get_world_size()]
    found = model.module(x.to(model.device)).argmax(dim=1)
    dist.all_reduce(right := (found == y.to(model.device)).sum())
    return right.item() / len(data)


def train(path: Path, epochs: int, device: torch.device) -> None:
    """Train until so many epochs are done, from the checkpoint if there is one."""
    data, held_out = spirals(2000), spirals(501)
    # Deals the data out, equally to all ranks, and shuffles: the loader must not.
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    batches = DataLoader(data, batch_size=32, sampler=sampler)  # 32 per rank
    net = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 2)).to(device)
    model = DDP(net)  # all ranks have rank 0's weights now
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    done = 0
    if path.exists():  # every rank reads it, each to its own device
        state = torch.load(path, map_location=device, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epoch"]
    for epoch in range(done, epochs):
        sampler.set_epoch(epoch)  # else every epoch has the same order
        loss = train_epoch(model, batches, optimizer)
        right = accuracy(model, held_out)
        if dist.get_rank() == 0:  # all ranks know the same: one speaks, one writes
            print(f"epoch {epoch + 1:2}  loss {loss:.4f}  right {right:.1%}")
            # Of the net, not of the wrapper, whose keys begin with "module.".
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"epoch": epoch + 1}, part := path.with_suffix(".part"))
            part.replace(path)  # a crash meanwhile leaves the old checkpoint whole
    dist.barrier()  # rank 0 has written the last checkpoint


def main() -> None:
    """Join, train, leave."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("spirals.pt"))
    parser.add_argument("--epochs", type=int, default=20, help="in all (default 20)")
    parser.add_argument("--smoke", action="store_true", help="2 epochs, and 1 resumed")
    args, device = parser.parse_args(), join_group()
    if args.smoke:
        path = Path(tempfile.gettempdir(), f"smoke_{os.environ['MASTER_PORT']}.pt")
        train(path, 2, device)
        train(path, 3, device)
        path.unlink(missing_ok=True)
    else:
        train(args.checkpoint, args.epochs, device)
    dist.destroy_process_group()  # lets the ranks end together, without complaints


if __name__ == "__main__":
    main()
