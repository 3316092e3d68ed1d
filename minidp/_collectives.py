"""The package's own collectives; nothing else here calls torch.distributed.

Every function here is a *collective*: all ranks of the group must call it, in the same
order. Ranks are group ranks throughout; the root is group rank 0 unless it is named.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import distributed_c10d as c10d

from ._groups import is_python_group
from ._layout import chunks_by_bytes
from ._waiting import PythonWork, Work, wait_for

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_IN_FLIGHT = 2  # coalesced messages; more would only hold more memory


class _NothingToDo:
    def wait(self) -> object:
        return True

    def is_completed(self) -> bool:
        return True

    def is_done_within(self, seconds: float) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(None)
        return done


def all_reduce(tensor: torch.Tensor, group: ProcessGroup) -> Work:
    """Start a SUM over all ranks, in place; someone must wait on the work.

    A group of one rank has nothing to do; but on CUDA the collective orders streams,
    a sparse tensor becomes coalesced, and a group written in Python may do anything:
    also bring the sum as the value of the work's future.
    """
    is_plain = tensor.is_cpu and tensor.layout is torch.strided
    is_python = is_python_group(group)
    if is_plain and not is_python and group.size() == 1:
        return _NothingToDo()
    # The group's own method: dist.all_reduce costs three times as much before anything
    # is sent, and a coalescing manager of the caller would swallow the work.
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    options.asyncOp = True
    work: Work = group.allreduce([tensor], options)
    return PythonWork(work, tensor) if is_python else work


def start_broadcast(tensor: torch.Tensor, group: ProcessGroup, root: int) -> Work:
    """Start to overwrite a tensor with the root's."""
    # The group's own method, because side groups have no other.
    options = dist.BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    options.asyncOp = True
    work: Work = group.broadcast([tensor], options)
    return PythonWork(work) if is_python_group(group) else work


class Gathering(NamedTuple):
    """All ranks' rows, once the work is done."""

    rows: torch.Tensor  # 2D
    work: Work


def start_gathering(row: torch.Tensor, group: ProcessGroup) -> Gathering:
    """Start to bring together all ranks' rows (1D, equally long on each rank)."""
    rows = row.new_empty(group.size(), row.numel())
    outputs, inputs = [list(rows.unbind())], [row]
    if not is_python_group(group):
        return Gathering(rows, group.allgather(outputs, inputs))
    try:
        options = c10d.AllgatherOptions()  # type: ignore[attr-defined]
        work = group.allgather(outputs, inputs, options)
    except RuntimeError:  # it has none, on all ranks alike
        rows.zero_()
        rows[group.rank()] = row
        return Gathering(rows, all_reduce(rows, group))
    return Gathering(rows, PythonWork(work))


def gather_rows(row: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All ranks' rows (1D, equally long on each rank), as one 2D tensor."""
    rows, work = start_gathering(row, group)
    wait_for(work)
    return rows


def meet(group: ProcessGroup) -> None:
    """Wait until all ranks are here; a group in Python may have no barrier."""
    if not is_python_group(group):
        wait_for(group.barrier())
        return
    with suppress(RuntimeError):
        wait_for(PythonWork(group.barrier(dist.BarrierOptions())))


def gather_integers(
    values: Sequence[int], group: ProcessGroup, device: torch.device
) -> list[list[int]]:
    """All ranks' integers (64 bit, equally many on each rank), by rank."""
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    rows: list[list[int]] = gather_rows(mine, group).tolist()
    return rows


def gather_bytes(
    payload: bytes, lengths: Sequence[int], group: ProcessGroup, device: torch.device
) -> list[bytes]:
    """All ranks' payloads, by rank; ``lengths`` are those of all ranks."""
    padded = bytearray(payload.ljust(max(lengths), b"\0"))
    mine = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    return [
        bytes(theirs[:length].cpu().numpy().tobytes())
        for theirs, length in zip(gather_rows(mine, group), lengths, strict=True)
    ]


def broadcast_integers(
    values: Sequence[int], group: ProcessGroup, device: torch.device
) -> list[int]:
    """Rank 0's integers; every rank passes equally many."""
    message = torch.tensor(values, dtype=torch.int64, device=device)
    wait_for(start_broadcast(message, group, 0))
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
    for tensor in tensors:
        if tensor.is_quantized:
            raise RuntimeError(
                "No support for quantized tensors: a module buffer or parameter of "
                f"{tensor.dtype} and shape {tuple(tensor.shape)} cannot be broadcast; "
                "put it on the module's ignore list."
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
        self._work = start_broadcast(self._bytes, group, root)

    def unpack(self) -> None:
        """Wait, then overwrite the tensors."""
        wait_for(self._work)
        pieces = self._bytes.split([t.nbytes for t in self._tensors])
        for tensor, piece in zip(self._tensors, pieces, strict=True):
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # as_strided, because a contiguous tensor of one element may have any stride.
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    dense = plain.as_strided((tensor.numel(),), (1,))
    return dense.view(torch.uint8)
