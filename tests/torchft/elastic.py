"""Replicas with logical ranks that die where they are told to, against one process.

A job trains a small net on replicas that are processes. Each writes the digest of
parameters, buffers and optimizer after each step that it has committed. One process
trains the same alone, by `alone`, and all digests must be equal.

    python -m tests.torchft.elastic --runs 50    # random deaths, 7 s each
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import minidp

os.environ.setdefault("RUST_LOG", "error")  # else torchft tells all it does
REPLICAS = 3
# Where a replica dies: before its first turn, in the forward or the backward of a turn,
# after the loop, or when half of the optimizer has stepped.
PLACES = ("quorum", "forward", "backward", "loop", "optimizer")


@dataclass(frozen=True)
class Death:
    """Where a replica kills itself, the first time that it comes there."""

    replica: int
    step: int
    place: str = "backward"
    turn: int = 0  # counted in the step, also over rounds


@dataclass(frozen=True)
class Training:
    """What all replicas train.

    Attributes:
        leaves: How many logical ranks there are.
        steps: How many steps are committed at the end.
        deaths: Who dies where. It is started again at once.
        late: Replicas that are started when the others have made some steps.
        options: Of the wrapper.
        sometimes: Whether some logical ranks leave a layer out.
        micro_batches: How many backwards there are in each turn.
        pause: Seconds between steps, so that who comes back takes part.
        heartbeat, join: For how many seconds the lighthouse believes that a replica
            lives, of which it hears nothing, and waits for one that lives.
    """

    leaves: int = 6
    steps: int = 20
    deaths: tuple[Death, ...] = ()
    late: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    sometimes: bool = False
    micro_batches: int = 1
    pause: float = 0.1
    heartbeat: float = 0.6
    join: float = 2.0


class Net(nn.Module):
    """Layers with buffers and dropout, one of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 20), nn.BatchNorm1d(20)
        self.spare, self.drop = nn.Linear(20, 20), nn.Dropout(0.3)
        self.last = nn.Linear(20, 1)

    def forward(self, x: Tensor, *, uses_spare: bool) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        if uses_spare:
            x = x + self.spare(x)
        return self.last(self.drop(x))


def make() -> tuple[Net, torch.optim.Optimizer]:
    """Return the net, and its optimizer."""
    torch.manual_seed(5)
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=0.05)


def batch_of(step: int, leaf: int) -> Tensor:
    """Return the samples of a logical rank in a step."""
    drawn = torch.Generator().manual_seed(1000 * step + leaf)
    return torch.randn(4, 6, generator=drawn)


def take_turn(model: Any, training: Training, step: int, leaf: int) -> None:
    """Do the forwards and backwards of a turn."""
    is_used = not training.sometimes or (step + leaf) % 3 == 0
    for number in range(training.micro_batches):
        x = batch_of(step, leaf) + number
        if number < training.micro_batches - 1:
            with model.no_sync():
                model(x, uses_spare=is_used).square().mean().backward()
        else:
            model(x, uses_spare=is_used).square().mean().backward()


def digest_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of all state."""
    state = [value for each in optimizer.state.values() for value in each.values()]
    tensors = [*net.state_dict().values(), *state]
    everything = b"".join(each.numpy().tobytes() for each in tensors)
    return hashlib.sha256(everything).hexdigest()[:12]


def alone(ctx: Any, training: Training) -> list[str]:
    """Train on the one rank of a job of the pool; return the digest after each step."""
    net, optimizer = make()
    model = minidp.DataParallel(
        net,
        process_group=ctx.group,
        logical_ranks=training.leaves,
        **training.options,
    )
    digests = []
    for step in range(training.steps):
        for leaf in model.each_logical_rank():
            take_turn(model, training, step, leaf)
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest_of(net, optimizer))
    return digests


class Mortal:
    """Kills this process at the places where it is told to."""

    def __init__(self, replica: int, deaths: list[Death], folder: Path) -> None:
        self._mine = [each for each in deaths if each.replica == replica]
        self._folder = folder
        self.step = self.turn = 0

    def at(self, place: str) -> None:
        """Die here, if that is due and has not happened yet."""
        for death in self._mine:
            due = death.step, death.place, death.turn
            mark = self._folder / f"died.{death.replica}.{death.step}.{place}"
            if (self.step, place, self.turn) == due and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)


class Stepper(torch.optim.AdamW):
    """AdamW that may die when half of the parameters have stepped."""

    mortal: Mortal

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        everything = group["params"]
        for half in (everything[:3], everything[3:]):
            group["params"] = half
            super().step()
            self.mortal.at("optimizer")
        group["params"] = everything


def train_replica(
    replica: int, lighthouse: str, folder: str, training: Training
) -> None:
    """Train as one replica; write a line for each step that it commits."""
    from torchft import Optimizer

    import minidp.torchft

    from .replica import make_manager

    logging.disable(logging.CRITICAL)
    said = os.open(f"{folder}/out.{replica}.{os.getpid()}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    torch.set_num_threads(1)
    mortal = Mortal(replica, list(training.deaths), Path(folder))
    net, _ = make()
    inner = Stepper(net.parameters(), lr=0.05)
    inner.mortal = mortal

    def save() -> dict[str, Any]:
        return {"net": net.state_dict(), "optimizer": inner.state_dict()}

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["optimizer"])

    net.first.weight.register_post_accumulate_grad_hook(lambda _: mortal.at("backward"))
    net.register_forward_pre_hook(lambda *_: mortal.at("forward"))
    # A replica that comes waits for those that look for the store of a dead one, which
    # takes twice their timeout on a busy machine. This is torchft's default.
    patience = timedelta(seconds=60)
    manager = make_manager(replica, lighthouse, load, save, quorum_timeout=patience)
    model = minidp.torchft.DataParallel(
        manager, net, logical_ranks=training.leaves, **training.options
    )
    optimizer = Optimizer(manager, inner)
    go = Path(folder, "go")
    Path(folder, f"ready.{replica}").touch()
    while not go.exists():
        time.sleep(0.01)
    with open(f"{folder}/log.{replica}.{os.getpid()}", "a", buffering=1) as log:
        while (step := manager.current_step()) < training.steps:
            mortal.step, mortal.turn = step, 0
            turns = []
            optimizer.zero_grad()
            mortal.at("quorum")
            for leaf in model.each_logical_rank():
                take_turn(model, training, manager.current_step(), leaf)
                mortal.turn += 1
                turns.append(leaf)
            mortal.turn = 0
            mortal.at("loop")
            optimizer.step()
            time.sleep(training.pause)
            if manager.current_step() == step + 1 and manager.is_participating():
                note = {
                    "step": step,
                    "replica": replica,
                    "turns": turns,
                    "digest": digest_of(net, inner),
                    "who": model.participants,
                }
                log.write(json.dumps(note) + "\n")
    manager.shutdown(wait=False)
    os._exit(0)


class Job:
    """The replicas of a training, on a lighthouse of their own.

    Args:
        training: What they train.
        folder: Where they write.
    """

    def __init__(self, training: Training, folder: str) -> None:
        from torchft._torchft import LighthouseServer

        self._training, self._folder = training, Path(folder)
        self._lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=1,
            join_timeout_ms=int(1000 * training.join),
            heartbeat_timeout_ms=int(1000 * training.heartbeat),
            quorum_tick_ms=20,
        )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "minidp", "minidp.torchft"])
        self._late = list(training.late)
        self._first = {*range(REPLICAS)} - {*training.late}
        self._running: dict[int, Any] = {}
        for replica in self._first:
            self._start(replica)

    def _start(self, replica: int) -> None:
        words = replica, self._lighthouse.address(), str(self._folder), self._training
        process = self._context.Process(target=train_replica, args=words)
        process.start()
        self._running[replica] = process

    @property
    def said(self) -> str:
        """What all replicas have printed."""
        return "\n".join(path.read_text() for path in self._folder.glob("out.*"))

    def watch(self) -> bool:
        """Start who is missing; return whether a replica has committed all steps."""
        ready = {path.name for path in self._folder.glob("ready.*")}
        if ready >= {f"ready.{replica}" for replica in self._first}:
            Path(self._folder, "go").touch()
        notes = notes_of(str(self._folder))
        if self._late and max((note["step"] for note in notes), default=0) >= 3:
            self._start(self._late.pop())
        for replica, process in list(self._running.items()):
            if process.exitcode == -signal.SIGKILL:
                self._start(replica)
            elif process.exitcode:
                raise RuntimeError(self.said)
        return any(each.exitcode == 0 for each in self._running.values())

    def end(self) -> None:
        """End all processes."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.join()
        self._lighthouse.shutdown()


def run(training: Training, limit: float = 90.0) -> list[dict[str, Any]]:
    """Run a job until some replica has committed all steps; return what they wrote.

    Raises:
        RuntimeError: A replica has raised an error, which is in the text.
        TimeoutError: It takes longer than ``limit`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="minidp-elastic-") as folder:
        job = Job(training, folder)
        deadline = time.monotonic() + limit
        try:
            while not job.watch():
                if time.monotonic() > deadline:
                    raise TimeoutError(job.said)
                time.sleep(0.02)
            time.sleep(0.2)  # the others commit the last step, too
        finally:
            job.end()
        return notes_of(folder)


def notes_of(folder: str) -> list[dict[str, Any]]:
    """Return what all replicas have written so far."""
    lines = [
        line
        for path in Path(folder).glob("log.*")
        for line in path.read_text().split("\n")[:-1]
    ]
    return sorted(map(json.loads, lines), key=lambda note: note["step"])


def wrong_of(notes: list[dict[str, Any]], digests: list[str]) -> list[dict[str, Any]]:
    """Return the notes of steps whose bits are not those of one process."""
    return [note for note in notes if note["digest"] != digests[note["step"]]]


def random_training(seed: int) -> Training:
    """Return a training with random deaths."""
    drawn = random.Random(seed)
    leaves, steps = drawn.randint(1, 12), 25
    deaths = []
    for _ in range(drawn.randint(1, 4)):
        place = drawn.choice(PLACES)
        turn = drawn.randrange(4) if place in ("forward", "backward") else 0
        step = drawn.randint(1, steps - 8)
        deaths.append(Death(drawn.randrange(REPLICAS), step, place, turn))
    options: dict[str, Any] = {"bucket_cap_mb": drawn.choice([25, 0.001])}
    sometimes = drawn.random() < 0.5
    if sometimes:
        options["find_unused_parameters"] = True
    if drawn.random() < 0.3:
        options["gradient_as_bucket_view"] = True
    late = (2,) if drawn.random() < 0.3 else ()
    micro_batches = drawn.choice([1, 1, 2])
    return Training(
        leaves, steps, tuple(deaths), late, options, sometimes, micro_batches
    )


def main() -> None:
    """Run trainings with random deaths."""
    from tests.support.pool import Pool
    from tests.torchft import elastic  # the rank process cannot import __main__

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pool = Pool(1)
    steps = compared = num_wrong = 0
    for seed in range(args.seed, args.seed + args.runs):
        training = elastic.random_training(seed)
        (digests,) = pool.run(elastic.alone, 1, training)
        notes = elastic.run(training)
        wrong = wrong_of(notes, digests)
        steps, compared = steps + training.steps, compared + len(notes)
        num_wrong += len(wrong)
        if wrong:
            print(f"seed {seed}: {asdict(training)}\n  {wrong[0]}", flush=True)
    pool.close()
    print(
        f"{args.runs} trainings, {steps} steps: {compared} digests, {num_wrong} wrong"
    )
    sys.exit(bool(num_wrong))


if __name__ == "__main__":
    main()
