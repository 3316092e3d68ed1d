"""Tell differences that rounding explains from those that it does not.

Ranks on other hardware, or with kernels that are not deterministic, compute averages
that differ in their last bits. That is no reason to stop a training.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from minidp.accelerator import to_host
from minidp.comm import broadcast_coalesced, exchange_device, gather_integers

if TYPE_CHECKING:
    from minidp.comm import Communicator

_DOING = "finding out how much values differ"
MOST_BYTES = 64 * 2**20  # to be broadcast and compared element by element


def are_close_on_all_ranks(
    tensors: Sequence[torch.Tensor | None],
    communicator: Communicator,
    limit: float,
    num_eps: int = 2,
) -> bool:
    """Return whether the tensors of all ranks are close to those of rank 0.

    All ranks must call this together, and all get the same answer. Dense tensors are
    compared in order until 64 MiB are compared; the rest is taken to be close.

    Args:
        tensors: The tensors of this rank. None is close to None alone.
        communicator: Knows the group, and how long to wait for the other ranks.
        limit: By how much an element may be off, as a fraction of the largest finite
            element of rank 0's tensor.
        num_eps: The same in units of the precision of the dtype. The larger of the two
            counts.
    """
    if not are_alike_on_all_ranks(tensors, communicator):
        return False
    are_close, left = True, MOST_BYTES
    for tensor in tensors:
        if tensor is not None and left > 0:
            (root,) = copies_of_rank_0([tensor], communicator)
            are_close &= _is_close(tensor.detach(), root, limit, num_eps)
            left -= tensor.nbytes
    return all(near for (near,) in _gather(are_close, communicator, tensors))


def are_alike_on_all_ranks(
    tensors: Sequence[torch.Tensor | None], communicator: Communicator
) -> bool:
    """Return whether all ranks have dense tensors of equal shapes and dtypes.

    All ranks must call this together, and all get the same answer. It comes before a
    broadcast: Gloo ends a process that receives one of another size than it expects.
    """
    shapes = [None if t is None else (tuple(t.shape), t.dtype) for t in tensors]
    dense = [tensor for tensor in tensors if tensor is not None]
    is_plain = bool(dense) and all(t.layout is torch.strided for t in dense)
    kind = 1 + zlib.crc32(repr(shapes).encode()) if is_plain else 0
    kinds = {value for (value,) in _gather(kind, communicator, tensors)}
    return len(kinds) == 1 and is_plain


def copies_of_rank_0(
    tensors: Sequence[torch.Tensor], communicator: Communicator
) -> list[torch.Tensor]:
    """Return rank 0's values of dense tensors, which are alike on all ranks."""
    roots = [tensor.detach().clone() for tensor in tensors]
    with communicator.blocking(_DOING):
        broadcast_coalesced(roots, communicator.group)
    return roots


def _gather(
    value: int, communicator: Communicator, like: Sequence[torch.Tensor | None]
) -> list[list[int]]:
    devices = [tensor.device for tensor in like if tensor is not None]
    device = next(iter(devices), torch.device("cpu"))
    group = communicator.group
    with communicator.blocking(_DOING):
        return gather_integers([value], group, exchange_device(group, device))


def _is_close(
    mine: torch.Tensor, root: torch.Tensor, limit: float, num_eps: int
) -> bool:
    if mine.is_complex():
        mine, root = torch.view_as_real(mine), torch.view_as_real(root)
    eps = torch.finfo(mine.dtype).eps if mine.is_floating_point() else 0.0
    # On the host, because not every device has double precision.
    mine, root = to_host(mine).double(), to_host(root).double()
    sizes = root.abs().nan_to_num(nan=0.0, posinf=0.0)
    largest = float(sizes.max()) if sizes.numel() else 0.0
    atol = max(limit, num_eps * eps) * largest
    return torch.allclose(mine, root, rtol=0.0, atol=atol, equal_nan=True)
