"""Wrap c10d's collectives; the ready-made comm hooks and the doctor call c10d itself.

All ranks of the group must call each function, in the same order. `all_reduce` and
``start_...`` return before the result is there; the others wait. Ranks are group ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import distributed_c10d as c10d

from minidp.layout import chunks_by_bytes

from .groups import ProcessGroup
from .work import NoWork, PythonWork, Work, is_python_group, wait_for

MESSAGE_BYTES = 250 * 2**20  # of one coalesced broadcast
MAX_IN_FLIGHT = 2  # coalesced broadcasts; more would only hold more memory


def all_reduce(tensor: torch.Tensor, group: ProcessGroup) -> Work:
    """Collective: start to sum ``tensor`` over all ranks, in place; do not divide.

    Return the work to wait for. A single rank starts nothing, and its work is done, if
    the tensor is dense and on the CPU, and the group is not written in Python.
    """
    # On CUDA an all-reduce orders streams; of a sparse tensor it merges equal indices.
    is_plain = tensor.is_cpu and tensor.layout is torch.strided
    is_python = type(group) is not ProcessGroup  # `is_python_group`, without its call
    if is_plain and not is_python and group.size() == 1:
        return NoWork()
    # The group's own method: dist.all_reduce has three times the overhead, and inside
    # a coalescing manager of the caller it returns no work.
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    options.asyncOp = True
    work: Work = group.allreduce([tensor], options)
    return PythonWork(work, tensor) if is_python else work


def start_broadcast(tensor: torch.Tensor, group: ProcessGroup, root: int) -> Work:
    """Collective: start to overwrite ``tensor`` by rank ``root``'s; return the work."""
    # The group's own method: torch.distributed does not know side groups.
    options = dist.BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    options.asyncOp = True
    work: Work = group.broadcast([tensor], options)
    return PythonWork(work) if is_python_group(group) else work


def start_gathering(
    row: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, Work]:
    """Collective: start to gather every rank's ``row`` (1D, equally long); do not wait.

    Return (rows, work): a 2D tensor with rank r's row in row r, valid once the work has
    been waited for. A Python group without all-gather runs an all-reduce instead.
    """
    rows = row.new_empty(group.size(), row.numel())
    outputs, inputs = [list(rows.unbind())], [row]
    if not is_python_group(group):
        return rows, group.allgather(outputs, inputs)
    try:
        options = c10d.AllgatherOptions()  # type: ignore[attr-defined]
        work = group.allgather(outputs, inputs, options)
    except RuntimeError:  # the Python group has no all-gather, on all ranks alike
        rows.zero_()
        rows[group.rank()] = row
        return rows, all_reduce(rows, group)
    return rows, PythonWork(work)


def gather_rows(row: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Collective: wait for all ranks' ``row`` (1D, equally long); return them as 2D."""
    rows, work = start_gathering(row, group)
    wait_for(work)
    return rows


def barrier(group: ProcessGroup) -> None:
    """Collective: wait until all ranks call this; no-op if a Python group cannot.

    Such a group may have no barrier. Any error of one that has is raised: a rank that
    died in it must not pass for a group without.
    """
    if not is_python_group(group):
        wait_for(group.barrier())
        return
    if type(group).barrier is ProcessGroup.barrier:
        return
    try:
        wait_for(PythonWork(group.barrier(dist.BarrierOptions())))
    except RuntimeError as error:
        lacks_it = isinstance(error, NotImplementedError)
        if not lacks_it and "does not support barrier" not in str(error):
            raise


def gather_integers(
    values: Sequence[int], group: ProcessGroup, device: torch.device
) -> list[list[int]]:
    """Collective: wait for all ranks' ``values`` (int64, equally many); return all.

    One list per rank, by rank. The message lies on ``device``.
    """
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    rows: list[list[int]] = gather_rows(mine, group).tolist()
    return rows


def gather_bytes(
    buffer: bytes, lengths: Sequence[int], group: ProcessGroup, device: torch.device
) -> list[bytes]:
    """Collective: wait for all ranks' ``buffer``; return these by rank.

    ``lengths``, equal on all ranks: bytes of each. The message, padded to the longest,
    lies on ``device``.
    """
    padded = bytearray(buffer.ljust(max(lengths), b"\0"))
    mine = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    return [
        bytes(theirs[:length].cpu().numpy().tobytes())
        for theirs, length in zip(gather_rows(mine, group), lengths, strict=True)
    ]


def broadcast_integers(
    values: Sequence[int], group: ProcessGroup, device: torch.device
) -> list[int]:
    """Collective: wait for rank 0's ``values`` (int64), and return them on every rank.

    Every rank passes equally many; other ranks' are ignored. Sent on ``device``.
    """
    message = torch.tensor(values, dtype=torch.int64, device=device)
    wait_for(start_broadcast(message, group, 0))
    return [int(value) for value in message.tolist()]


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], group: ProcessGroup, root: int = 0
) -> None:
    """Collective: overwrite ``tensors`` (any shapes, dtypes) with the root's; wait.

    Sent as raw bytes: a message of about 250 MiB carries all dtypes of a device; at
    most two messages are in flight. Version counters do not change, so that a graph may
    have saved a tensor. Those on the meta device have no values, and are left out.
    RuntimeError, before any message, for sparse and quantized tensors.
    """
    for tensor in tensors:
        is_sparse = tensor.layout is not torch.strided
        if is_sparse or tensor.is_quantized:
            what = f"layout {tensor.layout}" if is_sparse else str(tensor.dtype)
            raise RuntimeError(
                f"No support for {'sparse' if is_sparse else 'quantized'} tensors: a "
                f"module buffer or parameter of {what} and shape "
                f"{tuple(tensor.shape)} cannot be broadcast; put it on the module's "
                "ignore list."
            )
    members = [t.detach() for t in tensors if t.numel() > 0 and not t.is_meta]
    # Wide elements first, per device, so that every piece of a message is aligned.
    members.sort(key=lambda t: (str(t.device), -t.element_size()))
    parts = [
        [neighbours[i] for i in chunk]
        for _, of_device in itertools.groupby(members, key=lambda t: t.device)
        for neighbours in [list(of_device)]
        for chunk in chunks_by_bytes([t.nbytes for t in neighbours], MESSAGE_BYTES)
    ]
    in_flight: list[tuple[list[torch.Tensor], torch.Tensor, Work]] = []
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(members)):
        for part in parts:
            if len(in_flight) == MAX_IN_FLIGHT:
                _unpack(*in_flight.pop(0))
            message = torch.cat([_as_bytes(t) for t in part])  # 1D uint8
            in_flight.append((part, message, start_broadcast(message, group, root)))
        for arrived in in_flight:
            _unpack(*arrived)


def _unpack(tensors: list[torch.Tensor], message: torch.Tensor, work: Work) -> None:
    """Wait for ``message``'s broadcast, ``work``; copy its bytes into ``tensors``."""
    wait_for(work)
    pieces = message.split([t.nbytes for t in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, in row-major order, as 1-D uint8: if possible a view."""
    # as_strided: a contiguous tensor of one element may have any stride.
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
