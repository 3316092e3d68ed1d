"""Describe where a rank is, and exchange that through the process group's store.

Two kinds of messages go through the store::

    status/{rank}    where the rank is; every interval, with one beat more each time,
                     until it moves to another place of the store
    alarm/{number}   a rank will not come any more, and why; once, when that is so

The store lives in one process, and a `TCPStore` prints many lines when it cannot reach
that. So there is a second, silent connection to the same port, which is looked at
first: the system closes it when the process of the store ends.
"""

from __future__ import annotations

import os
import socket
import sys
import sysconfig
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from minidp import world
from minidp.comm import address_of, is_waiting, post_json, read_json
from minidp.core import Phase, Reducer
from minidp.errors import shortened

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

CONNECT_SECONDS = 2.0
ENDED = "its process ended"  # the text of an alarm, before the error that ended it
DELETED = "its DataParallel object is gone"  # the whole text of an alarm
MOVED = "it has moved to another process group"  # the same
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
# Files of torch in which the user's own collectives wait. Ours say themselves that they
# wait (`minidp.comm.waiting`), but torch's cannot.
_TORCHS_COLLECTIVES = {
    str(_folder("torch") / "distributed" / file)
    for file in ("distributed_c10d.py", "_functional_collectives.py")
}


class Alarm(NamedTuple):
    """The message of a rank that it joins no further collective, and why."""

    rank: int
    started: int  # how many collectives it had started by then
    why: str


@dataclass(frozen=True)
class RankStatus:
    """What a rank publishes: how far it is, and where its training thread is."""

    step: int  # how many synchronised backwards have finished, ever
    phase: str  # of the reducer, in words, with the gradients that are missing
    started: int  # how many collectives it has started since the last reset
    wait_description: str = ""  # the collective that it waits for; "" if it does not
    where: str = ""  # the innermost function of its thread, and who called it
    waits: bool = False  # whether its thread is in any collective, also of the user
    is_reducing: bool = False  # whether a synchronised backward has begun
    steps: int = 0  # of optimizers, since the last synchronised backward
    beat: int = 0  # counts messages: a rank whose beat stands still does not run
    seconds: float = 0.0  # since anything but the beat has changed
    has_moved: bool = False  # whether this is its last status at this place


def status_of(reducer: Reducer, thread: int) -> RankStatus:
    """Return this rank's status, whose beat and seconds are still 0.

    It may be called on any thread, and tells the place of the thread with the
    identifier ``thread``.
    """
    # The training thread goes on meanwhile. If these were read after the phase, a step
    # could be published as finished together with the phase before its end, as if the
    # next backward had begun.
    step, steps = reducer.ledger.finalized, reducer.ledger.steps
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
    return f", without gradients of {shortened(names)}" if names else ""


def place_of(thread: int) -> tuple[str, bool]:
    """Describe where a thread is, and tell whether it waits for other ranks.

    The text names the innermost function, and the line of the user's code that called
    it. It is empty if the thread has ended.
    """
    inside, frame = _walk(thread)
    waits = is_waiting(thread) or any(
        each.f_code.co_filename in _TORCHS_COLLECTIVES for each in inside
    )
    # Frames of the import machinery would tell the reader nothing.
    inside = [each for each in inside if not each.f_code.co_filename.startswith("<")]
    if frame is None or not inside:
        innermost = [*inside, frame][0]
        return "" if innermost is None else _name(innermost), waits
    return f"{_name(inside[0])}, called from {_name(frame)}", waits


def _walk(thread: int) -> tuple[list[FrameType], FrameType | None]:
    """Return a thread's frames in libraries, from the innermost, and the user's next.

    The latter is None if there is none, or if the thread has ended.
    """
    with world.frame_of(thread) as frame:
        inside: list[FrameType] = []
        while frame is not None and _is_library(frame):
            inside.append(frame)
            frame = frame.f_back
        return inside, frame


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_LIBRARIES) or "site-packages" in file


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"


# ----------------------------------------------------------------------- the store


class Channel:
    """Publish and read statuses and alarms in the process group's store.

    The constructor takes up to 2 s to open the silent connection to the store's host.

    Args:
        store: The store, with all keys under a prefix of this replica.
        rank: This rank.
        size: How many ranks there are.
        has_met: Whether all ranks are known to have wrapped the module, because they
            have compared their replicas, or have called ``reset()`` together.
    """

    def __init__(self, store: Store, rank: int, size: int, *, has_met: bool) -> None:
        self.rank, self.size, self.has_met = rank, size, has_met
        self._store, self._connection = store, connect(store)
        if self._connection is not None:
            self._connection.settimeout(0)
            weakref.finalize(self, self._connection.close)
        self.problem = ""  # why the store cannot be used any more; "" while it can
        self.statuses: dict[int, RankStatus] = {}  # the last one of each other rank
        self.alarms: dict[int, Alarm] = {}  # the first one of each other rank
        self.outgoing: list[Alarm] = []  # of this rank, still to be sent

    def send(self, status: RankStatus | None) -> None:
        """Publish all alarms in `outgoing`, and a status, if there is one.

        The alarms come first, and others read them last (`read_news`). So nobody sees
        that a rank waits no longer, but not that it has given up.

        Raises:
            RuntimeError: The store fails, or its host is gone.
        """
        if is_closed(self._connection):
            raise RuntimeError("the connection was closed")
        while self.outgoing:
            number = self._store.add("alarms", 1)
            post_json(self._store, "alarm", number, self.outgoing[0])
            del self.outgoing[0]  # only now: an alarm that failed is still to be sent
        if status is not None:
            post_json(self._store, "status", self.rank, vars(status))

    def lose(self, error: RuntimeError) -> None:
        """Keep the reason why the store failed, as a text for reports."""
        first_line = str(error).partition("\n")[0]
        self.problem = (
            "Nothing is known about the other ranks: the process group's store is "
            "gone, and with it the process that hosted it (rank 0, or torchrun's "
            f"agent): {first_line}."
        )

    def read_news(self, *, statuses: bool, alarms: bool) -> None:
        """Read the statuses of all other ranks, or their alarms, or both.

        Raises:
            RuntimeError: The store fails.
        """
        if statuses:
            self.read_statuses({*range(self.size)} - {self.rank})
        if alarms:
            self.read_alarms()

    def read_alarms(self) -> None:
        """Set `alarms` to the first valid alarm of each other rank.

        An alarm is not valid any more once the rank's status shows a later collective,
        so the statuses of the ranks that sent alarms are read, too.

        Raises:
            RuntimeError: The store fails.
        """
        # A rank that was killed after it took a number leaves a gap in the numbers.
        numbers = range(1, self._store.add("alarms", 0) + 1)
        rows = read_json(self._store, "alarm", numbers).values()
        alarms = [Alarm(*row) for row in reversed([*rows]) if row[0] != self.rank]
        self.read_statuses({alarm.rank for alarm in alarms})
        started = {rank: status.started for rank, status in self.statuses.items()}
        self.alarms = {a.rank: a for a in alarms if started.get(a.rank, 0) <= a.started}

    def read(self, topic: str) -> dict[int, Any]:
        """Return on rank 0 what each rank has posted last under ``topic``.

        On other ranks the result is empty. It waits for no rank.

        Raises:
            RuntimeError: The store fails.
        """
        return read_json(self._store, topic, range(self.size)) if self.rank == 0 else {}

    def post(self, topic: str, value: Any) -> None:
        """Post this rank's ``value``, which JSON can hold, under ``topic``."""
        post_json(self._store, topic, self.rank, value)

    def read_statuses(self, ranks: Iterable[int]) -> None:
        """Read into `statuses` what each of ``ranks`` has posted last, if anything.

        It waits for no rank.

        Raises:
            RuntimeError: The store fails.
        """
        for rank, fields in read_json(self._store, "status", ranks).items():
            self.statuses[rank] = RankStatus(**fields)


def connect(store: object) -> socket.socket | None:
    """Connect to the host of a TCPStore, only to notice when that process ends.

    The result is None for other stores, and if the host does not accept the connection
    within two seconds.
    """
    address = address_of(store)
    try:
        return address and socket.create_connection(address, CONNECT_SECONDS)
    except OSError:
        return None


def is_closed(connection: socket.socket | None) -> bool:
    """Return whether the host has closed the connection. It cannot close None."""
    try:
        return connection is not None and not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
