"""What may go wrong with ranks and messages, drawn from the tape.

Most faults strike a rank at one of its seams, whatever it does there; an error strikes
in a line of the user's script.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .network import Network
from .scheduler import Life, Process, Scheduler, Thread
from .store import Server
from .tape import Tape

SECONDS = (0.3, 2.0, 8.0, 25.0, 120.0, 700.0)  # how long something is frozen or slow


class Kind(Enum):
    """What can go wrong."""

    NOTHING = "nothing"
    DIES = "dies"  # at any seam, of any of its threads
    DIES_SILENTLY = "dies silently"  # its host is cut off: no connection is closed
    RAISES = "raises"  # in the user's script
    INTERRUPTED = "is interrupted"  # a KeyboardInterrupt at any seam
    FREEZES = "freezes"  # the whole process
    IS_SLOW = "is slow"  # the training thread only
    HEARS_LATE = "hears late"  # the next message to it


@dataclass
class Fault:
    """One fault, and whether it has struck."""

    kind: Kind
    rank: int
    at: int  # at which of the rank's seams (or points of its script)
    seconds: float = 0.0
    has_struck: bool = False

    def __str__(self) -> str:
        text = f"rank {self.rank} {self.kind.value} at {self.at}"
        return f"{text} for {self.seconds:g} s" if self.seconds else text


class InjectedError(RuntimeError):
    """The error of a user's script."""


class UsersError(ValueError):
    """What a line of the script raises, and the script catches."""


LASTING = {Kind.FREEZES, Kind.IS_SLOW, Kind.HEARS_LATE}
FATAL = {Kind.DIES, Kind.DIES_SILENTLY, Kind.RAISES, Kind.INTERRUPTED}


def draw(tape: Tape, ranks: int, seams: int, points: int, kinds: list[Kind]) -> Fault:
    """Draw one fault, of kinds of which the first is the mildest."""
    kind = kinds[tape.choose(len(kinds))]
    rank = tape.choose(ranks)
    at = tape.choose(points if kind is Kind.RAISES else seams)
    seconds = SECONDS[tape.choose(len(SECONDS))] if kind in LASTING else 0.0
    return Fault(kind, rank, at, seconds)


class Striker:
    """Lets a fault strike when its rank comes to its seam."""

    def __init__(
        self,
        fault: Fault,
        scheduler: Scheduler,
        network: Network,
        server: Server,
        *,
        hosts_store: bool,
    ) -> None:
        self.fault, self._scheduler = fault, scheduler
        self._network, self._server = network, server
        self._hosts_store = hosts_store  # whether rank 0's process holds the store

    def on_seam(self, thread: Thread, _what: str) -> None:
        """Strike if this is the seam."""
        fault, process = self.fault, thread.process
        if fault.has_struck or fault.kind in (Kind.NOTHING, Kind.RAISES):
            return
        if process.num_seams < fault.at:
            return
        is_main = thread is process.threads[0]
        if fault.kind in (Kind.INTERRUPTED, Kind.IS_SLOW) and not is_main:
            return
        fault.has_struck = True
        self._scheduler.note(f"--- {fault} ---")
        if fault.kind in (Kind.DIES, Kind.DIES_SILENTLY):
            self._network.is_silent = fault.kind is Kind.DIES_SILENTLY
            self.end(process, Life.KILLED)
        elif fault.kind is Kind.INTERRUPTED:
            raise KeyboardInterrupt
        elif fault.kind is Kind.FREEZES:
            process.silent_since = self._scheduler.time
            process.frozen_until = self._scheduler.time + fault.seconds
        elif fault.kind is Kind.IS_SLOW:
            thread.slow_until = self._scheduler.time + fault.seconds
        elif fault.kind is Kind.HEARS_LATE:
            self._network.delays[process.rank] = fault.seconds

    def at_point(self, process: Process, number: int) -> None:
        """Raise an error in the user's script if this is the point."""
        fault = self.fault
        is_it = fault.kind is Kind.RAISES and not fault.has_struck
        if is_it and process.rank == fault.rank and number >= fault.at:
            fault.has_struck = True
            self._scheduler.note(f"--- {fault} ---")
            raise InjectedError("injected")

    def end(self, process: Process, life: Life) -> None:
        """End a process, and its connections, and the store if it holds that."""
        self._scheduler.end(process, life)
        self._network.note_end(process)
        if process.rank == 0 and self._hosts_store:
            self._server.is_gone = True
