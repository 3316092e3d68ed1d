"""Around every collective: it ends in time, and its failure gets rank and remedy.

Waits are timed, in slices. Between two of them a `Lookout` is asked whether some rank
will never come; when the limit is over, or the backend gives up, it says who is
missing. A failed collective leaves its group unusable, so the watch also remembers it
for `reset`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ._groups import group_timeout, is_mixed, is_timed, keep_for_good
from ._waiting import Waiter, Work, is_done_within, patience
from .errors import CollectiveError, CommHookError, MiniDPError, explain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SLICE_SECONDS = 0.5
STORE_SECONDS = 2.0  # for a store to answer


class Lookout(Protocol):
    """Knows about the other ranks; see `_watchdog`."""

    def find_lost(self, started: int) -> str:
        """Why a rank will not take part in what was started; empty: none is known."""

    def report(self, started: int) -> str:
        """Who is missing, in sentences; may take seconds."""

    def give_up(self, why: str) -> None:
        """Tell the others that this rank will not come any more."""

    def move_to(self, group: ProcessGroup, key: str) -> None:
        """From now on ranks find each other elsewhere."""


class Nobody:
    """A lookout that knows nothing."""

    def find_lost(self, started: int) -> str:
        """Nothing is known."""
        return ""

    def report(self, started: int) -> str:
        """Nothing is known."""
        return ""

    def give_up(self, why: str) -> None:
        """Nobody listens."""

    def move_to(self, group: ProcessGroup, key: str) -> None:
        """Nobody looks for us."""


class Tally:
    """How many collectives an object has started; known also when it is gone."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start afresh, on another group."""
        self.started = 0  # all of them
        self.launched = 0  # those that are awaited later


class OnDevice(NamedTuple):
    """A collective that an accelerator executes: nobody can wait for it in time."""

    work: Work
    doing: str
    started: int  # collectives, with this one
    since: float


class Watch:
    """Watches the collectives of one object, one at a time (``with watch.over(...)``).

    Args:
        group: who takes part.
        limit: seconds that a collective may take; None: what the backend allows.
    """

    def __init__(self, group: ProcessGroup, limit: float | None = None) -> None:
        self.limit = limit
        self.lookout: Lookout = Nobody()
        self.tally = Tally()
        self.is_busy = False  # inside ``with``
        self.is_late = False  # a wait takes longer than usual
        self._doing = ""
        self._on_device: deque[OnDevice] = deque()  # oldest first
        self._on_device_lock = threading.Lock()  # the watchdog's thread looks, too
        self._bucket: int | None = None
        self._outer: Waiter | None = None
        self.begin_anew(group)

    def begin_anew(self, group: ProcessGroup) -> None:
        """Nothing has failed, perhaps in another group."""
        self.has_failed = False
        self.tally.forget()
        self.group = group
        self._rank = group.rank()
        self._world_size = group.size()
        has_limit = self.limit is not None and self._world_size > 1
        self._is_timed = has_limit and is_timed(group)
        # Nothing is known about a group of several backends: the backend's own limit.
        is_device = has_limit and not self._is_timed and not is_mixed(group)
        self._is_on_device = is_device and torch.cuda.is_available()
        self._on_device.clear()

    @property
    def started(self) -> int:
        """Collectives since the last restart."""
        return self.tally.started

    @property
    def seconds(self) -> float:
        """How long a collective may take: the limit, or the group's if it is less."""
        allowed = group_timeout(self.group).total_seconds()
        return allowed if self.limit is None else min(self.limit, allowed)

    def over(self, doing: str, bucket: int | None = None) -> Watch:
        """Say what comes next: a phrase for "failed while ...", and which bucket."""
        # No generator and no new object: this runs several times in every backward.
        self._doing = doing
        self._bucket = bucket
        return self

    def whole(self, doing: str) -> Watch:
        """The same, of a collective that starts and ends inside."""
        self.tally.started += 1
        return self.over(doing)

    def note_started(self, work: Work) -> None:
        """A collective is on its way."""
        self.tally.started += 1
        self.tally.launched += 1
        if self._is_on_device:
            self._note_on_device(work)

    def _note_on_device(self, work: Work) -> None:
        self.find_late_on_device()  # forgets what is done
        noted = OnDevice(work, self.place, self.started, time.monotonic())
        with self._on_device_lock:
            self._on_device.append(noted)

    def find_late_on_device(self) -> OnDevice | None:
        """The oldest collective of an accelerator, if it exceeds the limit."""
        with self._on_device_lock:
            waiting = self._on_device
            while waiting and waiting[0].work.is_completed():
                waiting.popleft()
            if not waiting or self.limit is None:
                return None
            oldest = waiting[0]
        return oldest if time.monotonic() > oldest.since + self.limit else None

    @property
    def place(self) -> str:
        """What is being done, in words."""
        bucket = "" if self._bucket is None else f" of bucket {self._bucket}"
        return f"{self._doing}{bucket}"

    def wait(self, work: Work) -> Any:
        """Wait for a collective, but not longer than the limit.

        Raises:
            TimeoutError: it is over, or another rank gave up. (A `CollectiveError` once
                it leaves ``with``.)
        """
        if not self._is_timed or is_done_within(work, SLICE_SECONDS):
            return work.wait()
        self.is_late = True
        try:
            return self._wait_long(work)
        finally:
            self.is_late = False

    def _wait_long(self, work: Work) -> Any:
        assert self.limit is not None
        deadline = time.monotonic() + self.limit - SLICE_SECONDS
        while not is_done_within(work, SLICE_SECONDS):
            lost = self.lookout.find_lost(self.started)
            if lost or time.monotonic() > deadline:
                keep_for_good(self.group, [work])
                raise TimeoutError(lost or f"it did not finish within {self.limit:g} s")
        return work.wait()

    def __enter__(self) -> None:
        """Waits on this thread are ours."""
        self.is_busy = True
        self._outer, patience.waiter = patience.waiter, self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Turn any exception into a `CollectiveError`, unless it has a name."""
        patience.waiter = self._outer
        if isinstance(error, Exception):
            self._explain(error)
        self.is_busy = False

    def _explain(self, error: Exception) -> None:
        self.has_failed = True  # at best other ranks wait in vain
        if isinstance(error, CommHookError) and "future that failed" in str(error):
            absent = self.lookout.report(self.started)
            raise type(error)(f"{error} {absent}".rstrip()) from error.__cause__
        if isinstance(error, MiniDPError):
            return
        text = str(error).rstrip(". \n")
        absent = self.lookout.report(self.started)
        failure = CollectiveError(
            explain(
                self._rank,
                f"A collective failed while {self.place}. {absent} ({text}.)".replace(
                    "  ", " "
                ),
                expected=f"all {self._world_size} ranks to take part in time",
                remedy="look for the rank that died, raised, took another branch, "
                "or ran out of inputs (see join()); then call reset() on all live "
                "ranks",
            )
        )
        self.lookout.give_up(f"CollectiveError: {failure}")
        try:
            raise failure from error
        finally:
            del failure  # it would keep this frame alive, and with it the gradients
