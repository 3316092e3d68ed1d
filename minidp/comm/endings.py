"""Let a process leave a group whose collectives still run, and end without an abort."""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Iterable

from minidp import world

from .groups import ProcessGroup
from .work import Work

EXIT_SECONDS = 2.0
SETTLE_SECONDS = 0.05  # ten times the interpreter's switch interval

_left_behind: list[Work] = []
# Groups of works that had not ended. A reference of C's own outlives this list, which
# Python frees at exit.
_leaked: list[tuple[ProcessGroup, list[Work]]] = []


def keep_for_good(group: ProcessGroup, in_flight: Iterable[Work]) -> None:
    """Leak ``group`` until the process ends, if a work of ``in_flight`` still runs.

    Freeing a Gloo group waits for its works, up to 30 minutes (the timeout), also at
    exit; a leaked group delays the exit by 2 s at most. Keeps the works alive, too, but
    ignores those in shared memory. Does not wait.
    """
    works = [work for work in in_flight if getattr(work, "is_left_behind", True)]
    endless = [work for work in works if not work.is_completed()]
    if not endless:
        return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _leaked.append((group, endless))
    call_once_at_exit(_wait_for_left_behind)
    # Works hold buckets: drop those that have ended since.
    _left_behind[:] = [work for work in _left_behind if not work.is_completed()]
    _left_behind.extend(endless)


def free_left_behind() -> None:
    """Let go of leaked groups whose works have ended: others freed theirs, mostly."""
    for row in list(_leaked):
        if all(work.is_completed() for work in row[1]):
            _leaked.remove(row)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(row[0]))


def call_once_at_exit(function: Callable[[], None]) -> None:
    """Let ``function`` run once at exit, before those that were registered earlier."""
    atexit.unregister(function)
    atexit.register(function)


def settle() -> None:
    """Sleep 0.05 s at exit, so that Gloo's threads release the last collectives.

    Such a thread needs the GIL to free tensors: once the interpreter is finalizing,
    that aborts the process (2 of 70 short runs, also with torch's DDP).
    """
    world.sleep(SETTLE_SECONDS)


def _wait_for_left_behind() -> None:
    """At exit, wait up to 2 s in all for collectives that `keep_for_good` left running.

    They fail when other ranks end; if Python is finalizing then, the process aborts.
    """
    deadline = world.now() + EXIT_SECONDS
    while not all(work.is_completed() for work in _left_behind):
        if world.now() > deadline:
            break
        world.sleep(SETTLE_SECONDS)
