"""Tell replicas that have drifted apart from weights that each rank moves by itself.

A training may add noise of each rank to the weights before a forward, and take it off
after the backward. In between, where the ranks compare, such replicas look like those
that have drifted apart. The next look tells them apart: replicas that have drifted
apart apply the same averages, and so stay as far from each other as they were. Noise is
drawn anew, so that nothing of the earlier difference is left.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from minidp.accelerator import to_host
from minidp.comm import exchange_device, gather_integers

from .digest import as_plain
from .rounding import are_alike_on_all_ranks, copies_of_rank_0

if TYPE_CHECKING:
    from minidp.comm import Communicator

_DOING = "finding out whether a difference lasts"
MOST_ELEMENTS = 2**19  # 4 MiB in double precision
# By how much a difference that lasts may have changed, as a fraction of what it is now.
# A drift that grows by the same amount in every step has changed by a half of itself at
# the second look. Noise that is drawn anew changes by more than itself.
MOST_CHANGE = 0.6
_LARGEST = 1e100  # stands for infinities and NaN; its square is finite


class Deviation:
    """How far this replica was from that of rank 0 when the ranks looked last."""

    def __init__(self) -> None:
        self._last: dict[str, torch.Tensor] = {}

    def has_lasted(
        self, tensors: Mapping[str, torch.Tensor], communicator: Communicator
    ) -> bool:
        """Return whether the replicas differ by what they differed at the last look.

        All ranks must call this together, and all get the same answer. The first look
        answers False. What cannot be subtracted, because its shape or dtype is not the
        same on all ranks, is taken to last.

        Args:
            tensors: The tensors that differ, by name. Of the elements of all of them,
                in order, the first half a million are looked at.
            communicator: Knows the group, and how long to wait for the other ranks.
        """
        last, heads, left = self._last, dict[str, torch.Tensor](), MOST_ELEMENTS
        for name, tensor in tensors.items():
            head = as_plain(tensor)[:left]
            left -= len(head)
            if len(head):
                heads[name] = head
        self._last = {}
        if not are_alike_on_all_ranks([*heads.values()], communicator):
            return True
        roots = copies_of_rank_0([*heads.values()], communicator)
        for (name, head), root in zip(heads.items(), roots, strict=True):
            self._last[name] = _numbers(head) - _numbers(root)
        known = [
            (now, last[name])
            for name, now in self._last.items()
            if name in last and last[name].shape == now.shape
        ]
        if not known:
            return False
        own_change = sum(float((now - then).square().sum()) for now, then in known)
        own_size = sum(float(now.square().sum()) for now, _ in known)
        rows = _gather(own_change, own_size, communicator, heads)
        change, size = sum(row[0] for row in rows), sum(row[1] for row in rows)
        return change <= MOST_CHANGE**2 * size


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """Return the values as numbers that can be subtracted and squared, on the host.

    Not every device has double precision.
    """
    return to_host(values).double().nan_to_num(nan=_LARGEST).clamp(-_LARGEST, _LARGEST)


def _gather(
    change: float,
    size: float,
    communicator: Communicator,
    like: Mapping[str, torch.Tensor],
) -> list[tuple[float, float]]:
    """Return both numbers of each rank. They travel as the bits of integers."""
    bits: tuple[int, ...] = struct.unpack("2q", struct.pack("2d", change, size))
    device = next(iter(like.values())).device
    group = communicator.group
    with communicator.blocking(_DOING):
        rows = gather_integers(bits, group, exchange_device(group, device))
    pairs: list[tuple[float, float]]
    pairs = [struct.unpack("2d", struct.pack("2q", *row)) for row in rows]
    return pairs
