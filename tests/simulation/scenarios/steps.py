"""One training step of a rank, at which scenarios let it raise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from minidp import DataParallel, attach
from minidp.errors import MiniDPError
from tests.simulation import training
from tests.simulation.faults import UsersError
from tests.simulation.play import Rank
from tests.simulation.tape import Tape
from tests.simulation.training import (
    Net,
    Settings,
    batch,
    heads_of,
    num_items,
)


@dataclass(frozen=True, kw_only=True)
class Raises:
    """Where a rank raises once, before all call `reset`; if anywhere.

    Attributes:
        rank, step: Which rank, and in which step.
        place: At which place of the script, by number or name.
    """

    rank: int = 0
    step: int = -1
    place: int | str = ""

    def at(self, ctx: Rank, step: int, place: int | str) -> None:
        """Raise if this is the place; once."""
        if is_raising(ctx, step, place):
            raise UsersError(USERS)


IN_HOOK = 4
USERS = "the user's own"  # the text of errors of the script


@dataclass(frozen=True)
class Raising(Raises):
    """A training in which one rank raises once, and all go on after a `reset`.

    Places are 0 before a forward, 1 before a backward, 2 in a backward, 3 before a
    step, and `IN_HOOK`: the future of the user's comm hook fails.
    """

    training: Settings
    is_runtime_error: bool = False  # in a hook, as that of a collective would be


def draw_raising(tape: Tape) -> Raising:
    """Draw a training, and where a rank raises in it."""
    settings = training.draw(tape)
    step = tape.choose(settings.steps - 1)
    rank, place = tape.choose(2), tape.choose(4)
    return Raising(settings, rank=rank, step=step, place=place)


def draw_failing_hook(tape: Tape) -> Raising:
    """Draw a training in which a user's comm hook fails once."""
    raising = draw_raising(tape)
    training = replace(raising.training, hook="users", items=False)
    is_runtime_error = bool(tape.choose(2))
    return replace(
        raising,
        training=training,
        place=IN_HOOK,
        is_runtime_error=is_runtime_error,
    )


HOOKS = {
    "torchs": default_hooks.allreduce_hook,
    "torchs in 16 bits": default_hooks.fp16_compress_hook,
}


def wrapped(ctx: Rank, settings: Settings) -> tuple[DataParallel, Any]:
    """Return a net that is wrapped or attached, and its optimizer.

    Of a net that is attached it is the hidden wrapper, for what scenarios ask of it.
    """
    net = Net(ctx.rank)
    if settings.is_attached:
        model = attach(net, **settings.constructor).data_parallel
    else:
        model = DataParallel(net, **settings.constructor)
    if settings.hook == "users":
        state = ctx.board["hook", ctx.rank] = HookState()
        model.register_comm_hook(state, users_hook)
    elif settings.hook is not None:
        model.register_comm_hook(None, HOOKS[settings.hook])
    return model, torch.optim.SGD(net.parameters(), settings.learning_rate)


class HookState:
    """The state of a comm hook: what its next callback raises."""

    def __init__(self) -> None:
        self.error: Exception | None = None


def users_hook(state: HookState, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average in a callback of the all-reduce."""
    error, state.error = state.error, None
    buffer = bucket.buffer()
    group = bucket.process_group()
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    size = group.size()

    def average(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        if error is not None:
            raise error
        return done.value()[0].div_(size)

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(average)
    return future


def is_raising(ctx: Rank, step: int, place: int | str) -> bool:
    """Return whether settings that are `Raises` want an error here; once."""
    wanted = ctx.settings
    if not isinstance(wanted, Raises) or ctx.board.get("raised"):
        return False
    if (wanted.rank, wanted.step, wanted.place) != (ctx.rank, step, place):
        return False
    ctx.board["raised"] = True
    return True


def mark(ctx: Rank, step: int, place: str) -> None:
    """Mark a line of the script, and do what the settings want to be done there."""
    ctx.point(place)
    act_at(ctx, step, place)


def act_at(ctx: Rank, step: int, place: int | str) -> None:
    """Do what the settings want to be done at this place of the script."""
    at = getattr(ctx.settings, "at", None)
    if at is not None:
        at(ctx, step, place)


def _raise(_grad: object) -> None:
    raise UsersError(f"{USERS}, in a backward")


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
                act_at(ctx, step, 0)
                called = model.module if settings.is_attached else model
                heads = heads_of(settings, ctx.rank, step)
                loss = called(batch(ctx.rank, step, part), heads)
                if settings.items and not is_local:
                    model.count_items(num_items(ctx.rank, step))
                elif settings.items:
                    model.count_items(0)
                ctx.point("before a backward")
                act_at(ctx, step, 1)
                hook = None
                if is_raising(ctx, step, 2):
                    hook = loss.register_hook(_raise)
                if is_raising(ctx, step, IN_HOOK):
                    kind = (UsersError, RuntimeError)[ctx.settings.is_runtime_error]
                    ctx.board["hook", ctx.rank].error = kind(USERS)
                loss.backward()
                del hook
        outcome.grads = {
            name: param.grad.clone()
            for name, param in model.module.named_parameters()
            if param.grad is not None
        }
        ctx.point("before a step")
        act_at(ctx, step, 3)
        optimizer.step()


def train_with_resets(
    ctx: Rank,
    model: DataParallel,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    train: Callable[[int], None],
    num_waits: int,
) -> None:
    """Train; where a rank raises, all reset, with the state of rank 0, and go on.

    ``train`` makes the step of a number. A reset waits ``num_waits`` times at most.
    """
    step = resets = 0
    while step < num_steps:
        try:
            train(step)
            step += 1
        except (UsersError, MiniDPError):
            if resets == 2:
                raise
            resets += 1
            ctx.board["step", ctx.rank, resets] = step
            with ctx.step(step) as outcome:
                outcome.num_waits = num_waits
                model.reset(copy_from=0)
            step = ctx.board["step", 0, resets]
            optimizer.zero_grad()
