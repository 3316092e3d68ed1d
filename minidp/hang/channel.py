"""Exchange statuses and alarms of ranks through the process group's store.

    status/{rank}    where the rank is; one beat more each time     every interval
    alarm/{number}   a rank will not come any more, and why         once that is so

A `TCPStore` that cannot send prints many lines. A second, silent connection shows first
whether the host is still there: the system closes it when the host's process ends.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from minidp.comm import address_of, post_json, read_json, unprefixed

from .rank_status import Alarm, RankStatus

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

CONNECT_SECONDS = 2.0


class Channel:
    """Publish and read ranks' statuses and alarms in the process group's store."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store, self._connection = store, connect(store)
        if self._connection is not None:
            self._connection.settimeout(0)
            weakref.finalize(self, self._connection.close)
        self.problem = ""  # why the store cannot be used any more
        self.statuses: dict[int, RankStatus] = {}  # of others, by rank: the last ones
        self.alarms: dict[int, Alarm] = {}  # of others, by rank: the first of each
        self.outgoing: list[Alarm] = []

    def send(self, status: RankStatus | None) -> None:
        """Publish ``status`` (if any) and alarms; RuntimeError if the host is gone."""
        if is_closed(self._connection):
            raise RuntimeError("the connection was closed")
        if status is not None:
            post_json(self._store, "status", self.rank, asdict(status))
        while self.outgoing:
            alarm = self.outgoing.pop(0)
            post_json(self._store, "alarm", self._store.add("alarms", 1), alarm)

    def lose(self, error: RuntimeError) -> None:
        """Set `problem`, a text for reports: the store failed with ``error``."""
        first_line = str(error).partition("\n")[0]
        self.problem = (
            "Nothing is known about the other ranks: the process group's store is "
            "gone, and with it the process that hosted it (rank 0, or torchrun's "
            f"agent): {first_line}."
        )

    def read_alarms(self) -> None:
        """Read other ranks' alarms; set `alarms` to the first valid one of each.

        An alarm is out of date once its rank's status shows a later collective.
        """
        rows: list[Any] = []
        while row := read_json(self._store, "alarm", [len(rows) + 1]):
            rows += row.values()
        alarms = [Alarm(*row) for row in reversed(rows) if row[0] != self.rank]
        self.read_statuses({alarm.rank for alarm in alarms})
        started = {rank: status.started for rank, status in self.statuses.items()}
        self.alarms = {a.rank: a for a in alarms if started.get(a.rank, 0) <= a.started}

    def exchange(self, topic: str, rider: Callable[[dict[int, Any]], Any]) -> None:
        """Post what ``rider`` returns; rank 0 calls it with what all have posted."""
        ranks = range(self.size) if self.rank == 0 else ()
        posted = read_json(self._store, topic, ranks)
        post_json(self._store, topic, self.rank, rider(posted))

    def read_statuses(self, ranks: Iterable[int]) -> None:
        """Read the published statuses of ``ranks`` from the store into `statuses`."""
        for rank, fields in read_json(self._store, "status", ranks).items():
            self.statuses[rank] = RankStatus(**fields)


def connect(store: object) -> socket.socket | None:
    """Connect to the host of a TCPStore, only to notice when that process ends.

    None for other stores, or if it does not accept within two seconds.
    """
    address = address_of(unprefixed(store))
    try:
        return address and socket.create_connection(address, CONNECT_SECONDS)
    except OSError:
        return None


def is_closed(connection: socket.socket | None) -> bool:
    """Return whether the host has closed the connection; False without one."""
    try:
        return connection is not None and not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
