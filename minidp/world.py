"""The clock and the threads, as everything that waits for other ranks gets them.

Code that waits (`minidp.comm`, `minidp.hang`, the comparisons of `minidp.guard` and
`minidp.replica`) asks this module and not `time` or `threading`, so that a test can put
a simulated world in its place and decide about every order of events. The rest of the
outside is behind doors of the same kind: stores come from `minidp.comm.stores`, and
collectives from `minidp.comm.collectives`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class World:
    """The real world, with the system's clock and threads. Tests derive another one."""

    def now(self) -> float:
        """Return seconds on a clock that never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let other threads and processes run for ``seconds``."""
        time.sleep(seconds)

    def event(self) -> threading.Event:
        """Return a new event, on which threads can wait."""
        return threading.Event()

    def thread(self, target: Callable[..., Any], **options: Any) -> threading.Thread:
        """Return a new thread, which is not started yet.

        The ``options`` are those of `threading.Thread`.
        """
        return threading.Thread(target=target, **options)


_world = World()


def now() -> float:
    """Return seconds on a clock that never goes back."""
    return _world.now()


def sleep(seconds: float) -> None:
    """Let other threads and processes run for ``seconds``."""
    _world.sleep(seconds)


def event() -> threading.Event:
    """Return a new event, on which threads can wait."""
    return _world.event()


def thread(target: Callable[..., Any], **options: Any) -> threading.Thread:
    """Return a new thread, which is not started yet.

    The ``options`` are those of `threading.Thread`.
    """
    return _world.thread(target, **options)


@contextmanager
def replaced(world: World) -> Iterator[None]:
    """Let everything in this process use another world inside the block, for tests."""
    global _world
    before, _world = _world, world
    try:
        yield
    finally:
        _world = before
