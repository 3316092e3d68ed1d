"""The lifecycle of a reducer: one enum, its transition table, one setter.

::

    IDLE <--> ARMED ---> REDUCING ---> FINALIZING ---> IDLE
                            ^  |
                            |  v
                          PENDING          anything ---> FAILED ---> IDLE (reset only)

A *local* backward (under ``no_sync``, or with nothing armed) leaves the phase alone.
"""

from __future__ import annotations

from enum import Enum

from .errors import InternalError


class Phase(Enum):
    """Where a reducer is between two synchronised backwards."""

    IDLE = "idle"  # gradients accumulate locally
    ARMED = "armed"  # a synchronising forward ended: the next backward reduces
    REDUCING = "reducing"  # the first gradient of a synchronised backward is here
    PENDING = "pending"  # a backward ended with slots missing; another may bring them
    FINALIZING = "finalizing"  # waiting for collectives, copying out
    FAILED = "failed"  # something raised; only reset() leads out


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.ARMED, Phase.REDUCING, Phase.FAILED}),
    Phase.ARMED: frozenset({Phase.ARMED, Phase.REDUCING, Phase.FAILED}),
    Phase.REDUCING: frozenset({Phase.PENDING, Phase.FINALIZING, Phase.FAILED}),
    Phase.PENDING: frozenset({Phase.REDUCING, Phase.FAILED}),
    Phase.FINALIZING: frozenset({Phase.IDLE, Phase.ARMED, Phase.FAILED}),
    Phase.FAILED: frozenset({Phase.FAILED, Phase.IDLE}),
}


class PhaseBox:
    """Holds the phase; refuses what the table does not allow."""

    __slots__ = ("_phase",)

    def __init__(self) -> None:
        self._phase = Phase.IDLE

    @property
    def now(self) -> Phase:
        """The current phase."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Go to ``phase``.

        Raises:
            InternalError: the table does not list this transition.
        """
        if phase not in TRANSITIONS[self._phase]:
            raise InternalError(
                f"Phase transition {self._phase.name} -> {phase.name} is not allowed."
            )
        self._phase = phase
