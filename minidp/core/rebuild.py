"""Rebuild buckets once, in the order in which gradients became ready on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidp.comm import Communicator, barrier, broadcast_integers
from minidp.config import ReducerConfig, SavedLayout
from minidp.layout import Layout, ParamSpec, build_layout, rebuilt_layout, to_plain


class RebuildPolicy:
    """Keep a ready order; let the next forward rebuild the buckets in it, only once.

    `reset` allows another rebuild. No rebuild if ``saved`` was saved after one.
    """

    def __init__(self, saved: SavedLayout | None = None) -> None:
        self._starts_rebuilt = saved is not None and saved.rebuilt
        self.has_rebuilt = self._starts_rebuilt
        self._order: list[int] | None = None
        self.layout_by = ""  # which search chose the layout; recorded with the steps

    @property
    def is_due(self) -> bool:
        """Whether the next forward in grad mode rebuilds; equal on all ranks."""
        return self._order is not None

    def keep(self, order: list[int]) -> None:
        """Keep ``order``, so that the next forward rebuilds; no-op after a rebuild."""
        if not self.has_rebuilt:
            self._order = order

    def plain_layout(
        self, now: Layout, specs: Sequence[ParamSpec], config: ReducerConfig
    ) -> dict[str, Any]:
        """Return the next backward's layout as plain data: ``now``, or a due rebuild's.

        The latter by this rank's ready order; rank 0's is the one that all will use.
        """
        if self._order is not None:
            now = layout_after(self._order, specs, config)
        rebuilt = self.has_rebuilt or self._order is not None
        return to_plain(now, specs, rebuilt=rebuilt)

    def next_layout(self, specs: Sequence[ParamSpec], config: ReducerConfig) -> Layout:
        """Return the layout for the kept order; drop that order, set `has_rebuilt`."""
        order, self._order = self._order or [], None
        self.has_rebuilt = True
        return layout_after(order, specs, config)

    def reset(self, *, rebuilds_again: bool = False) -> None:
        """Drop the kept order, and allow another rebuild.

        If the saved layout was rebuilt already: only with ``rebuilds_again``.
        """
        self.has_rebuilt = self._starts_rebuilt and not rebuilds_again
        self._order = None


def layout_after(
    order: Sequence[int], specs: Sequence[ParamSpec], config: ReducerConfig
) -> Layout:
    """Return the layout whose buckets fill up in the ready order ``order``."""
    limits = config.caps.rebuilt_limits()
    return rebuilt_layout(specs, limits, order, from_the_end=config.last_is_small)


def agreed_layout(
    mine: Layout, specs: Sequence[ParamSpec], communicator: Communicator
) -> Layout:
    """Collective, waits: broadcast rank 0's ``mine``; return that on every rank."""
    with communicator.blocking("broadcasting the bucket layout"):
        device, group = specs[0].device, communicator.group
        # Rank 0's broadcast can end before other ranks start theirs. If these then
        # broadcast another size first (module buffers), gloo aborts the process.
        barrier(group)
        agreed = broadcast_integers(encode_layout(mine), group, device)
    return decode_layout(agreed, specs)


def encode_layout(layout: Layout) -> list[int]:
    """Return all indices in bucket order, then as many bucket lengths, 0-padded."""
    lengths = [len(members) for members in layout.assignment]
    padding = [0] * (layout.num_params - len(lengths))
    return [i for members in layout.assignment for i in members] + lengths + padding


def decode_layout(message: Sequence[int], specs: Sequence[ParamSpec]) -> Layout:
    """Return the layout of ``specs`` from what `encode_layout` returned."""
    half = len(message) // 2
    rest = iter(message[:half])
    lengths = filter(None, message[half:])
    return build_layout(specs, [[next(rest) for _ in range(n)] for n in lengths])
