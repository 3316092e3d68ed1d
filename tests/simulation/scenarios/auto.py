"""`bucket_cap_mb="auto"`: all ranks change to the same layout before the same step.

Times are those of the simulated clock. So the tape decides which layout is the fastest,
who is slow, and where a rank dies or raises while layouts are tried. After a `reset`
the trials begin again, unless all ranks had the layout that stays.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace

from minidp.autotune import NUM_TRIALS, STEPS
from tests.simulation import training
from tests.simulation.checks import check_all, is_harmless
from tests.simulation.play import Play, Rank
from tests.simulation.scheduler import Finding
from tests.simulation.tape import Tape
from tests.simulation.training import Settings

from .plain import check_reset
from .steps import Raises, train_step, train_with_resets, wrapped

TRIED = NUM_TRIALS * STEPS  # in so many steps
SAYS = 'bucket_cap_mb="auto"'


@dataclass(frozen=True)
class Auto:
    """A training that tries layouts.

    Attributes:
        training: The training, with steps so small that it is stable.
        is_slow: Whether backwards with one bucket, which is torch's layout, are slow,
            so that another one stays, unless late messages hide it.
    """

    training: Settings
    is_slow: bool


def draw_auto(tape: Tape) -> Auto:
    """Draw a training that tries all layouts."""
    drawn = training.draw(tape)
    options = {**dict(drawn.options), "bucket_cap_mb": "auto"}
    settings = replace(
        drawn, steps=TRIED + 4, options=tuple(options.items()), learning_rate=2**-10
    )
    return Auto(settings, tape.choose(2) == 1)


@dataclass(frozen=True)
class RaisingAuto(Raises):
    """A training that tries layouts, in which one rank raises once.

    Attributes:
        training, is_slow: As in `Auto`.
    """

    training: Settings
    is_slow: bool


def draw_raising_auto(tape: Tape) -> RaisingAuto:
    """Draw a training, and a step about a change of layouts in which a rank raises.

    Enough steps are left to try all layouts again.
    """
    drawn = draw_auto(tape)
    change = first_of(drawn.training) + STEPS * tape.choose(NUM_TRIALS + 1)
    step = max(0, change - 1 + tape.choose(3))
    settings = replace(drawn.training, steps=step + TRIED + 5)
    rank, place = tape.choose(2), tape.choose(4)
    return RaisingAuto(settings, drawn.is_slow, rank=rank, step=step, place=place)


def first_of(settings: Settings) -> int:
    """Return the first step that tries a layout: the order of gradients is known.

    A static graph is known after its second backward.
    """
    return 2 if settings.mode == "static" else 1


def train_by_auto(ctx: Rank) -> None:
    """Construct, and train until the layout stays; keep the layout of each step.

    If a rank raises, all reset and go on; a layout is then kept under its turn, which
    counts the resets before.
    """
    settings: Settings = ctx.settings.training
    with ctx.step(-1):
        model, optimizer = wrapped(ctx, settings)
    queue = weakref.proxy(model._reducer.queue)  # or the hook lives for ever
    watched = weakref.proxy(ctx)

    def take_time(_grad: object) -> None:
        if len(queue.layout.assignment) == 1:
            watched.sleep(0.01)

    if ctx.settings.is_slow and ctx.rank == 0:
        model.module.first.weight.register_hook(take_time)

    def train(step: int) -> None:
        train_step(ctx, model, optimizer, settings, step)
        turn = sum(("step", ctx.rank, number) in ctx.board for number in (1, 2))
        stays = model.bucket_layout["rebuilt"]
        ctx.board["layout", turn, step, ctx.rank] = queue.layout.assignment, stays

    if isinstance(ctx.settings, Raises):
        train_with_resets(ctx, model, optimizer, settings.steps, train, num_waits=4)
        return
    for step in range(settings.steps):
        train(step)


def check_auto(play: Play) -> None:
    """Let gradients be right, and ranks have the same layouts, tried when they may be.

    Rank 0 says what it has chosen.
    """
    said = _who_says(play)
    check_all(play)
    if len(said) > 1:
        raise Finding("rank 0 tells twice of its choice")
    ranks, settings = len(play.scheduler.processes), play.settings.training
    before, first = None, first_of(settings)
    for step in range(settings.steps):
        found = [play.board.get(("layout", 0, step, rank)) for rank in range(ranks)]
        here = [each for each in found if each is not None]
        if any(each != here[0] for each in here):
            raise Finding(f"ranks have other layouts in step {step}: {here}")
        if here and here[0][1] is not (step >= first + TRIED):
            raise Finding(f"the layout of step {step} stays, or does not: {here[0]}")
        may_change = step <= first + TRIED and (step - first) % STEPS == 0
        if here and step and here[0][0] != before and not may_change:
            raise Finding(f"the layout of step {step} is another one: {here[0]}")
        before = here[0][0] if here else before
    if is_harmless(play) and not said:
        raise Finding("nobody tells of the choice")


def check_auto_reset(play: Play) -> None:
    """Let ranks have the same layouts after a reset, too, and try all of them again."""
    said = _who_says(play)
    check_reset(play)
    ranks, settings = len(play.scheduler.processes), play.settings.training
    for turn in range(3):
        layouts = [
            [play.board.get(("layout", turn, step, rank)) for rank in range(ranks)]
            for step in range(settings.steps)
        ]
        here = [[each for each in found if each is not None] for found in layouts]
        for step, found in enumerate(here):
            if any(each != found[0] for each in found):
                raise Finding(f"ranks have other layouts in step {step}: {found}")
        steps = [step for step, found in enumerate(here) if found]
        if turn and steps and not here[steps[0]][0][1]:
            first = steps[0] + first_of(settings)
            for step in steps:
                if here[step][0][1] is not (step >= first + TRIED):
                    raise Finding(f"the layout of step {step} stays, or does not")
    if is_harmless(play) and not said:
        raise Finding("nobody tells of the choice")


def _who_says(play: Play) -> list[int]:
    """Return who tells which layout stays, and take that for no warning."""
    said = [rank for rank, text in play.warned if text.startswith(SAYS)]
    play.warned = [each for each in play.warned if not each[1].startswith(SAYS)]
    if any(said):
        raise Finding(f"ranks {said} tell of the choice")
    return said
