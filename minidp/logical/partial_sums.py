"""Add up the gradients of a rank's own logical ranks, but for the last one.

The last one's gradients are in the buckets, where its backward reduces them. What
belongs to the same node of the tree is added to the bucket when that is full
(`add_to_bucket`); what does not is a piece of its own, which travels beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minidp.accelerator import After, has_streams, use_here
from minidp.layout import BucketPlan

from .sparse_sums import add_sparse, no_rows
from .tree import Node, Sums, cover

# A gradient for each parameter. None stands for zeros: this logical rank has not used
# the parameter.
Grads = list[Tensor | None]


class PartialSums:
    """The sums of the logical ranks that this rank has done in a step.

    Args:
        leaves: How many logical ranks there are in all.
        block: Those of this rank.
    """

    def __init__(self, leaves: int, block: range) -> None:
        self._leaves = leaves
        self.nodes = cover(leaves, block)  # of the pieces; the bucket is the last one
        self.num_apart = len(self.nodes) - 1  # how many pieces travel beside the bucket
        self.clear()

    def clear(self) -> None:
        """Forget all sums."""
        self._sums: Sums[Grads] = Sums(self._leaves, plus)
        self._made: dict[torch.device, After] = {}  # when they were, by device

    def add(self, leaf: int, grads: Grads) -> None:
        """Add the gradients of a logical rank, whose memory is ours from now on."""
        devices = {grad.device for grad in grads if grad is not None}
        with_streams = [each for each in devices if has_streams(each)]
        if with_streams:
            use_here(*grads)  # the streams of the backward have made them
        # Two embeddings may share the memory of their values: no sum is in place.
        grads = [g.coalesce() if g is not None and g.is_sparse else g for g in grads]
        self._sums.add(Node(0, leaf), grads)
        self._made = {each: After(each) for each in with_streams}

    def _of(self, plan: BucketPlan, sums: Sequence[Grads]) -> list[Grads]:
        """Return the gradients of a bucket, for the stream that is current now."""
        found = [[grads[i] for i in plan.indices] for grads in sums]
        if plan.device in self._made:
            self._made[plan.device].hold_back()
            for grads in found:
                use_here(*grads)
        return found

    def add_to_bucket(self, plan: BucketPlan, views: Sequence[Tensor]) -> None:
        """Add what meets the last logical rank in one node to its full bucket.

        Args:
            plan: Which parameters the bucket has.
            views: The view of the bucket's buffer for each of them; of a sparse bucket
                its gradient, which is coalesced then.
        """
        meeting = [grads for _, grads in self._sums.open[self.num_apart :]]
        sums = [*reversed(self._of(plan, meeting))]  # upwards in the tree
        if plan.sparse:
            (payload,) = views
            total = payload.coalesce()
            for (grad,) in sums:
                total = total if grad is None else add_sparse(grad, total)
            if total is not payload:
                payload.copy_(total)
        elif plan.device.type == "cpu":  # a view that was just written is in the cache
            for k, view in enumerate(views):
                for grads in sums:
                    _add([view], [grads[k]])
        else:  # where a launch costs more than memory
            for grads in sums:
                _add(views, grads)

    def pieces(self, plan: BucketPlan, payload: Tensor) -> list[Tensor]:
        """Return the sums that stay apart, each flat like a bucket's payload.

        Args:
            plan: Which parameters the bucket has.
            payload: Its buffer, of one dimension and real; or the sparse gradient.
        """
        found = []
        apart = [grads for _, grads in self._sums.open[: self.num_apart]]
        if plan.sparse:
            sparse = [grad for (grad,) in self._of(plan, apart)]
            return [no_rows(payload) if grad is None else grad for grad in sparse]
        for grads in self._of(plan, apart):
            piece = values = torch.zeros_like(payload)
            if plan.dtype.is_complex:
                values = torch.view_as_complex(piece.view(-1, 2))
            for slot, grad in zip(plan.slots, grads, strict=True):
                if grad is not None:
                    place = slot.shape, slot.stride, slot.offset
                    values.as_strided(*place).copy_(grad)
            found.append(piece)
        return found


def plus(left: Grads, right: Grads) -> Grads:
    """Return the sums of the gradients of two nodes, in the memory of both."""
    pairs = list(zip(left, right, strict=True))
    sums = [_plus_one(a, b) for a, b in pairs]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    dense = [(a, b) for a, b in both if not a.is_sparse]
    if dense:
        torch._foreach_add_([a for a, _ in dense], [b for _, b in dense])
    return sums


def _plus_one(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, or where `plus` will write it."""
    if a is not None and b is not None:
        return add_sparse(a, b) if a.is_sparse else a
    one = b if a is None else a
    if one is not None and not one.is_sparse:
        _add_zeros(one)
    return one


def _add(views: Sequence[Tensor], grads: Grads) -> None:
    """Add gradients to the views of a bucket."""
    pairs = list(zip(views, grads, strict=True))
    both = [(view, grad) for view, grad in pairs if grad is not None]
    if both:
        torch._foreach_add_([view for view, _ in both], [grad for _, grad in both])
    for view, grad in pairs:
        if grad is None:
            _add_zeros(view)


def _add_zeros(values: Tensor) -> None:
    """Add zeros, which makes 0 of -0: a rank that sends zeros does the same."""
    values.add_(0.0)
