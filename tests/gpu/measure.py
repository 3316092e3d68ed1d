"""Looking at a device: who waits, what is launched, how much memory it takes.

Functions take ``cuda``, which is ``torch.cuda``, or the stand-in for it in
`tests.support.fake_cuda`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

BUSY_CYCLES = 20_000_000  # enough for a clock to see


@contextmanager
def waiting_is_an_error(cuda: Any) -> Iterator[None]:
    """Raise where torch knows that the host waits for the device."""
    before = cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*prototype feature")
        cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            cuda.set_sync_debug_mode(before)


class Busy:
    """Keeps a device busy for about so many seconds, however fast its clock is.

    ``sleep(cycles)`` occupies the current stream.
    """

    def __init__(self, cuda: Any, sleep: Callable[[int], object]) -> None:
        self._cuda, self._sleep = cuda, sleep
        sleep(BUSY_CYCLES)  # the first one loads the kernel
        (ms,) = milliseconds(cuda, lambda: sleep(BUSY_CYCLES), 1)
        self.cycles_per_second = 1e3 * BUSY_CYCLES / ms

    def for_seconds(self, seconds: float) -> Any:
        """Begin; what comes back is an event behind it."""
        self._sleep(int(seconds * self.cycles_per_second))
        event = self._cuda.Event()
        event.record()
        return event


def waits(busy: Busy, seconds: float, work: Callable[[], object]) -> bool:
    """Whether the host waited for the device during ``work()``.

    The device is busy first, for longer than the host needs: if it has come to the end
    of that when the host is done, the host has waited.
    """
    end_of_sleep = busy.for_seconds(seconds)
    work()
    return bool(end_of_sleep.query())


def launches_in(events: Iterable[Any]) -> Counter[str]:
    """What a device did, by kernel, copy or fill, in ``profile.events()``."""
    return Counter(
        event.name
        for event in events
        if str(event.device_type).endswith("CUDA")
        # A label's span on the device is no work.
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith("minidp::")
    )


def peak_bytes(cuda: Any, work: Callable[[], object]) -> int:
    """The most memory in use during ``work()``, beyond what was before."""
    cuda.synchronize()
    before = cuda.memory_allocated()
    cuda.reset_peak_memory_stats()
    work()
    cuda.synchronize()
    return int(cuda.max_memory_allocated() - before)


def milliseconds(cuda: Any, work: Callable[[], object], times: int) -> list[float]:
    """Of each call, by the device's clock."""
    found = []
    for _ in range(times):
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return found
