"""Logical ranks on replicas that may die: the survivors take the turns of the dead.

What a logical rank computes does not depend on who computes it. So any replica can do
it, and do it again. A step goes in rounds::

    quorum      who is there
    holdings    each replica tells which sums it holds of rounds that have failed. The
                logical ranks that nobody holds are shared out among the contributors
    turns       each replica computes its logical ranks; the backward of its last one
                reduces
    buffers     all get the module buffers that logical rank 0 has left

If a replica dies in a round, a message of that round fails on each of the others. They
hold the sums of their turns, but not of the last one, whose gradients the buckets have
overwritten. A new quorum begins the next round, in which only that is computed which
died or was lost. The sum has the order of the tree in any case, and so the bits of a
step in which nobody died.

A replica that contributes nothing has a turn for nothing, so that its backward takes
part in the messages: one that catches up, or is one more than there are logical ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from minidp.comm import Work
from minidp.core import Averaging, Reducer
from minidp.layout import BucketPlan
from minidp.logical import (
    LogicalRanks,
    Node,
    PartialSums,
    Round,
    Slices,
    Start,
    TreeAveraging,
    block,
    cover,
)
from minidp.shared_memory import SharedBuffer

from .quorum import ATTEMPTS, BUFFERS, OverReplicas, Quorum, Sum


class Shares(NamedTuple):
    """Who holds what of earlier rounds, and who does what in this one."""

    held: list[list[Node]]  # by replica, from left to right
    turns: list[list[int]]  # by replica: logical ranks, in ascending order
    leaves: int  # how many logical ranks there are in all

    def nodes(self, replica: int) -> list[Node]:
        """Return the nodes of the sums that a replica brings, in its order."""
        return [*self.held[replica], *cover(self.leaves, self.turns[replica])]


def share_out(
    leaves: int, holdings: Sequence[Sequence[Node]], contributes: Sequence[bool]
) -> Shares:
    """Share out the logical ranks that no contributor holds, equally on all replicas.

    Args:
        leaves: How many logical ranks there are in all.
        holdings: By replica, the nodes of the sums that it holds, from left to right.
            Two replicas may hold the same logical rank, if one of them was given up and
            has come back. Then only the first of them counts.
        contributes: By replica, whether it contributes.
    """
    covered: set[int] = set()
    held: list[list[Node]] = []
    for nodes, can in zip(holdings, contributes, strict=True):
        mine = []
        for node in nodes if can else ():
            below = range(node.first, min(node.first + (1 << node.level), leaves))
            if covered.isdisjoint(below):
                covered.update(below)
                mine.append(node)
        held.append(mine)
    missing = sorted({*range(leaves)} - covered)
    workers = [replica for replica, can in enumerate(contributes) if can]
    turns: list[list[int]] = [[] for _ in contributes]
    for place, replica in enumerate(workers):
        turns[replica] = [missing[k] for k in block(len(missing), len(workers), place)]
    return Shares(held, turns, leaves)


class LastStep(NamedTuple):
    """What is known of the module buffers of the last loop."""

    step: int
    caught_up: bool  # this replica has received the state of another one
    before: Sequence[Tensor] | None  # with which the step began; None: as received
    after: Sequence[Tensor] | None  # which it left; None if its reduction has failed


class ReplicaRounds:
    """The rounds of each step, until one of them has not failed (see `Rounds`).

    Forwards change module buffers. So a step that was not committed begins with those
    that it had before. And a replica that joins receives a state with the buffers that
    its source has right then, in the middle of a step. So those with which the step
    began are a part of the state, too, and those which it has left are a message.

    Args:
        quorum: Who is there.
        logical: The logical ranks of the wrapper.
    """

    def __init__(self, quorum: Quorum, logical: LogicalRanks) -> None:
        self._quorum = quorum
        self._logical: LogicalRanks = weakref.proxy(logical)
        self.shares = Shares([], [], logical.options.number)  # of the present round
        self._has_common_buffers = True
        self._last: LastStep | None = None
        quorum.buffers_at = self._buffers_at

    def of_step(
        self, step: int | None, partial: PartialSums, start: Start
    ) -> Iterator[Round]:
        """Return the rounds of a step; by default it is that of the manager.

        After three of them the step is given up: the manager will not commit it.
        """
        quorum, logical = self._quorum, self._logical
        before: Sequence[Tensor] | None = None
        after: Sequence[Tensor] | None = None
        for attempt in range(1, ATTEMPTS + 1):
            quorum.meet()
            caught_up = quorum.received is not None
            if quorum.received is not None:
                before = _fitting(quorum.received.get(BUFFERS), start.first_buffers)
            elif attempt == 1:
                self._correct_buffers(start)
                before = _copies(start.first_buffers)
            self._last = LastStep(quorum.own_step, caught_up, before, None)
            if self._agree(partial, start):
                quorum.close_state()
                now = quorum.step_now if step is None else step
                yield Round(self._turns or [0], logical.options.seed, now)
                after = self._buffers_after(start)
            if not quorum.has_failed or quorum.gave_up or attempt == ATTEMPTS:
                break
            partial.keep()
            if quorum.begin_again():  # the state of another replica was loaded
                partial.kept = []
                start.note_state()
                if before is None:
                    before = _copies(start.first_buffers)
                else:
                    start.begin_with(before)
        if not quorum.has_failed:
            self._last = LastStep(quorum.step_now, caught_up, before, after)

    def _buffers_at(self, step: int) -> Sequence[Tensor] | None:
        """Return the module buffers with which a step begins, None if as they are.

        Any thread may call this.
        """
        last = self._last
        if last is None:
            return None
        if step == last.step:  # it was not committed
            return last.before
        return last.after if last.caught_up and step == last.step + 1 else None

    def _correct_buffers(self, start: Start) -> None:
        """Let module buffers be those of the last committed step."""
        found = self._buffers_at(self._quorum.own_step)
        if found is not None:
            start.begin_with(found)

    @property
    def _turns(self) -> list[int]:
        place, _ = self._quorum.place
        return self.shares.turns[place]

    def _agree(self, partial: PartialSums, start: Start) -> bool:
        """Share out the logical ranks of a round, and return whether that has worked.

        All replicas use the seed of the first contributor from now on.
        """
        quorum, logical, leaves = self._quorum, self._logical, self.shares.leaves
        place, size = quorum.place
        # Row r tells of replica r whether it contributes, its seed, how long a message
        # with its buffers is, and for each logical rank with which a sum begins that it
        # holds, the level of that sum's node, plus 1.
        table = torch.zeros(size, 3 + leaves, dtype=torch.int64, device=quorum.device)
        table[place, 0] = quorum.contributes
        table[place, 1] = logical.options.seed
        table[place, 2] = sum(map(_words, start.first_buffers))
        for node, _ in partial.kept:
            table[place, 3 + node.first] = node.level + 1
        if not quorum.add_up(table):
            return False
        rows = table.tolist()
        contributes = [bool(row[0]) for row in rows]
        if not any(contributes):
            quorum.give_up("no replica contributes to this step")
            return False
        seed = int(rows[contributes.index(True)][1])
        self._has_common_buffers = len({row[2] for row in rows}) == 1
        logical.options = replace(logical.options, seed=seed)
        holdings = [list(_nodes_of(codes)) for _, _, _, *codes in rows]
        self.shares = share_out(leaves, holdings, contributes)
        held = {*self.shares.held[place]}
        partial.kept = [pair for pair in partial.kept if pair[0] in held]
        partial.begin(self._turns)
        quorum.note_used(grads for _, grads in partial.kept)
        return True

    def _buffers_after(self, start: Start) -> Sequence[Tensor] | None:
        """Let all replicas have the module buffers that logical rank 0 has left."""
        place, _ = self._quorum.place
        is_mine = any(node.first == 0 for node in self.shares.nodes(place))
        values = start.buffers_of_first() if is_mine else start.first_buffers
        assert values is not None
        after = self._spread(values, is_mine=is_mine)
        if not self._quorum.has_failed:
            start.end_with(after)
        return after

    def _spread(self, values: Sequence[Tensor], *, is_mine: bool) -> Sequence[Tensor]:
        """Return the values that one replica has, on all replicas.

        They travel as integers, which a sum with zeros does not change. Where replicas
        have different buffers, each keeps its own values.
        """
        if not values or not self._has_common_buffers:
            return values
        words = [_words(value) for value in values]
        device = self._quorum.device
        message = torch.zeros(sum(words), dtype=torch.int64, device=device)
        parts = [
            part.view(torch.uint8)[: value.nbytes]
            for part, value in zip(message.split(words), values, strict=True)
        ]
        if is_mine:
            for part, value in zip(parts, values, strict=True):
                part.copy_(value.contiguous().view(-1).view(torch.uint8))
        self._quorum.add_up(message)
        return [
            part.to(value.device).view(value.dtype).view(value.shape)
            for part, value in zip(parts, values, strict=True)
        ]


def _copies(values: Sequence[Tensor]) -> Sequence[Tensor]:
    return [value.clone() for value in values]


def _fitting(
    values: Sequence[Tensor] | None, own: Sequence[Tensor]
) -> Sequence[Tensor] | None:
    """Return what another replica has sent, or None if it has different buffers."""
    shapes = [value.shape for value in values or ()]
    return values if shapes == [value.shape for value in own] else None


def _words(value: Tensor) -> int:
    """Return how many integers of 8 bytes a tensor takes in a message."""
    return -(-value.nbytes // 8)


def _nodes_of(codes: Sequence[int]) -> Iterator[Node]:
    """Return the nodes whose levels, plus 1, stand where they begin."""
    for first, code in enumerate(codes):
        if code:
            yield Node(code - 1, first >> (code - 1))


class TreeOfReplicas(OverReplicas, TreeAveraging):
    """Averages over logical ranks that replicas have shared out.

    Args:
        reducer: The reducer, whose `Averaging` this replaces.
        rounds: Who brings which sums.
        partial: The sums of this replica.
        quorum: Who is there.
    """

    def __init__(
        self,
        reducer: Reducer,
        rounds: ReplicaRounds,
        partial: PartialSums,
        quorum: Quorum,
    ) -> None:
        before: Averaging = reducer.queue.averaging
        leaves = rounds.shares.leaves
        super().__init__(before, leaves, partial, reducer.communicator)
        self.no_shared_memory = "the manager reduces the buckets"
        self._rounds, self.quorum = rounds, quorum

    def reduce(
        self, plan: BucketPlan, payload: Tensor, shared: SharedBuffer | None
    ) -> Work:
        """Start to add up a bucket over the replicas, in place."""
        _, size = self.quorum.place
        nodes = [self._rounds.shares.nodes(replica) for replica in range(size)]
        pieces = self.partial.pieces(plan, payload)
        slices = Slices(payload, pieces, nodes, self._leaves, self.quorum.group)
        work: Any = TreeSum(self.quorum, slices)
        return cast("Work", work)


class TreeSum(Sum):
    """The sum of a bucket in the order of the tree, as a work like `Sum`.

    Args:
        quorum: Starts messages, and knows of their errors.
        slices: The bucket.
    """

    def __init__(self, quorum: Quorum, slices: Slices) -> None:
        self._slices = slices
        self._message: tuple[Tensor, Any] | None = None  # None: a message has failed
        self._callbacks: list[Callable[[Any], None]] = []
        super().__init__(quorum, lambda: slices.payload)

    def launch(self) -> None:
        """Start the first message."""
        self.tensor = self._write()
        self._note_stream()
        self._message = self._quorum.attempt(self._slices.exchange)

    def pass_on(self) -> None:
        """Wait for the first message, add up, and start the second one."""
        if self._message is None:
            return
        with self._on_stream():
            arrived, work = self._message
            self._message = None
            if self._quorum.has_arrived(work):
                mine, group = self._slices.add_up(arrived), self._slices.group
                self._message = self._quorum.attempt(
                    lambda: self._slices.gather(mine, group)
                )

    def end(self) -> None:
        """Wait for the second message, with which the bucket has the sum."""
        if self._message is not None:
            with self._on_stream():
                rows, work = self._message
                if self._quorum.has_arrived(work):
                    self._slices.put_together(rows)
            self._message = None
        for call in self._callbacks:
            call(self)

    def is_completed(self) -> bool:
        """Return whether all sums of this backward have been waited for."""
        return self.is_over

    def is_done_within(self, seconds: float) -> bool:
        """Return `is_completed` at once: the process group's timeout ends a wait."""
        return self.is_over

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        """Call back at the `end`."""
        self._callbacks.append(call)
