r"""The same bits on one, two or three processes: logical ranks.

    for n in 1 2 3; do
        python -m torch.distributed.run --standalone --nproc-per-node $n \
            examples/same_bits.py
    done

A small convolutional net with dropout and batch norm is trained on noisy images, on six
logical ranks, however many processes there are. The digest of the weights at the end is
the same each time. With --stop-after the run ends in between and leaves a checkpoint,
from which the next start goes on, on any number of processes. Gloo on CPU; on GPUs, one
for each process, NCCL.
"""

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from minidp import DataParallel as DDP

LOGICAL_RANKS = 6  # into which each step is divided
BATCH = 8  # images for each of them


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


class Stripes(Dataset[tuple[Tensor, int]]):
    """Images with stripes in one of four directions, and noise that is drawn anew."""

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % 4
        across, down = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
        lines = (across, down, across + down, across - down)[label]
        image = ((lines + index // 4) % 4 < 2).float()
        return (image + 0.5 * torch.randn(12, 12))[None], label


def make_net() -> nn.Module:
    """Return a net that draws random numbers, and has module buffers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(200, 32), nn.ReLU()),
        nn.Linear(32, 4),
    )


def loader_of(leaf: int, epoch: int) -> DataLoader[tuple[Tensor, int]]:
    """Return the samples of one logical rank, whichever process asks for them."""
    dataset = Stripes()
    sampler: DistributedSampler[tuple[Tensor, int]]
    sampler = DistributedSampler(dataset, num_replicas=LOGICAL_RANKS, rank=leaf)
    sampler.set_epoch(epoch)
    # Workers draw the noise; without this their seeds would be those of the process.
    seeds = torch.Generator().manual_seed(1000 * epoch + leaf)
    return DataLoader(
        dataset, BATCH, sampler=sampler, num_workers=1, generator=seeds, drop_last=True
    )


def train_epoch(model: DDP, optimizer: torch.optim.Optimizer, epoch: int) -> float:
    """Train one epoch; return the last loss of this process."""
    batches = {leaf: iter(loader_of(leaf, epoch)) for leaf in model.logical_block}
    loss = torch.zeros(())
    for _ in range(len(Stripes()) // LOGICAL_RANKS // BATCH):
        for leaf in model.each_logical_rank():
            images, labels = next(batches[leaf])
            images, labels = images.to(model.device), labels.to(model.device)
            loss = cross_entropy(model(images), labels)
            loss.backward()  # the last one averages over all logical ranks
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def digest_of(net: nn.Module) -> str:
    """Return a digest of all bits of the weights."""
    values = [value.cpu().numpy().tobytes() for value in net.state_dict().values()]
    return hashlib.sha256(b"".join(values)).hexdigest()[:16]


def main() -> None:
    """Train, or go on with a checkpoint; print the digest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--stop-after", type=int, help="end after so many epochs")
    parser.add_argument("--checkpoint", type=Path, help="save here, and go on from it")
    parser.add_argument("--smoke", action="store_true", help="1 epoch")
    options = parser.parse_args()
    device = join_group()
    torch.set_num_threads(1)  # their number changes bits
    torch.manual_seed(0)
    net = make_net().to(device)
    saved: dict[str, Any] = {}
    if options.checkpoint and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        net.load_state_dict(saved["net"])
    model = DDP(net, logical_ranks=saved.get("logical", LOGICAL_RANKS))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
    first, end = saved.get("epoch", 0), 1 if options.smoke else options.epochs
    for epoch in range(first, min(end, options.stop_after or end)):
        loss = train_epoch(model, optimizer, epoch)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")
            state = {
                "net": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "logical": model.logical_state,
                "epoch": epoch + 1,
            }
            if options.checkpoint:
                torch.save(state, options.checkpoint)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes: digest {digest_of(net)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
