r"""Train so that a crash costs a few steps, and not one bit of the result.

    python -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3 \
        examples/elastic_checkpoint.py --directory /tmp/my_run

Kill a worker, or the whole job, at any moment. The launcher (or you) starts all ranks
again, they load the newest checkpoint that is whole, and go on. The digest of the
weights that is printed at the end is that of a run that nothing happened to:

* A checkpoint is written by rank 0 alone, to a temporary file that takes its final
  name only once it is on the disk. Whoever dies in between leaves the older ones alone.
* It begins with the sha256 of the rest. A file that was cut short, or in which a bit
  flipped, is not loaded; the one before it is.
* All ranks load the same one: the newest that every rank finds whole.
* It holds all that the next step depends on: weights, module buffers, optimizer, random
  numbers of every rank, the place in the data; and minidp's bucket layout, because at
  three and more ranks the last bits of an average depend on it.

Gloo on CPU. The directory must be one that all ranks see.
"""

import argparse
import hashlib
import io
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import minidp

KEPT = 3  # checkpoints; an older one is the way out when the newest is damaged
BATCH = 16  # samples per rank
DIGEST_BYTES = hashlib.sha256().digest_size

# ------------------------------------------------------------------ checkpoints on disk


def write(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that under its name there is all of it, or nothing."""
    packed = io.BytesIO()
    torch.save(state, packed)
    content = packed.getvalue()
    temporary = path.with_suffix(".part")  # beside it: a rename must not move data
    with temporary.open("wb") as file:
        file.write(hashlib.sha256(content).digest())
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # the data is on the disk before the name is
    os.replace(temporary, path)
    sync_directory(path.parent)  # and now the name is, too


def sync_directory(directory: Path) -> None:
    """Make renames in a directory survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def content_of(path: Path) -> bytes | None:
    """What a checkpoint file holds; None if it is not what was written."""
    everything = path.read_bytes()
    digest, content = everything[:DIGEST_BYTES], everything[DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


def path_of(directory: Path, step: int) -> Path:
    """Where the checkpoint taken after ``step`` steps is."""
    return directory / f"step-{step:08}.ckpt"


def whole_ones(directory: Path) -> dict[int, bytes]:
    """Step -> content of each checkpoint that is whole."""
    found = {}
    for path in sorted(directory.glob("step-*.ckpt")):
        content = content_of(path)
        if content is None:
            say(f"{path.name} is damaged and not used")
        else:
            found[int(path.stem.removeprefix("step-"))] = content
    return found


def tidy(directory: Path) -> None:
    """Drop what a killed rank left half written, and all but the newest checkpoints."""
    for path in directory.glob("*.part"):
        path.unlink()
    for path in sorted(directory.glob("step-*.ckpt"))[:-KEPT]:
        path.unlink()


# ------------------------------------------------------------- what all ranks do alike


def meet(patience: timedelta) -> None:
    """Wait for all ranks, and name the one that does not come.

    Before each collective of our own: those of a backward are watched by minidp.
    """
    dist.monitored_barrier(timeout=patience)


def newest_for_all(directory: Path, patience: timedelta) -> dict[str, Any] | None:
    """Collective: the newest checkpoint that is whole, and the same, on every rank."""
    mine = whole_ones(directory)
    digests = {step: hashlib.sha256(data).hexdigest() for step, data in mine.items()}
    theirs: list[dict[int, str]] = [{}] * dist.get_world_size()
    meet(patience)
    dist.all_gather_object(theirs, digests)
    common = [s for s in mine if all(d.get(s) == digests[s] for d in theirs)]
    if not common:
        return None
    content = io.BytesIO(mine[max(common)])
    # weights_only: a checkpoint is data, and must not be able to run code.
    state: dict[str, Any] = torch.load(content, map_location="cpu", weights_only=True)
    return state


class Trainer:
    """A replica, its optimizer, and its place in the data."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.seed, self.directory = args.seed, directory
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.patience = timedelta(seconds=args.hang_timeout)
        torch.manual_seed(self.seed + self.rank)  # each rank drops out other units
        if self.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            tidy(directory)
        meet(self.patience)
        state = newest_for_all(directory, self.patience)
        self.step = 0 if state is None else int(state["step"])
        say(f"starts after step {self.step}")
        self.net = build_net()
        self.model = minidp.DataParallel(
            self.net,
            bucket_cap_mb=0.01,  # so that this small net has several buckets
            hang_timeout=args.hang_timeout,
            bucket_layout=None if state is None else state["bucket_layout"],
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        if state is not None:
            self.net.load_state_dict(state["net"])
            self.optimizer.load_state_dict(state["optimizer"])
            if len(state["random"]) == self.world_size:  # else it is another run anyhow
                torch.set_rng_state(state["random"][self.rank])

    def train_until(self, last: int, every: int) -> None:
        """Take the steps that are left, and a checkpoint every so many."""
        self.model.train()
        while self.step < last:
            points, inside = self.batch()
            self.optimizer.zero_grad()
            cross_entropy(self.model(points), inside).backward()
            self.optimizer.step()
            self.step += 1
            if self.step % every == 0:
                self.save()

    def batch(self) -> tuple[Tensor, Tensor]:
        """Points, and 1.0 for those inside a sphere.

        The place in the data is the number of the step: nothing else is to be saved. A
        loader that shuffles would save its epoch and how many batches it gave.
        """
        number = (self.seed * 1_000_003 + self.step) * self.world_size + self.rank
        generator = torch.Generator().manual_seed(number)
        points = torch.randn(BATCH, 3, generator=generator)
        return points, (points.norm(dim=1, keepdim=True) < 1.5).float()

    def save(self) -> None:
        """Collective: rank 0 writes a checkpoint, while the others go on."""
        mine = torch.get_rng_state()
        everyones = [torch.empty_like(mine) for _ in range(self.world_size)]
        meet(self.patience)
        dist.gather(mine, everyones if self.rank == 0 else None)
        if self.rank == 0:
            state = {
                "step": self.step,
                "net": self.net.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "random": everyones,
                "bucket_layout": self.model.bucket_layout,
            }
            write(path_of(self.directory, self.step), state)
            tidy(self.directory)

    def digest(self) -> str:
        """Collective: sha256 of the net; its weights must be equal on all ranks."""
        weights = hashlib.sha256()
        for param in self.net.parameters():
            weights.update(param.detach().numpy().tobytes())
        digests = [""] * self.world_size
        meet(self.patience)
        dist.all_gather_object(digests, weights.hexdigest())
        if len(set(digests)) > 1:
            raise RuntimeError(f"The replicas differ: {digests}")
        for value in self.net.buffers():  # rank 0's; others take them in a forward
            weights.update(value.numpy().tobytes())
        return weights.hexdigest()


def build_net() -> nn.Module:
    """A net with module buffers, and with random numbers in its forward."""
    return nn.Sequential(
        nn.Linear(3, 64),
        nn.BatchNorm1d(64),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 1),
    )


def join_group(patience: timedelta) -> None:
    """Join the launcher's process group, or one of our own."""
    rank, world_size = int(os.environ.get("RANK", "0")), 1
    address: tuple[str, int] = ("127.0.0.1", 0)
    if "RANK" in os.environ:
        world_size = int(os.environ["WORLD_SIZE"])
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    base = dist.TCPStore(*address, is_master=not hosted and rank == 0)
    # The launcher keeps one store for all attempts (torch 2.13). Without a name for
    # each, ranks find the addresses that ranks of the attempt before left there.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", base)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=2 * patience,  # minidp, which can say who is missing, is the first
    )


def say(what: str) -> None:
    """Print, once for all ranks."""
    if dist.get_rank() == 0:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(f"[attempt {attempt}] {what}", flush=True)


def run(args: argparse.Namespace, directory: Path) -> str:
    """Go on from the newest checkpoint, to the end; return the digest."""
    trainer = Trainer(args, directory)
    trainer.train_until(args.steps, args.every)
    digest = trainer.digest()
    say(f"digest after step {trainer.step}: {digest}")
    return digest


def try_out(args: argparse.Namespace) -> bool:
    """Train, damage the newest checkpoint, go on from the one before; compare."""
    with tempfile.TemporaryDirectory() as name:
        names = [name]
        dist.broadcast_object_list(names)  # rank 0's; the others' stay empty
        directory = Path(names[0])
        undisturbed = run(args, directory)
        if dist.get_rank() == 0:
            newest = max(directory.glob("step-*.ckpt"))
            os.truncate(newest, newest.stat().st_size - 1)
        resumed = run(args, directory)
        dist.barrier()  # rank 0 removes the directory
    return undisturbed == resumed


@record  # so that the launcher's summary shows what a worker raised
def main() -> int:
    """Train; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=200, help="of training in total (default 200)")
    add("--every", type=int, default=20, help="steps per checkpoint (default 20)")
    add(
        "--directory",
        type=Path,
        default=Path("checkpoints"),
        help="for checkpoints; to start over, remove it (default ./checkpoints)",
    )
    add("--seed", type=int, default=0, help="for weights and data (default 0)")
    add(
        "--hang-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="until a rank that does not come is named and the run ends (default 60)",
    )
    add("--smoke", action="store_true", help="a few steps, and a damaged checkpoint")
    args = parser.parse_args()
    join_group(timedelta(seconds=args.hang_timeout))
    if args.smoke:
        args.steps, args.every = 9, 3
        is_well = try_out(args)
    else:
        run(args, args.directory)
        is_well = True
    dist.destroy_process_group()
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
