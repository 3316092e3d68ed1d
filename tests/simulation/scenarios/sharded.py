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
    check_results,
    check_story,
    is_harmless,
)
from tests.simulation.faults import UsersError
from tests.simulation.play import Outcome, Play, Rank
from tests.simulation.scheduler import Finding
from tests.simulation.tape import Tape
from tests.simulation.training import Net, Settings, batch, differ, heads_of

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
class Sharded:
    """A training whose steps are divided.

    Attributes:
        training: The training.
        optimizer: "sgd", with momentum, or "adamw".
        overlaps: Whether new values come while the next forward runs.
        reads: Whether the script reads all parameters after each step.
        clips: Whether gradients are clipped.
        rank, step, place: Where a rank raises once, before all call `reset`, or leaves
            out a step; if anywhere.
    """

    training: Settings
    optimizer: str
    overlaps: bool
    reads: bool
    clips: bool
    rank: int = 0
    step: int = -1
    place: str = ""


def draw_sharded(tape: Tape) -> Sharded:
    """Draw a training, and how its steps are divided."""
    settings = replace(training.draw(tape), hook=None, items=False)
    optimizer = ("sgd", "adamw")[tape.choose(2)]
    overlaps, reads, clips = (tape.choose(2) == 1 for _ in range(3))
    return Sharded(settings, optimizer, overlaps, reads, clips)


def draw_raising_sharded(tape: Tape) -> Sharded:
    """Draw a training, and where a rank raises in it."""
    drawn = draw_sharded(tape)
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
    net = Net(ctx.rank)
    with ctx.step(-1) as outcome:
        outcome.num_waits = 2
        model = DataParallel(net, **settings.training.constructor)
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
    common = settings.training
    with ctx.step(step) as outcome:
        outcome.num_waits = 3  # a reduction, an agreement, the values
        optimizer.zero_grad()
        for part in range(common.local + 1):
            is_local = part < common.local
            with model.no_sync() if is_local else nullcontext():
                _point(ctx, step, "before a forward")
                heads = heads_of(common, ctx.rank, step)
                loss = model(batch(ctx.rank, step, part), heads)
                _point(ctx, step, "before a backward")
                loss.backward()
        if last is not None and common.mode != "unused":
            last.grads = _values(model)
        _point(ctx, step, "after a backward")
        if settings.clips:
            model.clip_grad_norm_(0.5)
        ctx.point("before a step")
        if _is_raising(ctx, step, SKIPS):
            return outcome
        optimizer.raises = _is_raising(ctx, step, "in a step")
        optimizer.step()
        _point(ctx, step, "after a step")
        if settings.reads:
            outcome.grads = _values(model)
    return outcome


def _is_raising(ctx: Rank, step: int, place: str) -> bool:
    settings: Sharded = ctx.settings
    wanted = settings.rank, settings.step, settings.place
    if wanted != (ctx.rank, step, place) or ctx.board.get("raised"):
        return False
    ctx.board["raised"] = True
    return True


def _point(ctx: Rank, step: int, place: str) -> None:
    ctx.point(place)
    if _is_raising(ctx, step, place):
        raise UsersError("the user's own")


def _values(model: DataParallel) -> Values:
    named = model.module.named_parameters()
    return {name: param.detach().clone() for name, param in named}


@functools.cache
def expected(settings: Sharded, ranks: int) -> list[Values]:
    """Return the parameters after each step, computed without minidp."""
    net, common = Net(0), settings.training
    optimizer = _optimizer(settings, net)
    steps = []
    for step in range(common.steps):
        sums: Values = {}
        for rank in range(ranks):
            net.zero_grad()
            for part in range(common.local + 1):
                net(batch(rank, step, part), heads_of(common, rank, step)).backward()
            for name, param in net.named_parameters():
                if param.grad is not None:
                    mine = param.grad * (1 / ranks)
                    sums[name] = sums[name] + mine if name in sums else mine
        for name, param in net.named_parameters():
            param.grad = sums.get(name)
        if settings.clips:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        named = net.named_parameters()
        steps.append({name: param.detach().clone() for name, param in named})
    return steps


def check_sharded(play: Play) -> None:
    """Let parameters be those of a plain loop, bit for bit."""
    ranks = len(play.scheduler.processes)
    check_results(play, expected(play.settings, ranks), is_exact=_is_exact(ranks))
    check_story(play)


def _is_exact(ranks: int) -> bool:
    """Return whether each way to divide by so many has the same bits."""
    return ranks == 2


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
    check_results(play, right, is_exact=_is_exact(ranks))
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
        for rank, error in play.ends.items():
            if error is not None:
                raise Finding(f"rank {rank} raised {type(error).__name__}: {error}")
        return
    check_errors(play, {play.fault.rank}, must_name=False)
