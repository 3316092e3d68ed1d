"""Send each rank the gradients of its own parameters, where it adds them up.

An all-reduce gives everybody everything. Half of its messages suffice here: an
all-to-all in which each rank gets its stretch of the bucket from all ranks. The owner
adds them up in the order of ranks, so that two runs have the same bits, and with two
ranks these are the bits of an all-reduce, because a + b is b + a.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minidp import comm
from minidp.core import Averaging
from minidp.errors import GradientError, explain
from minidp.hooks import CommHook
from minidp.layout import BucketPlan, Layout
from minidp.shared_memory import BufferShape, SharedBuffer

from .owners import Owners


class ShardedAveraging(Averaging):
    """Averages for the owners of parameters, in place of the reducer's `Averaging`.

    Args:
        before: What the reducer has, whose counts of items it takes over.
        owners: Who owns which parameter.
        communicator: The communicator of the ranks.
        batched: Whether to divide full buffers instead of single gradients.
    """

    def __init__(
        self,
        before: Averaging,
        owners: Owners,
        communicator: comm.Communicator,
        *,
        batched: bool,
    ) -> None:
        super().__init__(communicator, before.device, batched=batched)
        self.items = before.items
        self._owners = owners
        self._widths: dict[int, list[int]] = {}  # of each bucket: what each rank gets

    def begin(self) -> None:  # noqa: D102
        super().begin()
        self.wait_description = "waiting for the gradients of this rank's share"

    def complete(self, plan: BucketPlan, views: Sequence[Tensor]) -> None:
        """Refuse gradients that have a graph of their own.

        Raises:
            GradientError: The backward runs with ``create_graph=True``.
        """
        if torch.is_grad_enabled():
            raise GradientError(
                explain(
                    self._communicator.rank,
                    "A backward with create_graph=True ran with sharded_step: what the "
                    "other ranks send has no graph.",
                    names=[f"those of bucket {plan.number}"],
                    remedy="use torch.autograd.grad for a penalty, and call backward() "
                    "of the loss without create_graph",
                )
            )

    def reduce(  # noqa: D102
        self, plan: BucketPlan, payload: Tensor, shared: SharedBuffer | None
    ) -> comm.Work:
        if shared is not None:
            # Nobody waits for what this rank adds up, and at the end of the backward
            # that goes straight to ``.grad``.
            work = shared.all_reduce()
            work.needs_asking = False
            return work
        if self._communicator.size == 1:
            return super().reduce(plan, payload, shared)
        reals = payload.numel() // max(plan.numel, 1)  # 2 for complex numbers
        widths = [width * reals for width in self._widths[plan.number]]
        return ShareSum(payload, widths, self._communicator.group)

    def share(self, layout: Layout, *args: Any, **options: Any) -> list[SharedBuffer]:
        """Note what each rank gets of the buckets of a new layout; see `Averaging`."""
        self._widths = {
            plan.number: [each.numel for each in self._owners.stretches(plan)]
            for plan in layout.buckets
        }
        return super().share(layout, *args, **options)

    def shape_of(self, plan: BucketPlan) -> BufferShape:  # noqa: D102
        stretches = self._owners.stretches(plan)
        bounds = (0, *(each.stop for each in stretches))
        return BufferShape(plan.numel, plan.dtype, bounds=bounds)

    def register(self, hook: CommHook) -> None:
        """Refuse a comm hook.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"The comm hook {hook.name} cannot be registered: a hook averages whole "
            "buckets, and with sharded_step each rank gets its share of them only. "
            "What to do: use no hook, or no sharded_step."
        )


class ShareSum:
    """The sum of this rank's stretch of a bucket, as a work.

    Args:
        payload: The bucket, of one dimension and real. Its stretch of this rank gets
            the sum.
        widths: How many elements each rank owns of it.
        group: The process group.
    """

    def __init__(
        self, payload: Tensor, widths: Sequence[int], group: comm.ProcessGroup
    ) -> None:
        rank = group.rank()
        self._mine = payload.narrow(0, sum(widths[:rank]), widths[rank])
        self._arrived, self._work = comm.start_scatter(payload, widths, group)
        self._is_done = False
        self.can_time_out = not comm.is_python_group(group)
        self.get_future: Any = self._work.get_future

    def is_completed(self) -> bool:
        """Return whether the gradients have come."""
        return self._is_done or self._work.is_completed()

    def is_done_within(self, seconds: float) -> bool:
        """Wait at most so long, and return whether they have come, or failed."""
        return self._is_done or comm.is_done_within(self._work, seconds)

    def wait(self) -> None:
        """Wait for the gradients of all ranks, and add them up.

        Raises:
            RuntimeError: The message has failed.
        """
        if self._is_done:
            return
        self._work.wait()
        with torch.no_grad():
            first, *others = self._arrived.unbind()
            for each in others:
                first.add_(each)
            self._mine.copy_(first)
        self._is_done = True
        del self._arrived
