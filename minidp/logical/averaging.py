"""Reduce buckets in the order of the tree, whatever the number of ranks.

An all-reduce adds in an order of its own. Where two ranks bring one sum each, that does
not matter, because a + b is b + a. In all other cases the sum has to be in the order of
the tree. If all ranks share a host, their pieces of a bucket lie in shared memory, and
whoever waits adds up parts of it in that order (`order_of_sums`). Else each rank adds
up a slice of the bucket for all ranks::

    all-to-all     rank r gets slice r of all pieces of all ranks
    tree           and adds them up
    all-gather     every rank gets the sums of all slices

If each rank brings one piece, these are the bytes of a ring all-reduce. For sparse
gradients see `sparse_sums`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from minidp import accelerator, comm, world
from minidp.comm import ProcessGroup
from minidp.core import Averaging, Exchange
from minidp.errors import GradientError, explain
from minidp.hooks import CommHook
from minidp.layout import BucketPlan, Layout
from minidp.shared_memory import SharedBuffer, SumOrder

from .partial_sums import PartialSums
from .sparse_sums import SparsePieces
from .tree import Node, Sums, adds_pairs, block, cover

_SLICE_SECONDS = 0.5
_GLANCE_SECONDS = 0.002  # after which whoever waits for a bucket looks at the others


class Watch(Protocol):
    """Looks at the buckets of a reduction."""

    def filled(self, plan: BucketPlan, views: Sequence[Tensor]) -> None:
        """Look at the gradients of this rank's last logical rank alone."""

    def launched(self, plan: BucketPlan, pieces: Sequence[Tensor]) -> None:
        """Look at what this rank brings. The last piece is about to get the sum."""

    def arrived(self, plan: BucketPlan, payload: Tensor) -> None:
        """Look at the sum over all logical ranks."""


class TreeAveraging(Averaging):
    """Averages over logical ranks, in place of the reducer's own `Averaging`.

    Args:
        before: What the reducer has, whose communicator and counts of items it takes
            over.
        leaves: How many logical ranks there are.
        partial: The sums of those that this rank has done in this step.
        communicator: The communicator of the ranks.
    """

    def __init__(
        self,
        before: Averaging,
        leaves: int,
        partial: PartialSums,
        communicator: comm.Communicator,
    ) -> None:
        super().__init__(communicator, before.device, batched=False)
        self.items = before.items
        self.leaves = self._leaves = leaves
        self.partial = partial
        ranks = communicator.size
        # The nodes of the pieces that each rank brings, by rank.
        self._nodes = [cover(leaves, block(leaves, ranks, r)) for r in range(ranks)]
        # Whether an all-reduce adds in the order of the tree.
        self._adds_pairs = adds_pairs(leaves, communicator.size)
        if not self._adds_pairs:
            self.order = order_of_sums(leaves, self._nodes)
        self._started: list[HostSum] = []  # the buckets of this backward, in order
        self.watch: Watch | None = None  # in an audited step

    @property
    def divisor(self) -> int:
        """The number by which gradients are divided before they travel."""
        return 1

    @property
    def scale(self) -> float | Tensor:
        """By what the sum over all logical ranks is multiplied."""
        return 1.0 / self._leaves if self.items is None else self.items.scale

    @property
    def has_owners(self) -> bool:
        """Whether one rank adds up a slice of a bucket for all.

        In shared memory whoever waits adds up some part of it.
        """
        return not self._adds_pairs and bool(self.no_shared_memory)

    @property
    def sees_sums(self) -> bool:
        """Whether the sums of this reduction are audited."""
        return self.watch is not None

    @property
    def counts(self) -> list[int]:
        """How many pieces of a bucket each rank brings, by rank."""
        return [*map(len, self._nodes)]

    def add_up(self, arrived: Tensor) -> Tensor:
        """Return the sum of the pieces of all ranks, or of one part of each of them.

        Args:
            arrived: A row for each piece, in the order of ranks, and of
                `PartialSums.pieces`. Sums may be written to it.
        """
        return added_up(arrived, self._nodes, self._leaves)

    def connect(self, *, has_sparse: bool) -> None:
        """Create what sums need; all ranks call it, and wait for each other.

        Args:
            has_sparse: Whether some parameter has a sparse gradient.
        """
        waits_here = has_sparse or self.device.type == "cpu"
        adds_pairs = self._adds_pairs and not has_sparse
        if waits_here and not adds_pairs and self._communicator.size > 1:
            with self._communicator.blocking("connecting the ranks for their sums"):
                _group_of_gathers(self._communicator.group)

    def begin(self) -> None:
        """Begin a backward, whose first bucket follows no other one."""
        super().begin()
        self.let_go()

    def let_go(self) -> None:
        """Let go of all sums that were started."""
        self._started.clear()

    def add_earlier_sums(self, plan: BucketPlan, views: Sequence[Tensor]) -> None:
        """Add the sums of this rank's other logical ranks to a full bucket.

        Raises:
            GradientError: Gradients have a graph of their own (``create_graph=True``).
        """
        if torch.is_grad_enabled():
            raise GradientError(
                explain(
                    self._communicator.rank,
                    "A backward with create_graph=True ran in the last logical rank: "
                    "sums over logical ranks have no graph.",
                    names=[f"those of bucket {plan.number}"],
                    remedy="use torch.autograd.grad for a penalty, and call backward() "
                    "of the loss without create_graph",
                )
            )
        if self.watch is not None:
            self.watch.filled(plan, views)
        self.partial.add_to_bucket(plan, views)

    def reduce(
        self, plan: BucketPlan, payload: Tensor, shared: SharedBuffer | None
    ) -> comm.Work:
        """Start to add up a bucket over all ranks, in place."""
        if plan.sparse and self._communicator.size == 1:
            return comm.NoWork()
        if self.watch is not None and not plan.sparse:
            self.watch.launched(plan, self.partial.pieces(plan, payload))
        if shared is not None:
            self.partial.fill_rows(plan)
        if shared is not None or (self._adds_pairs and not plan.sparse):
            return super().reduce(plan, payload, shared)
        pieces = self.partial.pieces(plan, payload)
        group = self._communicator.group
        kind = SparsePieces if plan.sparse else Slices
        slices = kind(payload, pieces, self._nodes, self._leaves, group)
        if isinstance(slices, Slices) and not payload.is_cpu:
            return StreamSum(slices)
        if comm.is_python_group(group):
            return WaitedSum(slices)
        return HostSum(slices, self._started)

    def slices(self, pieces: Sequence[Tensor], group: ProcessGroup) -> Slices:
        """Return how the pieces of a bucket, the payload last, are added up."""
        return Slices(pieces[-1], pieces, self._nodes, self._leaves, group)

    def arrived(self, plan: BucketPlan, payload: Tensor) -> None:
        """Show the sums of a bucket to `watch`."""
        if self.watch is not None:
            self.watch.arrived(plan, payload)

    def register(self, hook: CommHook) -> None:
        """Refuse a comm hook.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"The comm hook {hook.name} cannot be registered: a hook averages what "
            "each rank has in its buckets, and cannot know in which order the gradients"
            " of logical ranks have to be added. What to do: use no hook, or leave out "
            "logical_ranks."
        )

    def share(
        self, layout: Layout, exchanges: Sequence[Exchange], *, asks: bool
    ) -> list[SharedBuffer]:
        """Share buckets as without logical ranks, and rows for pieces beside them."""
        self.partial.use_rows([], [])  # lets the memory before go
        found = super().share(layout, exchanges, asks=asks)
        if found:
            self.partial.use_rows(layout.buckets, [each.apart for each in found])
        return found


def order_of_sums(leaves: int, nodes: Sequence[Sequence[Node]]) -> SumOrder:
    """Return the order of the tree for pieces in shared memory.

    Args:
        leaves: How many logical ranks there are.
        nodes: The nodes of the pieces of all ranks, by rank; a rank's last piece is in
            its bucket, and the others are beside it.
    """
    sums: Sums[list[int]] = Sums(
        leaves, lambda left, right: [*left, *right, SumOrder.ADD]
    )
    first = 0  # the number of a rank's bucket; those of its other rows follow
    for mine in nodes:
        for row, node in enumerate(mine, 1):
            sums.add(node, [first + row % len(mine)])
        first += len(mine)
    ((_, postfix),) = sums.open
    return SumOrder(tuple(map(len, nodes)), tuple(postfix))


class Slices:
    """How a bucket is cut into a slice for each rank, and its sums are put together.

    Args:
        payload: What gets the sum, of one dimension.
        pieces: What this rank brings, each of the payload's shape. One of them may be
            the payload.
        nodes: The nodes of the pieces of all ranks, by rank.
        leaves: How many logical ranks there are.
        group: The process group.
    """

    def __init__(
        self,
        payload: Tensor,
        pieces: Sequence[Tensor],
        nodes: Sequence[Sequence[Node]],
        leaves: int,
        group: ProcessGroup,
    ) -> None:
        self.payload, self.pieces = payload, pieces
        self._nodes, self._leaves = nodes, leaves
        self.group = group
        # Of a slice. The last slices may be shorter, and are filled up with zeros.
        self.width = -(-self.payload.numel() // len(nodes))
        self._is_even = self.width * len(nodes) == self.payload.numel()

    def exchange(self, shift: int = 0) -> tuple[Tensor, comm.Work]:
        """Start to give each rank its slice of all pieces, and to get ours.

        Args:
            shift: Rank r gets slice r + shift; the slices after the last one are the
                first ones.

        Returns:
            This rank's slices of all pieces, valid after the work; and the work.
        """
        ranks = len(self._nodes)
        counts = [len(each) for each in self._nodes]
        is_cut = len(self.pieces) == 1 and self.pieces[0] is self.payload
        if is_cut and self._is_even:
            slices = self.payload.view(ranks, 1, self.width)
            slices = slices.roll(-shift, 0) if shift else slices
            return comm.start_exchange(slices, counts, self.group)
        slices = self.payload.new_zeros(ranks, len(self.pieces), self.width)
        for number, piece in enumerate(self.pieces):
            for rank, part in enumerate(piece.split(self.width)):
                slices[(rank - shift) % ranks, number, : len(part)] = part
        self.pieces = ()  # they need no memory any more
        return comm.start_exchange(slices, counts, self.group)

    def add_up(self, arrived: Tensor) -> Tensor:
        """Return the sum of a slice of all pieces, which `exchange` has brought."""
        return added_up(arrived, self._nodes, self._leaves)

    def gather(self, mine: Tensor, group: ProcessGroup) -> tuple[Tensor, comm.Work]:
        """Start to gather the sums of all slices, in the payload if it is even."""
        rows = None
        if self._is_even:
            rows = self.payload.view(len(self._nodes), self.width)
        return comm.start_gathering(mine, group, rows)

    def put_together(self, rows: Tensor) -> None:
        """Let the payload have the sums of all slices, which `gather` has brought."""
        if not self._is_even:
            self.payload.copy_(rows.view(-1)[: self.payload.numel()])


def added_up(arrived: Tensor, nodes: Sequence[Sequence[Node]], leaves: int) -> Tensor:
    """Return the sum of rows in the order of the tree, written to one of them.

    Args:
        arrived: A row for each node.
        nodes: The nodes, by rank. No leaf is below two of them, or below none.
        leaves: How many logical ranks there are.
    """
    sums: Sums[Tensor] = Sums(leaves, Tensor.add_)
    in_order = [node for each in nodes for node in each]
    pairs = zip(in_order, arrived.unbind(), strict=True)
    for node, row in sorted(pairs, key=lambda pair: pair[0].first):
        sums.add(node, row)
    ((_, total),) = sums.open
    return total


class StreamSum:
    """The sum of a bucket on a device, as a work: streams wait, and no host.

    All of it is queued at once, on a stream of its own, so that a backward goes on.

    Args:
        slices: The bucket.
    """

    def __init__(self, slices: Slices) -> None:
        device = slices.payload.device
        filled = accelerator.After(device)
        with accelerator.on_side_stream(device, "sums over logical ranks"):
            filled.hold_back()
            accelerator.use_here(*slices.pieces)
            arrived, work = slices.exchange()
            work.wait()  # the stream does. The watchdog is told of the sum instead
            rows, last = slices.gather(slices.add_up(arrived), slices.group)
            self.get_future = last.get_future
            last.wait()
            slices.put_together(rows)
            self._end = accelerator.After(device)

    def is_completed(self) -> bool:
        """Return whether the device has written the sum."""
        return self._end.has_come()

    def wait(self) -> None:
        """Let the current stream wait for the sum."""
        self._end.hold_back()


class WaitedSum:
    """The sum of a bucket in a group that is written in Python, as a work.

    Such a group need not tell whether a message has come. So its second message goes
    when the backward is over, and the sum is waited for: in the order of buckets, and
    on all ranks after the first messages of all buckets.

    Args:
        slices: The bucket.
    """

    def __init__(self, slices: Slices | SparsePieces) -> None:
        self._slices = slices
        self._future: Future[Any] = Future()
        self._arrived, self._first = slices.exchange()

    def is_completed(self) -> bool:
        """Return whether the sum was waited for."""
        return self._future.done()

    def is_done_within(self, seconds: float) -> bool:
        """Return `is_completed` at once, because such a group has no limited wait."""
        return self.is_completed()

    def get_future(self) -> Future[Any]:
        """Return a future of None, which only `wait` completes."""
        return self._future

    def wait(self) -> None:
        """Wait until the sum is in the payload."""
        if self.is_completed():
            return
        slices = self._slices
        comm.wait_for(self._first)
        rows, second = slices.gather(slices.add_up(self._arrived), slices.group)
        comm.wait_for(second)
        slices.put_together(rows)
        self._future.set_result(None)


class HostSum:
    """The sum of a bucket on the CPU, as a work.

    No thread drives it. It goes on whenever somebody waits for it, or asks whether it
    is done. Whoever waits for another bucket of the same backward looks at it now and
    then, too, so that the link is not idle until its own turn to be waited for.

    Args:
        slices: The bucket.
        started: The sums of this backward that were started before, to which this one
            is added. Their second messages have to go first on all ranks, because Gloo
            matches messages by their order.
    """

    can_time_out = True  # the host waits, and in slices of time
    needs_asking = True  # or it does not go on

    def __init__(self, slices: Slices | SparsePieces, started: list[HostSum]) -> None:
        self._slices, self._started = slices, started
        self._before = started[-1] if started else None
        self._error: Exception | None = None
        self._is_done = False
        self._began = world.now()
        self._future: Future[Any] | None = None
        self._arrived: Tensor | None
        self._first: comm.Work | None
        self._arrived, self._first = slices.exchange()
        self._second: comm.Work | None = None  # the all-gather
        self._rows: Tensor | None = None  # what it brings
        started.append(self)

    def is_completed(self) -> bool:
        """Do what can be done now, and return whether the sum is there, or failed."""
        return self.is_done_within(0.0)

    def is_done_within(self, seconds: float) -> bool:
        """Wait at most so long, and return whether the sum is there, or failed."""
        deadline = world.now() + seconds
        while not self._advance():
            left = deadline - world.now()
            if left <= 0:
                return False
            # Whoever has waited for long need not look so often.
            glance = max(_GLANCE_SECONDS, (world.now() - self._began) / 100)
            comm.is_done_within(self._awaited, min(left, glance))
            for each in self._started:
                each._advance()
        return True

    @property
    def _awaited(self) -> comm.Work:
        """The message without which this sum cannot go on."""
        if self._second is not None:
            return self._second
        before = self._before
        if before is None or before._second is not None:
            assert self._first is not None
            return self._first
        return before._awaited

    def wait(self) -> None:
        """Wait until the sum is in the payload.

        Raises:
            RuntimeError: A message has failed.
        """
        while not self.is_done_within(_SLICE_SECONDS):
            pass  # the messages end at the group's timeout
        if self._error is not None:
            raise self._error

    def get_future(self) -> Future[Any]:
        """Return a future of None, which only the other methods here complete."""
        if self._future is None:
            self._future = Future()
            if self._is_done:
                self._future.set_result(None)
        return self._future

    def _advance(self) -> bool:
        if self._is_done or self._error is not None:
            return True
        try:
            self._is_done = self._has_second() and self._has_ended()
        except RuntimeError as error:  # raised by whoever waits for the sum
            self._error = error
            return True
        except BaseException as error:  # an interrupt: half of this has been done
            self._error = RuntimeError(f"{type(error).__name__} in a sum over ranks")
            raise
        if self._is_done and self._future is not None:
            self._future.set_result(None)
        return self._is_done

    def _has_second(self) -> bool:
        """Start the all-gather if it is its turn, and return whether it is started."""
        if self._error is not None:  # sums that were started later fail with it
            raise self._error
        if self._second is not None:
            return True
        if self._before is not None:
            if not self._before._has_second():
                return False
            self._before = None
        assert self._first is not None
        assert self._arrived is not None
        if not self._first.is_completed():
            return False
        self._first.wait()
        mine, self._arrived = self._slices.add_up(self._arrived), None
        # Not in the group of the first messages: ranks may come to this one before, or
        # after, they launch the next bucket.
        gathers = _group_of_gathers(self._slices.group)
        self._rows, self._second = self._slices.gather(mine, gathers)
        self._first = None  # it keeps what was sent
        return True

    def _has_ended(self) -> bool:
        assert self._second is not None
        assert self._rows is not None
        if not self._second.is_completed():
            return False
        self._second.wait()
        self._slices.put_together(self._rows)
        self._rows = None
        return True


def _group_of_gathers(group: ProcessGroup) -> ProcessGroup:
    return comm.side_group(group, "sums over logical ranks")
