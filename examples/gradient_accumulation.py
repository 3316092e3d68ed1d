r"""Accumulate gradients over micro-batches, and let them travel once: no_sync().

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/gradient_accumulation.py

Two replicas of a net train on the same batches, each in four pieces that fit into
memory. One averages gradients after every piece, the other after the last: the same
weights, for a fourth of the collectives. Gloo on CPU; NCCL with a GPU per process.
"""

import argparse
import contextlib
import copy
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.functional import mse_loss

from minidp import DataParallel as DDP
from minidp import GradBucket, comm_hooks

PIECES = 4


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


class Counter:
    """A comm hook that averages as usual, and counts how often."""

    value = 0

    def __call__(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """Start one collective."""
        self.value += 1
        return comm_hooks.all_reduce_hook(state, bucket)


def accumulate(model: DDP, x: Tensor, y: Tensor, *, only_once: bool) -> float:
    """Leave the averaged gradient of the whole batch in ``.grad``; return the loss."""
    total = 0.0
    pieces = list(zip(x.chunk(PIECES), y.chunk(PIECES), strict=True))
    for number, (inputs, targets) in enumerate(pieces, start=1):
        stays_here = only_once and number < len(pieces)
        with model.no_sync() if stays_here else contextlib.nullcontext():
            # The forward belongs inside, too: it is where DDP decides whether the
            # backward will average. Divided, because backwards add up in .grad.
            loss = mse_loss(model(inputs), targets) / len(pieces)
            loss.backward()
        total += loss.item()
    return total


def train(model: DDP, steps: int, *, only_once: bool) -> int:
    """Train; return the number of collectives."""
    model.register_comm_hook(None, counter := Counter())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(64, 8, generator=generator)
        y = x.sin().sum(dim=1, keepdim=True)
        optimizer.zero_grad()  # once per step, not per piece
        x, y = x.to(model.device), y.to(model.device)
        loss = accumulate(model, x, y, only_once=only_once)
        # Clipping, if any, comes here: after the last piece, when .grad is the average.
        optimizer.step()
    if dist.get_rank() == 0:
        when = "the last piece" if only_once else "every piece"
        print(f"after {when:14}  loss {loss:.6f}  collectives {counter.value}")
    return counter.value


def main() -> None:
    """Train twice, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="10 steps, not 200")
    steps = 10 if parser.parse_args().smoke else 200
    device = join_group()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    models = [DDP(copy.deepcopy(net)) for _ in range(2)]  # both get rank 0's weights
    often = train(models[0], steps, only_once=False)
    seldom = train(models[1], steps, only_once=True)
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b)  # not bit for bit: sums in another order
    assert often == PIECES * seldom
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
