"""Waits for collectives and for futures: in slices, so that they can be given up.

Every wait of the package goes through `wait_for`. How patient it is depends on the
`Watch` that this thread is in.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable
from datetime import timedelta
from inspect import Parameter
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work as TorchWork


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


class PythonWork:
    """The work of a process group written in Python, which may know only a part of it.

    An all-reduce takes the value of its future, as torch's DDP does: such a group may
    bring a new tensor and leave the one that it was given alone. Others only wait.

    Args:
        work: has ``wait()`` (perhaps with a timeout that must be given), or
            ``get_future()``, or both.
        result: gets what the future brings.
    """

    def __init__(self, work: Any, result: torch.Tensor | None = None) -> None:
        self._work = work
        self._result = result
        self._future: torch.futures.Future[Any] | None = None
        self._is_done = False

    def get_future(self) -> torch.futures.Future[Any]:
        """The work's own; if it has none, this waits, and gives a completed one."""
        if self._future is None:
            self._future = self._own_future()
        if self._future is None:
            self._wait_itself()
            self._future = torch.futures.Future()
            self._future.set_result(None)
        return self._future

    def is_completed(self) -> bool:
        """Whether it is known to be done."""
        if self._future is None:
            return self._is_done
        return bool(self._future.done())

    def is_done_within(self, seconds: float) -> bool:
        """Whether it is known to be done; nothing can be awaited for a while only."""
        return self.is_completed()

    def wait(self) -> None:
        """Wait; then the result is there.

        Raises:
            TypeError: the future brings neither a tensor nor None.
        """
        if self._result is None and self._waits_itself():
            self._wait_itself()
            return
        value = self.get_future().wait()
        self._is_done = True
        if self._result is None:
            return
        brought = _only_tensor(value)
        if brought is not None and brought is not self._result:
            with torch.no_grad():
                self._result.copy_(brought)

    def _own_future(self) -> torch.futures.Future[Any] | None:
        if not hasattr(self._work, "get_future"):
            return None
        try:
            future: torch.futures.Future[Any] = self._work.get_future()
        except RuntimeError:  # torch's Work has no other way
            return None
        return future

    def _waits_itself(self) -> bool:
        """Whether it has a ``wait`` that ends."""
        kind = type(self._work)
        own = getattr(kind, "wait", None)
        # A subclass that inherits it has nobody who would ever wake it up.
        is_torchs = own is TorchWork.wait
        return own is not None and (kind is TorchWork or not is_torchs)

    def _wait_itself(self) -> None:
        wait = self._work.wait
        try:
            needs_timeout = _num_required(wait) > 0
        except (TypeError, ValueError):  # no signature: not written in Python
            needs_timeout = False
        # Torch's C++ passes zero for "as long as it takes".
        wait(timedelta(0)) if needs_timeout else wait()
        self._is_done = True


def _num_required(function: Callable[..., Any]) -> int:
    parameters = inspect.signature(function).parameters.values()
    positional = {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD}
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def _only_tensor(value: object) -> torch.Tensor | None:
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if value is None or isinstance(value, torch.Tensor):
        return value
    raise TypeError(
        "The future of an all-reduce must bring a tensor, a list of one tensor, or "
        f"None, but this process group's brought {type(value).__name__}."
    )


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
    with contextlib.suppress(RuntimeError):  # not over yet, or failed: the next tells
        work.wait(timedelta(seconds=seconds))
        return True
    return bool(work.is_completed())


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
