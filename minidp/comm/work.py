"""Wait for collectives and futures, within the time limit of the moment.

`wait_for` knows who limits the waits of this thread. So code that waits deep inside a
collective needs no argument for it.

A thread that waits for other ranks says so itself, by `waiting`. Another thread reports
it to the other ranks (`minidp.hang`). A look at the stack would not tell it, because
most waits end in C++, and because functions move.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from inspect import Parameter
from typing import Any, Protocol, TypeVar

import torch
from torch._C._distributed_c10d import ProcessGroup
from torch._C._distributed_c10d import Work as TorchWork
from torch.futures import Future

from minidp import world

Value = TypeVar("Value")
_SHORTEST_SECONDS = 0.001  # of a wait with a limit


class NoWork:
    """The work of an all-reduce that a single rank need not start: it is done."""

    def get_future(self) -> Future[Any]:
        """Return a completed future of None."""
        return completed(None)

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return None at once."""


class FutureWork:
    """A future that `wait_for` can take for the `Work` of a collective."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def get_future(self) -> Future[Any]:
        """Return the wrapped future itself."""
        return self.future

    def is_completed(self) -> bool:
        """Return whether the future is done or failed."""
        return self.future.done()

    def is_done_within(self, seconds: float) -> bool:
        """Wait at most so long, and return whether the future is done or has failed."""
        done = world.event()
        self.future.add_done_callback(lambda _: done.set())
        return done.wait(seconds)

    def wait(self) -> Any:
        """Wait without a limit, and return the future's value or raise its error."""
        return self.future.wait()


def is_python_group(group: object) -> bool:
    """Return whether a group is a Python subclass of ``dist.ProcessGroup``.

    Its works may lack methods: see `PythonWork`.
    """
    kind = type(group)  # what an object says of its class may be more than it is
    return issubclass(kind, ProcessGroup) and kind is not ProcessGroup


class PythonWork:
    """The work of a process group written in Python, with the methods it may lack.

    Such a work has ``wait()`` (perhaps with a timeout that must be given),
    ``get_future()``, or both. Its future may bring a new tensor, which `wait` copies to
    ``result``, the tensor that was given to the collective.
    """

    def __init__(self, work: Any, result: torch.Tensor | None = None) -> None:
        self._work = work
        self._result = result
        self._future: Future[Any] | None = None
        self._is_done = False

    def get_future(self) -> Future[Any]:
        """Return the work's future.

        If the work has none, wait for the work, and return a completed future of None.
        """
        if self._future is None and hasattr(self._work, "get_future"):
            with suppress(RuntimeError):  # how torch's Work says that it has none
                self._future = self._work.get_future()
        if self._future is None:
            self._wait_itself()
            self._future = completed(None)
        return self._future

    def is_completed(self) -> bool:
        """Return whether the work is known to be done.

        Nothing is known before `wait` or `get_future` was called.
        """
        return self._is_done if self._future is None else bool(self._future.done())

    def is_done_within(self, seconds: float) -> bool:
        """Return `is_completed` at once, because such a work has no limited wait."""
        return self.is_completed()

    def wait(self) -> None:
        """Wait for the work, and copy what its future brings to ``result``.

        Nothing is copied if there is no ``result`` or no future, or if the future
        brings None or the tensor itself.

        Raises:
            TypeError: The future brings anything but a tensor.
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
    """A collective in flight, with the methods of torch's ``Work``.

    If it also has ``is_done_within(seconds)``, waits with a limit call that.
    """

    def get_future(self) -> Future[Any]:
        """Return a future of the result. `PythonWork` may have to wait first."""

    def is_completed(self) -> bool:
        """Return whether the collective is done, or has failed."""

    def wait(self) -> Any:
        """Wait up to the backend's timeout, and return the value or raise the error.

        With NCCL the current stream waits, and not the host.
        """


class HostWork:
    """A collective on tensors of the CPU, for which the host waits in slices.

    Its group may have a backend for a device, too, on whose collectives a host cannot
    wait with a limit. This one it can.

    Args:
        work: The work of Gloo.
    """

    can_time_out = True

    def __init__(self, work: Work) -> None:
        self.get_future = work.get_future
        self.is_completed = work.is_completed
        self.wait = work.wait


class BothWays:
    """Two collectives as one work, of which each sends in one direction.

    Args:
        there: The one that is launched first.
        back: The other one.
    """

    def __init__(self, there: Work, back: Work) -> None:
        self._works = there, back

    def get_future(self) -> Future[Any]:
        """Return a future that is done when both are."""
        return torch.futures.collect_all([each.get_future() for each in self._works])

    def is_completed(self) -> bool:
        """Return whether both are done, or have failed."""
        return all(each.is_completed() for each in self._works)

    def is_done_within(self, seconds: float) -> bool:
        """Wait at most so long for each, and return whether both are done.

        Raises:
            RuntimeError: One has failed, for whose error the other need not come.
        """
        are_done = True
        for each in self._works:
            if is_done_within(each, seconds if are_done else 0.0):
                each.wait()  # which raises if it has failed
            else:
                are_done = False
        return are_done

    def wait(self) -> None:
        """Wait for both.

        Raises:
            RuntimeError: One has failed.
        """
        for each in self._works:
            each.wait()


def completed(value: Any) -> Future[Any]:
    """Return a future that has this value already."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def is_done_within(work: Any, seconds: float) -> bool:
    """Wait for a work for at most so long, and return whether it is done or failed.

    Its error is not raised, unless the work's own ``is_done_within`` does so.
    """
    if hasattr(work, "is_done_within"):
        return bool(work.is_done_within(seconds))
    # Torch counts in whole milliseconds, and to it 0 of them are no limit at all.
    with suppress(RuntimeError):  # timed out or failed: see below
        work.wait(timedelta(seconds=max(seconds, _SHORTEST_SECONDS)))
        return True
    return bool(work.is_completed())


class Waiter(Protocol):
    """Waits on behalf of `wait_for`, and enforces a time limit: a `Communicator`."""

    def wait(self, work: Work) -> Any:
        """Return the result of a work.

        Raises:
            TimeoutError: The limit is over.
        """


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
    """Wait for a work, and return its result or raise its error.

    If this thread is in a `watching` block of a `Communicator`, the limit of that one
    holds, with a TimeoutError. Elsewhere only the backend's own timeout does.
    """
    with waiting():
        waiter = current_deadline.waiter
        return work.wait() if waiter is None else waiter.wait(work)


def in_time(function: Callable[[], Value], seconds: float | None = None) -> Value:
    """Call a function that waits for other ranks, with a time limit.

    To connect a group takes as long as the group's own timeout if a rank never comes,
    and such a wait cannot be cut short. So a thread calls the function. When the limit
    is over, the thread is left behind. Without a limit this one calls it.

    Args:
        function: What to call.
        seconds: The limit. By default it is that of the moment, as for `wait_for`.

    Raises:
        TimeoutError: The limit is over.
    """
    if seconds is None and current_deadline.waiter is None:
        with waiting():
            return function()
    future: Future[Value] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]

    world.thread(target=call, name="minidp connects", daemon=True).start()
    work = _TimedFuture(future)
    if seconds is not None:
        with waiting():
            if not work.is_done_within(seconds):
                raise TimeoutError(f"it did not finish within {seconds:g} s")
    value: Value = wait_for(work)
    return value


class _TimedFuture(FutureWork):
    """A future for which a wait may have a limit, whatever the group's backend is."""

    can_time_out = True
    is_left_behind = False  # no group waits for it


def then(
    future: Future[Any], finish: Callable[[], torch.Tensor]
) -> Future[torch.Tensor]:
    """Return a future of ``finish()``, which is called once ``future`` is done.

    It is called on any thread. If ``future`` fails, this one fails, without the call.
    """

    def complete(done: Future[Any]) -> torch.Tensor:
        done.value()
        return finish()

    return future.then(complete)
