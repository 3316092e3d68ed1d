"""Rebuild buckets once, in the order in which gradients became ready on rank 0.

The first buckets are filled from the last parameter to the first, which is a guess. A
gradient that comes later than guessed keeps its bucket, and all buckets after it, from
being launched. So after the first backward buckets are made anew in the real order; it
must be the same on all ranks, and rank 0's is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidp.comm import Communicator, barrier, broadcast_integers
from minidp.config import ReducerConfig, SavedLayout
from minidp.layout import Layout, ParamSpec, build_layout, rebuilt_layout, to_plain


class RebuildPolicy:
    """Keep an order of gradients, and let the next forward rebuild the buckets in it.

    This happens once; `reset` allows it once more. A ``saved`` layout that was rebuilt
    already is not rebuilt again.
    """

    def __init__(self, saved: SavedLayout | None = None) -> None:
        self._starts_rebuilt = saved is not None and saved.rebuilt
        self.has_rebuilt = self._starts_rebuilt
        self._order: list[int] | None = None
        self.layout_by = ""  # which search chose the layout; recorded with the steps

    @property
    def is_due(self) -> bool:
        """Whether the next forward in grad mode rebuilds. All ranks agree on it."""
        return self._order is not None

    def keep(self, order: list[int]) -> None:
        """Keep an order for the next forward, unless buckets were rebuilt already."""
        if not self.has_rebuilt:
            self._order = order

    def plain_layout(
        self, now: Layout, specs: Sequence[ParamSpec], config: ReducerConfig
    ) -> dict[str, Any]:
        """Return the layout of the next backward as plain data, for a checkpoint.

        It is the present one, ``now``, unless a rebuild is due. That will follow the
        order of rank 0, so only there is this the layout that all ranks will use.
        """
        if self._order is not None:
            now = layout_after(self._order, specs, config)
        rebuilt = self.has_rebuilt or self._order is not None
        return to_plain(now, specs, rebuilt=rebuilt)

    def next_layout(self, specs: Sequence[ParamSpec], config: ReducerConfig) -> Layout:
        """Return the layout for the order that was kept, which is used up by this."""
        order, self._order = self._order or [], None
        self.has_rebuilt = True
        return layout_after(order, specs, config)

    def reset(self, *, rebuilds_again: bool = False) -> None:
        """Forget the order, and allow another rebuild.

        Of a saved layout that was rebuilt already, only ``rebuilds_again`` allows it.
        """
        self.has_rebuilt = self._starts_rebuilt and not rebuilds_again
        self._order = None


def layout_after(
    order: Sequence[int], specs: Sequence[ParamSpec], config: ReducerConfig
) -> Layout:
    """Return the layout whose buckets become full in this order of gradients."""
    limits = config.caps.rebuilt_limits()
    return rebuilt_layout(specs, limits, order, from_the_end=config.last_is_small)


def agreed_layout(
    mine: Layout, specs: Sequence[ParamSpec], communicator: Communicator
) -> Layout:
    """Return the layout of rank 0 on every rank.

    All ranks of the group must call it together; they wait for each other.
    """
    with communicator.blocking("broadcasting the bucket layout"):
        device, group = specs[0].device, communicator.group
        # Rank 0's broadcast can end before other ranks start theirs. If these then
        # broadcast another size first (module buffers), gloo aborts the process.
        barrier(group, device)
        agreed = broadcast_integers(encode_layout(mine), group, device)
    return decode_layout(agreed, specs)


def encode_layout(layout: Layout) -> list[int]:
    """Return a layout as integers, equally many for each layout of these parameters.

    All parameters come first, in bucket order, then as many lengths of buckets, filled
    up with zeros.
    """
    lengths = [len(members) for members in layout.assignment]
    padding = [0] * (layout.num_params - len(lengths))
    return [i for members in layout.assignment for i in members] + lengths + padding


def decode_layout(message: Sequence[int], specs: Sequence[ParamSpec]) -> Layout:
    """Return the layout that `encode_layout` has encoded."""
    half = len(message) // 2
    rest = iter(message[:half])
    lengths = filter(None, message[half:])
    return build_layout(specs, [[next(rest) for _ in range(n)] for n in lengths])
