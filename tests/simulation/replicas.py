"""Replicas of torchft: its own manager, on a simulated lighthouse and network.

All of torchft 0.2.0 that is Python runs here as it is: `Manager`, its works, its
optimizer, `ProcessGroupWrapper`. In the place of what is compiled, or waits on sockets,
they get what follows::

    Server       asks the `Lighthouse`, and says who brings whom up to date
    Transport    has a state, which another replica may fetch until this one votes
    Gloo         a group over the replicas of a quorum, connected anew for each quorum
    Executor     the thread that waits for a quorum
    Replica      the manager, with all of these

As there, each replica votes for itself alone; a state is read when it is fetched; a
replica whose source has voted waits for it until the manager's timeout; a store on a
dead host is tried until the group's; who leaves a group waits for what it has in flight
there; a message that comes too late ends the connections of whoever waited for it; and
when a replica dies, some of the others may have all that it sent, and some not.

Left out are replicas of several processes, spares, retries of a quorum, states that are
read while they change, groups that are connected for some replicas only, and what Gloo
does on the wire: a collective fails on a rank as a whole.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FunctionType, SimpleNamespace
from typing import Any

from torchft import Manager
from torchft.checkpointing._rwlock import RWLock
from torchft.manager import WorldSizeMode
from torchft.process_group import ProcessGroupWrapper

from .lighthouse import GLANCE_SECONDS, Host, Lighthouse, Quorum, Request
from .network import Group, Network, Wire
from .play import Rank
from .scheduler import Life, Process, Scheduler, Thread, of_the_system
from .world import Event


class Server(Host):
    """What is compiled of a manager, and what another manager asks of it."""

    def __init__(self, lighthouse: Lighthouse, process: Process, name: str) -> None:
        super().__init__(lighthouse, process, name)
        self.transport = Transport(self)

    @of_the_system
    def _quorum(
        self,
        *,
        step: int,
        timeout: timedelta,
        init_sync: bool,
        commit_failures: int,
        **_: Any,
    ) -> Any:
        lighthouse = self.lighthouse
        scheduler, seconds = lighthouse.scheduler, timeout.total_seconds()
        scheduler.turn(f"asks for a quorum of step {step}")
        deadline = scheduler.time + seconds
        while lighthouse.cut_of(self.process) is not None:
            left = deadline - scheduler.time
            if left <= 0:
                raise TimeoutError("lighthouse quorum timeout")
            scheduler.block(min(left, GLANCE_SECONDS), "the lighthouse")
        event = Event(scheduler)
        request = Request(self.id, step, commit_failures, self.process, event)
        lighthouse.ask(request)
        request.answered.wait(deadline - scheduler.time)
        if request.quorum is None:
            lighthouse.forget(request)
            raise TimeoutError("lighthouse quorum timeout")
        return self._part_in(request.quorum, init_sync=init_sync)

    def _part_in(self, quorum: Quorum, *, init_sync: bool) -> Any:
        """Return this replica's part in a quorum, and who brings whom up to date."""
        ids = [each.id for each in quorum.members]
        steps = [each.step for each in quorum.members]
        rank, most = ids.index(self.id), max(steps)
        first = [name for name, step in zip(ids, steps, strict=True) if step == most]
        # At step 0 all take the state of one, as they may have begun with any.
        has_state = first[:1] if init_sync and most == 0 else first
        healthy = [k for k, name in enumerate(ids) if name in has_state]
        behind = [k for k, name in enumerate(ids) if name not in has_state]
        sources = {k: healthy[i % len(healthy)] for i, k in enumerate(behind)}
        source = sources.get(rank)
        return SimpleNamespace(
            quorum_id=quorum.number,
            replica_rank=rank,
            replica_world_size=len(ids),
            recover_src_manager_address=None
            if source is None
            else self._of(ids[source]),
            recover_src_replica_rank=source,
            recover_dst_replica_ranks=[k for k in behind if sources[k] == rank],
            store_address=first[0],
            max_step=most,
            max_replica_rank=first.index(self.id) if self.id in first else None,
            max_world_size=len(first),
            heal=source is not None,
            replica_ids=ids,
        )

    def _of(self, name: str) -> Host:
        return self.lighthouse.hosts[name]

    def should_commit(
        self, _group_rank: int, step: int, vote: bool, timeout: Any
    ) -> bool:
        self.lighthouse.scheduler.turn(f"votes for step {step}: {vote}")
        return vote  # it is the only process of its replica


@dataclass
class _Client:
    """What asks the server of another replica."""

    server: Server
    connect_timeout: timedelta

    def _checkpoint_metadata(self, _rank: int, timeout: timedelta) -> Transport:
        seconds = min(timeout, self.connect_timeout).total_seconds()
        name = self.server.id
        self.server.reach(seconds, f"asks {name} where its state is")
        return self.server.transport


class Transport:
    """The state of a replica for others, which they read when they fetch it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._state: Any = None
        self._step = -1
        self._is_open = False
        self._waiters: list[Thread] = []

    def metadata(self) -> Transport:
        return self

    def send_checkpoint(
        self, *, dst_ranks: Sequence[int], step: int, state_dict: Any, timeout: Any
    ) -> None:
        self._state, self._step, self._is_open = state_dict, step, True
        self._server.lighthouse.scheduler.wake_all(self._waiters)

    def disallow_checkpoint(self) -> None:
        self._is_open = False

    @of_the_system
    def recv_checkpoint(
        self, *, src_rank: int, metadata: Transport, step: int, timeout: timedelta
    ) -> Any:
        return metadata._fetch(step, timeout.total_seconds())

    @of_the_system
    def _fetch(self, step: int, seconds: float) -> Any:
        lighthouse = self._server.lighthouse
        scheduler, what = lighthouse.scheduler, f"the state of {self._server.id}"
        deadline = scheduler.time + seconds
        while True:
            self._server.reach(deadline - scheduler.time, what)
            if self._is_open:
                break
            left = deadline - scheduler.time
            if left <= 0:
                raise TimeoutError(f"{what} did not come in {seconds:g} s")
            scheduler.block(min(left, GLANCE_SECONDS), what, self._waiters)
        if step != self._step:
            raise RuntimeError(f"{what} is of step {self._step}, not {step}")
        return copy.deepcopy(self._state)


class _Group(Group):
    """One replica's half of a group, which it can leave."""

    @of_the_system
    def abort(self) -> None:
        """Wait for what is in flight here, as Gloo does, and close all connections."""
        rank = self._process.rank
        for each in self._wire.launches[rank]:
            while not each.work.is_completed():
                with suppress(RuntimeError):
                    each.work.wait()
        self._wire.close(rank)


class _Wire(Wire):
    """A group over the replicas of a quorum, as the network has it."""

    def __init__(self, network: Network, name: str, timeout: float) -> None:
        super().__init__(network, name, [])
        self.timeout = timeout
        self.seats: dict[int, Process] = {}
        self.waiting: list[Thread] = []
        self.gave_up = False  # some replica has left before all had come

    def connect(self) -> None:
        """Let a group begin, to which all have come."""
        self.ranks = [self.seats[rank].rank for rank in range(len(self.seats))]
        self.launches = {rank: [] for rank in self.ranks}
        self.network.scheduler.wake_all(self.waiting)

    def note_timeout(self, rank: int) -> None:
        """Let a replica close its connections, as Gloo does after a timeout."""
        self.close(rank)

    def close(self, ended: int) -> None:
        """Let fail what needs a replica that has ended, perhaps also what is under way.

        One that dies in the middle of a message may have sent its part of it to some.
        """
        if ended in self.ended:
            return
        super().close(ended)
        for rank, rows in self.launches.items():
            for number, each in enumerate(rows):
                is_under_way = each.is_sent and not each.work.is_completed()
                if is_under_way and not self._can_come(number):
                    self._fail(self.network.processes[rank], each)


def _with(function: Any, **others: Any) -> Any:
    """Return a function of torchft that finds other things by these global names."""
    names = {**function.__globals__, **others}
    made = FunctionType(function.__code__, names, function.__name__)
    made.__kwdefaults__, made.__defaults__ = (
        function.__kwdefaults__,
        function.__defaults__,
    )
    return made


class Gloo(ProcessGroupWrapper):
    """torchft's group, which is connected again for each quorum."""

    def __init__(self, server: Server) -> None:
        lighthouse = server.lighthouse
        seconds = lighthouse.limits.group
        super().__init__(timeout=timedelta(seconds=seconds))
        self._server, self._lighthouse, self._seconds = server, lighthouse, seconds

    configure = _with(
        ProcessGroupWrapper.configure,
        create_store_client=lambda address, timeout: address,
    )

    @of_the_system
    def _create_pg(self, store: str, rank: int, world_size: int) -> Group:
        host = self._lighthouse.hosts[store.partition("/")[0]]
        what = f"the store of {host.id}"
        host.reach(self._seconds, what, retries=True)
        network = self._lighthouse.network
        wire: Any = network.wires.get(store)
        if wire is None:
            wire = network.wires[store] = _Wire(network, store, self._seconds)
        wire.seats[rank] = self._server.process
        lives = all(each.life is Life.LIVES for each in wire.seats.values())
        if len(wire.seats) == world_size and lives and not wire.gave_up:
            wire.connect()
        elif not network.scheduler.block(
            self._seconds, f"all of {store}", wire.waiting
        ):
            wire.gave_up = True
            raise RuntimeError(f"not all have come to {store} in {self._seconds:g} s")
        group = _Group(wire, self._server.process)
        network.groups.append(group)
        return group  # type: ignore[return-value]

    def getBackendName(self) -> str:
        return "torchft-gloo"


class _Future:
    """What a thread of an `Executor` will return."""

    def __init__(self, scheduler: Scheduler, call: Callable[[], Any]) -> None:
        self._call, self._done = call, Event(scheduler)
        self._value: Any = None
        self._error: Exception | None = None

    @of_the_system
    def run(self) -> None:
        try:
            self._value = self._call()
        except Exception as error:
            self._error = error
        self._done.set()

    @of_the_system
    def result(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value


class Executor:
    """Runs one call after the other, because a manager waits in between."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        self._scheduler, self._process = scheduler, process

    @of_the_system
    def submit(self, call: Callable[..., Any], **arguments: Any) -> _Future:
        future = _Future(self._scheduler, lambda: call(**arguments))
        Thread(self._scheduler, self._process, future.run, name="quorum").start()
        return future


class _ToAccount:
    """Tells in the account of a run what torchft logs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.info = lambda _text: None
        self.warn = self.exception = scheduler.note


class Replica(Manager):
    """torchft's manager, without its constructor, which makes servers and sockets.

    Args:
        ctx: The rank that makes it.
        lighthouse: The lighthouse that it asks.
        number: The number of the replica, at the end of its name.
        load, save: What `Manager` calls ``load_state_dict`` and ``state_dict``.
    """

    def __init__(
        self,
        ctx: Rank,
        lighthouse: Lighthouse,
        number: int,
        load: Callable[[Any], None],
        save: Callable[[], Any],
    ) -> None:
        scheduler, limits = lighthouse.scheduler, lighthouse.limits
        process = lighthouse.network.processes[ctx.rank]
        quiet = logging.getLogger("torchft")
        self.quorum_logger = self.commits_logger = self.errors_logger = quiet
        self._logger = _ToAccount(scheduler)
        self._load_state_dict_fns, self._user_state_dicts = {}, {}
        self._original_fr_dump_temp_file = None
        self._replica_id = f"train_{number}"
        self._state_dict_lock = RWLock(timeout=limits.manager)
        self.register_state_dict_fn("default", load, save)
        self._pending_state_dict, self._use_async_quorum = None, True
        self._timeout = self._connect_timeout = timedelta(seconds=limits.manager)
        self._quorum_timeout = timedelta(seconds=limits.quorum)
        self._replica_world_size_mode = WorldSizeMode.DYNAMIC
        self._init_sync, self._max_retries, self._commit_failures = True, None, 0
        self._group_rank, self._group_world_size = 0, 1
        self._min_replica_size = limits.min_replica_size
        self._executor, self._quorum_future = Executor(scheduler, process), None
        self._client = Server(lighthouse, process, f"{self._replica_id}:{ctx.rank}")
        self._checkpoint_transport = self._client.transport
        self._pg = Gloo(self._client)
        self._recovery_stream = self._recovery_event = None
        self._step, self._quorum_id, self._batches_committed = 0, -1, 0
        self._errored, self._healing = None, False
        self._participating_replica_rank = None
        self._participating_replica_world_size = 0

    _async_quorum = _with(Manager._async_quorum.__wrapped__, ManagerClient=_Client)

    def wrap_future(self, fut: Any, default: Any, timeout: Any = None) -> Any:
        """Return a future that has ended, without torchft's thread with timers."""
        return fut
