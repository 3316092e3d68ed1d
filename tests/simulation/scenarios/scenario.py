"""What a scenario is: what the ranks do, what may go wrong, and what must hold then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation import training
from tests.simulation.checks import check_all
from tests.simulation.faults import Kind
from tests.simulation.play import Play, Rank
from tests.simulation.scheduler import Finding
from tests.simulation.tape import Tape


@dataclass(frozen=True)
class Scenario:
    """What the ranks do, what may go wrong, and what must hold then.

    Attributes:
        script: What each rank does.
        draw: Draws the settings.
        check: Gets a run that is over, and raises a `Finding`.
        kinds: What may go wrong, the mildest first.
        ranks: Numbers of ranks to choose from.
        has_numbers: Whether the ranks draw random numbers.
        seams, points: Up to which seam of a rank, and which point of its script,
            something may go wrong.
    """

    script: Callable[[Rank], None]
    draw: Callable[[Tape], Any] = training.draw
    check: Callable[[Play], None] = check_all
    kinds: tuple[Kind, ...] = (Kind.NOTHING,)
    ranks: tuple[int, ...] = (2, 3)
    has_numbers: bool = False
    seams: int = 160
    points: int = 10

    def prepare(self, tape: Tape) -> Play:
        """Draw settings and faults, and return the run."""
        ranks = self.ranks[tape.choose(len(self.ranks))]
        settings = self.draw(tape)
        return Play(
            self.script,
            tape,
            ranks,
            settings,
            self.kinds,
            seams=self.seams,
            points=self.points,
            more_faults=getattr(settings, "more_faults", ()),
            has_numbers=self.has_numbers,
        )

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
