"""Plain training, `reset` after an error, `join`, and a rank that leaves one out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from minidp.errors import CommHookError
from tests.simulation import training
from tests.simulation.checks import (
    check_all,
    check_errors,
    check_gradients,
    check_recovered,
    is_harmless,
)
from tests.simulation.faults import Kind
from tests.simulation.play import Play, Rank
from tests.simulation.scheduler import Finding
from tests.simulation.tape import Tape
from tests.simulation.training import Settings, batch, heads_of

from .steps import USERS, train_step, train_with_resets, wrapped


def train(ctx: Rank) -> None:
    """Construct, and train some steps."""
    settings: Settings = ctx.settings
    with ctx.step(-1):
        model, optimizer = wrapped(ctx, settings)
    for step in range(settings.steps):
        train_step(ctx, model, optimizer, settings, step)


def train_and_reset(ctx: Rank) -> None:
    """Train; a rank raises; all reset, with the state of rank 0, and go on."""
    settings: Settings = ctx.settings.training
    with ctx.step(-1):
        model, optimizer = wrapped(ctx, settings)
    make = partial(train_step, ctx, model, optimizer, settings)
    train_with_resets(ctx, model, optimizer, settings.steps, make, num_waits=4)


def check_reset(play: Play) -> None:
    """Let all ranks finish if no other fault has struck."""
    check_gradients(play)
    if is_harmless(play):
        check_recovered(play)
        return
    check_errors(play, {play.fault.rank}, must_name=False)


def check_failing_hook(play: Play) -> None:
    """Let the mistake in a comm hook come before ranks that are only slower."""
    check_reset(play)
    raising, fault = play.settings, play.fault
    is_only_slow = fault.kind is Kind.IS_SLOW and is_harmless(play)
    if raising.is_runtime_error and fault.has_struck and not is_only_slow:
        return  # it may be a collective's, and others may be gone, or give up
    for outcome in play.outcomes:
        told = str(outcome.error).partition("] ")[2]
        is_hooks = isinstance(outcome.error, CommHookError) and USERS in told
        is_own = is_hooks and outcome.rank == raising.rank
        if is_own and not told.startswith("The comm hook"):
            raise Finding(f"rank {outcome.rank} blames another: {told}")


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
