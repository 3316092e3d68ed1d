"""Give the collectives of a process group a time limit, and explain their failures.

A backend lets a rank wait for 10 or 30 minutes, and then its error does not say for
whom. A `Communicator` waits in slices of half a second. After each slice it asks its
`PeerMonitor` whether some rank will never take part. At the limit, or when the backend
gives up, the error names the missing ranks.

A failure leaves the group unusable, because other ranks may still be inside the
collective that failed here. It is remembered until `reset`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch

from minidp import world
from minidp.errors import CollectiveError, CommHookError, MiniDPError, explain

from .groups import ProcessGroup, group_timeout, is_mixed, is_timed, keep_for_good
from .work import Work, current_deadline, waiting

logger = logging.getLogger("minidp")
SLICE_SECONDS, FIRST_SLICE_SECONDS = 0.5, 0.05
STORE_SECONDS = 2.0  # time limit for a store's answer
ASKS_AGAIN = 10  # how often per time limit to ask whether missing ranks are busy


class Question(Protocol):
    """Describe the question which ranks do not come to a meeting of all ranks.

    The watchdog's thread fills the sets from what the ranks publish.
    """

    stepped: set[int]  # ranks that have made the coming optimizer step already
    reducing: set[int]  # ranks that are in the next backward without it
    gone: set[int]  # ranks that are further, wait elsewhere, or have ended

    def drop(self) -> None:
        """Forget the question: nobody waits for the answer any more."""


class Answerer(Protocol):
    """Describe who can answer another rank's question while this rank waits for it."""

    def answer(self) -> None:
        """Look for a question in the store, and post an answer; wait for nobody."""


# A rank that has a question makes the others wait for it in the next collective. Each
# slice of that wait asks these objects to look for the question.
answerers: WeakSet[Answerer] = WeakSet()


class PeerReport(NamedTuple):
    """Hold what `PeerMonitor.report` returns: who is missing, and if they may come."""

    text: str = ""  # sentences that name the missing ranks, for an error or warning
    may_still_come: bool = False  # no rank is gone, and some are busy or just here


class PeerMonitor:
    """Tell a `Communicator` about other ranks; this base class knows nothing of them.

    Serves without a limit, with one rank or without a store; else the watchdog puts a
    `minidp.hang` heartbeat in its place, which overrides all methods.
    """

    def find_lost(self, started: int) -> str:
        """Return why collective number ``started`` cannot finish; "" if not known.

        Waits for no rank. Here always "".
        """
        return ""

    def report(self, started: int) -> PeerReport:
        """Ask which ranks have not started collective number ``started``.

        May wait seconds for answers. Here return an empty `PeerReport` at once.
        """
        return PeerReport()

    def give_up(self, why: str) -> None:
        """Make other ranks' waits for this rank fail, because of ``why``; here no-op.

        Only queues an alarm: this rank joins no further collective. Does not wait.
        """

    def ask_who_passed(
        self, step: int, steps: int, *, may_answer: bool
    ) -> Question | None:
        """Ask which rank cannot come to a meeting any more; here None: cannot ask.

        Else return a question at once; no collective. The meeting is after backward
        number ``step`` and ``steps`` optimizer steps. ``may_answer``: ranks that have
        gone on do come, by `answerers`, so that only those that wait elsewhere do not.
        """
        return None

    def exchange_often(
        self, topic: str, rider: Callable[[dict[int, Any]], Any]
    ) -> Callable[[], None] | None:
        """Start to exchange values under ``topic``, 4 times a second.

        A thread calls ``rider(values)``, and posts what it returns, which JSON can
        hold. ``values``: on rank 0 what ranks posted last, by rank; {} on others.
        Return a function that stops it. Here start nothing, and return None.
        """
        return None

    def move_to(self, group: ProcessGroup, key: str) -> None:
        """Talk to other ranks by ``group``'s store, under ``key``, from now on.

        ``key`` is equal on all ranks, and all of them have just met. Here no-op.
        """


@dataclass(slots=True)
class Tally:
    """Hold how many collectives a `Communicator` has started since its last `reset`.

    The heartbeat holds this object, which does not keep the communicator alive.
    """

    started: int = 0  # all collectives
    launched: int = 0  # asynchronous collectives


@dataclass(slots=True, eq=False)
class InFlight:
    """Hold a running collective, its launch time and limit, to tell if it is late."""

    work: Work
    doing: str  # what the rank was doing, for messages
    started: int  # number of collectives started, including this one
    since: float  # launch, on world.now()
    allowed: float  # seconds
    warned_at: float = 0.0  # seconds of waiting

    @property
    def waited(self) -> float:
        """Seconds since the launch."""
        return world.now() - self.since


class Communicator:
    """Hold a process group, this rank, a time limit, and the monitor of the peers.

    Each reducer has one. The constructor starts nothing; `peers` is a mere
    `PeerMonitor` until the watchdog puts a heartbeat there.

    ``limit`` is in seconds; None: the backend's own timeout. With ``is_patient`` it
    applies only when ranks are gone or wait for each other: ranks that are busy
    elsewhere may take as long as the backend allows.
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
        self.peers = PeerMonitor()
        self.tally = Tally()
        self.is_late = False  # a wait takes longer than one slice
        self.operation: Operation | None = None  # the innermost one
        # No wait of the host can limit these.
        self._on_device: deque[InFlight] = deque()
        self._lock = threading.Lock()  # the watchdog's thread reads `_on_device` too
        self.reset(group)

    def reset(self, group: ProcessGroup) -> None:
        """Use ``group`` from now on; zero the counts; forget failure, running works.

        Waits for nothing. Does not move `peers` to the group's store.
        """
        self.has_failed = False
        self.tally.started = self.tally.launched = 0
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        has_limit = self.limit is not None and self.size > 1
        self._is_timed = has_limit and is_timed(group)
        # If one may wait on the host, another on a device, their own limit applies.
        is_device = has_limit and not self._is_timed and not is_mixed(group)
        self._is_on_device = is_device and torch.cuda.is_available()
        with self._lock:
            self._on_device.clear()

    @property
    def started(self) -> int:
        """Number of collectives that this rank has started since the last `reset`."""
        return self.tally.started

    @property
    def seconds(self) -> float:
        """The effective time limit: the smaller of `limit` and the group's timeout."""
        allowed = group_timeout(self.group).total_seconds()
        return allowed if self.limit is None else min(self.limit, allowed)

    @property
    def place(self) -> str:
        """Text of what the innermost `watching` block does now; "" outside of any."""
        operation = self.operation  # another thread may end it meanwhile
        return "" if operation is None else operation.place

    def tell_others(self, error: BaseException) -> None:
        """Make other ranks' waits for this rank raise, because of ``error``.

        Only queues its text (`PeerMonitor.give_up`); no-op without a heartbeat.
        """
        self.peers.give_up(f"{type(error).__name__}: {error}")

    def watching(self, doing: str, bucket: int | None = None) -> Operation:
        """Return a context whose `wait_for` calls are limited; it counts no collective.

        Its exceptions become a `CollectiveError` that names missing ranks, except for
        minidp's own. ``doing`` completes "A collective failed while ..."; ``bucket``:
        a bucket's number, to add to that.
        """
        return Operation(self, doing, bucket)

    def blocking(self, doing: str) -> Operation:
        """Count one collective as started now; return a `watching` context for it."""
        self.tally.started += 1
        return Operation(self, doing, None)

    def note_started(self, work: Work) -> None:
        """Count ``work``, just launched, as started; call this in a `watching` block.

        If the group is for CUDA only, with a limit, also list it: the watchdog ends the
        process when it is late.
        """
        self.tally.started += 1
        self.tally.launched += 1
        if self._is_on_device:
            self._oldest_on_device()
            launched = self._in_flight(work)
            with self._lock:
                self._on_device.append(launched)

    def _in_flight(self, work: Work) -> InFlight:
        """Wrap ``work`` as launched now, by the current `place`, under `limit`."""
        assert self.limit is not None
        now = world.now()
        return InFlight(work, self.place, self.started, now, self.limit)

    def _oldest_on_device(self) -> InFlight | None:
        """Return the oldest collective on CUDA that still runs, or None.

        Drops those that were launched before it, and are done, from the list.
        """
        with self._lock:
            while self._on_device and self._on_device[0].work.is_completed():
                self._on_device.popleft()
            return self._on_device[0] if self._on_device else None

    def find_late_on_device(self) -> InFlight | None:
        """Return the oldest running collective on CUDA if over its limit; else None.

        Always None unless the group is for CUDA only, and has a limit. Called by the
        watchdog's thread.
        """
        oldest = self._oldest_on_device()
        return oldest if oldest and oldest.waited > oldest.allowed else None

    def extend(self, late: InFlight) -> bool:
        """Let ``late`` wait a tenth of the limit longer if missing ranks are only busy.

        Return whether it may. Logs who is missing whenever the wait has doubled. False
        if a rank is gone, no missing rank is busy, not `is_patient`, or the backend's
        timeout is over. Asks the other ranks, which may take seconds.
        """
        waited = late.waited
        backends = group_timeout(self.group).total_seconds()
        if self.limit is None or not self.is_patient or waited > backends:
            return False
        absent = self.peers.report(late.started)
        if not absent.may_still_come:
            return False
        if not late.warned_at or waited > 2 * late.warned_at:
            late.warned_at = waited
            logger.warning(
                "[rank %d] Still %s, for %.0f s now. %s This goes on until the process "
                "group's own limit (%.0f s); pass hang_timeout=%g to make it an error.",
                self.rank,
                late.doing,
                waited,
                absent.text,
                backends,
                self.limit,
            )
        late.allowed = round(waited + self.limit / ASKS_AGAIN, 1)
        return True

    def wait(self, work: Work) -> Any:
        """Wait for a collective, at most until the time limit; return its result.

        Raises TimeoutError at the limit (which `extend` may move, if `is_patient`), or
        if another rank gave up; then the group is leaked, if ``work`` still runs.
        `watching` makes a `CollectiveError` of it. Only the backend's limit applies if
        `limit` is None, and to work without ``can_time_out`` unless `is_timed` (Gloo).
        """
        is_timed = self._is_timed or getattr(work, "can_time_out", False)
        with waiting():
            if self.limit is None or not is_timed:
                return work.wait()
            if is_done_within(work, FIRST_SLICE_SECONDS):
                return work.wait()
            _answer_questions()  # whoever has asked waits, and so do all others
            if is_done_within(work, SLICE_SECONDS - FIRST_SLICE_SECONDS):
                return work.wait()
            self.is_late = True
            try:
                return self._wait_long(self._in_flight(work))
            finally:
                self.is_late = False

    def _wait_long(self, late: InFlight) -> Any:
        """Go on waiting for ``late``, in slices, after a first one; return its result.

        TimeoutError at the limit, or if a peer is lost; the group is leaked then.
        """
        late.since -= SLICE_SECONDS
        _answer_questions()
        while not is_done_within(late.work, SLICE_SECONDS):
            _answer_questions()
            lost = self.peers.find_lost(self.started)
            if not lost and late.waited > late.allowed and not self.extend(late):
                lost = f"it did not finish within {late.allowed:g} s"
            if lost:
                keep_for_good(self.group, [late.work])
                raise TimeoutError(lost)
        return late.work.wait()


def _answer_questions() -> None:
    for each in [*answerers]:
        each.answer()


def is_done_within(work: Any, seconds: float) -> bool:
    """Wait up to ``seconds`` for ``work``; return whether it is done or failed.

    Does not raise its error, unless the work's own ``is_done_within`` does.
    """
    if hasattr(work, "is_done_within"):
        return bool(work.is_done_within(seconds))
    with suppress(RuntimeError):  # timed out or failed: see below
        work.wait(timedelta(seconds=seconds))
        return True
    return bool(work.is_completed())


class Operation:
    """A ``with`` block of `Communicator.watching` or `blocking`; made by them.

    Limits its waits, and raises errors that name missing ranks.
    """

    __slots__ = (
        *("_bucket", "_communicator", "_doing"),
        *("_mark", "_outer", "_outer_waiter"),
    )

    def __init__(
        self, communicator: Communicator, doing: str, bucket: int | None
    ) -> None:
        self._communicator = communicator
        self._doing = doing
        self._bucket = bucket
        self._outer: Operation | None = None
        self._outer_waiter: Any = None
        self._mark = waiting()

    @property
    def place(self) -> str:
        """Text of what this rank does in the block, with the bucket's number if any."""
        bucket = "" if self._bucket is None else f" of bucket {self._bucket}"
        return f"{self._doing}{bucket}"

    def __enter__(self) -> None:
        """Apply the communicator's time limit to `wait_for` calls of this thread.

        Become the communicator's `operation`: the heartbeat reports its `place` as what
        this rank does. No collective is counted or started. The thread counts as one
        that waits: a backend may make it wait already where it starts a collective.
        """
        self._mark.__enter__()
        owner = self._communicator
        self._outer, owner.operation = owner.operation, self
        self._outer_waiter, current_deadline.waiter = current_deadline.waiter, owner

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Turn an exception into a `CollectiveError`, unless it is minidp's own.

        The answer comes first in its text: who is missing, then what failed here.
        Any Exception sets the communicator's `has_failed`. May wait seconds to learn
        which ranks are missing; tells the others of a `CollectiveError`. The error of
        a comm hook's future is raised anew, with the missing ranks. Restores outer
        limits.
        """
        current_deadline.waiter = self._outer_waiter
        try:
            if isinstance(error, Exception):
                self._explain(error)
        finally:
            self._communicator.operation = self._outer
            self._mark.__exit__()

    def _explain(self, error: Exception) -> None:
        """Set `has_failed`; tell other ranks of, and raise, a CollectiveError.

        For minidp's own errors only set `has_failed` and return, but raise a failed
        hook future's anew, with the missing ranks. May wait seconds to learn these.
        """
        owner = self._communicator
        owner.has_failed = True  # other ranks may wait in vain
        of_hook = isinstance(error, CommHookError) and (
            isinstance(error.__cause__, TimeoutError)
            or "future that failed" in str(error)
        )
        if isinstance(error, MiniDPError) and not of_hook:
            return
        absent = owner.peers.report(owner.started).text
        if of_hook:
            raise type(error)(f"{error} {absent}".rstrip()) from error.__cause__
        text = str(error).rstrip(". \n")
        what = f"{absent} A collective failed while {self.place} ({text})."
        failure = CollectiveError(
            explain(
                owner.rank,
                what.lstrip(),
                expected=f"all {owner.size} ranks to take part in time",
                remedy="look for the rank that died, raised, took another branch, "
                "or ran out of inputs (see join()); then call reset() on all live "
                "ranks",
            )
        )
        owner.tell_others(failure)
        try:
            raise failure from None  # the text has all that the cause tells
        finally:
            del failure  # its traceback would keep this frame and gradients alive
