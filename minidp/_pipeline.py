"""The buckets of a replica, launched strictly in index order and awaited in that order.

    ready:    bucket 2   bucket 0   bucket 1
    launched:            0          1, 2          same order on every rank

Every collective of a backward starts and ends here, so that a failure has one place to
get its rank, its name and its remedy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ._bucket import Bucket, BucketState
from ._collectives import broadcast_integers
from ._countdown import Entry
from ._dense_bucket import DenseBucket
from ._layout import BucketPlan, Layout, ParamSpec, build_layout
from ._sparse_bucket import SparseBucket
from ._used_map import UsedMap
from .errors import CollectiveError, explain
from .trace import Moment, Recorder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Pipeline:
    """Owns buckets and used-map; knows neither phases nor autograd.

    Args:
        params: managed parameters, in parameter-index order.
        specs: the same, as the layout sees them.
        layout: the first layout.
        group: who reduces together.
        as_view: ``gradient_as_bucket_view``.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        specs: Sequence[ParamSpec],
        layout: Layout,
        group: ProcessGroup,
        *,
        as_view: bool,
    ) -> None:
        self.group = group
        self.rank = group.rank()
        self.recorder: Recorder | None = None
        self.collective_failed = False
        self.launched_count = 0  # asynchronous collectives, ever
        self.backward = 0  # for the recorder
        self.divisor = group.size()  # ranks that contribute to this backward
        self._params = params
        self._names = [spec.name for spec in specs]
        self._as_view = as_view
        self._used_map = UsedMap(len(params), specs[0].device)
        self._next = 0
        self.buckets: list[Bucket] = []
        self.adopt(layout)

    def adopt(self, layout: Layout) -> None:
        """Make the buckets of a layout; gradients that are views move along."""
        old = self.buckets if self._as_view else []
        self.buckets = []  # without views, frees their memory before we take new memory
        self.layout = layout
        self.buckets = [self._make_bucket(plan) for plan in layout.buckets]
        views = {
            param: view
            for bucket in self.buckets
            for param, view in zip(bucket.params, bucket.views, strict=False)
        }
        for bucket in old:
            bucket.move_grads_to(views)

    def _make_bucket(self, plan: BucketPlan) -> Bucket:
        if plan.sparse:
            return SparseBucket(plan, self._params, self._names, self.rank)
        return DenseBucket(
            plan, self._params, self._names, self.rank, as_view=self._as_view
        )

    def bucket_of(self, i: int) -> Bucket:
        """The bucket of parameter ``i``."""
        return self.buckets[self.layout.bucket_of[i]]

    def copy_now(self, i: int, grad: torch.Tensor) -> Entry:
        """Fill the slot of parameter ``i`` at once; returns the entry to keep."""
        bucket = self.bucket_of(i)
        return bucket.copy_now(bucket.position[i], grad, self.divisor)

    # -- launch ------------------------------------------------------------------------

    def start(self) -> None:
        """A synchronised backward begins."""
        self._next = 0
        self.divisor = self.group.size()

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
            with self.watching("launching the all-reduce", number):
                work = self.buckets[number].launch(self.group)
            self.launched_count += 1
            self.record(Moment.LAUNCHED, number)
            if self.recorder is not None:
                done = partial(self._note_done, number)
                work.get_future().add_done_callback(done)
        return before < self._next == len(self.buckets)

    def launch_used_map(self, used: Collection[int]) -> None:
        """Start summing the used-map, unless it is in flight."""
        if not self._used_map.is_launched:
            with self.watching("launching the all-reduce of the used-map"):
                self._used_map.launch(used, self.group)
            self.launched_count += 1

    # -- wait --------------------------------------------------------------------------

    def unused_everywhere(self) -> frozenset[int]:
        """Wait for the used-map, if launched: parameters that no rank used."""
        with self.watching("waiting for the all-reduce of the used-map"):
            return self._used_map.unused_everywhere()

    def finish(self, untouched: Collection[int]) -> None:
        """Wait for each bucket in turn and copy it out, but for ``untouched`` ones."""
        for number, bucket in enumerate(self.buckets):
            with self.watching("waiting for the all-reduce", number):
                bucket.complete()
            kept: Collection[int] = ()
            if untouched:
                kept = [k for k, i in enumerate(bucket.plan.indices) if i in untouched]
            bucket.unflatten(kept)
            self.record(Moment.COPIED_OUT, number)
        self.backward += 1

    def drain(self) -> None:
        """Wait for everything in flight and discard the results."""
        for number, bucket in enumerate(self.buckets):
            if bucket.state is BucketState.IN_FLIGHT:
                with self.watching("waiting for the all-reduce", number):
                    bucket.complete()
        self.unused_everywhere()

    def restart(self, group: ProcessGroup) -> None:
        """Abandon what is in flight, with its memory: it may still be written to."""
        self.group = group
        self.collective_failed = False
        self.launched_count = 0
        self._used_map.drop()
        self._next = 0
        self.adopt(self.layout)

    # -- rebuild -----------------------------------------------------------------------

    def agree_on(self, mine: Layout, specs: Sequence[ParamSpec]) -> Layout:
        """Collective: rank 0's layout, in one message.

        The message holds parameter indices in bucket order, then the buckets' lengths,
        padded with zeros to one per parameter.
        """
        total = mine.num_params
        indices = [i for members in mine.assignment for i in members]
        lengths = [len(members) for members in mine.assignment]
        lengths += [0] * (total - len(lengths))
        with self.watching("broadcasting the bucket layout"):
            agreed = broadcast_integers(indices + lengths, self.group, specs[0].device)
        rest = iter(agreed[:total])
        return build_layout(
            specs, [[next(rest) for _ in range(n)] for n in agreed[total:] if n]
        )

    # -- failures and moments ----------------------------------------------------------

    def watching(self, doing: str, bucket: int | None = None) -> Watch:
        """Around every collective: its failure gets rank, place and remedy."""
        return Watch(self, doing, bucket)

    def failure(self, doing: str, error: Exception) -> CollectiveError:
        """Note that a collective failed, and explain it."""
        self.collective_failed = True
        return CollectiveError(
            explain(
                self.rank,
                f"A collective failed while {doing}: {error}",
                expected=f"all {self.group.size()} ranks to take part in time",
                remedy="look for the rank that died, raised, or took another "
                "branch; then call reset() on all live ranks",
            )
        )

    def _note_done(self, number: int, _future: object) -> None:
        self.record(Moment.DONE, number)

    def record_arrival(self, i: int, *, first: bool) -> None:
        """Tell the recorder that the gradient of parameter ``i`` is ready."""
        self.record(Moment.PARAM_READY, i)
        if first:
            self.record(Moment.FIRST_GRADIENT, self.layout.bucket_of[i])

    def record(self, moment: Moment, index: int) -> None:
        """Tell the recorder, if there is one."""
        if self.recorder is not None:
            self.recorder.record(moment, index, self.backward)


class Watch:
    """Context of one collective (a class: several are entered in every backward)."""

    __slots__ = ("_bucket", "_doing", "_pipeline")

    def __init__(self, pipeline: Pipeline, doing: str, bucket: int | None) -> None:
        self._pipeline = pipeline
        self._doing = doing
        self._bucket = bucket

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Turn any exception into a `CollectiveError`."""
        if isinstance(error, Exception):
            bucket = "" if self._bucket is None else f" of bucket {self._bucket}"
            raise self._pipeline.failure(self._doing + bucket, error) from error
