"""Measure the memory that an action needs: its peak, and what is left at its end."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

SAMPLE_SECONDS = 0.0002
M_MMAP_THRESHOLD, M_MMAP_MAX = -3, -4  # of glibc's mallopt
LARGE = 2**16  # bytes: pieces from here on go back to the system when freed


def memory_of(action: Callable[[], object]) -> tuple[int, int]:
    """Run an action. Return its peak of memory, and what is in use at its end.

    Both are bytes beyond what is in use before. On the CPU the C library returns what
    is freed from now on, but for small pieces.
    """
    if torch.cuda.is_initialized():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = action()
        peak = torch.cuda.max_memory_allocated()
        after = torch.cuda.memory_allocated()
    else:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 2**20)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
        libc.malloc_trim(0)
        before, is_over = _resident(), threading.Event()
        samples = [before]

        def sample() -> None:
            while not is_over.wait(SAMPLE_SECONDS):
                samples.append(_resident())

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            kept = action()
        finally:
            is_over.set()
            sampler.join()
        after = _resident()
        peak = max(*samples, after)
    del kept
    return max(0, peak - before), max(0, after - before)


def _resident() -> int:
    """Return this process's resident bytes, without other ranks' shared buckets.

    Own shared buckets are those whose files we hold open; a rank closes the others'.
    """
    status = Path("/proc/self/status").read_text()
    found = int(re.findall(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)[0]) * 1024
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # what listed the folder is closed again
            if os.readlink(path).startswith("/memfd:minidp"):
                found += path.stat().st_blocks * 512
    return found
