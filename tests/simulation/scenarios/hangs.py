"""Two wrappers in one script, and a rank that is busy, frozen or dead: who is named?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minidp import MiniDPError, world
from tests.simulation import training
from tests.simulation.checks import (
    check_errors,
    check_gradients,
    check_no_error,
)
from tests.simulation.faults import LASTING, Kind
from tests.simulation.play import Play, Rank
from tests.simulation.scheduler import Finding
from tests.simulation.tape import Tape
from tests.simulation.training import Settings

from .steps import train_step, wrapped

AUTO_SECONDS = 300.0  # what hang_timeout="auto" allows to ranks that wait in vain
# A rank of which nothing was heard yet may be on its way. "auto" lets it take as long
# as the group allows, 1800 s, which is less than this many waits.
WAITS_OF_GROUP = 7
UNHEARD = "nothing was heard of it since"
# Of the limit of a wait: for how long a rank is busy.
SHARES = (0.0, 0.01, 0.5, 3.0)


@dataclass(frozen=True)
class Busy:
    """A training of two wrappers, in which one rank once does something else.

    Attributes:
        training: How each of them is trained.
        limit: Of a wait, in seconds. With ``is_patient`` it is that of "auto", which
            allows more to a rank that is only busy.
        rank, step, place: Who is busy, and before what: a forward of the first wrapper
            (0), its backward (1) or step (3), or between the two wrappers (4).
        seconds: For how long.
    """

    training: Settings
    limit: float = AUTO_SECONDS
    is_patient: bool = True
    rank: int = 0
    step: int = 0
    place: int = 0
    seconds: float = 0.0

    def at(self, ctx: Rank, step: int, place: int) -> None:
        """Be busy if this is the place; once."""
        here = ctx.rank, step, place
        if here == (self.rank, self.step, self.place) and not ctx.board.get("busy"):
            ctx.board["busy"] = True
            load_slowly(self.seconds)


def load_slowly(seconds: float) -> None:
    """Do something else. Reports have the name of this function."""
    world.sleep(seconds)


def draw_busy(tape: Tape) -> Busy:
    """Draw two trainings, limits, and who is busy for how long."""
    settings = replace(training.draw(tape), steps=3)
    limit = (AUTO_SECONDS, training.HANG_SECONDS, 5.0)[tape.choose(3)]
    given = "auto" if limit == AUTO_SECONDS else limit
    settings = replace(settings, options=(*settings.options, ("hang_timeout", given)))
    return Busy(
        settings,
        limit,
        limit == AUTO_SECONDS,
        rank=tape.choose(2),
        step=tape.choose(3),
        place=(0, 1, 3, 4)[tape.choose(4)],
        seconds=limit * SHARES[tape.choose(len(SHARES))],
    )


def train_two(ctx: Rank) -> None:
    """Train two wrappers by turns."""
    busy: Busy = ctx.settings
    settings = busy.training
    with ctx.step(-1) as outcome:
        outcome.num_waits = WAITS_OF_GROUP if busy.is_patient else 2
        models = [wrapped(ctx, settings) for _ in range(2)]
    for step in range(settings.steps):
        for number, (model, optimizer) in enumerate(models):
            train_step(ctx, model, optimizer, settings, step)
            if number == 0:
                busy.at(ctx, step, 4)


def check_reports(play: Play) -> None:
    """Let each wait end by its limit, and each report name who is missing."""
    check_gradients(play)
    busy, fault = play.settings, play.fault
    # Whoever is only busy may take as long as the group allows. Whoever is slow may do
    # so, too, unless it is slow where it starts a collective, and seems to wait.
    is_slow = fault.kind is Kind.IS_SLOW and busy.is_patient
    is_slow &= all(each.error is None for each in play.outcomes)
    is_short = fault.kind in LASTING and fault.seconds + busy.seconds < busy.limit
    is_quiet = not fault.has_struck or is_short or is_slow
    is_late = busy.seconds > busy.limit and "busy" in play.board
    if is_quiet and (busy.is_patient or not is_late):
        check_no_error(play)
        if is_late and fault.kind is Kind.NOTHING:
            _check_told(play)
        return
    culprits = {fault.rank} if fault.has_struck else set()
    # It has not come, which a report says even if it might still come in time.
    culprits |= {busy.rank} if is_late or busy.seconds else set()
    for outcome in play.outcomes:
        if busy.is_patient and UNHEARD in str(outcome.error):
            outcome.num_waits = WAITS_OF_GROUP
    check_errors(
        play,
        culprits,
        must_name=fault.kind is not Kind.HEARS_LATE,
        limit=busy.limit,
        busy=busy.seconds if busy.is_patient or not is_late else 0.0,
        has_two_wrappers=True,
    )
    if not is_late or fault.has_struck:
        return
    for outcome in play.outcomes:
        text = str(outcome.error)
        is_told = "load_slowly (hangs.py" in text or "gave up" in text
        is_report = isinstance(outcome.error, MiniDPError)
        if is_report and outcome.rank != busy.rank and not is_told:
            raise Finding(f"the report does not say where it is busy: {text}")


def _check_told(play: Play) -> None:
    """Let a warning say who is only busy, and where."""
    told = [text for rank, text in play.warned if rank != play.settings.rank]
    wanted = f"Missing: rank {play.settings.rank}."
    if not any(wanted in text and "load_slowly (hangs.py" in text for text in told):
        raise Finding(f"nobody was told that rank {play.settings.rank} is busy")
