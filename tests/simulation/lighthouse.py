"""A simulated lighthouse: which replicas of torchft are in a quorum, and when.

The rules are those of torchft 0.2.0, as its lighthouse was seen to answer:

* Whoever asks is a candidate until a quorum has been made, even if it has stopped
  waiting. It counts if its heartbeat was heard within the heartbeat timeout. A
  manager's heart beats in a thread of its own, while the training computes.
* If all of the last quorum ask again, these and whoever else asks are the next one.
* Else there must be ``min_replicas``, and more than half of those whose hearts beat.
  Others who live are waited for until the join timeout.
* The number of the quorum changes with its members, and if the last vote of one of them
  was against its step.

It does not fail, and does not begin anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .network import Network
from .scheduler import Life, Message, Process, Scheduler, of_the_system
from .world import Event

TICK_SECONDS = 0.1  # after which the lighthouse looks again
GLANCE_SECONDS = 0.5  # after which who waits for a host looks again


@dataclass(frozen=True)
class Limits:
    """How many replicas torchft wants, and how many seconds it waits."""

    min_replicas: int = 1  # of the lighthouse
    min_replica_size: int = 1  # of the managers
    heartbeat: float = 5.0
    join: float = 60.0
    quorum: float = 60.0
    manager: float = 60.0  # for a state
    group: float = 60.0


@dataclass(eq=False)
class Request:
    """A replica that asks for a quorum, and the answer."""

    id: str
    step: int
    failures: int  # how many votes in a row were against the step
    process: Process
    answered: Event
    joined: float = 0.0
    quorum: Quorum | None = None


@dataclass(frozen=True)
class Quorum:
    """Who takes part."""

    number: int
    members: Sequence[Request]


@dataclass
class Cut:
    """When nothing passes between some processes and the lighthouse."""

    ranks: Sequence[int]
    since: float
    until: float


@dataclass(eq=False)
class Lighthouse:
    """Makes the quorums of a run.

    Args:
        scheduler, network: Those of the run.
        limits: How long it waits for whom.
    """

    scheduler: Scheduler
    network: Network
    limits: Limits
    hosts: dict[str, Host] = field(default_factory=dict)  # by id, also dead ones
    cuts: list[Cut] = field(default_factory=list)
    _asking: dict[str, Request] = field(default_factory=dict)
    _unanswered: list[Request] = field(default_factory=list)
    _last: Quorum = field(default_factory=lambda: Quorum(0, ()))
    _ticks: bool = False

    def __post_init__(self) -> None:
        self._process = Process(rank=len(self.network.processes))

    def cut_of(self, process: Process) -> Cut | None:
        """Return the cut behind which a process is now, if any."""
        now = self.scheduler.time
        for cut in self.cuts:
            if process.rank in cut.ranks and cut.since <= now < cut.until:
                return cut
        return None

    @property
    def are_all_heard(self) -> bool:
        """Whether no process is cut off now."""
        return all(cut.until <= self.scheduler.time for cut in self.cuts)

    def cut(self, ranks: Sequence[int], seconds: float) -> None:
        """Hear nothing of some processes from now on, and tell them nothing."""
        now = self.scheduler.time
        self.cuts.append(Cut(ranks, now, now + seconds))

    def mend(self) -> None:
        """Hear all processes again."""
        for cut in self.cuts:
            cut.until = min(cut.until, self.scheduler.time)

    def ask(self, request: Request) -> None:
        """Let a replica wait for a quorum from now on."""
        request.joined = self.scheduler.time
        self._asking[request.id] = request
        self._unanswered.append(request)
        self._look()
        if self._unanswered and not self._ticks:
            self._ticks = True
            self._send_tick()

    def forget(self, request: Request) -> None:
        """Answer a replica no longer. For the lighthouse it still takes part."""
        if request in self._unanswered:
            self._unanswered.remove(request)

    def _send_tick(self) -> None:
        time = self.scheduler.time + TICK_SECONDS
        tick = Message(self._process, self._tick, "", time)
        self.scheduler.send(tick)

    def _tick(self) -> None:
        self._unanswered = [
            each for each in self._unanswered if each.process.life is Life.LIVES
        ]
        self._look()
        self._ticks = bool(self._unanswered)
        if self._ticks:
            self._send_tick()

    def _look(self) -> None:
        """Make a quorum, if there may be one, and tell its members."""
        members = self._members()
        if members is None:
            return
        names = [each.id for each in members]
        is_same = names == [each.id for each in self._last.members]
        is_new = not is_same or any(each.failures for each in members)
        quorum = self._last = Quorum(self._last.number + is_new, members)
        self._asking.clear()
        unanswered, self._unanswered = self._unanswered, []
        for each in unanswered:
            if each.id in names:
                self._answer(each, quorum)
            else:  # it asks again
                each.joined = self.scheduler.time
                self._asking[each.id] = each
                self._unanswered.append(each)

    def _members(self) -> list[Request] | None:
        """Return who is in the next quorum, in the order of ids; None: not yet."""
        limits, now = self.limits, self.scheduler.time
        healthy = {
            name
            for name, host in self.hosts.items()
            if now - self._last_heartbeat(host.process) < limits.heartbeat
        }
        here = {name: each for name, each in self._asking.items() if name in healthy}
        members = [here[name] for name in sorted(here)]
        last = self._last.members
        if last and all(each.id in here for each in last):
            return members
        if len(here) < limits.min_replicas or len(here) <= len(healthy) // 2:
            return None
        waited = now - min((each.joined for each in members), default=now)
        return members if len(here) == len(healthy) or waited >= limits.join else None

    def _last_heartbeat(self, process: Process) -> float:
        """Return when the heart of a manager was heard, which beats in a thread."""
        cut = self.cut_of(process)
        now = self.scheduler.time
        times = [now] if cut is None else [cut.since]
        if process.life is not Life.LIVES or process.frozen_until > now:
            times.append(process.silent_since)
        return min(times)

    def _answer(self, request: Request, quorum: Quorum) -> None:
        process = request.process
        names = ", ".join(each.id for each in quorum.members)
        what = f"quorum {quorum.number} arrives: {names}"

        def deliver() -> None:
            if self.cut_of(process) is not None:
                later = self.scheduler.time + TICK_SECONDS
                self.scheduler.send(Message(process, deliver, "", later))
                return
            self.scheduler.note(what)
            request.quorum = quorum
            request.answered.set()

        time = self.network.arrival(process)
        self.scheduler.send(Message(process, deliver, "", time))


@dataclass(eq=False)
class Host:
    """A process of a replica, which the lighthouse and other replicas know by an id."""

    lighthouse: Lighthouse
    process: Process
    id: str

    def __post_init__(self) -> None:
        self.lighthouse.hosts[self.id] = self

    @of_the_system
    def reach(self, seconds: float, what: str, *, retries: bool = False) -> None:
        """Let another replica wait until this process can answer.

        It does at once, unless it is frozen or has ended.

        Args:
            seconds: How long to wait at most.
            what: What is asked for.
            retries: Whether to wait all this time for one that has ended, too.

        Raises:
            ConnectionError: The process has ended.
            TimeoutError: It has not answered in time.
        """
        network, process = self.lighthouse.network, self.process
        scheduler = network.scheduler
        scheduler.turn(what)
        deadline = scheduler.time + seconds
        while process.life is not Life.LIVES or process.frozen_until > scheduler.time:
            is_gone = process.life is Life.ENDED or not network.is_silent
            if process.life is not Life.LIVES and is_gone and not retries:
                raise ConnectionError(f"{what}: connection refused")
            left = deadline - scheduler.time
            if left <= 0:
                raise TimeoutError(f"{what}: no answer in {seconds:g} s")
            scheduler.block(min(left, GLANCE_SECONDS), what)
