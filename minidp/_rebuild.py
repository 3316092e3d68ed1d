"""Buckets are rebuilt once, in the order in which gradients became ready on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._collectives import broadcast_integers, meet
from ._layout import Layout, ParamSpec, build_layout, rebuilt_layout
from ._saved_layout import to_plain
from ._watch import Watch
from .config import ReducerConfig, SavedLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ReadyOrder:
    """The order in which gradients became ready, while a rebuild is still to come.

    Args:
        saved: the layout to start with, which may be a rebuilt one.
    """

    def __init__(self, saved: SavedLayout | None = None) -> None:
        self._starts_rebuilt = saved is not None and saved.rebuilt
        self.has_rebuilt = self._starts_rebuilt
        self._order: list[int] | None = None
        self.layout_by = ""  # see `_timeline.Where`

    @property
    def is_due(self) -> bool:
        """Whether the next forward rebuilds; the same on all ranks."""
        return self._order is not None

    def note(self, order: list[int]) -> None:
        """A backward ended; the last one before the rebuild counts."""
        if not self.has_rebuilt:
            self._order = order

    def plain_layout(
        self, now: Layout, specs: Sequence[ParamSpec], config: ReducerConfig
    ) -> dict[str, Any]:
        """The layout of the next backward (rank 0's counts), for a checkpoint."""
        rebuilt = self.has_rebuilt or self._order is not None
        if self._order is not None:
            now = layout_after(self._order, specs, config)
        return to_plain(now, specs, rebuilt=rebuilt)

    def next_layout(self, specs: Sequence[ParamSpec], config: ReducerConfig) -> Layout:
        """Rebuild now: what this rank would have."""
        order, self._order = self._order or [], None
        self.has_rebuilt = True
        return layout_after(order, specs, config)

    def allow_again(self) -> None:
        """Rebuild once more, after the next backward."""
        self.has_rebuilt = False

    def start_over(self) -> None:
        """The same, whether one is due now or not: ranks may differ in that."""
        self.has_rebuilt = self._starts_rebuilt
        self._order = None


def layout_after(
    order: Sequence[int], specs: Sequence[ParamSpec], config: ReducerConfig
) -> Layout:
    """What this rank would have after a rebuild by ``order``."""
    limits = config.caps.rebuilt_limits()
    return rebuilt_layout(specs, limits, order, from_the_end=config.last_is_small)


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
        device = specs[0].device
        # Rank 0 would be done before the others have come, and a broadcast of another
        # size (module buffers) may be what they do: gloo then aborts the process.
        meet(group)
        agreed = broadcast_integers(_encode(mine), group, device)
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
