"""The collectives of c10d as minidp calls them.

They differ from those of ``torch.distributed`` in three ways: they work on groups of
which torch does not know, and on groups written in Python; they have less overhead; and
their waits end in time, because they go through `wait_for`.

All ranks of the group must call each of these functions, in the same order, because
backends match collectives by their order. `all_reduce` and those whose names begin with
``start_`` return before the result is there; the others wait for it. Ranks are those of
the group. Only the ready-made comm hooks and the doctor call c10d itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from minidp.accelerator import to_host, upload, use_here
from minidp.layout import chunks_by_bytes

from .backends import backend_of
from .groups import ProcessGroup
from .side_groups import way_back
from .work import (
    BothWays,
    HostWork,
    NoWork,
    PythonWork,
    Work,
    is_python_group,
    wait_for,
)

MESSAGE_BYTES = 250 * 2**20  # the size of one message of a coalesced broadcast
# Backends of torch that cannot add sparse tensors.
_ADD_DENSE_ONLY = {"nccl", "xccl", "mpi", "ucc"}
MAX_IN_FLIGHT = 2  # how many such messages travel at once; more would only need memory


def all_reduce(tensor: torch.Tensor, group: ProcessGroup) -> Work:
    """Start to sum a tensor over all ranks, in place, and return the work.

    All ranks of the group must call it, in the same order. Nothing is divided. With one
    rank, a dense CPU tensor is its own sum, so nothing is started, unless the group is
    written in Python.
    """
    # On a device an all-reduce orders streams, and of a sparse tensor it merges equal
    # indices.
    is_plain = tensor.is_cpu and tensor.layout is torch.strided
    # The first question is the cheap one. A side group is no ProcessGroup either.
    is_python = type(group) is not ProcessGroup and is_python_group(group)
    if is_plain and not is_python and group.size() == 1:
        return NoWork()
    # The group's own method: dist.all_reduce has three times the overhead, and inside
    # a coalescing manager of the caller it returns no work.
    if not is_plain and not is_python and _must_gather(tensor, group):
        return GatheredSum(tensor, group)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    options.asyncOp = True
    work: Work = group.allreduce([tensor], options)
    return PythonWork(work, tensor) if is_python else work


def _must_gather(tensor: torch.Tensor, group: ProcessGroup) -> bool:
    """Return whether a tensor is sparse, and the backend adds only dense ones."""
    if not tensor.is_sparse or group not in c10d._world.pg_map:
        return False
    return backend_of(group, tensor.device) in _ADD_DENSE_ONLY


class GatheredSum:
    """The sum of a sparse tensor over all ranks, as a work, where only dense ones add.

    Gloo can add sparse tensors by itself, NCCL cannot. So all ranks gather what each of
    them has. The constructor starts that, and `wait` writes the sum to the tensor. All
    ranks of the group must make it together. To know how much each has, the host waits
    for a small message first.
    """

    def __init__(self, tensor: torch.Tensor, group: ProcessGroup) -> None:
        self._tensor = tensor
        mine = tensor.coalesce()
        indices, values = mine.indices(), mine.values()
        if values.is_complex():
            values = torch.view_as_real(values)
        count = torch.tensor([len(values)], device=tensor.device)
        self._counts: list[int] = to_host(gather_rows(count, group)).flatten().tolist()
        most = max(1, *self._counts)  # a backend may refuse empty messages
        self._shape = (most, *values.shape[1:])
        padded_indices = indices.new_zeros(len(indices), most)
        padded_indices[:, : len(values)] = indices
        padded_values = values.new_zeros(self._shape)
        padded_values[: len(values)] = values
        self._indices, first = start_gathering(padded_indices.view(-1), group)
        self._values, last = start_gathering(padded_values.view(-1), group)
        self._sent = padded_indices, padded_values
        self._works = first, last

    def get_future(self) -> Future[Any]:
        """Return a future that is done when all parts are here."""
        return self._works[1].get_future()

    def is_completed(self) -> bool:
        """Return whether all parts are here."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait for all parts, and write their sum to the tensor."""
        for work in self._works:
            work.wait()
        use_here(self._indices, self._values, *self._sent)
        indices, values = [], []
        for k, count in enumerate(self._counts):
            indices.append(self._indices[k].view(-1, self._shape[0])[:, :count])
            values.append(self._values[k].view(self._shape)[:count])
        all_values = torch.cat(values)
        if self._tensor.is_complex():
            all_values = torch.view_as_complex(all_values)
        total = torch.sparse_coo_tensor(
            torch.cat(indices, 1),
            all_values,
            self._tensor.shape,
            device=self._tensor.device,  # else the user's default device
            check_invariants=False,
        )
        self._tensor.copy_(total.coalesce())


def start_broadcast(tensor: torch.Tensor, group: ProcessGroup, root: int) -> Work:
    """Start to overwrite a tensor by that of rank ``root``, and return the work.

    All ranks of the group must call it, in the same order.
    """
    # The group's own method: torch.distributed does not know side groups.
    options = dist.BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    options.asyncOp = True
    work: Work = group.broadcast([tensor], options)
    return PythonWork(work) if is_python_group(group) else work


def start_gathering(
    row: torch.Tensor, group: ProcessGroup, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, Work]:
    """Start to gather a row from every rank.

    All ranks of the group must call it, in the same order. A group that is written in
    Python and has no all-gather runs an all-reduce instead.

    Args:
        row: A tensor of one dimension, equally long on all ranks.
        group: The process group.
        rows: Where the rows shall lie; by default in a new tensor.

    Returns:
        A tensor of shape (ranks, elements), with rank r's row in row r, which is valid
        once the work has been waited for; and that work.
    """
    if rows is None:
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


def start_exchange(
    slices: torch.Tensor, counts: Sequence[int], group: ProcessGroup
) -> tuple[torch.Tensor, Work]:
    """Start to send rows to each rank, and to get those that are meant for this one.

    All ranks of the group must call it, in the same order. A group that is written in
    Python and has no all-to-all gathers all rows of all ranks instead, which is as many
    times the bytes as there are ranks.

    Args:
        slices: What to send, of shape (ranks, rows, elements): to rank r goes row r.
            The number of elements is the same on all ranks, that of rows need not be.
        counts: How many rows each rank sends, by rank.
        group: The process group.

    Returns:
        A tensor of shape (rows of all ranks, elements), in the order of ranks, which is
        valid once the work has been waited for; and that work.
    """
    ranks, _, width = slices.shape
    arrived = slices.new_empty(sum(counts), width)
    to_send = [slices[0].numel()] * ranks
    to_get = [count * width for count in counts]
    options = dist.AllToAllOptions()
    message = arrived.view(-1), slices.view(-1), to_get, to_send, options
    if not is_python_group(group):
        return arrived, group.alltoall_base(*message)
    try:
        return arrived, PythonWork(group.alltoall_base(*message))
    except RuntimeError:  # the Python group has no all-to-all, on all ranks alike
        return arrived, GatheredExchange(slices, counts, group, arrived)


class GatheredExchange:
    """What `start_exchange` starts in a group without all-to-all, as a work.

    Args:
        slices: What this rank sends.
        counts: How many rows each rank sends, by rank.
        group: The process group.
        arrived: What is written when this is waited for.
    """

    def __init__(
        self,
        slices: torch.Tensor,
        counts: Sequence[int],
        group: ProcessGroup,
        arrived: torch.Tensor,
    ) -> None:
        ranks, mine, width = slices.shape
        padded = slices.new_zeros(ranks, max(counts), width)
        padded[:, :mine] = slices
        self._rows, self._work = start_gathering(padded.view(-1), group)
        self._shape, self._rank = padded.shape, group.rank()
        self._counts, self._arrived = counts, arrived
        self.get_future = self._work.get_future
        self.is_completed = self._work.is_completed

    def wait(self) -> None:
        """Wait for the rows of all ranks, and keep those for this rank."""
        self._work.wait()
        found = [
            row.view(self._shape)[self._rank, :count]
            for row, count in zip(self._rows, self._counts, strict=True)
        ]
        torch.cat(found, out=self._arrived)


def start_scatter(
    flat: torch.Tensor,
    widths: Sequence[int],
    group: ProcessGroup,
    counts: Sequence[int] | None = None,
) -> tuple[torch.Tensor, Work]:
    """Start to send a part of each row to each rank, and to get ours from each.

    All ranks of the group must call it, in the same order. A group that is written in
    Python and has no all-to-all gathers the whole rows of all ranks instead.

    Args:
        flat: A tensor of one dimension: what goes to rank 0 of all rows of this rank,
            one row behind the other, then what goes to rank 1, and so on. Nobody may
            write to it before the work is done.
        widths: How many elements of a row each rank gets, by rank. They are the same on
            all ranks, and may be 0.
        group: The process group.
        counts: How many rows each rank brings, by rank; by default one.

    Returns:
        A tensor of shape (rows of all ranks, own width), in the order of ranks, which
        is valid once the work has been waited for; and that work.
    """
    ranks, rank = len(widths), group.rank()
    counts = [1] * ranks if counts is None else counts
    arrived = flat.new_empty(sum(counts), widths[rank])
    to_get = [count * widths[rank] for count in counts]
    to_send = [counts[rank] * width for width in widths]
    message = arrived.view(-1), flat, to_get, to_send
    if not is_python_group(group):
        return arrived, _send_parts(*message, group)
    try:
        work = group.alltoall_base(*message, dist.AllToAllOptions())
        return arrived, PythonWork(work)
    except RuntimeError:  # the Python group has no all-to-all, on all ranks alike
        return arrived, GatheredParts(flat, widths, counts, group, arrived)


def start_sharing(
    own: torch.Tensor, widths: Sequence[int], group: ProcessGroup
) -> tuple[list[torch.Tensor], Work]:
    """Start to send a tensor to all other ranks, and to get one from each of them.

    All ranks of the group must call it, in the same order. The group has an all-to-all.

    Args:
        own: A tensor of one dimension. Nobody may write to it before the work is done.
        widths: How many elements each rank sends, by rank. They are the same on all
            ranks, and may be 0.
        group: The process group.

    Returns:
        A tensor for each rank, with the elements that it sends, and none for this rank,
        which are valid once the work has been waited for; and that work.
    """
    ranks, rank = len(widths), group.rank()
    to_send, to_get = [widths[rank]] * ranks, list(widths)
    to_send[rank] = to_get[rank] = 0
    arrived = own.new_empty(sum(to_get))
    sent = own if ranks == 2 else own.repeat(ranks - 1)
    work = _send_parts(arrived, sent, to_get, to_send, group)
    return list(arrived.split(to_get)), work


def _send_parts(
    arrived: torch.Tensor,
    sent: torch.Tensor,
    to_get: list[int],
    to_send: list[int],
    group: ProcessGroup,
) -> Work:
    """Start an all-to-all of unequal parts, in both directions at once if that helps.

    Args:
        arrived: A tensor of one dimension for the parts of all ranks, in their order.
        sent: What goes to all ranks, in their order.
        to_get: How many elements each rank sends to this one.
        to_send: How many elements this one sends to each rank.
        group: The process group.
    """
    options = dist.AllToAllOptions()
    back = way_back(group) if sent.is_cpu else None
    if back is None:
        work: Work = group.alltoall_base(arrived, sent, to_get, to_send, options)
        return work
    rank = group.rank()
    lower, others = [0] * rank, [0] * (len(to_get) - rank - 1)
    get, send = sum(to_get[: rank + 1]), sum(to_send[:rank])
    # To ranks from this one on, and then to those before it.
    there = arrived[:get], sent[send:]
    there_sizes = [*to_get[: rank + 1], *others], [*lower, *to_send[rank:]]
    back_again = arrived[get:], sent[:send]
    back_sizes = [*lower, 0, *to_get[rank + 1 :]], [*to_send[:rank], 0, *others]
    return BothWays(
        group.alltoall_base(*there, *there_sizes, options),
        back.alltoall_base(*back_again, *back_sizes, options),
    )


def start_spreading(flats: Sequence[torch.Tensor], group: ProcessGroup) -> Work:
    """Start to overwrite tensor r by that of rank r, for each rank, in one launch.

    All ranks must call it, in the same order. It is an all-gather of unequal parts,
    which each have their place already, for groups whose collectives streams wait for.

    Args:
        flats: A tensor for each rank, of one dimension, alike on all ranks. One at
            least is not empty.
        group: The process group.
    """
    device = flats[0].device
    group._start_coalescing(device)
    for rank, flat in enumerate(flats):
        if flat.numel():
            start_broadcast(flat, group, rank)
    work: Work = group._end_coalescing(device)
    return work


class GatheredParts:
    """What `start_scatter` starts in a group without all-to-all, as a work.

    Args:
        flat: What this rank brings.
        widths: How many elements of a row each rank gets.
        counts: How many rows each rank brings.
        group: The process group.
        arrived: What is written when this is waited for.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        widths: Sequence[int],
        counts: Sequence[int],
        group: ProcessGroup,
        arrived: torch.Tensor,
    ) -> None:
        rank = group.rank()
        if lacking := (max(counts) - counts[rank]) * sum(widths):
            flat = torch.cat([flat, flat.new_zeros(lacking)])
        self._rows, self._work = start_gathering(flat, group)
        self._before, self._width = sum(widths[:rank]), widths[rank]
        self._counts, self._arrived = counts, arrived
        self.get_future = self._work.get_future
        self.is_completed = self._work.is_completed

    def wait(self) -> None:
        """Wait for the rows of all ranks, and keep the parts of this one."""
        self._work.wait()
        use_here(self._rows, self._arrived)
        found = [
            row[count * self._before :][: count * self._width]
            for row, count in zip(self._rows, self._counts, strict=True)
        ]
        torch.cat(found, out=self._arrived.view(-1))


def gather_rows(row: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Gather a row from every rank, as `start_gathering` does, and wait for them."""
    rows, work = start_gathering(row, group)
    wait_for_message(work, row.device, group)
    return rows


def wait_for_message(work: Work, device: torch.device, group: ProcessGroup) -> None:
    """Wait for a collective of a group, whose tensors may be on the CPU.

    A group of a device may send them by Gloo. Then the host waits, and `wait_for` alone
    would not do so with a limit, because it takes it for a collective of the device.

    Args:
        work: The collective.
        device: Where its tensors lie.
        group: The group.
    """
    if device.type == "cpu" and not is_python_group(group):
        is_side = type(group) is not ProcessGroup  # which is Gloo
        if is_side or backend_of(group, device) == "gloo":
            work = HostWork(work)
    wait_for(work)


def barrier(group: ProcessGroup, device: torch.device) -> None:
    """Wait until all ranks of the group have called this.

    A group that is written in Python may have no barrier, and then nothing is waited
    for. The error of a group that has one is raised, because a rank that died in it
    must not pass for a group without a barrier.

    Args:
        group: The process group.
        device: A device for which the group has a backend. It matters only to a group
            that has none for the CPU.
    """
    if not is_python_group(group):
        options = dist.BarrierOptions()
        if torch.device("cpu") not in group._device_types:
            options.device = device
            options.device_ids = [device.index or 0]  # else NCCL guesses by the rank
        wait_for(group.barrier(options))
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
    """Gather integers from every rank, and return those of each rank, by rank.

    All ranks of the group must call it, in the same order.

    Args:
        values: Integers of 64 bits, equally many on all ranks.
        group: The process group.
        device: Where the message lies; the backend may allow only one kind.
    """
    mine = upload(values, torch.int64, device)
    rows: list[list[int]] = to_host(gather_rows(mine, group)).tolist()
    return rows


def gather_bytes(
    buffer: bytes,
    group: ProcessGroup,
    device: torch.device,
    lengths: Sequence[int] | None = None,
) -> list[bytes]:
    """Gather bytes from every rank, and return those of each rank, by rank.

    All ranks of the group must call it, in the same order.

    Args:
        buffer: The bytes of this rank.
        group: The process group.
        device: Where the message lies; the backend may allow only one kind.
        lengths: How many bytes each rank has, if all ranks know all of these numbers.
            Otherwise they are gathered first.
    """
    if lengths is None:
        lengths = [row[0] for row in gather_integers([len(buffer)], group, device)]
    padded = bytearray(buffer.ljust(max(lengths), b"\0"))
    mine = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    rows = to_host(gather_rows(mine, group))
    return [
        bytes(theirs[:length].numpy().tobytes())
        for theirs, length in zip(rows, lengths, strict=True)
    ]


def broadcast_integers(
    values: Sequence[int], group: ProcessGroup, device: torch.device
) -> list[int]:
    """Return the integers of rank 0 on every rank.

    All ranks of the group must call it, in the same order.

    Args:
        values: Integers of 64 bits. The other ranks pass as many, which are ignored.
        group: The process group.
        device: Where the message lies; the backend may allow only one kind.
    """
    message = upload(values, torch.int64, device)
    wait_for_message(start_broadcast(message, group, 0), device, group)
    return [int(value) for value in to_host(message).tolist()]


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], group: ProcessGroup, root: int = 0
) -> None:
    """Overwrite tensors by those of rank ``root``, and wait for it.

    All ranks of the group must call it, in the same order. The tensors travel as raw
    bytes, so that one message of about 250 MiB carries all dtypes of a device. Their
    version counters do not change, because a graph may have saved a tensor. Tensors on
    the meta device have no values, and are left out.

    Args:
        tensors: Dense tensors of any shapes and dtypes, alike on all ranks.
        group: The process group.
        root: The rank that has the values.

    Raises:
        RuntimeError: A tensor is sparse or quantized. Nothing has been sent then.
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
                _unpack(*in_flight.pop(0), group)
            message = torch.cat([_as_bytes(t) for t in part])  # 1D uint8
            in_flight.append((part, message, start_broadcast(message, group, root)))
        for arrived in in_flight:
            _unpack(*arrived, group)


def _unpack(
    tensors: list[torch.Tensor],
    message: torch.Tensor,
    work: Work,
    group: ProcessGroup,
) -> None:
    """Wait for a message, and copy its bytes into the tensors."""
    wait_for_message(work, message.device, group)
    pieces = message.split([t.nbytes for t in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in row-major order: if possible as a view."""
    # as_strided: a contiguous tensor of one element may have any stride.
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
