"""Add up the gradients of logical ranks for the owners of parameters.

What a rank brings to the sum of a bucket are nodes of a tree (`minidp.logical`). Of all
of these an owner gets its stretch, and adds them up in the order of that tree::

    rank 0   (1, 0), 2  ---.---> rank 0: its stretch of (3, 0), times 1/5
                            X
    rank 1   3, 4  --------'---> rank 1: its stretch of (3, 0), times 1/5

So averages have the same bits on any number of ranks, although that number decides who
owns what. Nobody else gets them. Everything else is as without logical ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from minidp import comm
from minidp.core import Averaging
from minidp.layout import BucketPlan, Layout
from minidp.logical import TreeAveraging
from minidp.shared_memory import BufferShape, SharedBuffer

from .averaging import Brought, ShardedAveraging
from .owners import Owners


class ShardedTreeAveraging(ShardedAveraging):
    """Averages over logical ranks, of which each rank gets those of its share.

    Args:
        tree: What logical ranks have put in the place of the reducer's `Averaging`. It
            knows the order of the sums, and what this rank has added up by itself.
        owners: Who owns which parameter.
        communicator: The communicator of the ranks.
    """

    def __init__(
        self, tree: TreeAveraging, owners: Owners, communicator: comm.Communicator
    ) -> None:
        super().__init__(tree, owners, communicator, batched=False)
        self._tree = tree
        self.leaves, self.order = tree.leaves, tree.order

    @property
    def divisor(self) -> int:
        """The number by which gradients are divided before they travel."""
        return self._tree.divisor

    @property
    def scale(self) -> float | Tensor:
        """By what the sum over all logical ranks is multiplied."""
        return self._tree.scale

    def add_earlier_sums(self, plan: BucketPlan, views: Sequence[Tensor]) -> None:
        """Add the sums of this rank's other logical ranks to a full bucket.

        Raises:
            GradientError: Gradients have a graph of their own (``create_graph=True``).
        """
        self._tree.add_earlier_sums(plan, views)

    def reduce(  # noqa: D102
        self, plan: BucketPlan, payload: Tensor, shared: SharedBuffer | None
    ) -> comm.Work:
        if shared is not None:
            self._tree.partial.fill_rows(plan)
        return super().reduce(plan, payload, shared)

    def brought(self, plan: BucketPlan, payload: Tensor) -> Brought:
        """Return what the ranks bring to a bucket: one or several nodes of the tree."""
        pieces = self._tree.partial.pieces(plan, payload)
        return Brought(pieces, self._tree.counts, self._tree.add_up)

    def share(self, layout: Layout, *args: Any, **options: Any) -> list[SharedBuffer]:
        """Share buckets, and rows for pieces beside them; see `Averaging`."""
        self._tree.partial.use_rows([], [])  # lets the memory before go
        found = super().share(layout, *args, **options)
        if found:
            rows = [each.apart for each in found]
            self._tree.partial.use_rows(layout.buckets, rows)
        return found

    def shape_of(self, plan: BucketPlan) -> BufferShape:  # noqa: D102
        return super().shape_of(plan)._replace(order=self.order)


def averaging_for(
    before: Averaging,
    owners: Owners,
    communicator: comm.Communicator,
    *,
    batched: bool,
) -> ShardedAveraging:
    """Return what takes the place of a reducer's `Averaging` if steps are divided.

    Args:
        before: That one.
        owners: Who owns which parameter.
        communicator: The communicator of the ranks.
        batched: Whether to divide full buffers instead of single gradients. With
            logical ranks nothing is divided before it travels.
    """
    if isinstance(before, TreeAveraging):
        return ShardedTreeAveraging(before, owners, communicator)
    return ShardedAveraging(before, owners, communicator, batched=batched)
