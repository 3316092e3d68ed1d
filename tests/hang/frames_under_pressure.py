"""Describe where a thread is while it runs, and garbage is collected all the time.

    python -m tests.hang.frames_under_pressure SECONDS

A destructor lets the other thread run, which then leaves frames that are looked at.
"""

from __future__ import annotations

import gc
import sys
import threading
import time

from minidp.hang import rank_status

MOST = 100  # of the objects below; more would take longer than the test to collect


class Garbage:
    """Part of a cycle, so that only a collection frees it."""

    number = 0  # not collected yet

    def __init__(self) -> None:
        self.itself = self
        Garbage.number += 1

    def __del__(self) -> None:
        Garbage.number -= 1
        time.sleep(0.0005)


def deep(depth: int) -> int:
    """Enter and leave many frames."""
    return deep(depth - 1) if depth else 0


def look(thread: int, is_over: threading.Event) -> None:
    """Describe the other thread again and again."""
    while not is_over.is_set():
        for _ in range(3 if Garbage.number < MOST else 0):
            Garbage()
        rank_status.place_of(thread)


def main() -> None:
    """Run for some seconds, and end both threads before the process ends.

    Whatever measures coverage writes its data at the end, and must not be under
    pressure then, or it may never end.
    """
    rank_status._is_library = lambda _frame: True  # walk over all frames
    usual, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(2, 1, 1)
    sys.setswitchinterval(1e-6)
    is_over = threading.Event()
    arguments = (threading.get_ident(), is_over)
    looking = threading.Thread(target=look, args=arguments)
    looking.start()
    until = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < until:
        deep(400)
    is_over.set()
    gc.set_threshold(*usual)
    sys.setswitchinterval(interval)
    looking.join()


if __name__ == "__main__":
    main()
