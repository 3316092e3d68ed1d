"""Buckets are rebuilt once, in the order in which gradients became ready on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._collectives import broadcast_integers
from ._layout import Layout, ParamSpec, build_layout
from ._watch import Watch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ReadyOrder:
    """The order in which gradients became ready, while a rebuild is still to come."""

    def __init__(self) -> None:
        self.has_rebuilt = False
        self._order: list[int] | None = None

    @property
    def is_due(self) -> bool:
        """Whether the next forward rebuilds; the same on all ranks."""
        return self._order is not None

    def note(self, order: list[int]) -> None:
        """A backward ended; the last one before the rebuild counts."""
        if not self.has_rebuilt:
            self._order = order

    def take(self) -> list[int]:
        """Rebuild now."""
        order, self._order = self._order or [], None
        self.has_rebuilt = True
        return order

    def allow_again(self) -> None:
        """Rebuild once more, after the next backward."""
        self.has_rebuilt = False


def agreed_layout(
    mine: Layout, specs: Sequence[ParamSpec], group: ProcessGroup, watch: Watch
) -> Layout:
    """Collective: rank 0's layout.

    Args:
        mine: this rank's; only rank 0's counts.
        specs: the managed parameters.
        group: the ranks.
        watch: over the broadcast.
    """
    with watch.whole("broadcasting the bucket layout"):
        agreed = broadcast_integers(_encode(mine), group, specs[0].device)
    return build_layout(specs, _decode(agreed))


def _encode(layout: Layout) -> list[int]:
    """Indices in bucket order, then bucket lengths, padded to one per parameter."""
    lengths = [len(members) for members in layout.assignment]
    padding = [0] * (layout.num_params - len(lengths))
    return [i for members in layout.assignment for i in members] + lengths + padding


def _decode(message: Sequence[int]) -> list[list[int]]:
    """Parameter indices per bucket."""
    half = len(message) // 2
    rest = iter(message[:half])
    return [[next(rest) for _ in range(length)] for length in message[half:] if length]
