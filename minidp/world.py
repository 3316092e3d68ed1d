"""What a rank has of the outside: a clock, threads, groups, and a process of its own.

Code that waits (`minidp.comm`, `minidp.hang`, the comparisons of `minidp.guard` and
`minidp.replica`), or decides by times (`minidp.autotune`), asks this module and not
`time` or `threading`, so that a test can put a simulated world in its place and decide
about every order of events. There all ranks are threads of one process. So tables that
a process has once are a `PerProcess`, of which each simulated rank has its own.

Stores come from `minidp.comm.stores`, and collectives from `minidp.comm.collectives`:
both ask torch's default group, which a simulated world replaces.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class PerProcess(Generic[Value]):
    """Something that each process has once. Call this object to get it.

    Args:
        make: Returns a new one. It is called at once for this process.
    """

    def __init__(self, make: Callable[[], Value]) -> None:
        self.make = make
        self.of_this_process = make()

    def __call__(self) -> Value:
        """Return the one of this process, or of this rank of a simulated world."""
        return _world.own(self)


class World:
    """The real world, with the system's clock and threads. Tests derive another one."""

    def now(self) -> float:
        """Return seconds on a clock that never goes back."""
        return time.monotonic()

    def timer(self) -> Callable[[], int]:
        """Return a function that returns nanoseconds: on it steps are timed.

        It is a function of C, because what asks so often must cost next to nothing.
        """
        return time.perf_counter_ns

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

    def own(self, each: PerProcess[Value]) -> Value:
        """Return what this process has of something that each process has once."""
        return each.of_this_process

    def at_exit(self, function: Callable[[], object]) -> None:
        """Let a function run when this process ends."""
        atexit.register(function)
        # Most children of multiprocessing end without running atexit.
        Finalize(None, function, exitpriority=0)

    def keep_for_good(self, kept: object) -> None:
        """Keep an object alive even when Python frees everything at its exit."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def let_go(self, kept: object) -> None:
        """Keep an object no more for which `keep_for_good` was called."""
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(kept))

    def connect(
        self, make: Callable[[], Value], name: str, ranks: int, *, is_listed: bool
    ) -> Value:
        """Make a process group, and wait until all of its ranks are connected.

        Args:
            make: Makes the group, and waits.
            name: What its ranks call it, and no other group.
            ranks: How many ranks there are. They are those of the default group that
                call this with the same name.
            is_listed: Whether ``make`` lets torch.distributed know the group.
        """
        return make()


_world = World()


def now() -> float:
    """Return seconds on a clock that never goes back."""
    return _world.now()


def timer() -> Callable[[], int]:
    """Return the function that reads the clock on which steps are timed, in ns."""
    return _world.timer()


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


def at_exit(function: Callable[[], object]) -> None:
    """Let a function run when this process ends."""
    _world.at_exit(function)


def keep_for_good(kept: object) -> None:
    """Keep an object alive even when Python frees everything at its exit."""
    _world.keep_for_good(kept)


def let_go(kept: object) -> None:
    """Keep an object no more for which `keep_for_good` was called."""
    _world.let_go(kept)


def connect(
    make: Callable[[], Value], name: str, ranks: int, *, is_listed: bool
) -> Value:
    """Make a process group, and wait for its ranks, as `World.connect` says."""
    return _world.connect(make, name, ranks, is_listed=is_listed)


@contextmanager
def frame_of(thread: int) -> Iterator[FrameType | None]:
    """Give the block the innermost frame of a thread, or None if it has ended.

    Args:
        thread: Its ``ident``.
    """
    # Up to CPython 3.11, making a frame object may start a garbage collection, which
    # may run a destructor. That may wait for a lock which `sys._current_frames` holds
    # (CPython issue 106883), or let the other thread leave the frame whose object is
    # being made, which ends the process. So collections are off meanwhile.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield sys._current_frames().get(thread)
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def replaced(world: World) -> Iterator[None]:
    """Let everything in this process use another world inside the block, for tests."""
    global _world
    before, _world = _world, world
    try:
        yield
    finally:
        _world = before
