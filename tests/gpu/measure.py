"""Find out whether the host waits for the current CUDA device.

Also for the stand-in of `tests.support.fake_cuda` in the place of ``torch.cuda``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

MEASURED_CYCLES = 20_000_000  # enough for a clock to see


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Raise where torch knows that the host waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*prototype feature")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def cycles_of(seconds: float) -> int:
    """Return the cycles of ``torch.cuda._sleep`` that last so long; wait for it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(MEASURED_CYCLES)  # the first one loads the kernel
    begin.record()
    torch.cuda._sleep(MEASURED_CYCLES)
    end.record()
    end.synchronize()
    return int(1e3 * seconds * MEASURED_CYCLES / begin.elapsed_time(end))


def waits(seconds: float, work: Callable[[], object]) -> bool:
    """Call ``work()``; return whether the host waited for the device meanwhile.

    The device is busy first, for longer than the host needs: if it has come to the end
    of that when the host is done, the host has waited.
    """
    end_of_sleep = torch.cuda.Event()
    torch.cuda._sleep(cycles_of(seconds))
    end_of_sleep.record()
    work()
    return bool(end_of_sleep.query())
