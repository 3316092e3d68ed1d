"""Waits for collectives and for futures: in slices, so that they can be given up.

Every wait of the package goes through `wait_for`. How patient it is depends on the
`Watch` that this thread is in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch


class Work(Protocol):
    """What is used of torch.distributed.Work."""

    def wait(self) -> object:
        """Wait until the collective is done."""

    def is_completed(self) -> bool:
        """Whether it is done, or failed."""

    def get_future(self) -> torch.futures.Future[Any]:
        """Completes with the collective."""


class Promised:
    """What a future brings, awaited as a collective is."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self.future = future

    def get_future(self) -> torch.futures.Future[Any]:
        """The future."""
        return self.future

    def is_completed(self) -> bool:
        """Whether the future is done, or failed."""
        return self.future.done()

    def is_done_within(self, seconds: float) -> bool:
        """Wait a while: futures have no timed wait."""
        done = threading.Event()
        self.future.add_done_callback(lambda _: done.set())
        return done.wait(seconds)

    def wait(self) -> Any:
        """Its value, or what it failed with."""
        return self.future.wait()


class Waiter(Protocol):
    """Who waits for collectives, and how long."""

    def wait(self, work: Work) -> Any:
        """Wait, or raise."""


class _Patience(threading.local):
    waiter: Waiter | None = None


patience = _Patience()  # of this thread; a `Watch` sets it


def wait_for(work: Work) -> Any:
    """Every wait of the package: as long as the `Watch` around it allows."""
    waiter = patience.waiter
    return work.wait() if waiter is None else waiter.wait(work)


def is_done_within(work: Any, seconds: float) -> bool:
    """Wait a while; True if the work is done, or failed."""
    if hasattr(work, "is_done_within"):
        return bool(work.is_done_within(seconds))
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:  # it is not over yet, or it failed: the next wait tells
        return bool(work.is_completed())
    return True


def then(
    future: torch.futures.Future[Any], finish: Callable[[], torch.Tensor]
) -> torch.futures.Future[torch.Tensor]:
    """What ``finish()`` returns once a collective is done; or what either raised.

    A callback that does not look at its future would swallow the collective's failure,
    and go on with numbers that were never reduced.
    """

    def complete(done: torch.futures.Future[Any]) -> torch.Tensor:
        done.value()
        return finish()

    return future.then(complete)
