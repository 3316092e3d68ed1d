"""Add up sparse gradients in the order of the tree: embeddings with ``sparse=True``.

What a logical rank has not looked up is not zero, it is not there. So the sum of two
nodes has the rows of both, and adds those that both have: at most two values for each
row, and a + b is b + a. Nothing is added to a row that one of them lacks, which keeps
-0, and does so on any number of ranks.

How many rows a rank has differs from step to step, so that no slice of a bucket could
be summed on each rank. Instead all ranks tell each other how many they have, gather
all pieces, and each adds them up for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minidp import comm
from minidp.comm import ProcessGroup

from .tree import Node, Sums

_ALIGNED = 16  # bytes, more than the widest elements have


def add_sparse(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum of two coalesced sparse tensors of one shape.

    It is one of the two if the other has no rows, and else a new one.
    """
    if not right._nnz():
        return left
    if not left._nnz():
        return right
    indices = torch.cat([left.indices(), right.indices()], 1)
    return _sparse(indices, torch.cat([left.values(), right.values()]), left).coalesce()


def no_rows(like: Tensor) -> Tensor:
    """Return an empty sparse tensor, of the shape of one that is coalesced."""
    indices, values = like.indices()[:, :0], like.values()[:0]
    return _sparse(indices, values, like, is_coalesced=True)


def _sparse(
    indices: Tensor, values: Tensor, like: Tensor, *, is_coalesced: bool = False
) -> Tensor:
    return torch.sparse_coo_tensor(
        indices,
        values,
        like.shape,
        device=like.device,  # else the user's default device
        is_coalesced=is_coalesced,
        check_invariants=False,
    )


class SparsePieces:
    """How the pieces of a sparse bucket travel: what `Slices` is for a dense one.

    Args:
        payload: What gets the sum.
        pieces: What this rank brings, coalesced. One of them may be the payload.
        nodes: The nodes of the pieces of all ranks, by rank.
        leaves: How many logical ranks there are.
        group: The process group.
    """

    def __init__(
        self,
        payload: Tensor,
        pieces: Sequence[Tensor],
        nodes: Sequence[Sequence[Node]],
        leaves: int,
        group: ProcessGroup,
    ) -> None:
        self.payload, self.pieces = payload, pieces
        self._nodes, self._leaves = nodes, leaves
        self.group = group
        self._counts: list[list[int]] = []  # of rows, by rank and piece
        self._width = 0  # of the message with the values of a rank, in bytes

    def exchange(self) -> tuple[Tensor, comm.Work]:
        """Start to tell all ranks how many rows each piece has.

        Returns:
            These counts, of shape (ranks, pieces), valid after the work; and the work.
        """
        counts = [piece._nnz() for piece in self.pieces]
        counts += [0] * (max(map(len, self._nodes)) - len(counts))
        mine = torch.tensor(counts, device=self.payload.device)
        return comm.start_gathering(mine, self.group)

    def add_up(self, arrived: Tensor) -> Tensor:
        """Return this rank's message to all, once the counts of all have arrived."""
        self._counts = arrived.tolist()
        indices = torch.cat([piece.indices() for piece in self.pieces], 1)
        values = torch.cat([piece.values() for piece in self.pieces])
        most = max(1, *(sum(row) for row in self._counts))  # some refuse empty messages
        self._width = _padded(most * values.shape[1:].numel() * values.itemsize)
        nbytes = self._width + _padded(most * len(indices) * indices.itemsize)
        message = torch.zeros(nbytes, dtype=torch.uint8, device=indices.device)
        for start, part in ((0, values), (self._width, indices)):
            whole = part.contiguous().view(-1).view(torch.uint8)
            message[start : start + len(whole)] = whole
        self.pieces = ()  # they need no memory any more
        return message

    def gather(self, mine: Tensor, group: ProcessGroup) -> tuple[Tensor, comm.Work]:
        """Start to gather the messages of all ranks."""
        return comm.start_gathering(mine, group)

    def put_together(self, rows: Tensor) -> None:
        """Let the payload have the sum of all pieces, which `gather` has brought."""
        sums: Sums[Tensor] = Sums(self._leaves, add_sparse)
        for nodes, row, counts in zip(self._nodes, rows, self._counts, strict=True):
            pieces = self._unpacked(row, counts)
            for node, piece in zip(nodes, pieces, strict=False):
                sums.add(node, piece)
        ((_, total),) = sums.open
        self.payload.copy_(total)

    def _unpacked(self, row: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
        """Yield the pieces of a rank, from its message."""
        like, total = self.payload, sum(counts)
        shape = total, *like.shape[like.sparse_dim() :]
        values = _read(row, like.values().dtype, shape)
        shape = like.sparse_dim(), total
        indices = _read(row[self._width :], torch.int64, shape)
        starts = [sum(counts[:k]) for k in range(len(counts))]
        for start, count in zip(starts, counts, strict=True):
            part = slice(start, start + count)
            yield _sparse(indices[:, part], values[part], like, is_coalesced=True)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _read(row: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return the elements at the beginning of a message."""
    numel = torch.Size(shape).numel()
    return row[: numel * dtype.itemsize].view(dtype).view(shape)
