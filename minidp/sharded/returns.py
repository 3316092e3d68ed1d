"""Bring the new values of parameters from their owners back to all ranks.

Each owner sends its stretch of each bucket, which the others write to their parameters.
In between the values lie in the bucket's buffer, whose gradients nobody needs any more.
The buckets go in the order in which the next forward needs their parameters: the last
one first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minidp import comm
from minidp.core import Reducer, traced
from minidp.shared_memory import SharedBuffer
from minidp.trace import Moment

from .bucket import ShardedBucket
from .owners import Stretch

_DOING = "waiting for the new values of parameters"


class Returns:
    """The ways back of all parameters.

    Args:
        reducer: The reducer, which holds this object.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._open: list[Return] = []

    def start(self, stepper: int | None) -> None:
        """Start to send what this rank owns, and to get what the others own.

        All ranks must call it together.

        Args:
            stepper: The number of the optimizer whose parameters are meant; None for
                all.
        """
        for bucket in reversed(self._reducer.queue.buckets):
            assert isinstance(bucket, ShardedBucket)
            stretches = bucket.stretches(stepper)
            if any(each.numel for each in stretches):
                self._open.append(Return(bucket, stretches))

    def finish(self) -> None:
        """Wait for all values that are on their way, and write them to parameters."""
        while self._open:
            self._open[0].finish()
            del self._open[0]

    def drop(self) -> None:
        """Forget what is on its way, without waiting."""
        self._open = []


class Return:
    """The way back of parameters in one bucket, which the constructor starts.

    Args:
        bucket: The bucket.
        stretches: What each rank owns of it.
    """

    def __init__(self, bucket: ShardedBucket, stretches: Sequence[Stretch]) -> None:
        self._bucket, self._stretches = bucket, stretches
        self._communicator = bucket.communicator
        self.plan, self.observers = bucket.plan, bucket.observers  # to be `traced`
        self._works: list[comm.Work] = []
        self._start()

    @traced("send values", before=Moment.VALUES_STARTED, after=Moment.VALUES_SENT)
    def _start(self) -> None:
        bucket, communicator = self._bucket, self._communicator
        number = bucket.plan.number
        if bucket.shared is not None:
            self._give(bucket, bucket.shared)
            return
        self._room = bucket.room()
        for rank, stretch in enumerate(self._stretches):
            if not stretch.numel or communicator.size == 1:
                continue
            is_own = rank == communicator.rank
            flat = self._pack(stretch) if is_own else self._room.real(stretch)
            with communicator.watching("sending new values of parameters", number):
                work = comm.start_broadcast(flat, communicator.group, rank)
                communicator.note_started(work, bucket.plan.device)
            self._works.append(work)

    def _give(self, bucket: ShardedBucket, shared: SharedBuffer) -> None:
        """Write own values to memory from which the other ranks read them."""
        self._room = bucket.given_room(shared)
        number = bucket.plan.number
        with self._communicator.watching("giving new values of parameters", number):
            self._pack(self._stretches[self._communicator.rank])
            work = shared.give()
            self._communicator.note_started(work, bucket.plan.device)
        self._works.append(work)

    def _pack(self, stretch: Stretch) -> Tensor:
        """Return this rank's new values in memory that stays as it is."""
        views, flat = self._room.own(stretch)
        params: list[Tensor] = [self._bucket.params[k] for k in stretch.slots]
        if params:
            with torch.no_grad():
                torch._foreach_copy_(views, params)
        return flat

    @traced("wait for values", before=Moment.VALUES_AWAITED, after=Moment.VALUES_BACK)
    def finish(self) -> None:
        """Wait for the values of the other ranks, and write them to parameters."""
        communicator = self._communicator
        for work in self._works:
            with communicator.watching(_DOING, self._bucket.plan.number):
                communicator.wait(work)
        self._works = []
        slots = [
            k
            for rank, stretch in enumerate(self._stretches)
            if rank != communicator.rank
            for k in stretch.slots
        ]
        if slots and communicator.size > 1:
            params: list[Tensor] = [self._bucket.params[k] for k in slots]
            with torch.no_grad():
                torch._foreach_copy_(params, [self._room.views[k] for k in slots])
