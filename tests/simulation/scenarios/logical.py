"""Logical ranks: the bits of one process, whoever is late, and an error if one dies."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

import minidp
from minidp import DataParallel
from tests.simulation import training
from tests.simulation.checks import (
    check_errors,
    check_recovered,
    check_results,
    check_story,
    is_harmless,
)
from tests.simulation.play import Play, Rank
from tests.simulation.tape import Tape
from tests.simulation.training import (
    LEARNING_RATE,
    Net,
    Settings,
    batch,
    heads_of,
    num_items,
)

from .steps import Raises, mark, train_with_resets

SEED = 100  # of rank 0, which is that of all
Grads = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Logical(Raises):
    """A training by logical ranks.

    Attributes:
        training: The training.
        number: How many logical ranks there are.
    """

    training: Settings
    number: int


def draw_logical(tape: Tape, *, may_audit: bool = True) -> Logical:
    """Draw a training, and how many logical ranks it has."""
    settings = training.draw(tape)
    if settings.hook is not None or settings.mode == "static":
        settings = replace(settings, hook=None, mode="all")
    options = [pair for pair in settings.options if pair[0] != "forward_sync_buffers"]
    if may_audit and tape.choose(3) == 2:
        options.append(("audit_every", 1 + tape.choose(2)))
    settings = replace(settings, options=tuple(options))
    return Logical(settings, (4, 3, 5, 7, 8)[tape.choose(5)])


PLACES = ("before a forward", "before a backward", "after a turn", "before a step")


def draw_raising_logical(tape: Tape) -> Logical:
    """Draw a training, and where a rank raises in it."""
    drawn = draw_logical(tape)
    step = tape.choose(drawn.training.steps - 1)  # others hear of it in a later one
    place = PLACES[tape.choose(len(PLACES))]
    # The state of rank 0 is copied. If that has ended the loop, but not stepped, a
    # repetition changes module buffers once more, as with any wrapper.
    rank = 1 if place == "before a step" else tape.choose(2)
    return replace(drawn, rank=rank, step=step, place=place)


def _wrapped(ctx: Rank) -> tuple[DataParallel, torch.optim.Optimizer]:
    settings: Settings = ctx.settings.training
    torch.manual_seed(SEED + ctx.rank)
    with ctx.step(-1):
        net = Net(ctx.rank)
        model = DataParallel(
            net, logical_ranks=ctx.settings.number, **settings.constructor
        )
    return model, torch.optim.SGD(net.parameters(), LEARNING_RATE)


def train_by_logical_ranks(ctx: Rank) -> None:
    """Construct, and train some steps, each of which loops over logical ranks."""
    model, optimizer = _wrapped(ctx)
    for step in range(ctx.settings.training.steps):
        _step(ctx, model, optimizer, step, None)


def train_by_logical_ranks_and_reset(ctx: Rank) -> None:
    """Train; a rank raises; all reset, with the state of rank 0, and go on."""
    model, optimizer = _wrapped(ctx)

    def make(step: int) -> None:
        _step(ctx, model, optimizer, step, step)

    steps = ctx.settings.training.steps
    train_with_resets(ctx, model, optimizer, steps, make, num_waits=6)


def _step(
    ctx: Rank,
    model: DataParallel,
    optimizer: torch.optim.Optimizer,
    step: int,
    told: int | None,
) -> None:
    """Make one step, whose number the wrapper counts itself or is ``told``."""
    settings: Settings = ctx.settings.training
    with ctx.step(step) as outcome:
        optimizer.zero_grad()
        # An audited step waits for the exchange, and for what is computed again.
        outcome.num_waits = 2
        loop(ctx, model, settings, step, told)
        outcome.grads = _result(model.module)
        mark(ctx, step, "before a step")
        optimizer.step()


def loop(
    ctx: Rank, model: DataParallel, settings: Settings, step: int, told: int | None
) -> None:
    """Go through the logical ranks of a step, each with its backwards."""
    for leaf in model.each_logical_rank(told):
        for part in range(settings.local + 1):
            is_local = part < settings.local
            with model.no_sync() if is_local else nullcontext():
                mark(ctx, step, "before a forward")
                if settings.items:
                    model.count_items(0 if is_local else num_items(leaf, step))
                loss = loss_of(model, settings, leaf, step, part)
                mark(ctx, step, "before a backward")
                loss.backward()
        mark(ctx, step, "after a turn")


def loss_of(
    model: torch.nn.Module, settings: Settings, leaf: int, step: int, part: int
) -> torch.Tensor:
    """Return a loss of random inputs, so that each order of sums has other bits."""
    x = batch(leaf, step, part)
    x = x * torch.rand(x.shape)
    loss: torch.Tensor = model(x, heads_of(settings, leaf, step))
    return loss


def _result(net: Any) -> Grads:
    grads = {
        name: param.grad.clone()
        for name, param in net.named_parameters()
        if param.grad is not None
    }
    return grads | {"the buffer": net.seen.clone()}


@functools.cache
def expected(logical: Logical) -> list[Grads]:
    """Return what each step ends with, computed on no ranks at all."""
    net = Net(0)
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    steps = []
    for step in range(logical.training.steps):
        average(net, logical.training, logical.number, step)
        steps.append(_result(net))
        optimizer.step()
    return steps


def average(net: Net, settings: Settings, number: int, step: int) -> None:
    """Let ``.grad`` be the means over so many logical ranks, without minidp."""
    leaves, before = [], net.seen.clone()
    for leaf in range(number):
        net.zero_grad()
        net.seen.copy_(before)
        with minidp.seeded(SEED, step, leaf):
            for part in range(settings.local + 1):
                loss_of(net, settings, leaf, step, part).backward()
        leaves.append(_result(net))
    net.seen.copy_(leaves[0]["the buffer"])
    counts = [num_items(leaf, step) for leaf in range(number)]
    divisor = sum(counts) if settings.items else number
    for name, param in net.named_parameters():
        total = sum_of_tree([leaf.get(name) for leaf in leaves])
        param.grad = None if total is None else total * (1 / divisor)


def sum_of_tree(leaves: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Add up neighbours, then neighbours of these, and so on."""
    while len(leaves) > 1:
        pairs = [leaves[i : i + 2] for i in range(0, len(leaves), 2)]
        leaves = [_plus(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


def _plus(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def check_logical(play: Play) -> None:
    """Let each step that has ended have the bits of one process."""
    check_results(play, _expected(play), is_exact=True)
    check_story(play)


def _expected(play: Play) -> list[Grads]:
    return expected(replace(play.settings, rank=0, step=-1, place=""))


def check_logical_reset(play: Play) -> None:
    """Let all ranks finish, with the same bits, if no other fault has struck."""
    check_results(play, _expected(play), is_exact=True)
    if not is_harmless(play):
        check_errors(play, {play.fault.rank}, must_name=False)
        return
    check_recovered(play)
