"""What simulated ranks do: one function for each scenario."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from minidp import DataParallel, MiniDPError

from . import training
from .checks import (
    check_all,
    check_errors,
    check_gradients,
    check_no_error,
    is_harmless,
)
from .faults import Kind, UsersError
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
    group = bucket.process_group()
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    size = group.size()
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda done: done.value()[0].div_(size)
    )
    return future


def is_raising(ctx: Rank, step: int, place: int) -> bool:
    """Return whether a `Raising` wants an error here; once."""
    wanted = ctx.settings
    if not isinstance(wanted, Raising) or ctx.board.get("raised"):
        return False
    if (wanted.rank, wanted.step, wanted.place) != (ctx.rank, step, place):
        return False
    ctx.board["raised"] = True
    return True


def maybe_raise(ctx: Rank, step: int, place: int) -> None:
    """Raise the error of a `Raising` here, once."""
    if is_raising(ctx, step, place):
        raise UsersError("the user's own")


def _raise(_grad: object) -> None:
    raise UsersError("the user's own, in a backward")


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
                maybe_raise(ctx, step, 0)
                loss = model(
                    batch(ctx.rank, step, part), heads_of(settings, ctx.rank, step)
                )
                if settings.items and not is_local:
                    model.count_items(num_items(ctx.rank, step))
                elif settings.items:
                    model.count_items(0)
                ctx.point("before a backward")
                maybe_raise(ctx, step, 1)
                hook = None
                if is_raising(ctx, step, 2):
                    hook = loss.register_hook(_raise)
                loss.backward()
                del hook
        outcome.grads = {
            name: param.grad.clone()
            for name, param in model.module.named_parameters()
            if param.grad is not None
        }
        ctx.point("before a step")
        maybe_raise(ctx, step, 3)
        optimizer.step()


def train(ctx: Rank) -> None:
    """Construct, and train some steps."""
    settings: Settings = ctx.settings
    with ctx.step(-1):
        model, optimizer = wrapped(ctx, settings)
    for step in range(settings.steps):
        train_step(ctx, model, optimizer, settings, step)


@dataclass(frozen=True)
class Raising:
    """A training in which one rank raises once, and all go on after a `reset`."""

    training: Settings
    rank: int
    step: int
    place: int  # before a forward, before a backward, in a backward, before a step


def draw_raising(tape: Tape) -> Raising:
    """Draw a training, and where a rank raises in it."""
    settings = training.draw(tape)
    step = tape.choose(settings.steps - 1)
    return Raising(settings, tape.choose(2), step, tape.choose(4))


SOON_SECONDS = 5.0  # until others hear of a rank that calls reset()


def train_and_reset(ctx: Rank) -> None:
    """Train; a rank raises; all reset, with the state of rank 0, and go on."""
    settings: Settings = ctx.settings.training
    with ctx.step(-1):
        model, optimizer = wrapped(ctx, settings)
    step, resets = 0, 0
    while step < settings.steps:
        try:
            train_step(ctx, model, optimizer, settings, step)
            step += 1
        except (UsersError, MiniDPError):
            if resets == 2:
                raise
            resets += 1
            ctx.board["step", ctx.rank, resets] = step
            with ctx.step(step) as outcome:
                outcome.num_waits = 4
                model.reset(copy_from=0)
            step = ctx.board["step", 0, resets]
            optimizer.zero_grad()


def check_reset(play: Play) -> None:
    """Let all ranks finish if no other fault has struck."""
    check_gradients(play)
    if is_harmless(play):
        for rank, error in play.ends.items():
            if error is not None:
                raise Finding(f"rank {rank} raised {type(error).__name__}: {error}")
        for each in play.outcomes:
            took = each.ended - each.began
            if took > SOON_SECONDS + play.fault.seconds:
                raise Finding(
                    f"rank {each.rank} heard of the error only after {took:.1f} s"
                )
        return
    check_errors(play, {play.fault.rank}, must_name=False)


def train_in_join(ctx: Rank) -> None:
    """Train in `join`, with other numbers of inputs on each rank."""
    settings, inputs = ctx.settings.training, ctx.settings.inputs
    with ctx.step(-1):
        model, optimizer = wrapped(ctx, settings)
    with ctx.step(-2) as outcome:
        outcome.num_waits = 2
        with model.join():
            for step in range(inputs[ctx.rank]):
                train_step(ctx, model, optimizer, settings, step)
    ctx.board["end", ctx.rank] = [each.detach().clone() for each in model.parameters()]


@dataclass(frozen=True)
class Uneven:
    """A training in which ranks have unequally many inputs."""

    training: Settings
    inputs: tuple[int, ...]


def draw_uneven(tape: Tape) -> Uneven:
    """Draw a training, and how many inputs each of three ranks has."""
    settings = training.draw(tape)
    settings = replace(settings, local=0, hook=None, items=False)
    return Uneven(settings, tuple(3 - tape.choose(3) for _ in range(3)))


def check_join(play: Play) -> None:
    """Let averages be those over the ranks with inputs, and replicas be equal."""
    ranks = len(play.scheduler.processes)
    check_all(play, play.settings.inputs[:ranks])
    if is_harmless(play):
        ends = [play.board["end", rank] for rank in range(ranks)]
        for each in ends[1:]:
            if not all(map(torch.equal, each, ends[0])):
                raise Finding("replicas differ after join()")


@dataclass(frozen=True)
class Odd:
    """A training in which something unusual is done in one step.

    Attributes:
        training: The training.
        act: "skip": no optimizer steps. "by hand": gradients are averaged by the
            script, after a local backward. "local": they are not averaged at all.
        step: The step in which it is done.
        who: The rank that does it; None: all.
    """

    training: Settings
    act: str
    step: int
    who: int | None = None


def draw_legal(tape: Tape) -> Odd:
    """Draw something unusual that is right, because all ranks do it."""
    settings = replace(training.draw(tape), local=0, items=False, steps=4)
    act = ("skip", "by hand")[tape.choose(2)]
    return Odd(settings, act, tape.choose(3))


def draw_mistake(tape: Tape) -> Odd:
    """Draw a mistake, of one rank or of all."""
    settings = replace(training.draw(tape), local=0, items=False, steps=6)
    if settings.hook == "users":  # which may let replicas differ
        settings = replace(settings, hook=None)
    if tape.choose(2):
        return Odd(settings, "local", tape.choose(3))
    return Odd(settings, "skip", tape.choose(3), tape.choose(2))


def train_oddly(ctx: Rank) -> None:
    """Train, and do in one step what an `Odd` says."""
    odd: Odd = ctx.settings
    with ctx.step(-1):
        model, optimizer = wrapped(ctx, odd.training)
    for step in range(odd.training.steps):
        is_here = step == odd.step and odd.who in (None, ctx.rank)
        act = odd.act if is_here else ""
        with ctx.step(step) as outcome:
            optimizer.zero_grad()
            ctx.point("before a forward")
            with model.no_sync() if act in ("by hand", "local") else nullcontext():
                loss = model(
                    batch(ctx.rank, step, 0), heads_of(odd.training, ctx.rank, step)
                )
                ctx.point("before a backward")
                loss.backward()
            if act == "by hand":
                outcome.is_own = True
                for param in model.module.parameters():
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)
                    dist.all_reduce(param.grad)
                    param.grad /= ctx.size
            elif act != "local":
                outcome.grads = {
                    name: param.grad.clone()
                    for name, param in model.module.named_parameters()
                    if param.grad is not None
                }
            ctx.point("before a step")
            if act != "skip":
                optimizer.step()


# A rank that asks about a suspicion waits so long for one that is slow. Then nothing is
# decided, and it asks again in the next backward, and in the one after that: the slow
# rank cannot be behind by more.
ASKING_SECONDS = 2.0


def check_legal(play: Play) -> None:
    """Let nothing be said of what is right."""
    odd: Odd = play.settings
    skipped = odd.step if odd.act == "skip" else None
    check_gradients(play, skipped=skipped)
    if is_harmless(play):
        check_no_error(play)
    elif play.fault.kind is Kind.HEARS_LATE:
        check_errors(play, {play.fault.rank}, must_name=False)
    else:
        check_errors(play, {play.fault.rank}, must_name=True)


def check_mistake(play: Play) -> None:
    """Let all ranks know of a mistake before another optimizer step.

    If one of them is slow, let them know soon after it has come.
    """
    odd: Odd = play.settings
    if not is_harmless(play):
        return
    allowed = odd.step + (1 if play.fault.seconds <= ASKING_SECONDS else 3)
    for rank, error in play.ends.items():
        last = max(each.step for each in play.outcomes if each.rank == rank)
        if error is None:
            raise Finding(f"rank {rank} did not notice")
        if not isinstance(error, MiniDPError):
            raise Finding(f"rank {rank} raised {type(error).__name__}: {error}")
        if last > allowed:
            raise Finding(f"rank {rank} noticed only in step {last}: {error}")


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


_SLOW = (Kind.NOTHING, Kind.FREEZES, Kind.HEARS_LATE, Kind.IS_SLOW)
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
    "reset": Scenario(train_and_reset, draw_raising, check_reset, kinds=_FAULTS),
    "join": Scenario(train_in_join, draw_uneven, check_join, kinds=_FAULTS),
    "legal": Scenario(train_oddly, draw_legal, check_legal, kinds=_FAULTS),
    "mistake": Scenario(train_oddly, draw_mistake, check_mistake, kinds=_SLOW),
    "leave_out": Scenario(leave_out, lambda _: Settings(), check_left_out),
}


def warm_up() -> None:
    """Import what runs import late, and let `reset` find few objects to look at."""
    torch.set_num_threads(1)
    for scenario in SCENARIOS.values():
        scenario.prepare(Tape(row=())).run()
    gc.collect()
    gc.freeze()
