"""Divided steps: no parameter is old, or half of a step, without all ranks knowing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from minidp import DataParallel, MiniDPError
from tests.simulation import training
from tests.simulation.checks import (
    check_errors,
    check_recovered,
    check_results,
    check_story,
    is_harmless,
)
from tests.simulation.faults import UsersError
from tests.simulation.play import Outcome, Play, Rank
from tests.simulation.scheduler import Finding
from tests.simulation.tape import Tape
from tests.simulation.training import Net, Settings, batch, differ, heads_of

from . import logical
from .steps import Raises, is_raising, mark

Values = dict[str, torch.Tensor]
PLACES = (
    "before a forward",
    "before a backward",
    "after a backward",
    "in a step",
    "after a step",
    SKIPS := "in the place of a step",  # where it raises nothing, and goes on
)


@dataclass(frozen=True)
class Sharded(Raises):
    """A training whose steps are divided. A rank may also leave out one.

    Attributes:
        training: The training.
        optimizer: "sgd", with momentum, or "adamw".
        overlaps: Whether new values come while the next forward runs.
        reads: Whether the script reads all parameters after each step.
        clips: Whether gradients are clipped.
    """

    training: Settings
    optimizer: str
    overlaps: bool
    reads: bool
    clips: bool

    @property
    def constructor(self) -> dict[str, Any]:
        """The arguments of the wrapper's constructor."""
        return self.training.constructor

    def compute(self, ctx: Rank, model: DataParallel, step: int) -> None:
        """Run the forwards and backwards of a step."""
        settings = self.training
        for part in range(settings.local + 1):
            is_local = part < settings.local
            with model.no_sync() if is_local else nullcontext():
                mark(ctx, step, "before a forward")
                heads = heads_of(settings, ctx.rank, step)
                loss = model(batch(ctx.rank, step, part), heads)
                mark(ctx, step, "before a backward")
                loss.backward()

    def average(self, net: Net, step: int, ranks: int) -> None:
        """Let ``.grad`` be the averages of a step, computed without minidp."""
        sums: Values = {}
        for rank in range(ranks):
            net.zero_grad()
            for part in range(self.training.local + 1):
                heads = heads_of(self.training, rank, step)
                net(batch(rank, step, part), heads).backward()
            for name, param in net.named_parameters():
                if param.grad is not None:
                    mine = param.grad * (1 / ranks)
                    sums[name] = sums[name] + mine if name in sums else mine
        for name, param in net.named_parameters():
            param.grad = sums.get(name)

    def is_exact(self, ranks: int) -> bool:
        """Return whether each way to divide by so many ranks has the same bits."""
        return ranks == 2


@dataclass(frozen=True)
class LogicalSharded(Sharded):
    """A training by logical ranks, whose steps are divided.

    Attributes:
        number: How many logical ranks there are.
    """

    number: int

    @property
    def constructor(self) -> dict[str, Any]:
        return self.training.constructor | {"logical_ranks": self.number}

    def compute(self, ctx: Rank, model: DataParallel, step: int) -> None:
        logical.loop(ctx, model, self.training, step, step)

    def average(self, net: Net, step: int, _ranks: int) -> None:
        logical.average(net, self.training, self.number, step)

    def is_exact(self, _ranks: int) -> bool:
        return True


def draw_sharded(tape: Tape) -> Sharded:
    """Draw a training, and how its steps are divided."""
    settings = replace(training.draw(tape), hook=None, items=False)
    return Sharded(settings, *_draw_how(tape))


def draw_logical_sharded(tape: Tape) -> Sharded:
    """Draw a training by logical ranks, and how its steps are divided."""
    drawn = logical.draw_logical(tape, may_audit=False)
    return LogicalSharded(drawn.training, *_draw_how(tape), drawn.number)


def _draw_how(tape: Tape) -> tuple[str, bool, bool, bool]:
    optimizer = ("sgd", "adamw")[tape.choose(2)]
    overlaps, reads, clips = (tape.choose(2) == 1 for _ in range(3))
    return optimizer, overlaps, reads, clips


def draw_raising_sharded(tape: Tape) -> Sharded:
    """Draw a training, and where a rank raises in it."""
    return _raising(tape, draw_sharded(tape))


def draw_raising_logical_sharded(tape: Tape) -> Sharded:
    """Draw a training by logical ranks, and where a rank raises in it."""
    return _raising(tape, draw_logical_sharded(tape))


def _raising(tape: Tape, drawn: Sharded) -> Sharded:
    step = tape.choose(drawn.training.steps - 1)  # others hear of it in a later one
    place = PLACES[tape.choose(len(PLACES))]
    return replace(drawn, rank=tape.choose(2), step=step, place=place)


class Breaks(torch.optim.SGD):
    """SGD whose step may raise when all ranks have agreed to make it."""

    raises = False

    def step(self, closure: Any = None) -> Any:
        if self.raises:
            raise UsersError("the user's own, in a step")
        return super().step(closure)


class BreaksAdamW(torch.optim.AdamW):
    """The same of AdamW."""

    raises = False

    def step(self, closure: Any = None) -> Any:
        if self.raises:
            raise UsersError("the user's own, in a step")
        return super().step(closure)


def _optimizer(settings: Sharded, net: Net) -> Any:
    if settings.optimizer == "sgd":
        return Breaks(net.parameters(), 0.125, momentum=0.5)
    return BreaksAdamW(net.parameters(), 0.125)


def _wrapped(ctx: Rank) -> tuple[DataParallel, Any]:
    settings: Sharded = ctx.settings
    torch.manual_seed(logical.SEED + ctx.rank)
    net = Net(ctx.rank)
    with ctx.step(-1) as outcome:
        outcome.num_waits = 2
        model = DataParallel(net, **settings.constructor)
        optimizer = _optimizer(settings, net)
        model.sharded_step(
            optimizer, per_parameter=True, overlap_param_gather=settings.overlaps
        )
    return model, optimizer


def train_sharded(ctx: Rank) -> None:
    """Construct, and train some steps."""
    model, optimizer = _wrapped(ctx)
    last: Outcome | None = None
    for step in range(ctx.settings.training.steps):
        last = _step(ctx, model, optimizer, step, last)
    _read_all(ctx, model, last)


def _read_all(ctx: Rank, model: DataParallel, last: Outcome | None) -> None:
    with ctx.step(ctx.settings.training.steps):
        if last is not None:
            last.grads = _values(model)


def _step(
    ctx: Rank,
    model: DataParallel,
    optimizer: Any,
    step: int,
    last: Outcome | None = None,
) -> Outcome:
    """Make one step, and return its outcome.

    The values with which a step ends are kept, as ``grads`` of its outcome, when the
    script or the next forward has read them.
    """
    settings: Sharded = ctx.settings
    with ctx.step(step) as outcome:
        outcome.num_waits = 3  # a reduction, an agreement, the values
        optimizer.zero_grad()
        settings.compute(ctx, model, step)
        if last is not None and settings.training.mode != "unused":
            last.grads = _values(model)
        mark(ctx, step, "after a backward")
        if settings.clips:
            model.clip_grad_norm_(0.5)
        ctx.point("before a step")
        if is_raising(ctx, step, SKIPS):
            return outcome
        optimizer.raises = is_raising(ctx, step, "in a step")
        optimizer.step()
        mark(ctx, step, "after a step")
        if settings.reads:
            outcome.grads = _values(model)
    return outcome


def _values(model: DataParallel) -> Values:
    named = model.module.named_parameters()
    return {name: param.detach().clone() for name, param in named}


@functools.cache
def expected(settings: Sharded, ranks: int) -> list[Values]:
    """Return the parameters after each step, computed without minidp."""
    net = Net(0)
    optimizer = _optimizer(settings, net)
    steps = []
    for step in range(settings.training.steps):
        settings.average(net, step, ranks)
        if settings.clips:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        named = net.named_parameters()
        steps.append({name: param.detach().clone() for name, param in named})
    return steps


def check_sharded(play: Play) -> None:
    """Let parameters be those of a plain loop, bit for bit."""
    ranks = len(play.scheduler.processes)
    is_exact = play.settings.is_exact(ranks)
    check_results(play, expected(play.settings, ranks), is_exact=is_exact)
    check_story(play)


def train_sharded_and_reset(ctx: Rank) -> None:
    """Train; a rank raises; all reset; those whose shares are equally far go on."""
    settings: Sharded = ctx.settings
    model, optimizer = _wrapped(ctx)
    right = expected(settings, ctx.size)
    step = resets = 0
    last: Outcome | None = None
    while step < settings.training.steps:
        try:
            last = _step(ctx, model, optimizer, step, last)
            step += 1
        except (UsersError, MiniDPError):
            if resets == 2:
                raise
            resets += 1
            last, optimizer.raises = None, False
            with ctx.step(step) as outcome:
                outcome.num_waits = 6
                model.reset()
                values = _values(model)
            ctx.board["reset", resets, ctx.rank] = values
            done = _steps_made(right, values)
            if done is None:
                return  # only a checkpoint helps
            step = done
            optimizer.zero_grad()
    _read_all(ctx, model, last)


def _steps_made(right: Sequence[Values], values: Values) -> int | None:
    """Return after how many steps parameters are these, or None if after none."""
    found = [n for n, row in enumerate([_first(), *right]) if not differ(values, row)]
    return found[0] if found else None


def _same(a: Values, b: Values) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@functools.cache
def _first() -> Values:
    return {name: param.detach() for name, param in Net(0).named_parameters()}


def check_sharded_reset(play: Play) -> None:
    """Let all have the same parameters after `reset`: of one step, or warn."""
    ranks = len(play.scheduler.processes)
    right = expected(play.settings, ranks)
    check_results(play, right, is_exact=play.settings.is_exact(ranks))
    for number in (1, 2):
        found = [play.board.get(("reset", number, rank)) for rank in range(ranks)]
        here = [each for each in found if each is not None]
        if here and not all(_same(each, here[0]) for each in here):
            raise Finding("replicas differ after reset()")
        if here and _steps_made(right, here[0]) is None:
            warned = {rank for rank, text in play.warned if "not of the same" in text}
            if len(warned) < len(here):
                raise Finding(f"only ranks {warned} know that shares differ")
    if is_harmless(play):
        # Who leaves a step out tells it in a loop over logical ranks, where it begins.
        is_silent = play.settings.place == SKIPS
        is_silent &= not isinstance(play.settings, LogicalSharded)
        check_recovered(play, is_told=not is_silent)
        return
    check_errors(play, {play.fault.rank}, must_name=False)
