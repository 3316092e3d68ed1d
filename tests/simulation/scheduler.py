"""Let exactly one of many threads run, chosen by the tape at each seam.

Ranks are threads of this process, because a backward calls its hooks from C++, in the
thread that called it. Each thread has a baton, a lock that it waits for. Whoever runs
decides at its next seam who runs then, and hands the baton over. So no two threads ever
run at once, and all that happens follows from the tape.

Messages are no threads: whoever is at a seam when the tape chooses a message delivers
it, on behalf of the rank that gets it.

The clock stands still while somebody can run, but for a few microseconds per seam. When
everybody waits, it jumps to the next time at which somebody would wait no longer. If
there is none, nobody will ever run again, which is a `Deadlock`.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import CodeType
from typing import Any, TypeVar

from minidp.hang.rank_status import place_of

from .tape import Tape

SEAM_SECONDS = 2e-5  # how long a rank computes from one seam to the next
JUMP_SECONDS = 1.0  # by which the clock may go on although somebody can run
STUCK_SECONDS = 60.0  # of the real clock, until a thread that never comes to a seam
MAX_SEAMS = 100_000  # of one run
Function = TypeVar("Function", bound=Callable[..., Any])


def of_the_system(function: Function) -> Function:
    """Let a function look like a part of Python to whoever walks the stack.

    A hang report says in which line of the user's code a rank waits. It must not find
    the simulation there.
    """
    code: CodeType = function.__code__
    function.__code__ = code.replace(co_filename="<simulation>")  # type: ignore[attr-defined]
    return function


class Death(BaseException):
    """Ends the threads of a process that is no more. It is no Exception."""


class Finding(AssertionError):
    """Something happened that must never happen."""


class NotSimulatedError(NotImplementedError, AttributeError):
    """A script uses something that only real ranks have. That is no finding.

    It is an AttributeError, too, so that ``hasattr`` of a group is false.
    """


class Deadlock(Finding):
    """Nobody can run, and no wait will ever end."""


class Life(Enum):
    """What a simulated process can be."""

    LIVES = "lives"
    KILLED = "was killed"
    ENDED = "has ended"


class Style(Enum):
    """How a run chooses who goes on.

    Rare orders need a rank that is overtaken again and again. A uniform choice seldom
    brings that; priorities that change at few places do (Burckhardt and others, "A
    randomized scheduler with probabilistic guarantees of finding bugs", 2010).
    """

    GOES_ON = "whoever runs goes on, with rare exceptions"
    UNIFORM = "anybody"
    BY_PRIORITY = "the highest of random priorities, which change now and then"


@dataclass(eq=False)
class Process:
    """One rank: its threads, and what it has of everything that a process has once."""

    rank: int
    life: Life = Life.LIVES
    frozen_until: float = 0.0
    silent_since: float = 0.0  # when it ended, or was frozen the last time
    num_seams: int = 0
    clock_offset: float = 0.0
    threads: list[Thread] = field(default_factory=list)
    owned: dict[Any, Any] = field(default_factory=dict)
    at_exit: list[Callable[[], object]] = field(default_factory=list)
    torchs: Any = None  # its process groups, as torch knows them
    numbers: Any = None  # where its random generators are, while others run
    # Called at each seam of this process: faults strike here.
    on_seam: Callable[[Thread, str], None] | None = None


class Thread:
    """A thread of a simulated process, with the methods of `threading.Thread`."""

    def __init__(
        self,
        scheduler: Scheduler,
        process: Process,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        name: str = "thread",
        daemon: bool = False,
    ) -> None:
        self.process, self.name, self.daemon = process, name, daemon
        self.deadline: float | None = None  # of its wait, if it waits
        self.slow_until = 0.0
        self.waits = False
        self.waits_for = ""
        self.was_woken = False
        self.is_over = False
        self.error: BaseException | None = None
        self.priority = 0.0
        self.baton = threading.Lock()
        self.baton.acquire()
        self._scheduler, self._target, self._args = scheduler, target, args
        self._joiners: list[Thread] = []
        self._thread = threading.Thread(
            target=self._run, name=f"sim {name}", daemon=True
        )

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def start(self) -> None:
        """Let this thread run from now on, though not before the caller's next seam."""
        self._scheduler.add(self)
        self._thread.start()

    def is_alive(self) -> bool:
        return not self.is_over

    @of_the_system
    def join(self, timeout: float | None = None) -> None:
        if not self.is_over:
            self._scheduler.block(timeout, f"the end of {self.name}", self._joiners)

    @of_the_system
    def _run(self) -> None:
        self.baton.acquire()
        try:
            if self.process.life is Life.LIVES:
                self._target(*self._args)
        except Death:
            pass
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._scheduler.wake_all(self._joiners)
        self._target, self._args = None, ()  # type: ignore[assignment]
        self._scheduler.leave(self)

    def end(self) -> None:
        """Wait, on the real clock, for the end of a thread that is over."""
        if self._thread.ident is not None:
            self._thread.join(STUCK_SECONDS)


@dataclass(eq=False)
class Message:
    """Something that happens to a process from outside, at ``time`` or later."""

    process: Process
    deliver: Callable[[], None]
    what: str
    time: float = 0.0


class Scheduler:
    """Runs the threads of all processes, one at a time.

    Args:
        tape: Makes the choices.
        ranks: How many processes there are.
    """

    def __init__(self, tape: Tape, ranks: int) -> None:
        self.tape = tape
        self.time = 1000.0
        self.processes = [Process(rank) for rank in range(ranks)]
        self.threads: list[Thread] = []
        self._alive: list[Thread] = []  # those that are not over
        self.messages: list[Message] = []
        self.account: list[tuple[float, int, str, str]] = []
        self.num_seams = 0
        self.finding: BaseException | None = None
        self.is_over = False
        self.current: Thread = None  # type: ignore[assignment]
        # Gets the process whose threads run no longer, and that whose run now.
        self.on_switch: Callable[[Process | None, Process], None] | None = None
        self._acting: Process | None = None
        self._driver = threading.Lock()
        self._driver.acquire()
        self._style = [*Style][tape.choose(3)]
        self._change_in = 0
        self._jumps: list[tuple[float, float]] = []  # of the clock: see `busy_between`

    # -- who runs ----------------------------------------------------------------------

    @property
    def process(self) -> Process | None:
        """The process on whose behalf something happens now, or None outside."""
        if self._acting is not None:
            return self._acting
        if self.current is None or self.is_over:
            return None
        return self.current.process

    def busy_between(self, begin: float, end: float) -> float:
        """Return for how many seconds of that time the host let nobody run.

        Somebody could have run, so that these seconds count for no limit of a wait.
        """
        return sum(
            min(until, end) - max(since, begin)
            for since, until in self._jumps
            if since < end and until > begin
        )

    def note(self, text: str) -> None:
        """Add a line to the account of who did what, and when."""
        if self.is_over or self.current is None:
            return
        process = self.process
        assert process is not None
        where = "message" if self._acting else self.current.name
        self.account.append((self.time, process.rank, where, text))

    def add(self, thread: Thread) -> None:
        thread.process.threads.append(thread)
        self.threads.append(thread)
        self._alive.append(thread)
        if self._style is Style.BY_PRIORITY:
            thread.priority = 1.0 + self.tape.choose(1000)

    def run(self) -> None:
        """Run all threads to their ends, and raise what was found."""
        self._hand_over(self._next(None))
        seen = -1
        while not self._driver.acquire(timeout=STUCK_SECONDS):
            if self.num_seams == seen:
                raise self._stuck()
            seen = self.num_seams
        self.is_over = True
        for each in self.threads:
            each.end()
        if self.finding is not None:
            raise self.finding

    def found(self, text: str) -> Finding:
        """Return a finding to raise, with which the run ends, even if it is caught."""
        self.note(f"FOUND: {text}")
        finding = Finding(text)
        self.finding = self.finding or finding
        self.abandon()
        return finding

    def _stuck(self) -> Finding:
        """Return a finding about a thread that lets no other one run."""
        current = self.current
        where, _ = place_of(current.ident or 0)
        return Finding(
            f"rank {current.process.rank}, {current.name}, has been in "
            f"{where or 'no function'} for {STUCK_SECONDS:.0f} s of real time or "
            "longer. There it lets no other rank run"
        )

    def send(self, message: Message) -> None:
        self.messages.append(message)

    @of_the_system
    def turn(self, what: str) -> None:
        """Let the tape decide who goes on; the caller can go on at once.

        Args:
            what: What the caller is about to do, for the account.
        """
        if self._acting is not None or self.is_over:
            return  # whoever delivers a message does so in one go
        me = self.current
        self._arrive(me, what)
        self._switch(me)

    @of_the_system
    def block(
        self, seconds: float | None, what: str, waiters: list[Thread] | None = None
    ) -> bool:
        """Let others run until somebody wakes the caller, or its time is over.

        Args:
            seconds: How long to wait at most.
            what: What the caller waits for.
            waiters: Has the caller while it waits, for those who wake it.

        Returns:
            Whether it was woken.
        """
        if self._acting is not None:
            raise self.found(f"a callback of a message waits for {what}")
        me = self.current
        self._arrive(me, f"waits for {what}")
        me.waits, me.was_woken, me.waits_for = True, False, what
        me.deadline = None if seconds is None else self.time + max(0.0, seconds)
        if waiters is not None:
            waiters.append(me)
        try:
            self._switch(me)
        finally:
            if waiters is not None and me in waiters:
                waiters.remove(me)
        return me.was_woken

    def wake_all(self, waiters: list[Thread]) -> None:
        for each in waiters:
            self.wake(each)
        waiters.clear()

    def wake(self, thread: Thread) -> None:
        if thread.waits:
            thread.waits, thread.was_woken, thread.deadline = False, True, None

    def leave(self, thread: Thread) -> None:
        """End a thread, and hand the baton over for good."""
        self._alive.remove(thread)
        if thread.error is not None and self.finding is None:
            if isinstance(thread.error, Finding):
                self.finding = thread.error
            elif not isinstance(thread.error, (KeyboardInterrupt, SystemExit)):
                text = "".join(traceback.format_exception(thread.error))
                self.finding = Finding(
                    f"a thread of rank {thread.process.rank} raised\n{text}"
                )
            self.abandon()
        following = self._next(None)
        if following is None:
            self._driver.release()
        else:
            self._hand_over(following)

    def abandon(self) -> None:
        """End all processes, because something was found."""
        for each in self.processes:
            self.end(each, Life.KILLED)

    def end(self, process: Process, life: Life) -> None:
        """End a process: its threads get a `Death` wherever they are."""
        if process.life is Life.LIVES:
            process.life, process.silent_since = life, self.time
        process.frozen_until = 0.0
        for each in process.threads:
            each.waits, each.deadline, each.slow_until = False, None, 0.0
        self.messages = [each for each in self.messages if each.process is not process]

    # -- inside ------------------------------------------------------------------------

    @of_the_system
    def _arrive(self, me: Thread, what: str) -> None:
        process = me.process
        if process.life is not Life.LIVES:
            raise Death
        self.num_seams += 1
        process.num_seams += 1
        if self.num_seams > MAX_SEAMS:
            self.finding = self.finding or Finding(f"no end after {MAX_SEAMS} seams")
            self.abandon()
            raise Death
        self.time += SEAM_SECONDS
        self.account.append((self.time, process.rank, me.name, what))
        if process.on_seam is not None:
            process.on_seam(me, what)
            if process.life is not Life.LIVES:
                raise Death

    @of_the_system
    def _switch(self, me: Thread) -> None:
        following = self._next(me)
        if following is None:  # a deadlock: all are dead now
            following = me
        if following is not me:
            self._hand_over(following)
            if not me.baton.acquire(timeout=STUCK_SECONDS * 5):
                raise Finding("another thread never came to a seam")
        if me.process.life is not Life.LIVES:
            raise Death

    def _hand_over(self, thread: Thread | None) -> None:
        if thread is None:
            self._driver.release()
            return
        self.current = thread
        thread.baton.release()

    def _next(self, me: Thread | None) -> Thread | None:
        """Return the thread to run now; deliver messages that come before.

        It is None when all threads are over, or dead after a deadlock.
        """
        while True:
            can_run, arrived, later = self._possible()
            if not can_run and not arrived:
                if later < math.inf:
                    self.time = later
                elif not self._find_deadlock():
                    return None
                continue
            is_soon = later - self.time < JUMP_SECONDS
            if is_soon and self._style is not Style.GOES_ON and self.tape.is_rare(200):
                self._jumps.append((self.time, later))  # all who could run are slow
                self.time = later
                continue
            chosen = self._choose(me, can_run, arrived)
            if isinstance(chosen, Thread):
                chosen.waits, chosen.deadline = False, None
                before = None if self.current is None else self.current.process
                if self.on_switch is not None and before is not chosen.process:
                    self.on_switch(before, chosen.process)
                self.current = chosen
                return chosen
            self.messages.remove(chosen)
            self._deliver(chosen)

    def _possible(self) -> tuple[list[Thread], list[Message], float]:
        """Return who can run, what can arrive, and when something else can happen.

        It is called at each seam, and so it and the next one call nothing themselves.
        """
        can_run, first = self._threads_that_can()
        arrived, later = [], first
        for message in self.messages:
            until = message.time
            if message.process.frozen_until > until:
                until = message.process.frozen_until
            if until <= self.time:
                arrived.append(message)
            elif until < later:
                later = until
        return can_run, arrived, later

    def _threads_that_can(self) -> tuple[list[Thread], float]:
        """Return which threads can run, and when another one can."""
        can_run, later = [], math.inf
        for each in self._alive:
            until = each.deadline
            if until is None:
                if each.waits:
                    continue
                until = 0.0
            if each.slow_until > until:
                until = each.slow_until
            if each.process.frozen_until > until:
                until = each.process.frozen_until
            if until <= self.time:
                can_run.append(each)
            elif until < later:
                later = until
        return can_run, later

    def _choose(
        self, me: Thread | None, can_run: list[Thread], arrived: list[Message]
    ) -> Thread | Message:
        if me in can_run:
            can_run.remove(me)
            can_run.insert(0, me)
        everybody: list[Thread | Message] = [*can_run, *arrived]
        if len(everybody) == 1:
            return everybody[0]
        if self._style is Style.GOES_ON and not self.tape.is_rare(20):
            return everybody[0]
        if self._style is Style.BY_PRIORITY:
            return self._first(can_run, arrived)
        return everybody[self.tape.choose(len(everybody))]

    def _first(self, can_run: list[Thread], arrived: list[Message]) -> Thread | Message:
        if not can_run or (arrived and self.tape.is_rare(4)):
            return arrived[self.tape.choose(len(arrived))]
        first = max(can_run, key=lambda each: each.priority)
        self._change_in -= 1
        if self._change_in <= 0:
            first.priority = -float(self.num_seams)
            self._change_in = 1 + self.tape.choose(60)
        return first

    def _deliver(self, message: Message) -> None:
        self._acting = message.process
        try:
            if message.what:
                self.note(message.what)
            message.deliver()
        except Finding as finding:
            self.finding = self.finding or finding
            self._acting = None
            self.abandon()
        finally:
            self._acting = None

    def _find_deadlock(self) -> bool:
        """Note a deadlock, and end everybody. Return whether anybody was left."""
        left = [each for each in self.threads if not each.is_over]
        if not left:
            return False
        if any(each.process.life is Life.LIVES for each in left):
            lines = [
                f"rank {each.process.rank}, {each.name}: {each.waits_for}"
                for each in left
            ]
            self.finding = self.finding or Deadlock(
                "\n".join(["nobody can run", *lines])
            )
        self.abandon()
        return True
