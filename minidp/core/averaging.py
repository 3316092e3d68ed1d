"""By what gradients are divided, and which comm hook or count of items takes part.

A gradient is divided where that costs least: while it is copied to its bucket. Other
options divide elsewhere:

=====================  =================  =================  =======================
option                 each gradient      whole buffer       after the all-reduce
=====================  =================  =================  =======================
default                / ranks            -                  -
``batched_grad_copy``  -                  / ranks            -
over items             / ranks, or as     as the row above   x ranks / items of all
                       the row above
comm hook              -                  -                  what the hook does
=====================  =================  =================  =======================

Over items, gradients travel divided by the number of ranks, so that 16 bits do not
overflow. The other factor, ranks / items, is known once the counts have come
(`item_counts`). No comm hook can be registered then, because the factor would multiply
whatever the hook has made of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from minidp import comm
from minidp.hooks import BucketInfo, CommHook
from minidp.layout import BucketPlan, Layout
from minidp.shared_memory import BufferShape, SharedBuffer, SumOrder, share

from .exchange import Exchange
from .item_counts import ItemCounts


class DivideFactors(NamedTuple):
    """By what a bucket is divided before it travels. One of the two numbers is 1."""

    pre: int = 1  # divides each gradient, while it is copied
    post: int = 1  # divides the whole buffer, when it is full

    @property
    def product(self) -> int:
        """The number by which a gradient is divided in all, before it travels."""
        return self.pre * self.post


class Averaging:
    """Decides by what gradients are divided, and whether a comm hook reduces them.

    Args:
        communicator: The communicator of the ranks.
        device: The device of the gradients.
        batched: Whether to divide full buffers instead of single gradients.
    """

    def __init__(
        self, communicator: comm.Communicator, device: torch.device, *, batched: bool
    ) -> None:
        self._communicator = communicator
        self._is_batched = batched
        self.device = device  # of the gradients
        # How many logical ranks there are, if any: they are the leaves of the tree by
        # which `minidp.logical` adds their gradients.
        self.leaves: int | None = None
        self.items: ItemCounts | None = None  # with average_over="items"
        # How many ranks to average over, if not all: in `join()` some may be without
        # inputs, and with torchft some replicas take no part.
        self.num_contributors: int | None = None
        self.comm_hook: CommHook | None = None
        self.active_comm_hook: CommHook | None = None  # the one of this backward
        self.factors = DivideFactors()  # those of this backward
        self.wait_description = ""  # for errors; " of bucket 3" follows
        self.no_shared_memory = ""  # why buckets are messages; "" if they are shared
        self.order: SumOrder | None = None  # of sums in shared memory; None: Gloo's

    @property
    def divisor(self) -> int:
        """The number of ranks over which to average."""
        return self.num_contributors or self._communicator.size

    @property
    def scale(self) -> float | torch.Tensor:
        """By what averages are multiplied when they are copied out."""
        return 1.0 if self.items is None else self.items.scale

    @property
    def sees_sums(self) -> bool:
        """Whether `arrived` looks at the buckets of this backward."""
        return False

    @property
    def seat(self) -> tuple[int, int]:
        """The place of this rank among those that average, and their number.

        With torchft these are the replicas of the last quorum.
        """
        return self._communicator.rank, self._communicator.size

    def begin(self) -> None:
        """Choose the comm hook and the divisors of a backward that begins."""
        hook = self.active_comm_hook = self.comm_hook
        self.factors = self.factors_of(self.divisor if hook is None else 1)
        if self.items is not None:
            self.items.divisor = self.factors.product
        self.wait_description = "waiting for the all-reduce"
        if hook is not None:
            self.wait_description = f"waiting for the comm hook {hook.name}, call"

    def bucket_info(self, number: int, *, is_last: bool) -> BucketInfo:
        """Return what a comm hook is told about a bucket."""
        return BucketInfo(number, is_last, self.divisor, self._communicator.group)

    def factors_of(self, divisor: int) -> DivideFactors:
        """Return where to divide by this number."""
        return DivideFactors(1, divisor) if self._is_batched else DivideFactors(divisor)

    def register(self, hook: CommHook) -> None:
        """Set the comm hook.

        Raises:
            RuntimeError: There is one already, or averages are over items.
        """
        if self.comm_hook is not None:
            text = "register_comm_hook or register_builtin_comm_hook can only be called"
            name = self.comm_hook.name
            raise RuntimeError(f"{text} once, and {name} is registered.")
        if self.items is not None:
            raise RuntimeError(
                f'The comm hook {hook.name} cannot be registered: average_over="items" '
                "multiplies what the buckets bring, whatever a hook made of it. What "
                "to do: average over ranks, or use no hook."
            )
        self.comm_hook = hook

    def share(
        self, layout: Layout, exchanges: Sequence[Exchange], *, asks: bool
    ) -> list[SharedBuffer]:
        """Return a shared buffer for each dense bucket, or none if a rank cannot share.

        `no_shared_memory` says why then. With ``asks`` all ranks must call it together,
        and wait for each other, unless there is a comm hook, or the group or the device
        exclude sharing.

        Args:
            layout: The buckets.
            exchanges: These use shared memory, too, if there is any.
            asks: Whether to ask the other ranks. Without it, nothing is shared.

        Raises:
            NativeError: MINIDP_SHARED_MEMORY=1, and the ranks cannot share.
        """
        dense = [plan for plan in layout.buckets if not plan.sparse]
        found: list[SharedBuffer] | str = "ranks have not looked for it yet"
        if self.comm_hook is not None:
            found = "a comm hook is registered"
        elif asks:
            shapes = [self.shape_of(each) for each in dense]
            shapes += [BufferShape(*each.shape) for each in exchanges]
            device = layout.buckets[0].device
            found = share(shapes, self._communicator, device)
        if isinstance(found, str):
            self.no_shared_memory = found
            return []
        self.no_shared_memory = ""
        for each, shared in zip(exchanges, found[len(dense) :], strict=True):
            each.use(shared)
        return found[: len(dense)]

    def shape_of(self, plan: BucketPlan) -> BufferShape:
        """Return how the shared buffer of a bucket looks, and how it is added up."""
        return BufferShape(plan.numel, plan.dtype, self.order)

    def add_earlier_sums(self, plan: BucketPlan, views: Sequence[torch.Tensor]) -> None:
        """Add to a full bucket, before it is launched, what this rank has beside it.

        Here there is nothing. Logical ranks have the sums of those that came before.

        Args:
            plan: Which parameters the bucket has.
            views: The view of its buffer for each of them; or its sparse gradient.
        """

    def reduce(
        self, plan: BucketPlan, payload: torch.Tensor, shared: SharedBuffer | None
    ) -> comm.Work:
        """Start to add up a bucket over all ranks, in place, and return the work.

        All ranks must call it, for the same buckets in the same order.

        Args:
            plan: Which parameters the bucket has.
            payload: What is added up: the flat buffer, or a sparse gradient.
            shared: The memory of the buffer, if all ranks map it.
        """
        if shared is None:
            return comm.all_reduce(payload, self._communicator.group)
        return shared.all_reduce()

    def arrived(self, plan: BucketPlan, payload: torch.Tensor) -> None:
        """Look at the sums of a bucket, which no factor has multiplied yet.

        It is called only if `sees_sums`. Here there is nothing to see. The audit of
        logical ranks compares the sums between the ranks.

        Args:
            plan: Which parameters the bucket has.
            payload: Its flat buffer.
        """

    @contextmanager
    def without_comm_hook(self) -> Iterator[None]:
        """Leave out the comm hook inside the block."""
        hook, self.comm_hook = self.comm_hook, None
        try:
            yield
        finally:
            self.comm_hook = hook
