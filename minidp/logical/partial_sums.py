"""Add up the gradients of a rank's own logical ranks, but for the last one.

The last one's gradients are in the buckets, where its backward reduces them. What
belongs to the same node of the tree is added to the bucket when that is full
(`add_to_bucket`); what does not is a piece of its own, which travels beside it. Where
buckets are in shared memory such a piece is written there as soon as it is complete,
while it is added up, so that it is not copied later (`use_rows`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minidp.accelerator import After, has_streams, use_here
from minidp.core import add_natively
from minidp.layout import BucketPlan

from .arrived import Grads
from .sparse_sums import add_sparse, no_rows
from .tree import Node, Sums, cover

_CACHED_BYTES = 128 * 1024  # of a bucket, besides as much of what is added to it


class Piece(NamedTuple):
    """The sum of the gradients below one node of the tree."""

    node: Node
    grads: Grads


# Where a piece is to be written, by its node: a tensor for each parameter, or None if
# that has sparse gradients, which lie in no buffer.
Places = dict[Node, Sequence[Tensor | None]]


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
        self._places: Places = {}  # in shared memory, of pieces that stay apart
        self.clear()

    def use_rows(
        self, plans: Sequence[BucketPlan], rows: Sequence[Sequence[Tensor]]
    ) -> None:
        """Write pieces that stay apart to these rows, as soon as they are complete.

        A piece that is complete already stays where it is, until `fill_rows`.

        Args:
            plans: The buckets. Without any, pieces stay in memory of their own.
            rows: For each dense bucket a row for each such piece, of one dimension and
                real.
        """
        self._places.clear()
        if not plans:
            return
        apart = cover(self._leaves, self._block)[:-1]
        places: list[dict[int, Tensor]] = [{} for _ in apart]
        dense = [plan for plan in plans if not plan.sparse]
        for plan, of_bucket in zip(dense, rows, strict=True):
            for found, row in zip(places, of_bucket, strict=True):
                found |= zip(plan.indices, views_of(plan, row), strict=True)
        num_params = sum(len(plan.indices) for plan in plans)
        for node, found in zip(apart, places, strict=True):
            self._places[node] = [found.get(i) for i in range(num_params)]

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
        self._sums = self._no_sums()
        self._has_bucket = bool(turns)
        # How many sums of this round travel beside the bucket.
        self._num_apart = max(len(cover(self._leaves, turns)) - 1, 0)

    def reduced(self) -> None:
        """Forget all sums after a reduction, unless it may have failed."""
        if not self.may_repeat:
            self.clear()

    def keep(self) -> None:
        """Keep the sums of a round that has failed, for the next one."""
        self.kept += self._open
        self.kept.sort(key=lambda pair: pair[0].first)
        self._sums = self._no_sums()

    def _no_sums(self) -> Sums[Piece]:
        return Sums(self._leaves, functools.partial(plus_in, self._places))

    @property
    def _open(self) -> list[tuple[Node, Grads]]:
        return [(node, piece.grads) for node, piece in self._sums.open]

    def add(self, leaf: int, grads: Grads, *, are_plain: bool = False) -> None:
        """Add the gradients of a logical rank, whose memory is ours from now on.

        Args:
            leaf: The number of the logical rank.
            grads: Its gradients.
            are_plain: See `Taken`.
        """
        with_streams: list[torch.device] = []
        if not are_plain:
            devices = {grad.device for grad in grads if grad is not None}
            with_streams = [each for each in devices if has_streams(each)]
            # Two embeddings may share the memory of their values: no sum is in place.
            grads = [_coalesced(grad) for grad in grads]
        if with_streams:
            use_here(*grads)  # the streams of the backward have made them
        node = Node(0, leaf)
        if node in self._places:
            grads = copied(grads, self._places[node])
        self._sums.add(node, Piece(node, grads))
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
        meeting = [grads for _, grads in self._open[self._num_apart :]]
        sums = [*reversed(self._of(plan, meeting))]  # upwards in the tree
        if plan.sparse:
            (payload,) = views
            total = payload.coalesce()
            for (grad,) in sums:
                total = total if grad is None else add_sparse(grad, total)
            if total is not payload:
                payload.copy_(total)
            return
        if not sums:
            return
        # On the CPU what was just written is in the cache. On a device a launch costs
        # more than memory.
        most = _CACHED_BYTES if plan.device.type == "cpu" else plan.nbytes
        for part in _parts(plan, most):
            for grads in sums:
                _add(views[part], grads[part])

    def pieces(self, plan: BucketPlan, payload: Tensor) -> list[Tensor]:
        """Return what this rank adds to the sum of a bucket: its payload is the last.

        The others are sums that stay apart, each flat like the payload.

        Args:
            plan: Which parameters the bucket has.
            payload: Its buffer, of one dimension and real; or the sparse gradient.
        """
        found = []
        apart = [grads for _, grads in self.kept]
        apart += [grads for _, grads in self._open[: self._num_apart]]
        if plan.sparse:
            sparse = [grad for (grad,) in self._of(plan, apart)]
            found = [no_rows(payload) if grad is None else grad for grad in sparse]
            return [*found, payload] if self._has_bucket else found
        for grads in self._of(plan, apart):
            piece = torch.empty_like(payload)
            _fill(views_of(plan, piece), grads)
            found.append(piece)
        return [*found, payload] if self._has_bucket else found

    def fill_rows(self, plan: BucketPlan) -> None:
        """Write to the rows of a bucket what is not there already (`use_rows`)."""
        for node, grads in self._open[: self._num_apart]:
            places = [self._places[node][i] for i in plan.indices]
            _fill(
                [place for place in places if place is not None],  # of a dense bucket
                [grads[i] for i in plan.indices],
            )


def _coalesced(grad: Tensor | None) -> Tensor | None:
    return grad.coalesce() if grad is not None and grad.is_sparse else grad


def views_of(plan: BucketPlan, row: Tensor) -> list[Tensor]:
    """Return the view of each slot of a bucket into a real row of one dimension."""
    values = row
    if plan.dtype.is_complex:
        values = torch.view_as_complex(row.view(-1, 2))
    return [values.as_strided(s.shape, s.stride, s.offset) for s in plan.slots]


def _fill(views: Sequence[Tensor], grads: Grads) -> None:
    for view, grad in zip(views, grads, strict=True):
        if grad is None:
            view.zero_()
        elif grad is not view:
            view.copy_(grad)


def copied(grads: Grads, places: Sequence[Tensor | None]) -> Grads:
    """Return gradients that were copied to places, where there are both."""
    pairs = list(zip(places, grads, strict=True))
    both = [(p, grad) for p, grad in pairs if p is not None and grad is not None]
    if both:
        torch._foreach_copy_([place for place, _ in both], [grad for _, grad in both])
    return [grad if p is None or grad is None else p for p, grad in pairs]


def _parts(plan: BucketPlan, most: int) -> Iterator[slice]:
    """Cut the slots of a bucket into neighbours of at most so many bytes, or single."""
    start = nbytes = 0
    for k, slot in enumerate(plan.slots):
        nbytes += slot.numel * plan.dtype.itemsize
        if nbytes > most and k > start:
            yield slice(start, k)
            start, nbytes = k, slot.numel * plan.dtype.itemsize
    yield slice(start, len(plan.slots))


def plus_in(places: Places, left: Piece, right: Piece) -> Piece:
    """Return the sum of two siblings, in its place if it has one."""
    node = left.node.parent
    return Piece(node, plus(left.grads, right.grads, places.get(node)))


def plus(
    left: Grads, right: Grads, places: Sequence[Tensor | None] | None = None
) -> Grads:
    """Return the sums of the gradients of two nodes, in places or memory of both."""
    if add_natively(left, right, places):
        return left if places is None else list(places)
    if places is None:
        places = [None] * len(left)
    triples = list(zip(left, right, places, strict=True))
    sums = [_plus_one(a, b, place) for a, b, place in triples]
    dense = [
        (a, b)
        for a, b, place in triples
        if place is None and a is not None and b is not None and not a.is_sparse
    ]
    if dense:
        torch._foreach_add_([a for a, _ in dense], [b for _, b in dense])
    return sums


def _plus_one(
    a: Tensor | None, b: Tensor | None, place: Tensor | None
) -> Tensor | None:
    """Return the sum of two gradients, or where `plus` will write it."""
    if place is not None:
        return _sum_in(place, a, b)
    if a is not None and b is not None:
        return add_sparse(a, b) if a.is_sparse else a
    one = b if a is None else a
    if one is not None and not one.is_sparse:
        _add_zeros(one)
    return one


def _sum_in(place: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients in a place, or None if there are none."""
    if a is not None and b is not None:
        return torch.add(a, b, out=place)
    one = a if b is None else b
    return None if one is None else torch.add(one, 0.0, out=place)


def _add(views: Sequence[Tensor], grads: Grads) -> None:
    """Add gradients to the views of a bucket."""
    if add_natively(views, grads):
        return
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
