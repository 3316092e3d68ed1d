"""Send each rank the gradients of its own parameters, where it adds them up.

An all-reduce gives everybody everything. Half of its messages suffice here: an
all-to-all in which each rank gets its stretch of the bucket from all ranks. The owner
adds them up in the order of ranks, so that two runs have the same bits, and with two
ranks these are the bits of an all-reduce, because a + b is b + a.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from minidp import accelerator, comm
from minidp.core import Averaging
from minidp.errors import GradientError, explain
from minidp.hooks import CommHook
from minidp.layout import BucketPlan, Layout
from minidp.shared_memory import BufferShape, SharedBuffer

from .owners import Owners
from .pieces import Piece, Pieces, Range, cut


class Brought(NamedTuple):
    """What the ranks bring to the sum of one bucket, and how an owner adds it up."""

    # Those of this rank, flat as the bucket. The last one is the bucket's payload,
    # whose stretch of this rank gets the sum.
    rows: Sequence[Tensor]
    counts: Sequence[int]  # how many rows each rank brings, by rank
    # Returns the sum of what has arrived, a row for each of them, in the order of
    # ranks. It may write there.
    add_up: Callable[[Tensor], Tensor]


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

    def add_earlier_sums(self, plan: BucketPlan, views: Sequence[Tensor]) -> None:
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
        group, brought = self._communicator.group, self.brought(plan, payload)
        if comm.streams_wait(group, payload.device):
            return StreamedShare(brought, widths, group, plan.number)
        return share_sum(brought, widths, group)

    def brought(self, plan: BucketPlan, payload: Tensor) -> Brought:
        """Return what the ranks bring to a bucket: of each rank what is in it.

        Args:
            plan: Which parameters the bucket has.
            payload: Its buffer, of one dimension and real.
        """
        return Brought([payload], [1] * self._communicator.size, by_rank)

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


def share_sum(
    brought: Brought, widths: Sequence[int], group: comm.ProcessGroup
) -> Pieces:
    """Start to add up this rank's stretch of a bucket over all ranks.

    Args:
        brought: The rows of the bucket, of one dimension and real.
        widths: How many elements each rank owns of it.
        group: The process group.
    """
    payload, rank = brought.rows[-1], group.rank()
    start = sum(widths[:rank])
    pieces = []
    for parts in cut(widths, payload):
        sent = _sent(brought.rows, widths, parts)
        sizes = [part.stop - part.start for part in parts]
        arrived, work = comm.start_scatter(sent, sizes, group, brought.counts)
        mine = payload[start + parts[rank].start : start + parts[rank].stop]
        take = partial(_take, brought.add_up, arrived, mine)
        pieces.append(Piece(work, take, sent))
    return Pieces(pieces, group)


def _sent(
    rows: Sequence[Tensor], widths: Sequence[int], parts: Sequence[Range]
) -> Tensor:
    """Return what goes to the ranks of one piece of a message, as one tensor.

    Args:
        rows: What this rank brings.
        widths: How many elements each rank owns of a row.
        parts: The part of it that goes to each rank.
    """
    if len(rows) == 1 and all(p == (0, w) for p, w in zip(parts, widths, strict=True)):
        return rows[0]
    starts = zip(accumulate(widths, initial=0), parts, strict=False)
    ranges = [slice(start + part.start, start + part.stop) for start, part in starts]
    return torch.cat([row[each] for each in ranges for row in rows])


class StreamedShare:
    """The sum of this rank's stretch of a bucket on a device, as a work.

    Streams wait, and no host. All of it is queued at once, on a stream of its own, so
    that the backward goes on. What arrives is memory of that stream, which the next
    bucket there can use at once, however far the device is behind. There are two such
    streams, so that a bucket can travel while the one before it is added up.

    Args:
        brought: The rows of the bucket, as in `share_sum`.
        widths: How many elements each rank owns of it.
        group: The process group, for whose collectives streams wait.
        number: The number of the bucket.
    """

    def __init__(
        self,
        brought: Brought,
        widths: Sequence[int],
        group: comm.ProcessGroup,
        number: int,
    ) -> None:
        rows, rank = brought.rows, group.rank()
        start, device = sum(widths[:rank]), rows[-1].device
        self._mine = rows[-1][start : start + widths[rank]]
        self._purpose = f"sums of shares {number % 2}"
        filled = accelerator.After(device)
        with accelerator.on_side_stream(device, self._purpose):
            filled.hold_back()
            accelerator.use_here(*rows)  # which may be dropped at any time
            sent = _sent(rows, widths, [Range(0, width) for width in widths])
            arrived, work = comm.start_scatter(sent, widths, group, brought.counts)
            work.wait()  # the stream does. The watchdog is told of the sum instead
            self._mine.copy_(brought.add_up(arrived))
            self._end = accelerator.After(device)

    def get_future(self) -> Future[Any]:
        """Return a future of the sum, which the stream of the sums records now."""
        device = self._mine.device
        future: Future[Any] = Future(devices=[device])
        with accelerator.on_side_stream(device, self._purpose):
            future.set_result(self._mine)
        return future

    def is_completed(self) -> bool:
        """Return whether the device has written the sum."""
        return self._end.has_come()

    def wait(self) -> None:
        """Let the current stream wait for the sum."""
        self._end.hold_back()


def _take(add_up: Callable[[Tensor], Tensor], arrived: Tensor, mine: Tensor) -> None:
    accelerator.use_here(arrived)  # it is of the stream that has filled the bucket
    mine.copy_(add_up(arrived))


def by_rank(arrived: Tensor) -> Tensor:
    """Return the sum of rows, added in the order of ranks to the first one."""
    first, *others = arrived.unbind()
    for each in others:
        first.add_(each)
    return first
