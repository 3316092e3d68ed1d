"""The simulated key-value store: one dictionary, and a connection for each thread.

As in torch's TCPStore one server answers one request after the other. What a rank gets
may be old when it arrives there, because others go on meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from .scheduler import Scheduler, Thread, of_the_system

Value = TypeVar("Value")
MARK = re.compile(r"\b[0-9a-f]{9,16}(?=/)")  # of a group: `minidp.comm.mark_group`
TIMEOUT = timedelta(seconds=300)


class Server:
    """What all connections talk to."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.values: dict[str, bytes] = {}
        self.waiters: list[Thread] = []
        self.is_gone = False  # with the process that hosts it
        self.connections: list[Connection] = []  # C++ holds only their C++ halves


class Connection(dist.Store):
    """One connection to the server, with torch's interface of a store."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server, self._scheduler = server, server.scheduler
        server.connections.append(self)

    def clone(self) -> Connection:
        return Connection(self._server)

    @of_the_system
    def _ask(self, what: str, answer: Callable[[], Value]) -> Value:
        scheduler = self._scheduler
        scheduler.turn(f"store: {what}")
        if self._server.is_gone:
            raise RuntimeError("Connection reset by peer")
        value = answer()
        if not scheduler.is_over and scheduler.tape.is_rare(4):
            scheduler.turn(f"store: answer to {what}")
        return value

    @of_the_system
    def set(self, key: str, value: Any) -> None:
        written = _as_bytes(value)
        self._ask(f"set {_short(key)}", lambda: self._write(key, written))

    def _write(self, key: str, value: bytes) -> None:
        self._server.values[key] = value
        self._scheduler.wake_all(self._server.waiters)

    @of_the_system
    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask(f"get {_short(key)}", lambda: self._server.values[key])

    @of_the_system
    def check(self, keys: list[str]) -> bool:
        has = self._server.values.__contains__
        return self._ask(f"check {_short(keys[0])}", lambda: all(map(has, keys)))

    @of_the_system
    def wait(self, keys: list[str], timeout: timedelta = TIMEOUT) -> None:
        deadline = self._scheduler.time + timeout.total_seconds()
        while not all(key in self._server.values for key in keys):
            left = deadline - self._scheduler.time
            if left <= 0:
                raise RuntimeError(f"wait timeout after {timeout}: {keys}")
            what = f"key {_short(keys[0])}"
            self._scheduler.block(left, what, self._server.waiters)

    @of_the_system
    def add(self, key: str, number: int) -> int:
        def answer() -> int:
            total = int(self._server.values.get(key, b"0")) + number
            self._write(key, str(total).encode())
            return total

        return self._ask(f"add {number} to {_short(key)}", answer)

    @of_the_system
    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        wanted, new = _as_bytes(expected), _as_bytes(desired)

        def answer() -> bytes:
            if self._server.values.get(key, b"") == wanted:
                self._write(key, new)
            return self._server.values.get(key, wanted)

        return self._ask(f"compare and set {_short(key)}", answer)

    @of_the_system
    def deleteKey(self, key: str) -> bool:
        values = self._server.values
        return self._ask(
            f"delete {_short(key)}", lambda: values.pop(key, None) is not None
        )


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _short(key: str) -> str:
    return "/".join(MARK.sub("~", key).split("/")[2:])[-60:]
