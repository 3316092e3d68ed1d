"""The buckets of a replica, launched strictly in index order and awaited in that order.

    ready:    bucket 2   bucket 0   bucket 1
    launched:            0          1, 2          same order on every rank

Every bucket's collective starts and ends here, under the eye of a `Watch`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ._arrivals import Entry
from ._averaging import Averaging
from ._bucket import Bucket, BucketState
from ._dense_bucket import DenseBucket
from ._dist_autograd import ContextGrads
from ._finite import AFTER, BEFORE, refuse_nonfinite
from ._groups import keep_for_good
from ._labels import label
from ._layout import Layout, ParamSpec, initial_layout
from ._overlap import Observer
from ._rebuild import agreed_layout
from ._saved_layout import resumed_layout
from ._sparse_bucket import SparseBucket
from ._used_map import UsedMap
from ._waiting import Promised, wait_for
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
        watch: over the collectives of its group.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        specs: Sequence[ParamSpec],
        config: ReducerConfig,
        watch: Watch,
    ) -> None:
        self.averaging = Averaging(watch.group, batched=config.batched_grad_copy)
        self.rank = watch.group.rank()
        self.tracer = Tracer()
        self.watch = watch
        self.checks_finite = False
        self.skipped: Collection[int] = ()  # buckets that do not travel this time
        self.observers: list[Observer] = []
        self.owed: list[torch.futures.Future[Any]] = []  # the next backward waits for
        self.used_map = UsedMap(len(params), specs[0].device, self.watch)
        # Of forwards that share what they reach; and of reductions without a backward.
        self.reach_map = UsedMap(len(params), specs[0].device, self.watch, is_odd=True)
        self._params = params
        self.specs = specs
        self.config = config
        self.next = 0  # bucket to be launched
        self._context: ContextGrads | None = None
        self.buckets: list[Bucket] = []
        self.replan(static_graph=config.static_graph)

    @property
    def group(self) -> ProcessGroup:
        """Who reduces together."""
        return self.averaging.group

    def adopt(self, layout: Layout) -> None:
        """Make the buckets of a layout; gradient views move along."""
        self.buckets = []  # frees memory before we take new memory
        self._context = None  # new buckets are not set apart
        self.layout = layout
        as_view = self.config.gradient_as_bucket_view
        names = [spec.name for spec in self.specs]
        self.buckets = [
            SparseBucket(plan, self._params, names, self.rank)
            if plan.sparse
            else DenseBucket(plan, self._params, names, self.rank, as_view=as_view)
            for plan in layout.buckets
        ]
        if as_view:
            for bucket in self.buckets:
                bucket.tie_grads()

    def replan(self, *, static_graph: bool | None = None) -> ReducerConfig:
        """Start over, with or without the promise of a static graph (None: as is)."""
        if static_graph is not None:
            self.config = replace(self.config, static_graph=static_graph)
        self.used_map.is_odd = self.config.static_graph  # its first backward has one
        config = self.config
        if config.saved_layout is not None:
            self.adopt(resumed_layout(config.saved_layout, self.specs))
            return config
        one_bucket = config.starts_with_one_bucket
        limits = config.caps.initial_limits(one_bucket=one_bucket)
        self.adopt(initial_layout(self.specs, limits))
        return config

    def rebuild(self, mine: Layout) -> None:
        """Collective: adopt rank 0's layout, which is ``mine`` if this is rank 0."""
        # New buckets also of an equal layout, as in torch: whether .grad is already
        # a view of its bucket decides how it is divided.
        self.adopt(agreed_layout(mine, self.specs, self.group, self.watch))

    def is_filling(self, i: int) -> bool:
        """Whether the bucket of parameter ``i`` still waits for gradients."""
        number = self.layout.bucket_of[i]
        is_filling = self.buckets[number].state is BucketState.FILLING
        return is_filling and number not in self.skipped

    def copy_now(self, i: int, grad: torch.Tensor) -> Entry:
        """Fill the slot of parameter ``i`` at once; returns the entry to keep."""
        bucket = self.buckets[self.layout.bucket_of[i]]
        return bucket.copy_now(bucket.position[i], grad, self.averaging.division)

    # -- launch ------------------------------------------------------------------------

    def start(
        self,
        absent: frozenset[int] = frozenset(),
        context: ContextGrads | None = None,
    ) -> None:
        """A synchronised backward begins.

        Args:
            absent: parameters that no rank brings: buckets of only these do not travel.
            context: where gradients live, if not in ``.grad``.
        """
        if (context is None) != (self._context is None):
            for bucket in self.buckets:
                bucket.set_apart(apart=context is not None)
        self._context = context
        self.next = 0
        self.skipped = {
            number
            for number, bucket in enumerate(self.buckets)
            if absent and absent.issuperset(bucket.plan.indices)
        }
        self.averaging.begin()

    @property
    def is_launched(self) -> bool:
        """Whether every bucket of this backward is launched."""
        return self.next == len(self.buckets)

    def launch_due(self) -> bool:
        """Launch every full bucket whose predecessors are; True with the last one."""
        before = self.next
        while self.next < len(self.buckets):
            number = self.next
            if number not in self.skipped:
                if self.buckets[number].state is not BucketState.FULL:
                    break
                self._launch(number)
            self.next += 1
        return before < self.next == len(self.buckets)

    def _launch(self, number: int) -> None:
        if self.checks_finite:
            bucket, step = self.buckets[number], self.tracer.backward
            with bucket.streams.launching():  # after the kernels that filled it
                refuse_nonfinite(bucket, self.rank, step, BEFORE)
        # Before: it may be over by the time that this thread runs again.
        self.tracer.note(Moment.LAUNCHED, number)
        launching = self.watch.over("launching the all-reduce", number)
        with label("launch", number), launching:
            following = range(number + 1, len(self.buckets))
            is_last = all(later in self.skipped for later in following)
            work = self.averaging.launch(self.buckets[number], number, is_last=is_last)
            self.watch.note_started(work)
        if self.tracer.is_on:
            done = partial(self.tracer.note, Moment.DONE, number)
            work.get_future().add_done_callback(done)

    # -- wait --------------------------------------------------------------------------

    def finish(self, untouched: Collection[int]) -> None:
        """Wait for each bucket in turn and copy it out, but for ``untouched`` ones."""
        observers = tuple(self.observers)  # some take themselves off the list
        for number, bucket in enumerate(self.buckets):
            if number not in self.skipped:
                waiting = self.watch.over(self.averaging.doing, number)
                with label("wait", number), waiting:
                    bucket.complete()
                if self.checks_finite and self.averaging.hook_now is not None:
                    refuse_nonfinite(bucket, self.rank, self.tracer.backward, AFTER)
                with label("copy out", number):
                    kept = _slots_of(untouched, bucket)
                    bucket.unflatten(kept, _targets_of(bucket, self._context, kept))
                self.tracer.note(Moment.COPIED_OUT, number)
            for observer in observers:
                observer.reduced(bucket.params)
        for observer in observers:
            observer.finished()
        owed, self.owed = self.owed, []
        for future in owed:
            with self.watch.over("waiting for what a hook owes"):
                wait_for(Promised(future))
        self.tracer.backward += 1

    def abandon(self) -> None:
        """Nobody may ever complete what is in flight: do not let its group end."""
        works = [bucket.work for bucket in self.buckets if bucket.work is not None]
        if works:
            keep_for_good(self.group, works)

    def drain(self) -> None:
        """Wait for everything in flight and discard the results."""
        for number, bucket in enumerate(self.buckets):
            if bucket.state is BucketState.IN_FLIGHT:
                with self.watch.over(self.averaging.doing, number):
                    bucket.complete()
        for shared in (self.used_map, self.reach_map):
            shared.settle()

    def restart(self, group: ProcessGroup) -> None:
        """Abandon what is in flight, with its memory: it may still be written to."""
        self.averaging.move_to(group)
        self.rank = group.rank()
        self.watch.begin_anew(group)
        self.next = 0
        self.owed = []
        self.skipped = ()
        for shared in (self.used_map, self.reach_map):
            shared.drop()
        self.adopt(self.layout)


def _targets_of(
    bucket: Bucket, context: ContextGrads | None, kept: Collection[int]
) -> list[torch.Tensor | None] | None:
    """Where averages go instead of into ``.grad``; None: nowhere else."""
    if context is None:
        return None
    return context.to_write(bucket.params, bucket.names, kept)


def _slots_of(params: Collection[int], bucket: Bucket) -> list[int]:
    if not params:
        return []
    return [k for k, i in enumerate(bucket.plan.indices) if i in params]
