"""A line between a replica and the lighthouse, which can be cut for a while."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from torchft._torchft import LighthouseServer


def hasty_lighthouse() -> LighthouseServer:
    """Return a lighthouse that goes on without a replica of which it hears nothing.

    But of a quorum of which all ask again it makes the next one at once, and does not
    wait for others who live.
    """
    return LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=5000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=1000,
    )


def leave_whole(whole: Iterable[Line], lines: Iterable[Line]) -> None:
    """Cut all lines but some, and wait until the lighthouse knows who is there."""
    for line in {*lines} - {*whole}:
        line.cut()
    for line in whole:
        line.mend()
    time.sleep(1.5)


def meet(parts: Sequence[Sequence[Callable[[], object]]]) -> None:
    """Let parts that were apart train on, the last part a little after the others.

    For if that asks first, the lighthouse lets it go on alone.
    """
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(train) for part in parts[:-1] for train in part]
        time.sleep(0.5)
        futures += [pool.submit(train) for train in parts[-1]]
        for future in futures:
            future.result(timeout=60)


class Line:
    """Pass on what a replica and the lighthouse say to each other, when it is whole.

    What is said while it is cut arrives late: heartbeats are missing meanwhile.

    Args:
        lighthouse: The address of the lighthouse. `address` stands for it.
    """

    def __init__(self, lighthouse: str) -> None:
        there = urlsplit(lighthouse)
        self._lighthouse = there.hostname, there.port
        self._whole = threading.Event()
        self._whole.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._start(self._accept)

    def cut(self) -> None:
        """Hold back whatever is said from now on."""
        self._whole.clear()

    def mend(self) -> None:
        """Let it through."""
        self._whole.set()

    def close(self) -> None:
        """Accept no further connection."""
        self._server.close()
        self._whole.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                one, _ = self._server.accept()
                other = socket.create_connection(self._lighthouse)
                self._start(self._pass_on, one, other)
                self._start(self._pass_on, other, one)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._whole.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    @staticmethod
    def _start(work, *args) -> None:
        threading.Thread(target=work, args=args, daemon=True).start()
