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
        self._leaves, self._block = leaves, block
        self.may_repeat = False  # a reduction may fail, and another round follow
        self.kept: list[tuple[Node, Grads]]  # sums of earlier rounds, left to right
        self.clear()

    def clear(self) -> None:
        """Forget all sums."""
        self.kept = []
        self._made: dict[torch.device, After] = {}  # when they were, by device
        self.begin(self._block)

    def begin(self, turns: Sequence[int]) -> None:
        """Begin a round of these logical ranks, in ascending order.

        What is `kept` remains. Without any logical ranks this rank has nothing to add
        to the sum, and what its buckets hold does not count.
        """
        self._sums: Sums[Grads] = Sums(self._leaves, plus)
        self._has_bucket = bool(turns)
        # How many sums of this round travel beside the bucket.
        self._num_apart = max(len(cover(self._leaves, turns)) - 1, 0)

    def reduced(self) -> None:
        """Forget all sums after a reduction, unless it may have failed."""
        if not self.may_repeat:
            self.clear()

    def keep(self) -> None:
        """Keep the sums of a round that has failed, for the next one."""
        self.kept += self._sums.open
        self.kept.sort(key=lambda pair: pair[0].first)
        self._sums = Sums(self._leaves, plus)

    def add(self, leaf: int, grads: Grads) -> None:
        """Add the gradients of a logical rank, whose memory is ours from now on."""
        devices = {grad.device for grad in grads if grad is not None}
        with_streams = [each for each in devices if has_streams(each)]
        if with_streams:
            use_here(*grads)  # the streams of the backward have made them
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
            views: The view of the bucket's buffer for each of them.
        """
        meeting = [grads for _, grads in self._sums.open[self._num_apart :]]
        sums = [*reversed(self._of(plan, meeting))]  # upwards in the tree
        if plan.device.type == "cpu":  # a view that was just written is in the cache
            for k, view in enumerate(views):
                for grads in sums:
                    _add([view], [grads[k]])
        else:  # where a launch costs more than memory
            for grads in sums:
                _add(views, grads)

    def pieces(self, plan: BucketPlan, payload: Tensor) -> list[Tensor]:
        """Return what this rank adds to the sum of a bucket: its payload is the last.

        The others are sums that stay apart, each flat like the payload.

        Args:
            plan: Which parameters the bucket has.
            payload: Its buffer, of one dimension and real.
        """
        found = []
        apart = [grads for _, grads in self.kept]
        apart += [grads for _, grads in self._sums.open[: self._num_apart]]
        for grads in self._of(plan, apart):
            piece = values = torch.zeros_like(payload)
            if plan.dtype.is_complex:
                values = torch.view_as_complex(piece.view(-1, 2))
            for slot, grad in zip(plan.slots, grads, strict=True):
                if grad is not None:
                    place = slot.shape, slot.stride, slot.offset
                    values.as_strided(*place).copy_(grad)
            found.append(piece)
        return [*found, payload] if self._has_bucket else found


def plus(left: Grads, right: Grads) -> Grads:
    """Return the sums of the gradients of two nodes, in the memory of both."""
    pairs = list(zip(left, right, strict=True))
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    for a, b in pairs:
        one = a if b is None else b
        if (a is None) != (b is None) and one is not None:
            _add_zeros(one)
    return [b if a is None else a for a, b in pairs]


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
