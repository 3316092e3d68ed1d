"""The package's own collectives; nothing else here calls torch.distributed.

Every function here is a *collective*: all ranks of the group must call it, in the same
order. Ranks are group ranks throughout; the root is group rank 0 unless it is named.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import distributed_c10d as c10d

from ._layout import chunks_by_bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_IN_FLIGHT = 2  # coalesced messages; more would only hold more memory


def default_group() -> ProcessGroup:
    """The default process group.

    Raises:
        ValueError: torch.distributed is not initialized.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "Default process group has not been initialized: call "
            "torch.distributed.init_process_group() first (torchrun sets the "
            "environment variables that it reads), or pass process_group."
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def joined_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """``group`` or the default one; None while torch.distributed is not initialized."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return default_group() if group is None else group


def default_first_bucket_bytes() -> int:
    """Limit of the small first bucket; torch's constant, so that both can be set."""
    return int(dist._DEFAULT_FIRST_BUCKET_BYTES)  # type: ignore[attr-defined]


def is_group(value: object) -> bool:
    """Whether a value is a process group that this process belongs to."""
    return isinstance(value, dist.ProcessGroup)


def fresh_group(group: ProcessGroup, key: str) -> ProcessGroup:
    """A new group over the same ranks, backend and timeout; its members call it.

    Args:
        group: the old one.
        key: the same on all ranks, and never used before in this group.
    """
    # Not new_group(), whose name for a group that only its members make depends on how
    # many groups a process is in: ranks that differ there would wait for each other.
    ranks = dist.get_process_group_ranks(group)
    made = c10d._new_process_group_helper(
        len(ranks),
        group.rank(),
        ranks,
        dist.Backend(str(dist.get_backend(group))),
        c10d._get_default_store(),
        c10d.GroupName(f"minidp/{group.group_name}/{key}"),
        timeout=group_timeout(group),
    )
    created: ProcessGroup = made[0]
    c10d._world.pg_group_ranks[created] = {rank: i for i, rank in enumerate(ranks)}
    return created


_side_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
_renewals: dict[frozenset[int], str] = {}  # global ranks -> key of their last failure


def side_group(group: ProcessGroup) -> ProcessGroup:
    """Gloo between the same ranks once more, for layers; made by the first call.

    Ranks whose graphs differ launch buckets at different points of a backward. On one
    group, the sums of a layer would then meet a bucket of another rank: gloo aborts the
    process, or adds them up if they are equally long. It is faster, too, not to queue
    behind the buckets.
    """
    if group not in _side_groups:
        ranks = frozenset(dist.get_process_group_ranks(group))
        newest_first = reversed(_renewals.items())
        key = next((key for members, key in newest_first if members >= ranks), "first")
        store = group_store(group, f"side/{key}")
        # Not new_group(), whose names depend on how many groups a process is in. The
        # backend alone has all that is called of a process group here.
        gloo: Any = dist.ProcessGroupGloo(
            store, group.rank(), group.size(), group_timeout(group)
        )
        _side_groups[group] = gloo
    return _side_groups[group]


def renew_side_groups(group: ProcessGroup, key: str) -> None:
    """After a failure: side groups within ``group`` are made anew when needed.

    Args:
        group: all of its ranks call this.
        key: the same on all ranks, and never used before.
    """
    members = frozenset(dist.get_process_group_ranks(group))
    _renewals.pop(members, None)
    _renewals[members] = key
    for other in list(_side_groups):
        if members.issuperset(dist.get_process_group_ranks(other)):
            del _side_groups[other]


def group_timeout(group: ProcessGroup) -> timedelta:
    """How long collectives of a group may take."""
    for device_type in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device_type)).options
        except RuntimeError:
            continue  # the group has no backend for this device
        return options._timeout
    return timedelta(minutes=30)


def group_store(group: ProcessGroup, prefix: str) -> c10d.Store:
    """A key-value store that outlives broken collectives of the group."""
    store = c10d._get_default_store()
    return c10d.PrefixStore(f"minidp/{group.group_name}/{prefix}", store)


def exchange_device(group: ProcessGroup, fallback: torch.device) -> torch.device:
    """Where small host-side messages live: the CPU when the group can carry it."""
    backend = str(dist.get_backend(group))
    if any(name in backend for name in ("gloo", "mpi", "ucc", "threaded")):
        return torch.device("cpu")
    return fallback


class Work(Protocol):
    """What is used of torch.distributed.Work."""

    def wait(self) -> object:
        """Wait until the collective is done."""

    def get_future(self) -> torch.futures.Future[Any]:
        """Completes with the collective."""


class _NothingToDo:
    def wait(self) -> object:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(None)
        return done


def all_reduce(tensor: torch.Tensor, group: ProcessGroup) -> Work:
    """Start a SUM over all ranks, in place; someone must wait on the work.

    A group of one rank has nothing to do; but on CUDA the collective orders streams,
    and a sparse tensor becomes coalesced.
    """
    is_plain = tensor.is_cpu and tensor.layout is torch.strided
    if is_plain and group.size() == 1:
        return _NothingToDo()
    # The group's own method: dist.all_reduce costs three times as much before anything
    # is sent, and a coalescing manager of the caller would swallow the work.
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    options.asyncOp = True
    work: Work = group.allreduce([tensor], options)
    return work


def gather_rows(row: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All ranks' rows (1D, equally long on each rank), as one 2D tensor."""
    rows = row.new_empty(group.size(), row.numel())
    group.allgather([list(rows.unbind())], [row]).wait()
    return rows


def then(
    future: torch.futures.Future[Any], finish: Callable[[], torch.Tensor]
) -> torch.futures.Future[torch.Tensor]:
    """What ``finish()`` returns once a collective is done; or what either raised.

    A callback that does not look at its future would swallow the collective's failure,
    and go on with numbers that were never reduced.
    """

    def complete(done: torch.futures.Future[Any]) -> torch.Tensor:
        done.value()
        return finish()

    return future.then(complete)


def gather_integers(
    values: Sequence[int], group: ProcessGroup, device: torch.device
) -> list[list[int]]:
    """All ranks' integers (64 bit, equally many on each rank), by rank."""
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    return [theirs.tolist() for theirs in everyone]


def gather_bytes(
    payload: bytes, lengths: Sequence[int], group: ProcessGroup, device: torch.device
) -> list[bytes]:
    """All ranks' payloads, by rank; ``lengths`` are those of all ranks."""
    padded = bytearray(payload.ljust(max(lengths), b"\0"))
    mine = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(everyone, mine, group=group)
    return [
        bytes(theirs[:length].cpu().numpy().tobytes())
        for theirs, length in zip(everyone, lengths, strict=True)
    ]


def broadcast_integers(
    values: Sequence[int], group: ProcessGroup, device: torch.device
) -> list[int]:
    """Rank 0's integers; every rank passes equally many."""
    message = torch.tensor(values, dtype=torch.int64, device=device)
    dist.broadcast(message, group=group, group_src=0)
    return [int(value) for value in message.tolist()]


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor],
    group: ProcessGroup,
    message_bytes: int,
    root: int = 0,
) -> None:
    """Overwrite ``tensors`` (any shapes, strides, dtypes) with the root's, in place.

    Tensors travel as raw bytes, so that one message per device carries all dtypes, in
    messages of about ``message_bytes``, at most two in flight. Version counters stay as
    they are: a graph that saved a module buffer must still be able to run backward.
    """
    sparse = [t for t in tensors if t.layout is not torch.strided]
    if sparse:
        raise RuntimeError(
            f"No support for sparse tensors: a module buffer or parameter of layout "
            f"{sparse[0].layout} and shape {tuple(sparse[0].shape)} cannot be "
            "broadcast; put it on the module's ignore list."
        )
    members = [t.detach() for t in tensors if t.numel() > 0]
    # Wide elements first, per device: every piece of a message is then aligned.
    members.sort(key=lambda t: (str(t.device), -t.element_size()))
    in_flight: list[Message] = []
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(members)):
        for part in _parts(members, message_bytes):
            if len(in_flight) == MAX_IN_FLIGHT:
                in_flight.pop(0).unpack()
            in_flight.append(Message(part, group, root))
        for message in in_flight:
            message.unpack()


def _parts(
    members: list[torch.Tensor], message_bytes: int
) -> Iterator[list[torch.Tensor]]:
    """Neighbours on one device, about ``message_bytes`` at a time."""
    for _, neighbours in itertools.groupby(members, key=lambda t: t.device):
        part = list(neighbours)
        for chunk in chunks_by_bytes([t.nbytes for t in part], message_bytes):
            yield [part[i] for i in chunk]


class Message:
    """One coalesced broadcast in flight; owns the bytes until they are unpacked."""

    def __init__(
        self, tensors: list[torch.Tensor], group: ProcessGroup, root: int
    ) -> None:
        self._tensors = tensors
        self._bytes = torch.cat([_as_bytes(t) for t in tensors])  # 1D uint8
        self._work = dist.broadcast(
            self._bytes, group=group, group_src=root, async_op=True
        )

    def unpack(self) -> None:
        """Wait, then overwrite the tensors."""
        self._work.wait()
        pieces = self._bytes.split([t.nbytes for t in self._tensors])
        for tensor, piece in zip(self._tensors, pieces, strict=True):
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # as_strided, because a contiguous tensor of one element may have any stride.
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    dense = plain.as_strided((tensor.numel(),), (1,))
    return dense.view(torch.uint8)
