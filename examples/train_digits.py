r"""Train one small net on torch's DDP and on minidp, and compare every gradient.

    bash examples/quickstart.sh            # installs what is needed, then runs this:
    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/train_digits.py

A convolutional net with batch normalization learns the 1,797 handwritten digits
that come with scikit-learn. Two replicas of it, one in each wrapper, take every
step on the same images. After every step, on every rank, every gradient, weight
and module buffer of the one is compared with that of the other. The exit status
is 0 only if all of them are equal and the net has learned to read.

Gloo on CPU; NCCL if each process on this host has a GPU of its own.
"""

import argparse
import copy
import gc
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import chain, islice

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import minidp
from minidp import native

REQUIRED_ACCURACY = 0.95  # held-out, after the last epoch; not asked of --smoke
HEADER = """\
held-out: read correctly, of the fifth of the images that is not trained on
seconds: forward, backward and optimizer step of all steps of the epoch
All are means over the ranks. Loading and comparing are not timed.
minidp runs {} its C++ extension.

             loss            held-out           seconds
epoch    torch  minidp    torch   minidp    torch  minidp"""
ROW = "{:5}   {:6.4f}  {:6.4f}   {:6.1%}   {:6.1%}   {:6.3f}  {:6.3f}"


def build_net() -> nn.Module:
    """Return the net; its 1.1 MiB of gradients make two buckets by default."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(1, 32, 3, padding=1),
        norm1=nn.BatchNorm2d(32),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, 3, stride=2, padding=1),
        norm2=nn.BatchNorm2d(64),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        hidden=nn.Linear(64 * 4 * 4, 256),
        relu3=nn.ReLU(),
        output=nn.Linear(256, 10),
    )
    return nn.Sequential(layers)


def join_group() -> torch.device:
    """Join the launcher's process group, or one of our own; return the device."""
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        backend = "nccl"
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = True
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, "tcp://127.0.0.1:0", rank=0, world_size=1)
    return device


def load_data(device: torch.device) -> tuple[TensorDataset, tuple[Tensor, ...]]:
    """Return four fifths of the images to train on, and the held-out fifth."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device) / 16
    images, labels = images.unsqueeze(1), torch.tensor(digits.target, device=device)
    held_out = torch.arange(len(labels), device=device) % 5 == 0
    train = TensorDataset(images[~held_out], labels[~held_out])
    return train, (images[held_out], labels[held_out])


class Run:
    """One replica in its wrapper, with its optimizer."""

    def __init__(self, net: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self.net = net
        self.model = wrap(net)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def train(self, images: Tensor, labels: Tensor) -> tuple[float, float]:
        """Take one training step; return its loss and the seconds it took."""
        self.model.train()
        dist.barrier()  # so that no wrapper is charged for a rank that comes late
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item(), time.perf_counter() - start  # item() waits for a GPU

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Return the fraction of the images that is read correctly."""
        self.model.eval()
        # Through the wrapper, which first hands rank 0's module buffers to all ranks.
        return float((self.model(images).argmax(dim=1) == labels).double().mean())

    def state(self) -> dict[str, Tensor | None]:
        """Return, by name, all gradients, weights and module buffers."""
        gradients = {f"{n}.grad": p.grad for n, p in self.net.named_parameters()}
        return gradients | self.net.state_dict()


def differing(left: Run, right: Run) -> list[str]:
    """Return the names of what is not exactly equal, or missing on a side."""
    pairs = zip(left.state().items(), right.state().values(), strict=True)
    return [n for (n, a), b in pairs if a is None or b is None or not a.equal(b)]


def compare(args: argparse.Namespace, device: torch.device) -> bool:
    """Train both, compare, report; return whether all is well."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank != 0, highlight=False)
    console.print(HEADER.format("with" if native.library() else "without"))
    train_set, held_out = load_data(device)
    sampler: DistributedSampler[int] = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    epochs = 2 if args.smoke else args.epochs
    steps = min(3, len(loader)) if args.smoke else len(loader)

    torch.manual_seed(args.seed + rank)  # unequal: the wrappers hand out rank 0's net
    net = build_net().to(device)
    runs = [
        Run(copy.deepcopy(net), DistributedDataParallel),
        Run(copy.deepcopy(net), minidp.DataParallel),  # nothing else changes
    ]
    cross_entropy(net(held_out[0]), held_out[1]).backward()  # libraries warm up

    rows: list[Tensor] = []  # an epoch's [loss | accuracy | seconds, torch | minidp]
    found: list[tuple[int, int, int, str]] = []  # epoch, step, rank, what differs
    with Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("training on both", total=epochs * steps)
        for epoch in range(1, epochs + 1):
            sampler.set_epoch(epoch)
            row = torch.zeros(3, 2, dtype=torch.float64)
            for step, batch in enumerate(islice(loader, steps), start=1):
                for i in (step % 2, 1 - step % 2):  # they go first in turns
                    loss, seconds = runs[i].train(*batch)
                    row[:, i] += torch.tensor([loss / steps, 0, seconds])
                found += [(epoch, step, rank, name) for name in differing(*runs)]
                progress.advance(task)
            row[1] = torch.tensor([run.accuracy(*held_out) for run in runs])
            dist.all_reduce(row := row.to(device) / world_size)
            rows.append(row)
            console.print(ROW.format(epoch, *row.flatten().tolist()))

    # Every rank learns what all have found, so that all reach the same verdict.
    everywhere = [found] * world_size
    dist.all_gather_object(everywhere, found)
    differences = sorted(chain.from_iterable(everywhere), key=lambda d: d[:3])
    learned = args.smoke or rows[-1][1].min().item() >= REQUIRED_ACCURACY
    medians = torch.stack(rows)[:, 2].quantile(0.5, dim=0).tolist()
    console.print("median epoch: torch {:.3f} s, minidp {:.3f} s".format(*medians))
    console.print(f"compared: {len(runs[0].state())} tensors x {epochs * steps} steps")
    if not learned:
        console.print(f"held-out accuracy is below {REQUIRED_ACCURACY:.0%}")
    if differences:
        console.print("first at epoch {}, step {}, rank {}: {}".format(*differences[0]))
    console.print("identical: no" if differences else "identical: yes")
    write_page(args.page, runs[1], loader)
    return learned and not differences


def write_page(
    path: str | None, run: Run, loader: DataLoader[tuple[Tensor, ...]]
) -> None:
    """Record 20 more steps, of minidp alone; write a page that shows them to a file."""
    if not path:
        return
    with minidp.record(run.model) as recording:
        for batch in islice(loader, 20):
            run.train(*batch)
    recording.gather()
    if dist.get_rank() == 0:
        recording.save_page(path)


def main() -> int:
    """Run the comparison; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--epochs", type=int, default=8, help="passes over the images (default 8)")
    add("--batch-size", type=int, default=32, help="images per rank (default 32)")
    add("--seed", type=int, default=0, help="for weights and order (default 0)")
    add("--page", metavar="FILE", help="write a page that shows where steps spend time")
    add("--smoke", action="store_true", help="2 epochs of 3 steps, any accuracy")
    is_well = compare(parser.parse_args(), join_group())
    dist.barrier()  # a launcher may end all ranks once one of them ends with status 1
    gc.collect()  # torch's wrapper, in a cycle, holds the group: its threads would
    dist.destroy_process_group()  # live on and could abort the process at its exit
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
