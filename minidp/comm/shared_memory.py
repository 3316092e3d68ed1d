"""Reduce buckets in memory that all ranks of one host map: no message travels.

Each rank's buckets lie in an anonymous file of its own, which every rank maps. A rank
posts a full bucket; any rank that waits then sums pieces over all ranks and writes the
sums to all (``csrc/shared_memory.h``), with the bits of Gloo's ring.

The ranks find out together whether they can: a rank opens the others' files under
``/proc/PID/fd``. If one rank cannot, all ranks use the process group.

No reducer uses this yet: buckets still travel through the process group.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minidp import native

from .collectives import gather_integers
from .communicator import Communicator
from .groups import group_timeout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

VARIABLE = "MINIDP_SHARED_MEMORY"
MODES = ("auto", "0", "1")
_SLICE_SECONDS = 0.5  # between two looks at whether the other processes live
_FILE = "/memfd:minidp"  # where /proc says that a file of ours lies


class Obstacle(IntEnum):
    """Name why a rank cannot share memory; ranks exchange the number."""

    NONE = 0
    SWITCHED_OFF = 1
    NO_EXTENSION = 2
    NO_MEMORY = 3
    OTHER_BUILD = 4
    NOT_REACHABLE = 5


_TEXTS = {
    Obstacle.SWITCHED_OFF: f"{VARIABLE}=0",
    Obstacle.NO_EXTENSION: "the extension is not loaded (python -m minidp.native)",
    Obstacle.NO_MEMORY: "the system gave no anonymous shared memory",
    Obstacle.OTHER_BUILD: "ranks run different builds of the extension",
    Obstacle.NOT_REACHABLE: "cannot map the memory of another rank: another host, "
    "another container, or another user",
}


def read_mode() -> str:
    """Return MINIDP_SHARED_MEMORY; "auto" if it is not set.

    Raises:
        ValueError: it is none of auto, 0 and 1.
    """
    mode = os.environ.get(VARIABLE) or "auto"
    if mode not in MODES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(MODES)}, not {mode!r}.")
    return mode


class SharedBuckets:
    """Hold the buffers of one layout's buckets, and reduce them in shared memory.

    Args:
        memory: the extension's ``SharedMemory``, connected to all ranks.
        group: the process group of these ranks.
        processes: the process id of each rank.
    """

    def __init__(
        self, memory: Any, group: ProcessGroup, processes: Sequence[int]
    ) -> None:
        self._memory = memory
        self._group = group
        self._ends = select.poll()
        # A descriptor of a process becomes readable when the process ends.
        self._descriptors = {
            os.pidfd_open(process): rank
            for rank, process in enumerate(processes)
            if rank != group.rank()
        }
        for descriptor in self._descriptors:
            self._ends.register(descriptor, select.POLLIN)

    def __del__(self) -> None:
        """Close the descriptors of the other processes."""
        for descriptor in self._descriptors:
            os.close(descriptor)

    def buffer(self, k: int) -> Tensor:
        """Return the 1-D buffer of bucket ``k``, in shared memory."""
        buffer: Tensor = self._memory.buffer(k)
        return buffer

    def all_reduce(self, k: int) -> SharedWork:
        """Start to sum bucket ``k`` over all ranks, in place; return its work."""
        self._memory.post(k)
        return SharedWork(self, k)

    def is_done(self, k: int, seconds: float = 0.0) -> bool:
        """Sum what all ranks have posted; wait at most ``seconds`` for the bucket.

        Raises:
            RuntimeError: the process of a rank that has not posted bucket ``k`` ended.
        """
        memory = self._memory
        if memory.wait(k, seconds) if seconds else memory.advance(k):
            return True
        if not seconds:
            return False
        ended = {self._descriptors[found] for found, _ in self._ends.poll(0)}
        if ended and memory.advance(k):  # the last act of such a process
            return True
        missing = set(memory.missing(k))
        lost = ended & missing if missing else ended  # it ended while it summed
        if lost:
            names = ", ".join(map(str, sorted(lost)))
            raise RuntimeError(f"the process of rank {names} ended")
        return False

    @property
    def seconds(self) -> float:
        """The process group's timeout, for waits without a limit of ours."""
        return group_timeout(self._group).total_seconds()


class SharedWork:
    """Wait for one bucket in shared memory; a `Work`."""

    can_time_out = True

    def __init__(self, buckets: SharedBuckets, k: int) -> None:
        self._buckets = buckets
        self._k = k
        self._is_done = False
        self._future: torch.futures.Future[Any] | None = None

    def is_completed(self) -> bool:
        """Return whether the bucket is reduced; reduce what can be reduced now."""
        return self.is_done_within(0.0)

    def is_done_within(self, seconds: float) -> bool:
        """Help to sum, up to ``seconds``; return whether the bucket is reduced.

        Completes the future. RuntimeError if the process of a missing rank ended.
        """
        if not self._is_done and self._buckets.is_done(self._k, seconds):
            self._is_done = True
            if self._future is not None:
                self._future.set_result(None)
        return self._is_done

    def wait(self) -> None:
        """Wait until the bucket is reduced, at most for the group's timeout."""
        deadline = time.monotonic() + self._buckets.seconds
        while not self.is_done_within(_SLICE_SECONDS):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done within {self._buckets.seconds:g} s")

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes when this rank finds the bucket reduced."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self._is_done:
                self._future.set_result(None)
        return self._future


def share(
    shapes: Sequence[tuple[int, torch.dtype]], communicator: Communicator
) -> SharedBuckets | str:
    """Take shared memory for buckets on all ranks; return the reason if one cannot.

    A collective: all ranks of the group call it, with equal shapes.

    Args:
        shapes: number of elements and dtype of each bucket.
        communicator: the ranks.

    Raises:
        RuntimeError: MINIDP_SHARED_MEMORY=1 on this rank, and a rank cannot.
    """
    group = communicator.group
    memory, obstacle = _own_memory(shapes, communicator)
    mine = [obstacle, 0, 0, 0, _build_number()]
    if memory is not None:
        mine[1:4] = os.getpid(), memory.descriptor, memory.token
    with communicator.blocking("looking for shared memory"):
        facts = gather_integers(mine, group, torch.device("cpu"))
        if not any(found[0] for found in facts):
            obstacle = _connect(memory, facts, communicator.rank)
        # Also keeps each file open until all ranks have mapped it.
        answers = gather_integers([obstacle], group, torch.device("cpu"))
    refusals = [Obstacle(code) for (code,) in answers]
    if not any(refusals):
        return SharedBuckets(memory, group, [process for _, process, *_ in facts])
    rank = next(r for r, refusal in enumerate(refusals) if refusal)
    reason = f"rank {rank}: {_TEXTS[refusals[rank]]}"
    if read_mode() == "1":
        raise RuntimeError(
            f"[rank {communicator.rank}] {VARIABLE}=1, but these ranks cannot share "
            f"memory. {reason}. Let all ranks run on one host, or unset {VARIABLE}."
        )
    return reason


def _own_memory(
    shapes: Sequence[tuple[int, torch.dtype]], communicator: Communicator
) -> tuple[Any | None, Obstacle]:
    if read_mode() == "0":
        return None, Obstacle.SWITCHED_OFF
    library = native.library()
    if library is None:
        return None, Obstacle.NO_EXTENSION
    if not hasattr(library, "SharedMemory"):  # built elsewhere than on Linux
        return None, Obstacle.NO_MEMORY
    try:
        memory = library.SharedMemory(communicator.rank, communicator.size, shapes)
    except RuntimeError:
        return None, Obstacle.NO_MEMORY
    return memory, Obstacle.NONE


def _connect(memory: Any, facts: Sequence[Sequence[int]], rank: int) -> Obstacle:
    if any(found[4] != facts[rank][4] for found in facts):
        return Obstacle.OTHER_BUILD
    for peer, (_, process, descriptor, token, _) in enumerate(facts):
        path = f"/proc/{process}/fd/{descriptor}"
        try:
            if peer != rank and os.readlink(path).startswith(_FILE):
                memory.connect(peer, path, token)
            elif peer != rank:
                return Obstacle.NOT_REACHABLE
        except (OSError, RuntimeError):
            return Obstacle.NOT_REACHABLE
    return Obstacle.NONE


def _build_number() -> int:
    key = native.status().key
    return int(key[:15] or "0", 16)
