"""Give the collectives of a process group a time limit, and explain their failures.

A backend lets a rank wait for 10 or 30 minutes, and then its error does not say for
whom. A `Communicator` waits in slices of half a second. After each slice it asks its
`PeerMonitor` whether some rank will never take part. At the limit, or when the backend
gives up, the error names the missing ranks.

A failure leaves the group unusable, because other ranks may still be inside the
collective that failed here. It is remembered until `reset`.

On a device the host does not wait for a collective: streams do. So the thread of the
watchdog (`minidp.hang`) looks at those that run, and lets a late one be given up. This
is noted here (`lose`), before the group is aborted, and `check` raises it in whatever
this rank does next.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch

from minidp import accelerator, world
from minidp.accelerator import After
from minidp.errors import CollectiveError, CommHookError, MiniDPError, explain

from .backends import (
    OF_COLLECTIVES,
    group_timeout,
    is_timed,
    may_come_from_collective,
)
from .endings import keep_for_good
from .groups import ProcessGroup
from .work import (
    FutureWork,
    Work,
    current_deadline,
    is_done_within,
    is_python_group,
    waiting,
)

logger = logging.getLogger("minidp")
_CPU = torch.device("cpu")
_POLL_SECONDS = 0.005
SLICE_SECONDS, FIRST_SLICE_SECONDS = 0.5, 0.05
STORE_SECONDS = 2.0  # time limit for a store's answer
ASKS_AGAIN = 10  # how often per time limit to ask whether missing ranks are busy
# The number of a collective that is not counted: every rank that gives up is missed.
_UNCOUNTED = sys.maxsize
_REMEDY = (
    "look for the rank that died, raised, took a different branch, or ran out of "
    "inputs (see join()); then call reset() on all live ranks"
)


class Question(Protocol):
    """Asks which ranks will not come to a meeting of all ranks.

    The thread of the watchdog fills the sets, from what the ranks publish.
    """

    stepped: set[int]  # ranks that have made the coming optimizer step already
    reducing: set[int]  # ranks that are in the next backward without it
    gone: set[int]  # ranks that are further, wait elsewhere, or have ended
    ahead: set[int]  # those of them that are further, or have ended: they never come

    def drop(self) -> None:
        """Forget the question: nobody waits for the answer any more."""


class Answerer(Protocol):
    """Answers other ranks' questions while this rank waits in a collective."""

    def answer(self) -> None:
        """Look for a question in the store, and post an answer, without waiting."""


# A rank that has a question makes the others wait for it in the next collective. Each
# slice of that wait asks these objects to look for the question.
answerers: world.PerProcess[WeakSet[Answerer]] = world.PerProcess(WeakSet)


class PeerReport(NamedTuple):
    """Who is missing from a collective, and whether they may still come."""

    text: str = ""  # sentences that name the missing ranks, for an error or a warning
    may_still_come: bool = False  # nobody is gone, and some are busy or have just come
    is_anyone_gone: bool = False  # a named one gave up, has ended or does not answer


class PeerMonitor:
    """What a `Communicator` knows about the other ranks: here, nothing.

    This base class serves where there is no limit, one rank, or no store. Otherwise the
    watchdog puts a heartbeat of `minidp.hang` in its place, which overrides all
    methods.
    """

    is_alone = False  # whether the other ranks are not known to have such a wrapper

    def find_lost(self, started: int) -> str:
        """Say why collective number ``started`` cannot finish, or "" if it may.

        It does not wait for any rank.
        """
        return ""

    def num_started_by_all(self) -> int | None:
        """Return after how many collectives the first rank gave up, or None.

        It does not wait for any rank.
        """
        return None

    def report(self, started: int) -> PeerReport:
        """Ask which ranks have not started collective number ``started``.

        The answers may take seconds.
        """
        return PeerReport()

    def give_up(self, why: str) -> None:
        """Let the other ranks' waits for this rank fail, because of ``why``.

        This rank must join no further collective. The alarm is only queued here.
        """

    def leave(self) -> None:
        """Tell the other ranks that this one joins another group.

        It must join no further collective of the present one, and `move_to` must
        follow. The alarm is only queued here.
        """

    def ask_who_passed(
        self, step: int, steps: int, *, may_answer: bool
    ) -> Question | None:
        """Ask which ranks cannot come to a meeting any more.

        The question is returned at once, and is answered later. It is None if one
        cannot ask.

        Args:
            step: The number of the backward after which the ranks meet.
            steps: After how many steps of optimizers they meet.
            may_answer: Whether ranks that have gone on may still come, because they
                answer (`answerers`). Then only those that wait elsewhere do not come.
        """
        return None

    def exchange_often(
        self, topic: str, rider: Callable[[dict[int, Any]], Any]
    ) -> Callable[[], None] | None:
        """Start to exchange values with the other ranks, four times a second.

        Args:
            topic: The name under which the values are posted.
            rider: A thread calls it, and posts what it returns, which must be plain
                data for JSON. Its argument has what each rank has posted last, by rank.
                On all ranks but 0 the argument is empty.

        Returns:
            A function that ends the exchange, or None if there is none.
        """
        return None

    def move_to(
        self,
        group: ProcessGroup,
        key: str,
        *,
        has_met: bool = True,
        leaves_word: bool = False,
    ) -> None:
        """Talk to the other ranks at another place of a store from now on.

        Here this does nothing.

        Args:
            group: The group whose store it is, perhaps another one than before.
            key: The place in it, which is equal on all ranks.
            has_met: Whether all ranks are known to have met.
            leaves_word: Whether ranks that are still at the old place, because they are
                in a collective that this one has finished, are told that it has moved.
        """


@dataclass(slots=True)
class Tally:
    """How many collectives a `Communicator` has started since its last `reset`.

    The heartbeat holds this object instead of the communicator, to keep that one from
    living on.
    """

    started: int = 0  # all collectives
    launched: int = 0  # asynchronous collectives
    stepped: int = 0  # those that were started when an optimizer last stepped
    has_reduced: bool = False  # whether one, ever, was not launched by a comm hook


@dataclass(slots=True, eq=False)
class InFlight:
    """A running collective, with what tells whether it is late."""

    work: Work | None  # None if `end` tells more
    doing: str  # what the rank was doing, for messages
    started: int  # how many collectives were started, this one included
    since: float  # when it was launched, on the clock of `world.now`
    allowed: float  # how many seconds it may take
    warned_at: float = 0.0  # how many seconds it had waited at the last warning
    device: torch.device | None = None  # where it runs, if not on the host
    end: After | None = None  # a moment of the device after it

    @property
    def waited(self) -> float:
        """How many seconds have passed since the launch."""
        return world.now() - self.since

    def ask_the_device(self) -> None:
        """Let `is_over` ask the device from now on, and not the work.

        A work says that it is completed as soon as its group is aborted, even if the
        device still runs it.
        """
        if self.end is None and self.work is not None and self.work.is_completed():
            return  # before the abort this is the truth
        if self.end is None and not isinstance(self.work, FutureWork):
            assert self.work is not None
            assert self.device is not None
            with accelerator.on_side_stream(self.device):
                self.work.get_future().wait()  # only the stream waits
                self.waited_for()

    def is_over(self) -> bool:
        """Return whether a collective on a device has ended. This waits for nothing.

        The future of a comm hook is done as soon as the hook has queued its kernels. So
        a stream of our own waits for what that future stands for, and is asked.
        """
        if self.end is None and isinstance(self.work, FutureWork):
            if not self.work.is_completed():
                return False
            assert self.device is not None
            try:
                with accelerator.on_side_stream(self.device):
                    self.work.future.wait()
                    self.waited_for()
            except Exception:  # the hook has failed, of which its waiter hears
                return True
        if self.end is not None:
            return self.end.has_come()
        return self.work is None or self.work.is_completed()

    def waited_for(self) -> None:
        """Look at the current stream from now on, which waits for the collective.

        The work itself is let go, because it keeps the memory of its tensors: after a
        rebuild that would be a second set of buckets.
        """
        assert self.device is not None
        self.end, self.work = After(self.device), None


class Communicator:
    """A process group, this rank, a time limit, and what is known about other ranks.

    Each reducer has one. The constructor starts nothing, and `peers` is a mere
    `PeerMonitor` until the watchdog puts a heartbeat there.

    Args:
        group: The process group.
        limit: How many seconds a collective may take. With None only the backend's own
            timeout counts.
        is_patient: Whether to apply the limit only if ranks are gone or wait for each
            other. Ranks that are busy elsewhere may then take as long as the backend
            allows.
        device: Where the tensors lie that travel. The backend of that device decides
            whether the host can wait for them. By default it is the CPU.
    """

    def __init__(
        self,
        group: ProcessGroup,
        limit: float | None = None,
        *,
        is_patient: bool = False,
        device: torch.device = _CPU,
    ) -> None:
        self.limit = limit
        self.device = device
        self.is_patient = is_patient
        self.peers = PeerMonitor()
        self.tally = Tally()
        self.is_late = False  # a wait takes longer than one slice
        self.operation: Operation | None = None  # the innermost one
        # No wait of the host can limit these.
        self._on_device: deque[InFlight] = deque()
        # The watchdog's thread reads `_on_device` too, and writes `lost`.
        self._lock = threading.Lock()
        self.reset(group)

    def reset(self, group: ProcessGroup) -> None:
        """Use another group from now on, and forget counts, failures and running works.

        It waits for nothing. `peers` is not moved to the store of the group.
        """
        self.has_failed = False
        self.lost = ""  # why collectives on a device were given up; "" if none was
        self._given_up: list[InFlight] = []  # of those, until the next reset
        self._num_kept = 0  # how many were started before the first of those
        self.tally.started = self.tally.launched = self.tally.stepped = 0
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        has_limit = self.limit is not None and self.size > 1
        self._is_timed = has_limit and is_timed(group, self.device)
        # What a group that is written in Python does, only itself knows.
        is_own = has_limit and not self._is_timed and not is_python_group(group)
        # Whether streams wait for collectives, and the host does not.
        self.is_on_device = is_own and accelerator.has_streams(self.device)
        with self._lock:
            self._on_device.clear()

    @property
    def started(self) -> int:
        """How many collectives this rank has started since the last `reset`."""
        return self.tally.started

    @property
    def answers_questions(self) -> bool:
        """Whether ranks that wait in collectives answer questions meanwhile.

        They do if they wait in slices (`answerers`): not on a device, and not without a
        limit.
        """
        return self.limit is not None and self._is_timed

    @property
    def _awaited(self) -> int:
        """The number of the collective for which this rank waits now."""
        operation = self.operation
        is_counted = operation is None or operation.is_counted
        return self.started if is_counted else _UNCOUNTED

    @property
    def seconds(self) -> float:
        """The limit that holds: the smaller of `limit` and the group's own timeout."""
        allowed = group_timeout(self.group).total_seconds()
        return allowed if self.limit is None else min(self.limit, allowed)

    @property
    def place(self) -> str:
        """What this rank does now, by the innermost `watching` block, or ""."""
        operation = self.operation  # another thread may end it meanwhile
        return "" if operation is None else operation.place

    @property
    def has_applied_lost(self) -> bool:
        """Whether parameters may hold an average that is incomplete.

        An aborted collective lets the device go on. If an optimizer step was queued
        behind it, that step has applied what was there of the averages.
        """
        return bool(self.lost) and self.tally.stepped > self._num_kept

    def would_apply_lost(self) -> bool:
        """Return `has_applied_lost` as it is if the group is left and aborted now."""
        with self._lock:
            running = (e.started for e in self._on_device if not e.is_over())
            first = min(running, default=self.tally.started + 1)
        return self.has_applied_lost or first <= self.tally.stepped

    def let_finish(self, seconds: float) -> None:
        """Wait a while until no collective runs on a device, unless one has failed."""
        deadline = world.now() + seconds
        while not self.has_failed and self._oldest_on_device() is not None:
            if world.now() > deadline:
                return
            world.sleep(_POLL_SECONDS)

    def tell_others(self, error: BaseException) -> None:
        """Let the other ranks' waits for this rank raise, because of this error."""
        self.peers.give_up(f"{type(error).__name__}: {error}")

    def note_step(self) -> None:
        """Note that an optimizer is about to apply what was averaged so far."""
        if not self.lost:
            self.tally.stepped = self.tally.started

    def watching(self, doing: str, bucket: int | None = None) -> Operation:
        """Return a context whose waits have the limit, and whose errors say for whom.

        An exception that a collective may have raised becomes a `CollectiveError`.

        Args:
            doing: Completes the sentence "A collective failed while ...".
            bucket: The number of a bucket, to add to that.
        """
        return Operation(self, doing, bucket)

    def blocking(self, doing: str) -> Operation:
        """Count a collective as started now, and return a `watching` context for it."""
        self.tally.started += not self.lost
        return Operation(self, doing, None)

    def beside(self, doing: str) -> Operation:
        """Return a `watching` context for a collective that is not to be counted.

        A layer's collective may come between other buckets on each rank, so its place
        in the count would not tell who takes part. It needs every rank, because the
        caller waits for it at once. So its wait ends as soon as any rank gives up.
        """
        return Operation(self, doing, None, is_counted=False)

    def note_started(self, work: Work, device: torch.device = _CPU) -> None:
        """Count a collective that was just launched, inside a `watching` block.

        No wait of the host can limit one that runs on a device. It is listed instead,
        for the watchdog. A collective that a graph captures does not run yet, and to
        ask for its end would end the capture. One of the hosts is waited for as on the
        CPU.

        Args:
            work: The collective.
            device: Where its tensors lie.
        """
        self.tally.has_reduced |= not isinstance(work, FutureWork)
        if not self.is_on_device or device.type == "cpu":
            self.tally.started += not self.lost
            self.tally.launched += not self.lost
            return
        is_capturing = accelerator.is_capturing(device)
        if not is_capturing:
            self._oldest_on_device()  # those that are over are dropped
        with self._lock:
            if self.lost:  # a moment ago: this one will not be completed either
                return
            self.tally.started += 1
            self.tally.launched += 1
            if is_capturing:
                self._on_device.clear()
            else:
                self._on_device.append(self._in_flight(work, device))

    def _wait_on_device(self, work: Work) -> Any:
        """Let the current stream wait for a collective, and let go of its tensors.

        The host may wait here, too: for a barrier, or if the group sends tensors of the
        CPU by another backend. So a work that is not listed yet is listed meanwhile.
        """
        if accelerator.is_capturing(self.device):
            return work.wait()
        with self._lock:
            found = [each for each in self._on_device if each.work is work]
            launched = found[0] if found else self._in_flight(work, self.device)
            if not found and not self.lost:
                self._on_device.append(launched)
        result = work.wait()
        # A future is done as soon as its kernels are queued, which says nothing here.
        is_over = not isinstance(work, FutureWork) and work.is_completed()
        with self._lock:
            if launched in self._on_device:
                if is_over:
                    self._on_device.remove(launched)
                else:
                    launched.waited_for()
        return result

    def _in_flight(self, work: Work, device: torch.device | None = None) -> InFlight:
        assert self.limit is not None
        now = world.now()
        place, started = self.place, self.started
        return InFlight(work, place, started, now, self.limit, device=device)

    def _oldest_on_device(self) -> InFlight | None:
        """Return the oldest collective that still runs on a device, or None."""
        with self._lock:
            while self._on_device and self._on_device[0].is_over():
                self._on_device.popleft()
            return self._on_device[0] if self._on_device else None

    def find_late_on_device(self) -> InFlight | None:
        """Return the oldest collective on a device if it is late, else None.

        It is late if it is over its limit, or if it takes long and another rank has
        given up.

        This is for the thread of the watchdog, which drops none of them. While another
        thread waits for a copy to the host (``loss.cpu()``), CUDA lets events be asked,
        but not freed, so this thread would wait, too.
        """
        with self._lock:
            launched = list(self._on_device)
        if not any(map(self._would_be_late, launched)):
            return None
        # The device first: else events of another one would take memory on device 0.
        with accelerator.selected(self.device):
            oldest = next((each for each in launched if not each.is_over()), None)
        return oldest if oldest is not None and self._would_be_late(oldest) else None

    def _would_be_late(self, launched: InFlight) -> bool:
        """Return whether a collective is late if it still runs."""
        if launched.waited > launched.allowed:
            return True
        return launched.waited > SLICE_SECONDS and self.is_hopeless(launched)

    def is_hopeless(self, late: InFlight) -> bool:
        """Return whether a rank has given up that a collective needs."""
        return bool(self.peers.find_lost(late.started))

    def explain_late(self, late: InFlight) -> str:
        """Return sentences that say who is missing in a late collective, and which.

        To ask the other ranks may take seconds.
        """
        why = self.peers.find_lost(late.started)
        why = why or f"it did not finish within {late.allowed:g} s"
        absent = self.peers.report(late.started).text
        what = f"A collective failed on the device: {late.doing} ({why})."
        return f"{absent} {what}".lstrip()

    def lose(self, why: str, late: InFlight | None = None) -> bool:
        """Note that what runs on the device is given up, and tell the other ranks.

        The caller aborts the group then. That lets the device go on with incomplete
        averages, so `check` has to raise before this rank uses them. Collectives that
        are given up do not count as started any more. Another thread may call this.

        Args:
            why: Sentences for the error.
            late: Why it is done: nothing happens if this one has ended meanwhile, or
                `reset` was called. By default it is done in any case.

        Returns:
            Whether it was done.
        """
        with self._lock:
            if late is not None and (late not in self._on_device or late.is_over()):
                return False
            if not self.lost:
                running = (e.started for e in self._on_device if not e.is_over())
                self._num_kept = min(running, default=self.tally.started + 1) - 1
                self.tally.started = self._num_kept
                self.lost, self.has_failed = why, True
            # To free their events now might wait for them: see `find_late_on_device`.
            self._given_up += self._on_device
            self._on_device.clear()
        self.tell_others(self._error_of_lost())
        return True

    def refuse_in_vain(self) -> None:
        """Raise if the next collective would be launched in vain, on a device.

        There this rank would go on as if it had averages, until the collective is late.

        Raises:
            TimeoutError: A rank has given up. A `watching` block makes a
                `CollectiveError` of this.
        """
        if self.is_on_device and (why := self.peers.find_lost(self.started + 1)):
            raise TimeoutError(why)

    def check(self) -> None:
        """Raise if collectives on a device were given up.

        Raises:
            CollectiveError: They were. The text says who is missing.
        """
        if self.lost:
            raise self._error_of_lost()

    def failure(self, what: str) -> CollectiveError:
        """Return the error of a collective that has failed, to be raised now.

        On a device it means that averages are incomplete, which `lost` keeps. Without
        an alarm nobody knows since when.

        Args:
            what: Sentences that say who is missing and what failed.
        """
        with self._lock:
            if self.is_on_device and not self.lost:
                told = self.peers.num_started_by_all()
                self._num_kept = 0 if told is None else min(told, self.started)
                self.lost = what
        return self._error_of(what)

    def _error_of_lost(self) -> CollectiveError:
        return self._error_of(self.lost)

    def _error_of(self, what: str) -> CollectiveError:
        remedy = _REMEDY
        if self.has_applied_lost:
            what += (
                " An optimizer step was queued behind it: the parameters of this rank "
                "may hold an incomplete average."
            )
            remedy += (
                "; then load a checkpoint of model and optimizers on all ranks, or let "
                "reset(copy_from=...) copy a rank whose error does not say this"
            )
        expected = f"all {self.size} ranks to take part in time"
        return CollectiveError(
            explain(self.rank, what, expected=expected, remedy=remedy)
        )

    def extend(self, late: InFlight) -> bool:
        """Let a collective wait longer if the missing ranks are only busy.

        It gets another tenth of the limit. The log says who is missing whenever the
        wait has doubled. To ask the other ranks may take seconds.

        Returns:
            Whether it may wait longer. It may not if a rank is gone, if no missing rank
            is busy, if this communicator is not patient, or if the backend's timeout is
            over.
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
        """Wait for a collective, at most until the limit, and return its result.

        Only the backend's own timeout counts if there is no limit, or if neither the
        group nor this work can be waited for in slices.

        Raises:
            TimeoutError: The limit is over, and `extend` does not move it, or another
                rank has given up. The group is kept for good if the work still runs. A
                `watching` block makes a `CollectiveError` of this.
            RuntimeError: The collective has failed, whatever it raises: a future of the
                user, or a group written in Python, may raise anything.
        """
        is_timed = self._is_timed or getattr(work, "can_time_out", False)
        try:
            with waiting():
                if self.limit is None or not is_timed:
                    on_device = self.is_on_device
                    return self._wait_on_device(work) if on_device else work.wait()
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
        except OF_COLLECTIVES:
            raise
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def _wait_long(self, late: InFlight) -> Any:
        """Go on waiting after a first slice, and return the result."""
        work = late.work
        assert work is not None
        late.since -= SLICE_SECONDS
        _answer_questions()
        while not is_done_within(work, SLICE_SECONDS):
            _answer_questions()
            if self.lost:  # the watchdog has given up what this rank needs, too
                keep_for_good(self.group, [work])
                self.check()
            lost = self.peers.find_lost(self._awaited)
            if not lost and late.waited > late.allowed and not self.extend(late):
                lost = f"it did not finish within {late.allowed:g} s"
            if lost:
                keep_for_good(self.group, [work])
                raise TimeoutError(lost)
        return work.wait()


def _answer_questions() -> None:
    for each in [*answerers()]:
        each.answer()


class Operation:
    """The ``with`` block of `Communicator.watching`, `blocking` and `beside`."""

    __slots__ = (
        *("_bucket", "_communicator", "_doing"),
        *("_mark", "_outer", "_outer_waiter"),
        "is_counted",
    )

    def __init__(
        self,
        communicator: Communicator,
        doing: str,
        bucket: int | None,
        *,
        is_counted: bool = True,
    ) -> None:
        self.is_counted = is_counted  # whether `started` counts its collectives
        self._communicator = communicator
        self._doing = doing
        self._bucket = bucket
        self._outer: Operation | None = None
        self._outer_waiter: Any = None
        self._mark = waiting()

    @property
    def place(self) -> str:
        """What this rank does in the block, with the number of the bucket if any."""
        bucket = "" if self._bucket is None else f" of bucket {self._bucket}"
        return f"{self._doing}{bucket}"

    def __enter__(self) -> None:
        """Apply the communicator's limit to the waits of this thread.

        The heartbeat reports `place` as what this rank does. The thread counts as one
        that waits, because a backend may let it wait already where it starts a
        collective.

        Raises:
            CollectiveError: An earlier collective was given up on a device.
        """
        owner = self._communicator
        if owner.lost:
            owner.check()
        self._mark.__enter__()
        self._outer, owner.operation = owner.operation, self
        self._outer_waiter, current_deadline.waiter = current_deadline.waiter, owner

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Turn what a collective may have raised into a `CollectiveError`.

        The text begins with the answer: who is missing, and then what failed here. To
        learn it may take seconds. Errors of minidp pass as they are, and so do mistakes
        of a program, such as a TypeError. Any exception marks the communicator as
        failed.
        """
        current_deadline.waiter = self._outer_waiter
        try:
            if isinstance(error, Exception):
                self._explain(error)
            elif error is None and self._communicator.lost:
                self._communicator.check()  # what came is incomplete
        finally:
            self._communicator.operation = self._outer
            self._mark.__exit__()

    def _explain(self, error: Exception) -> None:
        """Raise a CollectiveError for this error, and tell the other ranks of it.

        Minidp's own errors are left alone, but for that of a comm hook in which a
        collective may have failed: it is raised anew with the names of missing ranks.
        The other ranks are told of a mistake of the program, too, but this rank need
        not ask who is missing.
        """
        owner = self._communicator
        owner.has_failed = True  # other ranks may wait in vain
        if owner.lost:  # this thread came free because of that
            raise owner._error_of_lost() from None
        of_hook = isinstance(error, CommHookError) and may_come_from_collective(
            error.__cause__
        )
        if isinstance(error, MiniDPError) and not of_hook:
            return
        if not isinstance(error, OF_COLLECTIVES):
            owner.tell_others(error)
            return
        report = owner.peers.report(owner._awaited)
        absent = report.text
        if of_hook:
            speaker = f"[rank {owner.rank}] "
            what = str(error).removeprefix(speaker)
            # A rank that is gone is the cause, and comes first: others repeat only the
            # beginning of this error. One that runs may just be slower than this one,
            # in whose hook is a mistake.
            if report.is_anyone_gone:
                what = f"{absent} {what}"
            elif absent:
                what = f"{what} If the hook itself is right: {absent}"
            raise type(error)(speaker + what) from error.__cause__
        text = str(error).rstrip(". \n")
        what = f"{absent} A collective failed while {self.place} ({text})."
        failure = owner.failure(what.lstrip())
        owner.tell_others(failure)
        try:
            raise failure from None  # the text has all that the cause tells
        finally:
            del failure  # its traceback would keep this frame and gradients alive
