"""`bucket_cap_mb="auto"`: all ranks change to the same layout before the same step.

Times are those of the simulated clock. So the tape decides which layout is the fastest,
who is slow, and where a rank dies while layouts are tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minidp.autotune import NUM_TRIALS, STEPS
from tests.simulation import training
from tests.simulation.checks import check_all, is_harmless
from tests.simulation.play import Play, Rank
from tests.simulation.scheduler import Finding
from tests.simulation.tape import Tape
from tests.simulation.training import Settings

from .steps import train_step, wrapped

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


def first_of(settings: Settings) -> int:
    """Return the first step that tries a layout: the order of gradients is known.

    A static graph is known after its second backward.
    """
    return 2 if settings.mode == "static" else 1


def train_by_auto(ctx: Rank) -> None:
    """Construct, and train until the layout stays; keep the layout of each step."""
    settings: Settings = ctx.settings.training
    with ctx.step(-1):
        model, optimizer = wrapped(ctx, settings)
    queue = model._reducer.queue

    def take_time(_grad: object) -> None:
        if len(queue.layout.assignment) == 1:
            ctx.sleep(0.01)

    if ctx.settings.is_slow and ctx.rank == 0:
        model.module.first.weight.register_hook(take_time)
    for step in range(settings.steps):
        train_step(ctx, model, optimizer, settings, step)
        stays = model.bucket_layout["rebuilt"]
        ctx.board["layout", step, ctx.rank] = queue.layout.assignment, stays


def check_auto(play: Play) -> None:
    """Let gradients be right, and ranks have the same layouts, tried when they may be.

    Rank 0 says what it has chosen.
    """
    said = [rank for rank, text in play.warned if text.startswith(SAYS)]
    play.warned = [each for each in play.warned if not each[1].startswith(SAYS)]
    check_all(play)
    if said not in ([], [0]):
        raise Finding(f"ranks {said} tell of the choice")
    ranks, settings = len(play.scheduler.processes), play.settings.training
    before, first = None, first_of(settings)
    for step in range(settings.steps):
        found = [play.board.get(("layout", step, rank)) for rank in range(ranks)]
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
