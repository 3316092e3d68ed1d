"""What simulated ranks do: one function for each scenario."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from minidp import DataParallel

from . import training
from .checks import check_all, check_errors
from .faults import Kind
from .play import Play, Rank
from .scheduler import Finding
from .tape import Tape
from .training import LEARNING_RATE, Net, Settings, batch, heads_of, num_items


@dataclass(frozen=True)
class Scenario:
    """What the ranks do, what may go wrong, and what must hold then.

    Attributes:
        script: What each rank does.
        draw: Draws the settings.
        check: Gets a run that is over, and raises a `Finding`.
        kinds: What may go wrong, the mildest first.
        ranks: Numbers of ranks to choose from.
    """

    script: Callable[[Rank], None]
    draw: Callable[[Tape], Any] = training.draw
    check: Callable[[Play], None] = check_all
    kinds: tuple[Kind, ...] = (Kind.NOTHING,)
    ranks: tuple[int, ...] = (2, 3)

    def prepare(self, tape: Tape) -> Play:
        """Draw settings and faults, and return the run."""
        ranks = self.ranks[tape.choose(len(self.ranks))]
        return Play(self.script, tape, ranks, self.draw(tape), self.kinds)

    def play(self, tape: Tape) -> Play:
        """Run it, check it, and return it.

        Raises:
            Finding: Something happened that must not. Its attribute ``play`` is the
                run.
        """
        play = self.prepare(tape)
        try:
            play.run()
            self.check(play)
        except Finding as finding:
            finding.play = play  # type: ignore[attr-defined]
            raise
        return play


def wrapped(ctx: Rank, settings: Settings) -> tuple[DataParallel, Any]:
    """Return a wrapped net, and its optimizer."""
    net = Net(ctx.rank)
    model = DataParallel(net, **settings.constructor)
    if settings.hook == "torchs":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif settings.hook == "users":
        model.register_comm_hook(None, users_hook)
    return model, torch.optim.SGD(net.parameters(), LEARNING_RATE)


def users_hook(_state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average in a callback of the all-reduce."""
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    size = dist.get_world_size()
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda done: done.value()[0].div_(size)
    )
    return future


def train_step(
    ctx: Rank, model: DataParallel, optimizer: Any, settings: Settings, step: int
) -> None:
    """Make one step, and keep its averages."""
    with ctx.step(step) as outcome:
        optimizer.zero_grad()
        for part in range(settings.local + 1):
            is_local = part < settings.local
            with model.no_sync() if is_local else nullcontext():
                ctx.point("before a forward")
                loss = model(
                    batch(ctx.rank, step, part), heads_of(settings, ctx.rank, step)
                )
                if settings.items and not is_local:
                    model.count_items(num_items(ctx.rank, step))
                elif settings.items:
                    model.count_items(0)
                ctx.point("before a backward")
                loss.backward()
        outcome.grads = {
            name: param.grad.clone()
            for name, param in model.module.named_parameters()
            if param.grad is not None
        }
        ctx.point("before a step")
        optimizer.step()


def train(ctx: Rank) -> None:
    """Construct, and train some steps."""
    settings: Settings = ctx.settings
    with ctx.step(-1):
        model, optimizer = wrapped(ctx, settings)
    for step in range(settings.steps):
        train_step(ctx, model, optimizer, settings, step)


def leave_out(ctx: Rank) -> None:
    """Train, but the last rank leaves out the backward of step 1, and sleeps."""
    settings: Settings = ctx.settings
    model, optimizer = wrapped(ctx, settings)
    train_step(ctx, model, optimizer, settings, 0)
    if ctx.rank == ctx.size - 1:
        model(batch(ctx.rank, 1, 0), heads_of(settings, ctx.rank, 1))
        ctx.sleep(1000.0)
        return
    train_step(ctx, model, optimizer, settings, 1)


def check_left_out(play: Play) -> None:
    """Let all ranks but the last name it, within the limit."""
    last = len(play.scheduler.processes) - 1
    check_errors(play, {last}, must_name=True)
    for outcome in play.outcomes:
        if outcome.rank != last and outcome.step == 1 and outcome.error is None:
            raise Finding(f"rank {outcome.rank} knows of no error")


_FAULTS = (
    Kind.NOTHING,
    Kind.FREEZES,
    Kind.HEARS_LATE,
    Kind.IS_SLOW,
    Kind.RAISES,
    Kind.DIES,
    Kind.DIES_SILENTLY,
    Kind.INTERRUPTED,
)

SCENARIOS: dict[str, Scenario] = {
    "train": Scenario(train),
    "faults": Scenario(train, kinds=_FAULTS),
    "leave_out": Scenario(leave_out, lambda _: Settings(), check_left_out),
}
