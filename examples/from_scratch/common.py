"""What all stages share: digits, net, ranks, and the comparison with torch's DDP.

`run(DDP)` trains two replicas of one net on the same batches, one wrapped in the
stage's `DDP`, one in torch's. After every step, on every rank, all weights and
gradients are compared bit for bit. Then some steps of the stage are recorded.
"""

import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from record import Recorder, show

Batch = tuple[Tensor, Tensor]  # images (N, 64) and labels (N,)
NUM_IMAGES = 1437  # to train on
RECORDED_STEPS = 24


class Net(nn.Module):
    """Map 64 pixels to 10 scores. Each block adds to its input, or is skipped."""

    def __init__(self, num_blocks: int = 8, width: int = 256) -> None:
        super().__init__()
        self.stem = nn.Linear(64, width)
        layers = [nn.Linear(width, width) for _ in range(num_blocks)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, skipped: int | None = None) -> Tensor:
        """Return scores of shape (N, 10); leave out the block of number ``skipped``."""
        x = self.stem(images)
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = x + block(x).relu()
        return self.head(x)


class Replica:
    """One net in its wrapper, with its optimizer."""

    def __init__(self, net: nn.Module, wrap: Callable[..., nn.Module]) -> None:
        self.net = net
        self.model: Any = wrap(net)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def state(self) -> dict[str, Tensor | None]:
        """Return all weights and gradients by name."""
        grads = {f"{name}.grad": p.grad for name, p in self.net.named_parameters()}
        return {**self.net.state_dict(), **grads}


def train_step(replica: Replica, batch: Batch, _number: int) -> None:
    """Take one training step: the loop of every tutorial, and one line more."""
    images, labels = batch
    replica.optimizer.zero_grad()
    cross_entropy(replica.model(images), labels).backward()
    after_backward(replica.model)
    replica.optimizer.step()


def after_backward(model: nn.Module) -> None:
    """Let stages 1 to 3 finish. Later ones, and torch's, finish inside `backward()`."""
    finish = getattr(model, "after_backward", None)
    if finish is not None:
        finish()


@dataclass(frozen=True)
class Task:
    """What is trained, and how."""

    DDP: Callable[..., nn.Module]  # the stage's wrapper
    net: Callable[[], nn.Module] = Net
    step: Callable[[Replica, Batch, int], None] = train_step
    recorder: Any = Recorder
    torch_options: dict[str, Any] = field(default_factory=dict)
    # Options that make torch's DDP sum the same messages as the stage, and whether the
    # bits are then equal with any number of ranks. (With 2 they are, whatever is sent.)
    same_messages: dict[str, Any] = field(default_factory=dict)
    is_exact: bool = True


# ----------------------------------------------------------------------------- start


def run(DDP: Callable[..., nn.Module], **more: Any) -> None:
    """Start the ranks, which train and compare; exit with 1 if bits are wrong.

    ``more``: the other fields of `Task`.
    """
    options = parse()
    # Linux copies this process, which has imported torch; elsewhere ranks start anew.
    how = "fork" if sys.platform == "linux" else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        arguments = (Path(folder), options, Task(DDP, **more))
        mp.start_processes(rank_main, arguments, options.ranks, start_method=how)
        sys.exit(Path(folder, "wrong").exists())


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes (default 2)")
    add("--epochs", type=int, default=10, help="passes over the digits (default 10)")
    add("--batch-size", type=int, default=128, help="images per rank (default 128)")
    add("--save", type=Path, help="where the recording goes (default STAGE.json)")
    text = "let torch's DDP sum the same messages; matters with 3 ranks and more"
    add("--same-messages", action="store_true", help=text)
    options = parser.parse_args()
    if options.ranks * options.batch_size >= NUM_IMAGES:
        parser.error(f"ranks x batch size must be less than {NUM_IMAGES} images")
    options.stage = Path(sys.argv[0]).stem
    options.save = options.save or Path(f"{options.stage}.json")
    return options


def rank_main(rank: int, folder: Path, options: argparse.Namespace, task: Task) -> None:
    """Be one rank: join the group, work; make a file ``wrong`` if bits are wrong."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    torch.set_num_threads(1)  # more would fight for the cores
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=options.ranks)
    if not compare(options, task):
        Path(folder, "wrong").touch()
    dist.barrier()
    dist.destroy_process_group()


# ----------------------------------------------------------------- train and compare


def load() -> tuple[Batch, Batch]:
    """Return four fifths of the digits to train on, and the held-out fifth."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def batches(data: Batch, size: int, epoch: int) -> Iterator[Batch]:
    """Yield this rank's batches of an epoch: each rank takes other images."""
    images, labels = data
    seed = torch.Generator().manual_seed(epoch)  # the same order on all ranks
    order = torch.randperm(len(labels), generator=seed)
    for chunk in order.split(size * dist.get_world_size())[:-1]:  # the rest is dropped
        mine = chunk.split(size)[dist.get_rank()]
        yield images[mine], labels[mine]


def compare(options: argparse.Namespace, task: Task) -> bool:
    """Train on the stage and on torch, print what differs; return whether it may."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    data, (images, labels) = load()
    more = task.same_messages if options.same_messages else {}
    torch.manual_seed(rank)  # unequal: the wrappers must hand out rank 0's weights
    net = task.net()
    stage = Replica(copy.deepcopy(net), task.DDP)
    torchs_ddp = partial(DistributedDataParallel, **task.torch_options, **more)
    torchs = Replica(net, torchs_ddp)
    pair = [(stage, list[float]()), (torchs, list[float]())]  # and seconds of steps
    found: list[str] = []
    say(f"{options.stage}, {num_ranks} ranks")
    for epoch in range(1, options.epochs + 1):
        for batch in batches(data, options.batch_size, epoch):
            number = len(pair[0][1])
            for replica, seconds in reversed(pair) if number % 2 else pair:
                dist.barrier()  # nobody is charged for a rank that comes late
                start = time.perf_counter()
                task.step(replica, batch, number)
                seconds.append(time.perf_counter() - start)
            found += differences(stage, torchs, f"step {number}, rank {rank}")
        with torch.no_grad():
            read = (stage.net(images).argmax(dim=1) == labels).double().mean()
        say(f"epoch {epoch:2}: {read:5.1%} of the held-out digits read")
    mine, theirs = (1e3 * statistics.median(seconds) for _, seconds in pair)
    ratio = f"{mine / theirs:.2f}x"
    say(f"a step takes {mine:.2f} ms, torch's DDP {theirs:.2f} ms: {ratio}")
    say(f"compared: {len(stage.state())} tensors x {number + 1} steps, on every rank")
    is_same = report(found)
    record(stage, options, task)
    may_differ = num_ranks > 2 and not (more and task.is_exact)
    return is_same or may_differ


def differences(left: Replica, right: Replica, where: str) -> list[str]:
    """Return a line for each weight or gradient whose bits differ."""
    lines = []
    for (name, a), b in zip(left.state().items(), right.state().values(), strict=True):
        if a is None or b is None:
            if a is not b:
                lines.append(f"{where}: {name} is None in one replica only")
        elif not bits(a).equal(bits(b)):
            error = float((a - b).abs().max() / b.abs().max())
            unequal = f"{int((bits(a) != bits(b)).sum())} of {a.numel()} elements"
            lines.append(f"{where}: {name}: {unequal}, by {error:.0e} of the largest")
    return lines


def bits(tensor: Tensor) -> Tensor:
    """Return 32-bit floats as integers: as floats, 0.0 and -0.0 would be equal."""
    return tensor.view(torch.int32)


def report(found: list[str]) -> bool:
    """Print the first differences of all ranks; return whether there is none."""
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    lines = list(chain.from_iterable(everyone))
    say("\n".join([*lines[:3], f"identical: {'no' if lines else 'yes'}"]))
    return not lines


def record(stage: Replica, options: argparse.Namespace, task: Task) -> None:
    """Train some more steps, and save when everything in them happened."""
    data, _ = load()
    more = (batches(data, options.batch_size, epoch) for epoch in count())
    with task.recorder(stage.model, stage.optimizer) as recording:
        steps = islice(chain.from_iterable(more), RECORDED_STEPS)
        for number, batch in enumerate(steps):
            task.step(stage, batch, number)
    recording.gather()
    if dist.get_rank() == 0:
        recording.save(options.save)
        show(options.save)


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)
