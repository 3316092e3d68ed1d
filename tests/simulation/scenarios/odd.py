"""Something unusual in one step: right if all ranks do it, or a mistake."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from minidp import MiniDPError
from tests.simulation import training
from tests.simulation.checks import (
    check_errors,
    check_gradients,
    check_no_error,
    is_harmless,
)
from tests.simulation.faults import Kind
from tests.simulation.play import Play, Rank
from tests.simulation.scheduler import Finding
from tests.simulation.tape import Tape
from tests.simulation.training import Settings, batch, heads_of

from .steps import wrapped


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
