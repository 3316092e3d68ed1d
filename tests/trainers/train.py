"""What the scripts of this folder share. Each is started in one of three ways::

    torchrun by_TRAINER.py OUT torch             on torch's DDP
    torchrun -m minidp.run by_TRAINER.py OUT torch    unmodified, on minidp
    torchrun by_TRAINER.py OUT minidp            on minidp, by the trainer's own means

and writes to OUT, on rank 0, what wrapped the net and the weights that it got.
"""

from __future__ import annotations

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import minidp

LEARNING_RATE = 0.1
WAYS = {"torch": contextlib.nullcontext, "minidp": minidp.swapped}


def make_net():
    """A different one on each rank: DDP is to hand out that of rank 0."""
    torch.manual_seed(int(os.environ["RANK"]))
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)
    )


def make_data():
    """96 samples in batches of 8, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)


def sgd(module, learning_rate):
    """With momentum, so that every step leaves its mark on all later ones."""
    return torch.optim.SGD(module.parameters(), lr=learning_rate, momentum=0.9)


def main(train):
    """Train, and write down what came out."""
    out, way = sys.argv[1:]
    kind, weights = train(WAYS[way])
    if os.environ["RANK"] == "0":
        name = f"{kind.__module__}.{kind.__qualname__}"
        torch.save({"wrapper": name, "weights": dict(weights)}, out)
    if dist.is_initialized():
        dist.destroy_process_group()
