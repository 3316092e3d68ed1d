"""The phases of a reducer, and which may follow which.

::

    IDLE ---> ARMED ---> REDUCING ---> FINALIZING ---> IDLE
                            ^  |
                            |  v
                          PAUSED           anything ---> FAILED ---> IDLE (reset only)

``sync_gradients()`` and ``join()`` reduce without a forward: IDLE ---> REDUCING. If an
earlier forward still waits for its backward, ``sync_gradients()`` begins in ARMED, and
goes back to it at its end.
"""

from __future__ import annotations

from enum import Enum

from minidp.errors import InternalError


class Phase(Enum):
    """What a reducer does at the moment, or waits for."""

    IDLE = "idle"  # gradients accumulate locally
    ARMED = "armed"  # a synchronising forward ended: the next backward reduces
    REDUCING = "reducing"  # the first gradient of a synchronised backward is here
    PAUSED = "paused"  # a backward ended with gradients missing; another may go on
    FINALIZING = "finalizing"  # waiting for collectives, copying out
    FAILED = "failed"  # something raised; only reset() leads out

    __hash__ = object.__hash__  # Enum's is a Python function: slow


TRANSITIONS = {
    Phase.IDLE: {Phase.ARMED, Phase.REDUCING, Phase.FAILED},
    Phase.ARMED: {Phase.ARMED, Phase.REDUCING, Phase.FAILED},  # a second forward
    Phase.REDUCING: {Phase.PAUSED, Phase.FINALIZING, Phase.FAILED},
    Phase.PAUSED: {Phase.REDUCING, Phase.FAILED},
    Phase.FINALIZING: {Phase.IDLE, Phase.FAILED},
    Phase.FAILED: {Phase.FAILED, Phase.IDLE},  # methods that fail may be nested
}


class PhaseMachine:
    """The present phase of a reducer, `now`, which only `enter` changes."""

    now = Phase.IDLE

    @property
    def is_idle(self) -> bool:
        """Whether the phase is IDLE: gradients accumulate locally."""
        return self.now is Phase.IDLE

    def enter(self, phase: Phase) -> None:
        """Change to another phase.

        Raises:
            InternalError: TRANSITIONS does not allow this change.
        """
        if phase not in TRANSITIONS[self.now]:
            raise InternalError(
                f"Phase transition {self.now.name} -> {phase.name} is not allowed."
            )
        self.now = phase
