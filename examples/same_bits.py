r"""The same bits on one, two or three processes: logical ranks.

    for n in 1 2 3; do
        python -m torch.distributed.run --standalone --nproc-per-node $n \
            examples/same_bits.py
    done

A small convolutional net with dropout and batch norm is trained on noisy images, on six
logical ranks, however many processes there are. The digest of the weights at the end is
the same each time, also if --stop-after ends a run in the middle of an epoch, and
another number of processes goes on from its --checkpoint. Gloo on CPU; NCCL with a GPU
per process.
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
from torch.utils.data import DataLoader, Dataset, default_collate

import minidp
from minidp import DataParallel as DDP

LOGICAL_RANKS = 6  # into which each step is divided
BATCH = 8  # images for each of them
IMAGES = 480  # of an epoch


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


def image_of(index: int) -> tuple[Tensor, int]:
    """Return stripes in one of four directions, and noise that is drawn anew."""
    x, y = torch.arange(12)[:, None], torch.arange(12)
    lines = (x + 0 * y, y + 0 * x, x + y, x - y)[index % 4]
    image = ((lines + index // 4) % 4 < 2).float()
    return (image + 0.5 * torch.randn(12, 12))[None], index % 4


class Batches(Dataset[Any]):
    """The samples of a logical rank in a step, whichever process asks for them."""

    def __getitem__(self, where: Any) -> Any:
        step, leaf = where
        epoch, k = divmod(step, IMAGES // (LOGICAL_RANKS * BATCH))
        order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(epoch))
        mine = order[(LOGICAL_RANKS * k + leaf) * BATCH :][:BATCH].tolist()
        with minidp.seeded(step, leaf):  # from which the noise is drawn
            return default_collate([image_of(i) for i in mine])


def train(model: DDP, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train some steps; a worker process makes the batches."""
    mine = [(step, leaf) for step in steps for leaf in model.logical_block]
    loader = iter(DataLoader(Batches(), None, sampler=mine, num_workers=1))
    for _ in steps:
        ready = {leaf: next(loader) for leaf in model.logical_block}
        for leaf in model.each_logical_rank():
            images, labels = (each.to(model.device) for each in ready[leaf])
            # The last one averages over all logical ranks.
            cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Train, or go on with a checkpoint; print the digest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stop-after", type=int, default=50, help="so many steps")
    parser.add_argument("--checkpoint", type=Path, help="save here, and go on from it")
    parser.add_argument("--smoke", action="store_true", help="10 steps")
    options = parser.parse_args()
    device = join_group()
    torch.set_num_threads(1)  # their number changes bits
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(200, 32), nn.ReLU()),
        nn.Linear(32, 4),
    ).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    saved: dict[str, Any] = {}
    if options.checkpoint and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
    model = DDP(net, logical_ranks=saved.get("logical", LOGICAL_RANKS))
    end = 10 if options.smoke else options.stop_after
    train(model, optimizer, range(model.logical_state["first_step"], end))
    if dist.get_rank() == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        if options.checkpoint:
            torch.save(state | {"logical": model.logical_state}, options.checkpoint)
        values = [each.cpu().numpy().tobytes() for each in state["net"].values()]
        digest = hashlib.sha256(b"".join(values)).hexdigest()[:16]
        print(f"{dist.get_world_size()} processes, {end} steps: digest {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
