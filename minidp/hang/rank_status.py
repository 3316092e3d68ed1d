"""Describe where a rank is, and exchange that through the process group's store.

    status/{rank}    where the rank is; one beat more each time     every interval
    alarm/{number}   a rank will not come any more, and why         once that is so

A `TCPStore` that cannot send prints many lines. A second, silent connection shows first
whether the host is still there: the system closes it when the host's process ends.
"""

from __future__ import annotations

import gc
import socket
import sys
import sysconfig
import weakref
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from minidp.comm import address_of, is_waiting, post_json, read_json
from minidp.core import Phase, Reducer
from minidp.errors import MAX_NAMES

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

CONNECT_SECONDS = 2.0
ENDED = "its process ended"  # an alarm; an error that ended it follows
_PHRASES = {
    Phase.IDLE: "between two steps",
    Phase.ARMED: "after a forward, before its backward",
    Phase.REDUCING: "in a backward",
    Phase.PAUSED: "after a backward that left gradients missing",
    Phase.FINALIZING: "at the end of a backward",
    Phase.FAILED: "after a failure",
}


def _folder(package: str) -> Path:
    return Path(sys.modules[package].__file__ or "").parent


_LIBRARIES = tuple(f"{_folder(name)}/" for name in ("torch", "minidp"))
_LIBRARIES += ("<", sysconfig.get_path("stdlib"))
# Of the user's own collectives, which cannot say themselves that they wait.
_TORCHS_COLLECTIVES = {
    str(_folder("torch") / "distributed" / file)
    for file in ("distributed_c10d.py", "_functional_collectives.py")
}


class Alarm(NamedTuple):
    """Hold a rank's message to others: it joins no further collective, and why."""

    rank: int
    started: int  # number of collectives that it had started by then
    why: str


@dataclass(frozen=True)
class RankStatus:
    """What a rank publishes per beat: how far it is, where its training thread is."""

    step: int  # synchronised backwards finished, ever
    phase: str  # of the reducer, with missing gradients
    started: int  # collectives, since the last reset
    wait_description: str = ""  # the collective that is awaited; "": none
    where: str = ""  # innermost function of its thread, and the caller in user code
    waits: bool = False  # its thread is in a collective, of this wrapper or another
    is_reducing: bool = False  # a synchronised backward has begun, and waits for all
    steps: int = 0  # of optimizers, since the last synchronised backward
    beat: int = 0  # counts messages: a rank whose beat stands still is not running
    seconds: float = 0.0  # since anything above changed


def status_of(reducer: Reducer, thread: int) -> RankStatus:
    """Return this rank's status, with beat and seconds still 0; from any thread.

    ``thread``: identifier of the thread whose place it tells.
    """
    step, steps = reducer.ledger.finalized, reducer.ledger.steps  # before the phase
    phase, queue, communicator = reducer.phase.now, reducer.queue, reducer.communicator
    text = "before finalize_backward()" if reducer.awaits_user else _PHRASES[phase]
    if phase in (Phase.REDUCING, Phase.PAUSED):
        text += f", bucket {queue.next} of {len(queue.buckets)} next"
        text += _text_of_missing([reducer.names[i] for i in reducer.pending.missing()])
    return RankStatus(
        step,
        text,
        communicator.started,
        communicator.place,
        *place_of(thread),
        is_reducing=phase in (Phase.REDUCING, Phase.FINALIZING),
        steps=steps,
    )


def _text_of_missing(names: list[str]) -> str:
    listed, rest = ", ".join(names[:MAX_NAMES]), len(names[MAX_NAMES:])
    more = f" and {rest} more" if rest else ""
    return f", without gradients of {listed}{more}" if names else ""


def place_of(thread: int) -> tuple[str, bool]:
    """Return where a thread is, as text, and whether inside a wait for other ranks.

    Text: its innermost function, and the caller in user code; "" if the thread ended.
    """
    frame = _frame_of(thread)
    inside: list[FrameType] = []  # of libraries that the user's code called
    while frame is not None and _is_library(frame):
        inside.append(frame)
        frame = frame.f_back
    waits = is_waiting(thread) or any(
        each.f_code.co_filename in _TORCHS_COLLECTIVES for each in inside
    )
    # The import machinery tells nothing.
    inside = [each for each in inside if not each.f_code.co_filename.startswith("<")]
    if frame is None or not inside:
        innermost = [*inside, frame][0]
        return "" if innermost is None else _name(innermost), waits
    return f"{_name(inside[0])}, called from {_name(frame)}", waits


def _frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread; None if it ended.

    Garbage collection is off meanwhile: up to CPython 3.11.8 it deadlocks in there
    (CPython issue 106883), as a destructor waits for a lock that the call holds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if was_enabled:
            gc.enable()


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_LIBRARIES) or "site-packages" in file


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"


# ----------------------------------------------------------------------- the store


class Channel:
    """Publish and read ranks' statuses and alarms in the process group's store.

    The constructor connects to a TCPStore's host (up to 2 s), only to notice its end.
    ``has_met``: all ranks are known to have wrapped the module, because they have
    compared their replicas, or have called ``reset()`` together.
    """

    def __init__(self, store: Store, rank: int, size: int, *, has_met: bool) -> None:
        self.rank, self.size, self.has_met = rank, size, has_met
        self._store, self._connection = store, connect(store)
        if self._connection is not None:
            self._connection.settimeout(0)
            weakref.finalize(self, self._connection.close)
        self.problem = ""  # why the store cannot be used any more
        self.statuses: dict[int, RankStatus] = {}  # of others, by rank: the last ones
        self.alarms: dict[int, Alarm] = {}  # of others, by rank: the first of each
        self.outgoing: list[Alarm] = []

    def send(self, status: RankStatus | None) -> None:
        """Publish ``status`` (None: only alarms) and alarms in `outgoing`; empty that.

        RuntimeError if the store's host is gone, or the store fails.
        """
        if is_closed(self._connection):
            raise RuntimeError("the connection was closed")
        if status is not None:
            post_json(self._store, "status", self.rank, asdict(status))
        while self.outgoing:
            number = self._store.add("alarms", 1)
            post_json(self._store, "alarm", number, self.outgoing[0])
            del self.outgoing[0]  # not earlier: what failed is still to be sent

    def lose(self, error: RuntimeError) -> None:
        """Set `problem`, a text for reports, because the store failed with ``error``.

        Sends nothing; a `Heartbeat` does not use a channel with a problem any more.
        """
        first_line = str(error).partition("\n")[0]
        self.problem = (
            "Nothing is known about the other ranks: the process group's store is "
            "gone, and with it the process that hosted it (rank 0, or torchrun's "
            f"agent): {first_line}."
        )

    def read_alarms(self) -> None:
        """Read other ranks' alarms; set `alarms` to the first valid one of each.

        Not valid once the rank's status shows a later collective: also reads statuses
        of the ranks that sent alarms. RuntimeError if the store fails.
        """
        # A rank that took a number and then failed, or was killed, leaves a gap.
        numbers = range(1, self._store.add("alarms", 0) + 1)
        rows = read_json(self._store, "alarm", numbers).values()
        alarms = [Alarm(*row) for row in reversed([*rows]) if row[0] != self.rank]
        self.read_statuses({alarm.rank for alarm in alarms})
        started = {rank: status.started for rank, status in self.statuses.items()}
        self.alarms = {a.rank: a for a in alarms if started.get(a.rank, 0) <= a.started}

    def read(self, topic: str) -> dict[int, Any]:
        """Return on rank 0 what each rank last posted under ``topic``; {} on others.

        Does not wait for any rank. RuntimeError if the store fails.
        """
        return read_json(self._store, topic, range(self.size)) if self.rank == 0 else {}

    def post(self, topic: str, value: Any) -> None:
        """Post this rank's ``value``, which JSON can hold, under ``topic``."""
        post_json(self._store, topic, self.rank, value)

    def read_statuses(self, ranks: Iterable[int]) -> None:
        """Update `statuses` by what each of ``ranks`` posted last, if anything.

        Does not wait for any rank. RuntimeError if the store fails.
        """
        for rank, fields in read_json(self._store, "status", ranks).items():
            self.statuses[rank] = RankStatus(**fields)


def connect(store: object) -> socket.socket | None:
    """Connect to the host of a TCPStore, only to notice when that process ends.

    None for other stores, or if it refuses or does not accept within two seconds.
    """
    address = address_of(store)
    try:
        return address and socket.create_connection(address, CONNECT_SECONDS)
    except OSError:
        return None


def is_closed(connection: socket.socket | None) -> bool:
    """Return whether the host has closed the connection; False if it is None."""
    try:
        return connection is not None and not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
