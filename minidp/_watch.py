"""Around every collective: it ends in time, and its failure gets rank and remedy.

Waits are timed, in slices. Between two of them a `Lookout` is asked whether some rank
will never come; when the limit is over, or the backend gives up, it says who is
missing. A failed collective leaves its group unusable, so the watch also remembers it
for `reset`.
"""

from __future__ import annotations

import logging
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

logger = logging.getLogger("minidp")
SLICE_SECONDS = 0.5
STORE_SECONDS = 2.0  # for a store to answer
ASKS_AGAIN = 10  # times in as long as the limit is, whether a busy rank still is busy


class Report(NamedTuple):
    """Who is missing."""

    text: str = ""  # in sentences
    may_still_come: bool = False  # nobody is gone, and somebody does something else


class Lookout(Protocol):
    """Knows about the other ranks; see `_watchdog`."""

    def find_lost(self, started: int) -> str:
        """Why a rank will not take part in what was started; empty: none is known."""

    def report(self, started: int) -> Report:
        """Who is missing; may take seconds."""

    def give_up(self, why: str) -> None:
        """Tell the others that this rank will not come any more."""

    def ask_who_skips(self, step: int, steps: int) -> Work | None:
        """Wait until the others step without reduction ``step``, or one runs it.

        Args:
            step: synchronised backwards finished.
            steps: of optimizers since then, with the one that is about to come.

        Returns:
            What brings who takes part in the reduction, in a sentence, or "" if all
            leave it out. None: nobody knows.
        """

    def move_to(self, group: ProcessGroup, key: str) -> None:
        """From now on ranks find each other elsewhere."""


class Nobody:
    """A lookout that knows nothing."""

    def find_lost(self, started: int) -> str:
        """Nothing is known."""
        return ""

    def report(self, started: int) -> Report:
        """Nothing is known."""
        return Report()

    def give_up(self, why: str) -> None:
        """Nobody listens."""

    def ask_who_skips(self, step: int, steps: int) -> Work | None:
        """Nothing is known."""
        return None

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


class DeviceQueue:
    """Collectives that an accelerator executes, oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[OnDevice] = deque()
        self._lock = threading.Lock()  # the watchdog's thread looks, too
        self.extra = 0.0  # seconds that the oldest may take longer than others
        self.busy: Patience | None = None  # with it

    def clear(self) -> None:
        """Forget them."""
        with self._lock:
            self._waiting.clear()

    def note(self, launched: OnDevice) -> None:
        """One more; forgets what is done."""
        self.oldest()
        with self._lock:
            self._waiting.append(launched)

    def oldest(self) -> OnDevice | None:
        """The oldest that is not done."""
        with self._lock:
            while self._waiting and self._waiting[0].work.is_completed():
                self._waiting.popleft()
                self.extra, self.busy = 0.0, None
            return self._waiting[0] if self._waiting else None


class Patience:
    """More time than the limit, for ranks that are alive and busy with something else.

    Args:
        watch: over the collective that takes longer.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._warned_at = 0.0  # seconds of waiting

    def more(self, waited: float, started: int, doing: str) -> float:
        """How many seconds to go on; then ask again, for one may have died meanwhile.

        Args:
            waited: seconds so far.
            started: collectives, with the one that is awaited.
            doing: what that is for.

        Returns:
            0 if a rank is gone, or all wait for each other, or nobody wants to wait.
        """
        watch = self._watch
        if watch.limit is None or not watch.is_patient:
            return 0.0
        backends = group_timeout(watch.group).total_seconds()
        if waited > backends:
            return 0.0
        absent = watch.lookout.report(started)
        if not absent.may_still_come:
            return 0.0
        if not self._warned_at or waited > 2 * self._warned_at:
            self._warned_at = waited
            logger.warning(
                "[rank %d] Still %s, for %.0f s now. %s This goes on until the process "
                "group's own limit (%.0f s); pass hang_timeout=%g to make it an error.",
                watch.group.rank(),
                doing,
                waited,
                absent.text,
                backends,
                watch.limit,
            )
        return watch.limit / ASKS_AGAIN


class Watch:
    """Watches the collectives of one object, one at a time (``with watch.over(...)``).

    Args:
        group: who takes part.
        limit: seconds that a collective may take; None: what the backend allows.
        is_patient: the limit is for ranks that are gone, or wait for each other. Those
            that do something else have as long as the backend allows.
    """

    def __init__(
        self,
        group: ProcessGroup,
        limit: float | None = None,
        *,
        is_patient: bool = False,
    ) -> None:
        self.limit = limit
        self.is_patient = is_patient
        self.lookout: Lookout = Nobody()
        self.tally = Tally()
        self.is_busy = False  # inside ``with``
        self.is_late = False  # a wait takes longer than usual
        self._doing = ""
        self._on_device = DeviceQueue()
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
            now = time.monotonic()
            self._on_device.note(OnDevice(work, self.place, self.started, now))

    def find_late_on_device(self) -> OnDevice | None:
        """The oldest collective of an accelerator, if it exceeds the limit."""
        oldest = self._on_device.oldest()
        if oldest is None or self.limit is None:
            return None
        allowed = self.limit + self._on_device.extra
        return oldest if time.monotonic() > oldest.since + allowed else None

    def extend_on_device(self, late: OnDevice) -> bool:
        """Wait a little longer for what an accelerator executes, if there is hope."""
        waited = time.monotonic() - late.since
        busy = self._on_device.busy or Patience(self)
        more = busy.more(waited, late.started, late.doing)
        self._on_device.busy = busy
        self._on_device.extra = max(0.0, waited - (self.limit or 0.0)) + more
        return more > 0

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
        is_timed = self._is_timed or getattr(work, "can_time_out", False)
        if not is_timed or is_done_within(work, SLICE_SECONDS):
            return work.wait()
        self.is_late = True
        try:
            return self._wait_long(work)
        finally:
            self.is_late = False

    def _wait_long(self, work: Work) -> Any:
        assert self.limit is not None
        busy = Patience(self)
        begun = time.monotonic() - SLICE_SECONDS
        allowed = self.limit
        while not is_done_within(work, SLICE_SECONDS):
            lost = self.lookout.find_lost(self.started)
            waited = time.monotonic() - begun
            if not lost and waited > allowed:
                more = busy.more(waited, self.started, self.place)
                lost = "" if more else f"it did not finish within {allowed:g} s"
                allowed = round(waited + more, 1)
            if lost:
                keep_for_good(self.group, [work])
                raise TimeoutError(lost)
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
            absent = self.lookout.report(self.started).text
            raise type(error)(f"{error} {absent}".rstrip()) from error.__cause__
        if isinstance(error, MiniDPError):
            return
        text = str(error).rstrip(". \n")
        absent = self.lookout.report(self.started).text
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
