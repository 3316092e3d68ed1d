"""Logical ranks: the bits of one process, whoever is late, and an error if one dies."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

import minidp
from minidp import DataParallel
from tests.simulation import training
from tests.simulation.checks import check_results, check_story
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

SEED = 100  # of rank 0, which is that of all
Grads = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Logical:
    """A training by logical ranks.

    Attributes:
        training: The training.
        number: How many logical ranks there are.
    """

    training: Settings
    number: int


def draw_logical(tape: Tape) -> Logical:
    """Draw a training, and how many logical ranks it has."""
    settings = training.draw(tape)
    if settings.hook is not None or settings.mode == "static":
        settings = replace(settings, hook=None, mode="all")
    options = [pair for pair in settings.options if pair[0] != "forward_sync_buffers"]
    if tape.choose(3) == 2:
        options.append(("audit_every", 1 + tape.choose(2)))
    settings = replace(settings, options=tuple(options))
    return Logical(settings, (4, 3, 5, 7, 8)[tape.choose(5)])


def train_by_logical_ranks(ctx: Rank) -> None:
    """Construct, and train some steps, each of which loops over logical ranks."""
    settings: Settings = ctx.settings.training
    torch.manual_seed(SEED + ctx.rank)
    with ctx.step(-1):
        net = Net(ctx.rank)
        model = DataParallel(
            net, logical_ranks=ctx.settings.number, **settings.constructor
        )
        optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    for step in range(settings.steps):
        with ctx.step(step) as outcome:
            optimizer.zero_grad()
            # An audited step waits for the exchange, and for what is computed again.
            outcome.num_waits = 2
            for leaf in model.each_logical_rank():
                _train(ctx, model, settings, leaf, step)
            outcome.grads = _result(net)
            ctx.point("before a step")
            optimizer.step()


def _train(
    ctx: Rank, model: DataParallel, settings: Settings, leaf: int, step: int
) -> None:
    for part in range(settings.local + 1):
        is_local = part < settings.local
        with model.no_sync() if is_local else nullcontext():
            ctx.point("before a forward")
            if settings.items:
                model.count_items(0 if is_local else num_items(leaf, step))
            loss = _loss(model, settings, leaf, step, part)
            ctx.point("before a backward")
            loss.backward()


def _loss(
    model: torch.nn.Module, settings: Settings, leaf: int, step: int, part: int
) -> torch.Tensor:
    """Return a loss of random inputs, so that each order of sums has other bits."""
    x = batch(leaf, step, part)
    x = x * torch.rand(x.shape)
    loss: torch.Tensor = model(x, heads_of(settings, leaf, step))
    return loss


def _result(net: Net) -> Grads:
    grads = {
        name: param.grad.clone()
        for name, param in net.named_parameters()
        if param.grad is not None
    }
    return grads | {"the buffer": net.seen.clone()}


@functools.cache
def expected(logical: Logical) -> list[Grads]:
    """Return what each step ends with, computed on no ranks at all."""
    settings, net = logical.training, Net(0)
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    names = [name for name, _ in net.named_parameters()]
    steps = []
    for step in range(settings.steps):
        leaves, before = [], net.seen.clone()
        for leaf in range(logical.number):
            net.zero_grad()
            net.seen.copy_(before)
            with minidp.seeded(SEED, step, leaf):
                for part in range(settings.local + 1):
                    _loss(net, settings, leaf, step, part).backward()
            leaves.append(_result(net))
        net.seen.copy_(leaves[0]["the buffer"])
        counts = [num_items(leaf, step) for leaf in range(logical.number)]
        divisor = sum(counts) if settings.items else logical.number
        for name in names:
            total = sum_of_tree([leaf.get(name) for leaf in leaves])
            param = net.get_parameter(name)
            param.grad = None if total is None else total * (1 / divisor)
        steps.append(_result(net))
        optimizer.step()
    return steps


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
    check_results(play, expected(play.settings), is_exact=True)
    check_story(play)
