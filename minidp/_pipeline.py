"""The buckets of a replica, launched strictly in index order and awaited in that order.

    ready:    bucket 2   bucket 0   bucket 1
    launched:            0          1, 2          same order on every rank

Every collective of a backward starts and ends here, under the eye of a `Watch`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from ._arrivals import Entry
from ._bucket import Bucket, BucketState, Division
from ._collectives import Work, all_reduce, broadcast_integers
from ._comm_hook import CommHook
from ._dense_bucket import DenseBucket
from ._grad_bucket import GradBucket, Turn
from ._layout import (
    BucketPlan,
    Layout,
    ParamSpec,
    build_layout,
    initial_layout,
    rebuilt_layout,
)
from ._sparse_bucket import SparseBucket
from ._used_map import UsedMap
from ._watch import Watch
from .config import ReducerConfig
from .trace import Moment, Tracer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Pipeline:
    """Owns buckets and used-map; knows neither phases nor autograd.

    Args:
        params: managed parameters, in parameter-index order.
        specs: the same, as the layout sees them.
        config: options.
        group: who reduces together.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        specs: Sequence[ParamSpec],
        config: ReducerConfig,
        group: ProcessGroup,
    ) -> None:
        self.group = group
        self.rank = group.rank()
        self.tracer = Tracer()
        self.watch = Watch(self.rank, group.size())
        self.launched_count = 0  # asynchronous collectives, ever
        self.num_contributors: int | None = None  # ranks to average over; None: all
        self.division = Division()
        self.comm_hook: CommHook | None = None
        self._hook_now: CommHook | None = None  # the one of this backward
        self._params = params
        self._names = [spec.name for spec in specs]
        self._specs = specs
        self._config = config
        self._as_view = config.gradient_as_bucket_view
        self._used_map = UsedMap(len(params), specs[0].device)
        self._next = 0
        self.buckets: list[Bucket] = []
        limits = config.caps.initial_limits(one_bucket=config.starts_with_one_bucket)
        self.adopt(initial_layout(specs, limits))

    def adopt(self, layout: Layout) -> None:
        """Make the buckets of a layout; gradient views move along."""
        self.buckets = []  # frees memory before we take new memory
        self.layout = layout
        self.buckets = [self._make_bucket(plan) for plan in layout.buckets]
        if self._as_view:
            for bucket in self.buckets:
                bucket.tie_grads()

    def _make_bucket(self, plan: BucketPlan) -> Bucket:
        if plan.sparse:
            return SparseBucket(plan, self._params, self._names, self.rank)
        return DenseBucket(
            plan, self._params, self._names, self.rank, as_view=self._as_view
        )

    def is_filling(self, i: int) -> bool:
        """Whether the bucket of parameter ``i`` still waits for gradients."""
        bucket = self.buckets[self.layout.bucket_of[i]]
        return bucket.state is BucketState.FILLING

    def copy_now(self, i: int, grad: torch.Tensor) -> Entry:
        """Fill the slot of parameter ``i`` at once; returns the entry to keep."""
        bucket = self.buckets[self.layout.bucket_of[i]]
        return bucket.copy_now(bucket.position[i], grad, self.division)

    # -- launch ------------------------------------------------------------------------

    @property
    def divisor(self) -> int:
        """How many ranks to average over."""
        return self.num_contributors or self.group.size()

    def start(self) -> None:
        """A synchronised backward begins."""
        self._next = 0
        self._hook_now = self.comm_hook
        if self._hook_now is not None:
            self.division = Division()
        elif self._config.batched_grad_copy:
            self.division = Division(of_buffer=self.divisor)
        else:
            self.division = Division(at_copy=self.divisor)

    @contextmanager
    def without_comm_hook(self) -> Iterator[None]:
        """Average plainly, whatever hook is registered."""
        hook, self.comm_hook = self.comm_hook, None
        try:
            yield
        finally:
            self.comm_hook = hook

    @property
    def is_launched(self) -> bool:
        """Whether every bucket of this backward is launched."""
        return self._next == len(self.buckets)

    def launch_due(self) -> bool:
        """Launch every full bucket whose predecessors are; True with the last one."""
        before = self._next
        while (
            self._next < len(self.buckets)
            and self.buckets[self._next].state is BucketState.FULL
        ):
            number = self._next
            self._next += 1
            with self.watch.over("launching the all-reduce", number):
                work = self._launch(number)
            self.launched_count += 1
            self.tracer.note(Moment.LAUNCHED, number)
            if self.tracer.is_on:
                done = partial(self.tracer.note, Moment.DONE, number)
                work.get_future().add_done_callback(done)
        return before < self._next == len(self.buckets)

    def _launch(self, number: int) -> Work:
        bucket, group = self.buckets[number], self.group
        hook = self._hook_now
        if hook is None:
            return bucket.launch(
                lambda payload: all_reduce(payload, group), is_alone=group.size() == 1
            )
        is_last = number == len(self.buckets) - 1
        turn = Turn(number, is_last, self.divisor, group)
        return bucket.launch(
            lambda payload: hook.start(
                GradBucket(bucket.plan, payload, bucket.params, turn),
                bucket.names,
                self.rank,
            )
        )

    def launch_used_map(self, used: Collection[int]) -> None:
        """Start summing the used-map, unless it is in flight."""
        if not self._used_map.is_launched:
            with self.watch.over("launching the all-reduce of the used-map"):
                self._used_map.launch(used, self.group)
            self.launched_count += 1

    # -- wait --------------------------------------------------------------------------

    def unused_everywhere(self) -> frozenset[int]:
        """Wait for the used-map, if launched: parameters that no rank used."""
        with self.watch.over("waiting for the all-reduce of the used-map"):
            return self._used_map.unused_everywhere()

    def finish(self, untouched: Collection[int]) -> None:
        """Wait for each bucket in turn and copy it out, but for ``untouched`` ones."""
        for number, bucket in enumerate(self.buckets):
            with self.watch.over("waiting for the all-reduce", number):
                bucket.complete()
            kept: Collection[int] = ()
            if untouched:
                kept = [k for k, i in enumerate(bucket.plan.indices) if i in untouched]
            bucket.unflatten(kept)
            self.tracer.note(Moment.COPIED_OUT, number)
        self.tracer.backward += 1

    def drain(self) -> None:
        """Wait for everything in flight and discard the results."""
        for number, bucket in enumerate(self.buckets):
            if bucket.state is BucketState.IN_FLIGHT:
                with self.watch.over("waiting for the all-reduce", number):
                    bucket.complete()
        self.unused_everywhere()

    def restart(self, group: ProcessGroup) -> None:
        """Abandon what is in flight, with its memory: it may still be written to."""
        if self.comm_hook is not None and self.comm_hook.state is self.group:
            self.comm_hook.state = group
        self.group = group
        self.watch.has_failed = False
        self.launched_count = 0
        self._used_map.drop()
        self._next = 0
        self.adopt(self.layout)

    # -- rebuild -----------------------------------------------------------------------

    def rebuild(self, ready_order: Sequence[int]) -> None:
        """Collective: adopt the layout that follows rank 0's ready order."""
        limits = self._config.caps.rebuilt_limits()
        mine = rebuilt_layout(self._specs, limits, ready_order)
        with self.watch.over("broadcasting the bucket layout"):
            agreed = broadcast_integers(
                _encode(mine), self.group, self._specs[0].device
            )
        self.adopt(build_layout(self._specs, _decode(agreed)))


def _encode(layout: Layout) -> list[int]:
    """Indices in bucket order, then bucket lengths, padded to one per parameter."""
    lengths = [len(members) for members in layout.assignment]
    padding = [0] * (layout.num_params - len(lengths))
    return [i for members in layout.assignment for i in members] + lengths + padding


def _decode(message: Sequence[int]) -> list[list[int]]:
    """Parameter indices per bucket."""
    half = len(message) // 2
    rest = iter(message[:half])
    return [[next(rest) for _ in range(length)] for length in message[half:] if length]
