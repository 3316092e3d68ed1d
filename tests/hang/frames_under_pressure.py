"""Describe where a thread is while it runs, and garbage is collected all the time.

    python -m tests.hang.frames_under_pressure SECONDS

A destructor lets the other thread run, which then leaves frames that are looked at.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time

from minidp.hang import rank_status


class Garbage:
    """Part of a cycle, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0.0005)


def deep(depth: int) -> int:
    """Enter and leave many frames."""
    return deep(depth - 1) if depth else 0


def look(thread: int) -> None:
    """Describe the other thread again and again."""
    while True:
        for _ in range(3):
            Garbage()
        rank_status.place_of(thread)


def main() -> None:
    """Run for some seconds, and end without waiting for the other thread."""
    rank_status._is_library = lambda _frame: True  # walk over all frames
    gc.set_threshold(2, 1, 1)
    sys.setswitchinterval(1e-6)
    watched = threading.get_ident()
    threading.Thread(target=look, args=(watched,), daemon=True).start()
    until = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < until:
        deep(400)
    os._exit(0)


if __name__ == "__main__":
    main()
