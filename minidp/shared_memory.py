"""Reduce buckets in memory that all ranks of one host map, so that no message travels.

Gloo copies each bucket through sockets, even between processes of one host. Here the
buckets of each rank lie in an anonymous file of its own, which every rank maps. A rank
posts (marks) a bucket that is full. Ranks that wait sum pieces of it over all ranks,
and write the sums to all (``csrc/shared_memory.h``), with the bits of Gloo's ring, or
in an order of the caller's (`SumOrder`).

The ranks find out together whether they can do that (`share`): each opens the files of
the others under ``/proc/PID/fd``. If one rank cannot, all ranks use the process group.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from minidp import native, world
from minidp.comm import (
    Communicator,
    ProcessGroup,
    gather_integers,
    group_timeout,
    is_plain_gloo,
)
from minidp.errors import NativeError, explain

VARIABLE = "MINIDP_SHARED_MEMORY"
MODES = ("auto", "0", "1")
_SLICE_SECONDS = 0.5  # between two looks at whether the other processes live
_FILE = "/memfd:minidp"  # where /proc says that a file of ours lies


# Why a rank cannot share memory. Ranks tell each other the obstacle's number.
READY, SWITCHED_OFF, NO_EXTENSION, NO_MEMORY, OTHER_BUILD, NOT_REACHABLE = range(6)
OBSTACLES = (
    "",
    f"{VARIABLE}=0",
    "the extension is not loaded (minidp.native status)",
    "no anonymous memory from the system, or no sums of a dtype",
    "ranks run different builds of the extension",
    "cannot map the memory of another rank: another host, another container, or "
    "another user",
)


def sharing_mode() -> str:
    """Return the value of MINIDP_SHARED_MEMORY, or "auto" if it is not set.

    Raises:
        ValueError: The value is none of `MODES`.
    """
    mode = os.environ.get(VARIABLE) or "auto"
    if mode not in MODES:
        raise ValueError(
            f"{VARIABLE} must be one of {', '.join(MODES)}, but is {mode!r}."
        )
    return mode


@dataclass(frozen=True)
class SumOrder:
    """In which order the values of a buffer are added up.

    A rank brings one or several rows of values: the buffer itself, which gets the sum,
    and maybe others beside it. All rows are numbered, rank by rank, the buffer first.

    Args:
        counts: How many rows each rank brings, by rank.
        postfix: What is added to what. The number of a row puts the row on a stack;
            `ADD` adds the top of the stack to what lies below it, and takes it off.
            Each row must occur once, and their sum be left.
    """

    ADD: ClassVar[int] = -1
    counts: tuple[int, ...]
    postfix: tuple[int, ...]


class BufferShape(NamedTuple):
    """How a shared buffer looks, alike on all ranks."""

    numel: int
    dtype: torch.dtype
    order: SumOrder | None = None  # of its sum; None is that of Gloo's ring
    # Where the share of each rank begins, and the end of the last one. With shares a
    # rank gets the sums of its own only, added in the order of ranks if there is no
    # other one.
    bounds: tuple[int, ...] = ()

    @property
    def real(self) -> BufferShape:
        """The same of real numbers: Gloo adds no complex ones, but their parts."""
        real = self.dtype.to_real()
        parts = self.dtype.itemsize // real.itemsize
        bounds = tuple(parts * bound for bound in self.bounds)
        return BufferShape(parts * self.numel, real, self.order, bounds)


class ProcessEnds:
    """Processes of this host, one for each rank, of which it tells who has ended."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}  # by descriptor
        self._poll = select.poll()

    def add(self, rank: int, process: int) -> None:
        """Watch the process of a rank, as long as this object lives.

        Raises:
            OSError: The process has ended, or cannot be seen from here.
        """
        descriptor = os.pidfd_open(process)  # readable when the process ends
        self._ranks[descriptor] = rank
        self._poll.register(descriptor, select.POLLIN)

    def ranks(self) -> set[int]:
        """Return the ranks whose processes have ended."""
        return {self._ranks[descriptor] for descriptor, _ in self._poll.poll(0)}

    def __del__(self) -> None:
        """Close the descriptors of the processes."""
        for descriptor in self._ranks:
            os.close(descriptor)


class SharedBuffer:
    """The buffer of one bucket in shared memory, which the ranks sum. `share` makes it.

    Args:
        memory: The extension's ``SharedMemory``, connected to all ranks.
        k: The number of the bucket in it.
        num_rows: How many rows this rank brings.
        group: The process group of these ranks.
        ends: Watches the processes of the other ranks.
        has_shares: Whether a rank gets the sums of its share only.
    """

    def __init__(
        self,
        memory: Any,
        k: int,
        num_rows: int,
        group: ProcessGroup,
        ends: ProcessEnds,
        *,
        has_shares: bool = False,
    ) -> None:
        self._memory, self._k, self._group, self._ends = memory, k, group, ends
        self._has_shares = has_shares
        self.values: Tensor = memory.buffer(k)  # 1-D, real
        # The rows beside it, of the same shape. Like it, nobody may touch them between
        # `all_reduce` and the end of its work.
        self.apart: list[Tensor] = [memory.buffer(k, i) for i in range(1, num_rows)]
        # The extension's slots, whose gradients take sums in place of `values`.
        self.into: Any | None = None
        self._address = self.values.data_ptr()

    def all_reduce(self) -> SharedWork:
        """Let all ranks sum `values` in place from now on, and return the work.

        If the sum has an order of its own, `apart` is added, too, and stays as it is.
        All ranks must call it. It does not wait, and no thread sums: once all ranks
        have called it, they sum whenever they wait for their works, or ask them whether
        they are done.

        Raises:
            RuntimeError: `values` was moved to other memory (``share_memory_()``), or
                this is a forked child.
        """
        if self.values.data_ptr() != self._address:
            raise RuntimeError(
                "the bucket's buffer is no longer in shared memory: do not call "
                f"share_memory_() on .grad, or set {VARIABLE}=0"
            )
        profiled = self._memory.post(self._k)
        return SharedWork(self, profiled)

    def given(self, rank: int) -> Tensor:
        """Return the values that a rank gives to all, in its share of a 1-D tensor.

        The buffer has shares. What a rank has given may be read after the work of
        `give`. It may give other values when all ranks have read these.
        """
        values: Tensor = self._memory.given(self._k, rank)
        return values

    def give(self) -> GivenWork:
        """Let the other ranks read `given` of this one; return a work for all ranks.

        All ranks must call it, whether they have a share or not. It does not wait.
        """
        self._memory.give(self._k)
        return GivenWork(self)

    def are_given_within(self, seconds: float) -> bool:
        """Wait at most so long, and return whether all ranks have given values.

        Raises:
            RuntimeError: The process of a rank has ended for which this one waits.
        """
        if self._memory.wait_given(self._k, seconds):
            return True
        self._refuse_ended(self._memory.not_given(self._k), seconds)
        return False

    def read_by_all(self) -> ReadWork:
        """Return a work that is done when no rank reads `values` of this rank any more.

        The buffer has shares, and its last sum has ended on this rank.
        """
        return ReadWork(self)

    def are_read_within(self, seconds: float) -> bool:
        """Wait at most so long, and return whether all ranks have read `values`.

        Raises:
            RuntimeError: The process of a rank has ended for which this one waits.
        """
        if self._memory.wait_summed(self._k, seconds):
            return True
        self._refuse_ended(self._memory.not_summed(self._k), seconds)
        return False

    def _refuse_ended(self, missing: Sequence[int], seconds: float) -> None:
        lost = self._ends.ranks() & {*missing} if seconds else set()
        if lost:
            names = ", ".join(map(str, sorted(lost)))
            raise RuntimeError(f"the process of rank {names} ended")

    def is_done_within(self, seconds: float) -> bool:
        """Help to sum for at most so long, and return whether the sum is complete.

        With 0 seconds it only sums what can be summed now; of a buffer with shares
        nothing, because nobody else waits for the sums of this rank. Otherwise what
        this call sums goes to `into`, if that is set, in place of this rank's `values`.

        Raises:
            RuntimeError: The process of a rank has ended for which this one waits.
        """
        memory, k = self._memory, self._k
        if not seconds:
            return bool(memory.is_done(k) if self._has_shares else memory.advance(k))
        if memory.wait(k, seconds, self.into):
            return True
        ended = self._ends.ranks()
        if ended and memory.advance(k, self.into):  # the last act of such a process
            return True
        missing = set(memory.missing(k))
        lost = ended & missing if missing else ended  # it ended while it summed
        if lost:
            names = ", ".join(map(str, sorted(lost)))
            raise RuntimeError(f"the process of rank {names} ended")
        return False

    @property
    def timeout(self) -> float:
        """The timeout of the process group in seconds, which ends any wait."""
        return group_timeout(self._group).total_seconds()


class SharedWork:
    """The work of a sum in shared memory, which sums whenever one waits for it or asks.

    No thread of this rank sums besides, but other ranks sum for it while they wait.

    Args:
        buffer: The buffer that is summed.
        profiled: The range that a running profiler shows for this work, as it shows one
            for a message of Gloo. It ends when the bucket is found to be reduced.
    """

    can_time_out = True
    needs_asking = True  # or this rank does not sum
    is_left_behind = False  # no thread of a backend writes to the buffer

    def __init__(self, buffer: SharedBuffer, profiled: Any | None = None) -> None:
        self._buffer = buffer
        self._profiled = profiled
        self._is_done = False
        self._future: torch.futures.Future[Any] | None = None

    def is_completed(self) -> bool:
        """Sum what can be summed now, and return whether everything is."""
        return self.is_done_within(0.0)

    def is_done_within(self, seconds: float) -> bool:
        """Help to sum for at most so long, and return whether the bucket is reduced.

        Raises:
            RuntimeError: The process of a missing rank has ended, and ``seconds`` is
                not 0.
        """
        if not self._is_done and self._buffer.is_done_within(seconds):
            self._is_done = True
            if self._profiled is not None:
                self._profiled.end()
                self._profiled = None
            if self._future is not None:
                self._future.set_result(None)
        return self._is_done

    def wait(self) -> None:
        """Wait until the bucket is reduced.

        Raises:
            TimeoutError: The timeout of the process group is over.
            RuntimeError: The process of a missing rank has ended.
        """
        if self._is_done:
            return
        limit = self._buffer.timeout
        deadline = world.now() + limit
        while not self.is_done_within(_SLICE_SECONDS):
            if world.now() > deadline:
                raise TimeoutError(f"it did not finish within {limit:g} s")

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of None, which only the other methods here complete."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self._is_done:
                self._future.set_result(None)
        return self._future


class GivenWork(SharedWork):
    """The work that is done when all ranks have given the values of their shares."""

    needs_asking = False

    def is_done_within(self, seconds: float) -> bool:
        """Wait for at most so long, and return whether they have.

        Raises:
            RuntimeError: The process of a missing rank has ended, and ``seconds`` is
                not 0.
        """
        if not self._is_done and self._has_come(seconds):
            self._is_done = True
            if self._future is not None:
                self._future.set_result(None)
        return self._is_done

    def _has_come(self, seconds: float) -> bool:
        return self._buffer.are_given_within(seconds)


class ReadWork(GivenWork):
    """The work that is done when all ranks have added up their shares of a buffer."""

    def _has_come(self, seconds: float) -> bool:
        return self._buffer.are_read_within(seconds)


def share(
    shapes: Sequence[BufferShape],
    communicator: Communicator,
    device: torch.device,
) -> list[SharedBuffer] | str:
    """Create a shared buffer for each shape, or return why some rank cannot.

    All ranks of the group must call it together, and wait for each other. But if the
    group has one rank or is not plain Gloo, or if the gradients are not on the CPU, the
    reason comes at once.

    Args:
        shapes: Of each buffer, alike on all ranks.
        communicator: The communicator of these ranks.
        device: The device of the gradients.

    Raises:
        NativeError: MINIDP_SHARED_MEMORY=1 on some rank, and there are several ranks
            that cannot share memory. All of them raise it, but where the device or the
            group excludes sharing, which only a rank that insists minds.
    """
    group = communicator.group
    if group.size() == 1:
        return "one rank: nothing travels"
    rank, insists = communicator.rank, sharing_mode() == "1"
    ranks_that_insist = [rank] if insists else []
    if device.type != "cpu":
        reason = f"the gradients are on {device.type}"
        return _refuse(reason, rank, ranks_that_insist)
    if not is_plain_gloo(group):
        reason = "the process group is not Gloo's own"
        return _refuse(reason, rank, ranks_that_insist)
    memory, obstacle = _own_memory(shapes, communicator)
    mine = [obstacle, 0, 0, 0, _build_number(), insists]
    if memory is not None:
        mine[1:4] = os.getpid(), memory.descriptor, memory.token
    ends = ProcessEnds()
    with communicator.blocking("looking for shared memory"):
        facts = gather_integers(mine, group, device)
        refusals = [found[0] for found in facts]
        if not any(refusals):
            obstacle = _connect(memory, facts, rank, ends)
            # Also keeps each file open until all ranks have mapped it.
            answers = gather_integers([obstacle], group, device)
            refusals = [answer for (answer,) in answers]
    if not any(refusals):
        return [
            SharedBuffer(
                memory,
                k,
                1 if shape.order is None else shape.order.counts[group.rank()],
                group,
                ends,
                has_shares=bool(shape.bounds),
            )
            for k, shape in enumerate(shapes)
        ]
    refuses = next(r for r, refusal in enumerate(refusals) if refusal)
    reason = f"rank {refuses}: {OBSTACLES[refusals[refuses]]}"
    return _refuse(reason, rank, [r for r, found in enumerate(facts) if found[5]])


def _refuse(reason: str, rank: int, ranks_that_insist: Sequence[int]) -> str:
    """Return the reason, or raise it as a NativeError if some rank insists."""
    if not ranks_that_insist:
        return reason
    where = "" if rank in ranks_that_insist else f" on rank {ranks_that_insist[0]}"
    raise NativeError(
        explain(
            rank,
            f"{VARIABLE}=1{where}, but these ranks cannot share memory: {reason}.",
            expected="all ranks on one host, with CPU gradients, a Gloo group and the "
            "extension",
            remedy=f"unset {VARIABLE}",
        )
    )


def _own_memory(
    shapes: Sequence[BufferShape], communicator: Communicator
) -> tuple[Any | None, int]:
    """Create the memory of this rank, not connected to that of others yet.

    Returns:
        The memory and READY, or None and the number of the obstacle.
    """
    if sharing_mode() == "0":
        return None, SWITCHED_OFF
    library = native.library()
    if library is None:
        return None, NO_EXTENSION
    if not hasattr(library, "SharedMemory"):  # built elsewhere than on Linux
        return None, NO_MEMORY
    orders = {None: None} | {
        order: library.SumOrder(order.counts, order.postfix)
        for order in {shape.order for shape in shapes}
        if order is not None
    }
    buffers = [
        (numel, dtype, orders[order], bounds)
        for numel, dtype, order, bounds in (shape.real for shape in shapes)
    ]
    try:
        memory = library.SharedMemory(communicator.rank, communicator.size, buffers)
    except RuntimeError:
        return None, NO_MEMORY
    return memory, READY


def _connect(
    memory: Any, facts: Sequence[Sequence[int]], rank: int, ends: ProcessEnds
) -> int:
    """Map the memory of the other ranks, and watch their processes.

    Args:
        memory: The memory of this rank.
        facts: For each rank READY, process id, file descriptor, token, build, and
            whether it insists.
        rank: This rank.
        ends: Gets the processes to watch.

    Returns:
        READY, OTHER_BUILD or NOT_REACHABLE. In the last case some may be mapped.
    """
    if any(found[4] != facts[rank][4] for found in facts):
        return OTHER_BUILD
    for peer, (_, process, descriptor, token, *_) in enumerate(facts):
        if peer == rank:
            continue
        path = f"/proc/{process}/fd/{descriptor}"
        try:
            if not os.readlink(path).startswith(_FILE):
                return NOT_REACHABLE
            memory.connect(peer, path, token)
            ends.add(peer, process)
        except (OSError, RuntimeError):
            return NOT_REACHABLE
    return READY


def _build_number() -> int:
    """Return a number that differs between builds of the extension, 0 without one."""
    key = native.status().key
    return int(key[:15] or "0", 16)
