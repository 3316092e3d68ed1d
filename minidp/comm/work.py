"""Wait for collectives and futures; `wait_for` keeps the current time limit.

A thread that waits for other ranks says so itself, by `waiting`: another thread reports
that to them (`minidp.hang`), and a stack would not tell it, because most waits end in
C++, and because functions move.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from inspect import Parameter
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import ProcessGroup
from torch._C._distributed_c10d import Work as TorchWork
from torch.futures import Future

from minidp import world


class NoWork:
    """Stand for the work of an all-reduce that one rank need not start: it is done."""

    def get_future(self) -> Future[Any]:
        """Return a completed future of None."""
        return completed(None)

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return None at once."""


class FutureWork:
    """Wrap a future, so that `wait_for` takes it for the `Work` of a collective."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def get_future(self) -> Future[Any]:
        """Return the wrapped future itself."""
        return self.future

    def is_completed(self) -> bool:
        """Return whether the future is done or failed."""
        return self.future.done()

    def is_done_within(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether the future is done or failed."""
        done = world.event()
        self.future.add_done_callback(lambda _: done.set())
        return done.wait(seconds)

    def wait(self) -> Any:
        """Wait without limit; return the future's value, or raise its error."""
        return self.future.wait()


def is_python_group(group: object) -> bool:
    """Return whether a group is a Python subclass of ``dist.ProcessGroup``.

    Its works may lack methods: see `PythonWork`.
    """
    return isinstance(group, ProcessGroup) and type(group) is not ProcessGroup


class PythonWork:
    """Give a Python process group's work the methods of `Work` that it may lack.

    It has ``wait()`` (maybe with a required timeout), ``get_future()``, or both. The
    future may bring a new tensor, which `wait` copies to ``result``, the input.
    """

    def __init__(self, work: Any, result: torch.Tensor | None = None) -> None:
        self._work = work
        self._result = result
        self._future: Future[Any] | None = None
        self._is_done = False

    def get_future(self) -> Future[Any]:
        """Return the work's future; without one, wait and return a completed future."""
        if self._future is None and hasattr(self._work, "get_future"):
            with suppress(RuntimeError):  # how torch's Work says that it has none
                self._future = self._work.get_future()
        if self._future is None:
            self._wait_itself()
            self._future = completed(None)
        return self._future

    def is_completed(self) -> bool:
        """Return whether the work is known to be done.

        Before `wait` or `get_future` is called False, even if it is done.
        """
        return self._is_done if self._future is None else bool(self._future.done())

    def is_done_within(self, seconds: float) -> bool:
        """Return `is_completed` at once: such work has no wait for some ``seconds``."""
        return self.is_completed()

    def wait(self) -> None:
        """Wait for the work; if ``result`` was given, copy its future's tensor there.

        Nothing is copied if the future brings None or that tensor itself, or there is
        no future. TypeError if ``result`` was given, and it brings anything else.
        """
        own = getattr(type(self._work), "wait", None)
        # A Python subclass that inherits torch's ``wait`` is never woken up.
        is_endless = own is TorchWork.wait and type(self._work) is not TorchWork
        if self._result is None and own is not None and not is_endless:
            self._wait_itself()
            return
        value = self.get_future().wait()
        self._is_done = True
        while isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        if self._result is None or value is None or value is self._result:
            return
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                "The future of an all-reduce must bring a tensor, a list of one tensor,"
                f" or None, but this process group's brought {type(value).__name__}."
            )
        with torch.no_grad():
            self._result.copy_(value)

    def _wait_itself(self) -> None:
        """Call the work's own ``wait``; for a required timeout pass 0: no limit."""
        try:
            parameters = inspect.signature(self._work.wait).parameters.values()
        except (TypeError, ValueError):  # no signature: not written in Python
            parameters = {}.values()
        positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        needs = any(p.kind in positional and p.default is p.empty for p in parameters)
        with waiting():
            # Torch's C++ passes zero for "no timeout".
            self._work.wait(*[timedelta(0)] * needs)
        self._is_done = True


class Work(Protocol):
    """Describe a collective in flight, as torch's ``Work`` does.

    If it has ``is_done_within(seconds)``, timed waits call that.
    """

    def get_future(self) -> Future[Any]:
        """Return a future of the result; that of `PythonWork` may wait first."""

    def is_completed(self) -> bool:
        """Return whether the collective is done or failed."""

    def wait(self) -> Any:
        """Wait up to the backend's timeout; return the value, or raise the error.

        On CUDA (NCCL) the current stream waits, not the host.
        """


def completed(value: Any) -> Future[Any]:
    """Return a future that has ``value`` already."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Waiter(Protocol):
    """Describe who waits in place of `wait_for`, with a limit: a `Communicator`."""

    def wait(self, work: Work) -> Any:
        """Return the result of ``work``; raise TimeoutError at the time limit."""


# How many open `waiting` blocks each thread has, by its identifier; none if not listed.
_waiting: dict[int, int] = {}


class waiting:
    """A block in which this thread waits for other ranks, or may have to."""

    __slots__ = ("_thread",)

    def __enter__(self) -> None:
        self._thread = thread = threading.get_ident()
        _waiting[thread] = _waiting.get(thread, 0) + 1

    def __exit__(self, *_error: object) -> None:
        thread = self._thread
        left = _waiting[thread] - 1
        if left:
            _waiting[thread] = left
        else:
            del _waiting[thread]


def is_waiting(thread: int) -> bool:
    """Return whether a thread, or autograd on its behalf, is in a `waiting` block.

    Autograd has threads of its own, one per accelerator; nobody knows for whom they
    work, so that a wait in one of them counts for every thread.
    """
    if thread in _waiting:
        return True
    others = list(_waiting)
    if not others:
        return False
    of_python = {
        each.ident
        for each in threading.enumerate()
        if not isinstance(each, threading._DummyThread)
    }
    return any(other not in of_python for other in others)


class _CurrentDeadline(threading.local):
    waiter: Waiter | None = None  # the communicator whose `watching` block we are in


current_deadline = _CurrentDeadline()


def wait_for(work: Work) -> Any:
    """Wait for ``work`` and return its result, or raise its error.

    In a `watching` block of a `Communicator` on this thread its limit applies, with
    TimeoutError (`Communicator.wait`); elsewhere the backend's own timeout alone.
    """
    with waiting():
        waiter = current_deadline.waiter
        return work.wait() if waiter is None else waiter.wait(work)


def then(
    future: Future[Any], finish: Callable[[], torch.Tensor]
) -> Future[torch.Tensor]:
    """Return a future of ``finish()``, called (on any thread) when ``future`` is done.

    If ``future``, that of a collective, fails, so does this one, without the call.
    """

    def complete(done: Future[Any]) -> torch.Tensor:
        done.value()
        return finish()

    return future.then(complete)
