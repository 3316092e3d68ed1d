"""Simulated process groups, which to minidp are Gloo's.

The n-th collective of each rank in a group belongs to the n-th of all others, as with
Gloo. When all ranks that a result needs have started theirs, it is ready, and the tape
says when it arrives at each rank. What a rank sends is what its tensors held at the
launch; if somebody has written to them before the result arrives, that is a `Finding`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from minidp.comm import endings

from .lines import line_here
from .scheduler import (
    Finding,
    Life,
    Message,
    NotSimulatedError,
    Process,
    Scheduler,
    Thread,
    of_the_system,
)
from .store import MARK

CLOSED = "Connection closed by peer"


class Work:
    """A collective in flight on one rank, with the methods of torch's ``Work``."""

    def __init__(
        self,
        scheduler: Scheduler,
        what: str,
        outputs: Any,
        timeout: float,
        on_timeout: Callable[[], None],
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        self.what = what
        self._deadline = scheduler.time + timeout  # of the backend
        self._on_timeout, self._call = on_timeout, call
        self._scheduler, self._outputs = scheduler, outputs
        self._waiters: list[Thread] = []
        self._future: torch.futures.Future[Any] | None = None
        self._is_done = False
        self._error: str | None = None

    def finish(self, error: str | None = None) -> None:
        """Note that the collective is done, or why it has failed; once."""
        if self._is_done:
            return
        self._is_done, self._error = True, error
        self._scheduler.wake_all(self._waiters)
        if self._future is not None:
            self._call(self._set_future)

    def _set_future(self) -> None:
        assert self._future is not None
        if self._error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(RuntimeError(self._error))

    def is_completed(self) -> bool:
        return self._is_done

    def is_success(self) -> bool:
        return self._is_done and self._error is None

    @of_the_system
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        scheduler = self._scheduler
        if scheduler.is_over:
            raise RuntimeError("the simulation is over")
        left = self._deadline - scheduler.time
        # Torch counts in whole milliseconds, and to it 0 of them are no limit.
        milliseconds = timeout // timedelta(milliseconds=1)
        seconds = min(milliseconds / 1000 or left, left)
        scheduler.turn(f"wait for {self.what}")
        if not self._is_done:
            scheduler.block(seconds, self.what, self._waiters)
        if not self._is_done and scheduler.time >= self._deadline:
            self.finish("Timed out waiting for recv operation to complete")
            self._on_timeout()
        if not self._is_done:
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise RuntimeError(self._error)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._future = Future(self)
            if self._is_done:
                self._set_future()
        return self._future


class Future(torch.futures.Future[Any]):
    """The future of a `Work`. Who waits for it lets others run meanwhile."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    @of_the_system
    def wait(self) -> Any:
        with suppress(RuntimeError):  # the future has it, too
            self._work.wait()
        return super().wait()


class Launch:
    """One rank's part of a collective."""

    def __init__(
        self,
        kind: str,
        inputs: Sequence[torch.Tensor],
        work: Work,
        write: Callable[[list[Launch]], None],
        *,
        root: int | None = None,
        shape: object = None,
    ) -> None:
        self.kind, self.inputs, self.work, self.write = kind, inputs, work, write
        self.root = root
        self.size = shape
        self.sent = [each.detach().clone() for each in inputs]
        self.shape = (kind, root, shape)
        self.is_sent = False  # whether a message with the result is on its way

    def __str__(self) -> str:
        root = "" if self.root is None else f" from rank {self.root}"
        size = self.size
        if isinstance(size, tuple):
            size = f"{size[1]} elements, {size[0]}"
        return f"{self.kind}{root}" + (f" ({size})" if size else "")

    def check_untouched(self) -> None:
        for now, then in zip(self.inputs, self.sent, strict=True):
            if not torch.equal(_bytes(now), _bytes(then)):
                raise Finding(
                    f"somebody wrote to a tensor of {self.work.what} in flight"
                )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class Wire:
    """A group as the network has it: the collectives of all of its ranks."""

    def __init__(self, network: Network, name: str, ranks: Sequence[int]) -> None:
        self.network, self.name, self.ranks = network, name, list(ranks)
        self.timeout = network.timeout
        self.launches: dict[int, list[Launch]] = {rank: [] for rank in ranks}
        self.ended: list[int] = []  # ranks that are gone, and their connections

    def launch(self, rank: int, launch: Launch) -> None:
        mine = self.launches[rank]
        mine.append(launch)
        number = len(mine) - 1
        process = self.network.processes[rank]
        if not self._can_come(number):
            self._fail(process, launch)
            return
        rows_of = self.launches.items()
        here = {r: rows[number] for r, rows in rows_of if len(rows) > number}
        for r, each in here.items():
            if each.shape != launch.shape:
                raise self.network.scheduler.found(
                    f"collective {number} in {self.name} is {launch} on rank {rank}, "
                    f"and it is matched with {each} on rank {r}"
                )
        root = launch.root
        all_here = len(here) == len(self.ranks)
        for r, rows in self.launches.items():
            if len(rows) <= number or rows[number].is_sent:
                continue
            has_root = root is not None and len(self.launches[root]) > number
            if all_here or (has_root and r != root):
                rows[number].is_sent = True
                self._send(self.network.processes[r], rows[number], number)

    def _send(self, process: Process, launch: Launch, number: int) -> None:
        rows = self.launches.values()
        parts = [each[number] if len(each) > number else None for each in rows]

        def deliver() -> None:
            if launch.work.is_completed():
                return
            launch.check_untouched()
            with torch.no_grad():
                launch.write(parts)  # type: ignore[arg-type]
            launch.work.finish()

        what = f"result of {launch.work.what} arrives"
        time = self.network.arrival(process)
        self.network.scheduler.send(Message(process, deliver, what, time))

    def _fail(self, process: Process, launch: Launch) -> None:
        what = f"{launch.work.what} fails"
        time = self.network.arrival(process)
        finish = launch.work.finish
        message = Message(process, lambda: finish(CLOSED), what, time)
        self.network.scheduler.send(message)

    def _can_come(self, number: int) -> bool:
        """Return whether all ranks that have ended had done their part of this.

        Who has got what a root broadcasts may end, and others still get theirs.
        """
        return all(
            len(self.launches[rank]) > number
            and self.launches[rank][number].work.is_success()
            for rank in self.ended
        )

    def note_timeout(self, rank: int) -> None:
        """Hear of a collective that has not ended in time."""

    def close(self, ended: int) -> None:
        """Let what needs a rank that has ended fail, unless it is on its way."""
        self.ended.append(ended)
        for rank, rows in self.launches.items():
            process = self.network.processes[rank]
            if process.life is not Life.LIVES:
                continue
            for number, each in enumerate(rows):
                is_open = not each.work.is_completed() and not each.is_sent
                if is_open and not self._can_come(number):
                    self._fail(process, each)


class Network:
    """All groups of a simulated run."""

    def __init__(self, scheduler: Scheduler, timeout: float) -> None:
        self.scheduler, self.processes = scheduler, scheduler.processes
        self.timeout = timeout  # of the groups
        self.wires: dict[str, Wire] = {}
        self._waiting: dict[str, list[Thread]] = {}
        self.delays: dict[int, float] = {}  # of the next message to a rank
        self.is_silent = False  # whether connections of ranks that have ended stay open
        self.is_users = False  # callbacks may wait, and the account tells lines of code
        self.groups: list[Group] = []

    def arrival(self, process: Process) -> float:
        return self.scheduler.time + self.delays.pop(process.rank, 0.0)

    @of_the_system
    def join(self, name: str, ranks: int, *, is_listed: bool) -> Group:
        """Return this rank's half of a group, when all of its ranks have come."""
        scheduler = self.scheduler
        scheduler.turn(f"connects to {name}")
        process = scheduler.process
        assert process is not None
        if name not in self.wires:
            self.wires[name] = Wire(self, name, [])
        wire = self.wires[name]
        wire.ranks.append(process.rank)
        wire.launches[process.rank] = []
        waiting = self._waiting.setdefault(name, [])
        if len(wire.ranks) == ranks:
            wire.ranks.sort()
            wire.launches = {rank: wire.launches[rank] for rank in wire.ranks}
            scheduler.wake_all(waiting)
        else:
            if not scheduler.block(self.timeout, f"all ranks of {name}", waiting):
                raise RuntimeError("Timed out waiting for a connection")
        return self._group(wire, process, is_listed=is_listed)

    def _group(self, wire: Wire, process: Process, *, is_listed: bool) -> Group:
        group = Group(wire, process)
        self.groups.append(group)
        if is_listed:
            torchs = process.torchs
            store = torchs.pg_map[torchs.default_pg][1] if torchs.default_pg else None
            torchs.pg_map[group] = ("gloo", store)
            torchs.pg_names[group] = wire.name
            torchs.pg_to_tag[group] = None
            torchs.pg_backend_config[group] = "cpu:gloo"
            torchs.pg_group_ranks[group] = {r: i for i, r in enumerate(wire.ranks)}
        return group

    def start(self, stores: Sequence[Any]) -> None:
        """Give each rank a default group, and its store, as before a run begins."""
        wire = self.wires["default"] = Wire(self, "default", range(len(stores)))
        for process, store in zip(self.processes, stores, strict=True):
            group = self._group(wire, process, is_listed=True)
            process.torchs.default_pg = group
            process.torchs.pg_map[group] = ("gloo", store)

    @of_the_system
    def finish(self, process: Process) -> None:
        """Wait for what a process has in flight, as the end of a Gloo group does.

        Groups that `minidp.comm.keep_for_good` has leaked are not waited for.
        """
        leaked = [group for group, _ in process.owned.get(endings._leaked, ())]
        for group in self.groups:
            if group._process is not process or group in leaked:
                continue
            for each in group._wire.launches[process.rank]:
                while not each.work.is_completed():
                    with suppress(RuntimeError):
                        each.work.wait()

    def call(self, process: Process, callback: Callable[[], None]) -> None:
        """Call what a process has asked for when a message comes.

        Callbacks of minidp wait for nothing. Those of a user may, so that they get the
        thread that Gloo has for them.
        """
        if self.is_users and not self.scheduler.is_over:
            Thread(self.scheduler, process, callback, name="gloo").start()
        else:
            callback()

    def note_end(self, process: Process) -> None:
        """Close the connections of a process that has ended, unless nobody hears it."""
        if self.is_silent and process.life is Life.KILLED:
            return
        for wire in self.wires.values():
            if process.rank in wire.launches:
                wire.close(process.rank)

    def clear(self) -> None:
        """Let go of everything, because minidp leaks groups whose works still run."""
        for each in self.groups:
            vars(each).clear()


class _Options:
    def __init__(self, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)


class _Backend:
    def __init__(self, timeout: float) -> None:
        self.options = _Options(timeout)

    def abort(self) -> None:
        raise RuntimeError("no abort")


class Group:
    """One rank's half of a group, with the methods of torch's ``ProcessGroup``.

    It says that it is one, because torch and minidp ask for that.
    """

    __class__: Any = dist.ProcessGroup
    bound_device_id = None

    def __init__(self, wire: Wire, process: Process) -> None:
        self._wire, self._process = wire, process
        self._backend = _Backend(wire.timeout)
        self._device_types = [torch.device("cpu")]
        self.group_name = self.group_desc = wire.name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(dist.ProcessGroup, name):
            raise AttributeError(name)
        raise NotSimulatedError(f"{name}() of a process group is not simulated")

    def rank(self) -> int:
        return self._wire.ranks.index(self._process.rank)

    def size(self) -> int:
        return len(self._wire.ranks)

    def name(self) -> str:
        return "gloo"

    def _get_backend(self, _device: torch.device) -> _Backend:
        return self._backend

    @of_the_system
    def _launch(
        self,
        kind: str,
        inputs: Sequence[torch.Tensor],
        outputs: Any,
        write: Callable[[list[Launch]], None],
        *,
        root: int | None = None,
        shape: object = None,
    ) -> Work:
        scheduler = self._wire.network.scheduler
        number = len(self._wire.launches[self._process.rank])
        what = f"{kind} {number} in {MARK.sub('~', self.group_name)[-30:]}"
        wire, rank = self._wire, self._process.rank
        where = _users_line(scheduler) if wire.network.is_users else ""
        scheduler.turn(f"starts {what}{where}")
        on_timeout = functools.partial(wire.note_timeout, rank)
        call = functools.partial(wire.network.call, self._process)
        work = Work(scheduler, what, outputs, wire.timeout, on_timeout, call)
        launch = Launch(kind, inputs, work, write, root=root, shape=shape)
        wire.launch(rank, launch)
        return work

    @of_the_system
    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Work:
        (mine,) = tensors
        op = dist.ReduceOp.SUM if options is None else options.reduceOp
        if mine.is_sparse:
            raise NotImplementedError
        add = _reduction(op)

        def write(parts: list[Launch]) -> None:
            mine.detach().copy_(add(parts))

        shape = (mine.dtype, mine.numel())
        return self._launch("allreduce", tensors, tensors, write, shape=shape)

    @of_the_system
    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        (mine,) = tensors
        index = options.rootRank
        root = self._wire.ranks[index]

        def write(parts: list[Launch]) -> None:
            mine.detach().copy_(parts[index].sent[0])

        shape = (mine.dtype, mine.numel())
        return self._launch(
            "broadcast", tensors, tensors, write, root=root, shape=shape
        )

    @of_the_system
    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        _options: Any = None,
    ) -> Work:
        def write(parts: list[Launch]) -> None:
            for row, part in zip(outputs[0], parts, strict=True):
                row.copy_(part.sent[0])

        shape = (inputs[0].dtype, inputs[0].numel())
        return self._launch("allgather", inputs, outputs, write, shape=shape)

    @of_the_system
    def _allgather_base(
        self, output: torch.Tensor, mine: torch.Tensor, _options: Any = None
    ) -> Work:
        rows = output.view(self.size(), mine.numel())
        return self.allgather([list(rows.unbind())], [mine.view(-1)])

    all_gather_single = _allgather_base  # as torch 2.13 calls it

    # Only a user calls the next three. Real ranks without a result may go on at once.
    @of_the_system
    def reduce(self, tensors: list[torch.Tensor], options: Any) -> Work:
        (mine,), add = tensors, _reduction(options.reduceOp)

        def write(parts: list[Launch]) -> None:
            if self.rank() == options.rootRank:
                mine.detach().copy_(add(parts))

        shape = (mine.dtype, mine.numel())
        return self._launch(
            f"reduce to {options.rootRank}", tensors, tensors, write, shape=shape
        )

    @of_the_system
    def gather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        options: Any,
    ) -> Work:
        def write(parts: list[Launch]) -> None:
            for rows in outputs:
                for row, part in zip(rows, parts, strict=True):
                    row.copy_(part.sent[0])

        shape = (inputs[0].dtype, inputs[0].numel())
        return self._launch(
            f"gather to {options.rootRank}", inputs, outputs, write, shape=shape
        )

    @of_the_system
    def scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        options: Any,
    ) -> Work:
        (mine,), me = outputs, self.rank()
        root = self._wire.ranks[options.rootRank]

        def write(parts: list[Launch]) -> None:
            mine.copy_(parts[options.rootRank].sent[me])

        sent = [each for row in inputs for each in row]
        shape = (mine.dtype, mine.numel())
        return self._launch("scatter", sent, outputs, write, root=root, shape=shape)

    @of_the_system
    def alltoall_base(
        self,
        output: torch.Tensor,
        mine: torch.Tensor,
        to_get: list[int],
        to_send: list[int],
        _options: Any = None,
    ) -> Work:
        me, size = self.rank(), self.size()
        to_send = list(to_send) or [len(mine) // size] * size

        def write(parts: list[Launch]) -> None:
            pieces = [each.sent[0].split(each.to_send)[me] for each in parts]  # type: ignore[attr-defined]
            torch.cat(pieces, out=output.detach())

        work = self._launch("alltoall", [mine], [output], write, shape=mine.dtype)
        self._wire.launches[self._process.rank][-1].to_send = to_send  # type: ignore[attr-defined]
        return work

    all_to_all_single = alltoall_base  # as torch 2.13 calls it

    @of_the_system
    def barrier(self, opts: Any = None) -> Work:
        return self._launch("barrier", [], [], lambda _parts: None)

    def monitored_barrier(self, *_args: Any, **_kwargs: Any) -> None:
        self.barrier().wait()

    def shutdown(self) -> None:
        self._wire.network.scheduler.turn(f"leaves {self.group_name}")


def _users_line(scheduler: Scheduler) -> str:
    """Return where the thread that runs now has come from, for the account."""
    if threading.get_ident() != scheduler.current.ident:
        raise NotSimulatedError(
            "collectives of a thread that the script has started are not simulated"
        )
    return line_here()


_REDUCTIONS = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.BAND, torch.bitwise_and),
    (dist.ReduceOp.BOR, torch.bitwise_or),
    (dist.ReduceOp.BXOR, torch.bitwise_xor),
)


def _reduction(op: Any) -> Callable[[list[Launch]], torch.Tensor]:
    """Return the function that reduces what all ranks have sent."""
    if op == dist.ReduceOp.AVG:
        total = _reduction(dist.ReduceOp.SUM)
        return lambda parts: total(parts) / len(parts)
    for known, add in _REDUCTIONS:
        if op == known:
            return lambda parts: functools.reduce(add, [p.sent[0] for p in parts])
    raise NotSimulatedError(f"the reduction {op} is not simulated")
