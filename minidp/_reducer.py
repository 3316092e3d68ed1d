"""From "gradient i is ready" to launched buckets and a finished backward.

    arm            a synchronising forward ended                        data_parallel
    _on_unusual    first gradient of a backward: open the countdown     grad hook
    _on_full       flatten a bucket, launch what is due, in index order grad hook
    _end_probe     the backward is over: complete it, or note PENDING   final callback
    _finalize      wait, copy out, close                                final callback

Buckets are launched strictly in index order whatever the ready order, because every rank
must issue the same collectives in the same order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from . import _layout
from ._autograd import (
    NO_TASK,
    GradHooks,
    current_task,
    probe_outputs,
    queue_final_callback,
)
from ._bucket import AnyBucket, BucketState, is_copied_at_once, make_bucket
from ._collectives import broadcast_integers
from ._countdown import Countdown, Entry, Mark
from ._expectation import StaticGraph, expectation_for
from ._phase import Phase, PhaseBox
from ._used_map import UsedMap
from .config import ReducerConfig
from .errors import (
    CollectiveError,
    GraphChangedError,
    MarkedTwiceError,
    explain,
)
from .trace import Moment, Recorder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Reducer:
    """Reduces the gradients of one replica; knows no module and no optimizer.

    Args:
        params: managed parameters, in parameter-index order.
        specs: the same, as the layout sees them.
        config: options.
        group: who reduces together.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        specs: Sequence[_layout.ParamSpec],
        config: ReducerConfig,
        group: ProcessGroup,
    ) -> None:
        self.params = tuple(params)
        self.specs = tuple(specs)
        self.names = tuple(spec.name for spec in specs)
        self.config = config
        self.group = group
        self.rank = group.rank()
        self.phase = PhaseBox()
        self.sync_enabled = True  # False inside no_sync()
        self.recorder: Recorder | None = None
        self.collective_failed = False
        self.forwards = 0  # grad-enabled forwards since the last finalize
        self.armed_count = 0  # synchronising forwards, ever
        self.finalized_count = 0  # synchronised backwards, ever
        self.launched_count = 0  # asynchronous collectives, ever
        self.unsynced: set[int] = set()  # .grad holds something never reduced
        self.used_locally: set[int] = set()  # by local backwards since finalize
        self._expected = expectation_for(
            len(params),
            find_unused=config.find_unused_parameters,
            static_graph=config.static_graph,
        )
        self._used_map = UsedMap(len(params), specs[0].device)
        self._lock = threading.RLock()
        self._probed_task = NO_TASK
        self._rebuild_order: list[int] | None = None
        self.has_rebuilt = False
        limits = config.caps.initial_limits(one_bucket=config.starts_with_one_bucket)
        self.layout = _layout.initial_layout(specs, limits)
        self.buckets: list[AnyBucket] = []
        self._next_bucket = 0
        self._absent: set[int] = set()
        self._countdown = Countdown(
            self.layout,
            _weakly(self._on_full),
            _weakly(self._on_unusual),
            _weakly(self._copy_now),
        )
        self._make_buckets()
        self._hooks = GradHooks(
            self.params,
            self._countdown,
            [not s.sparse and is_copied_at_once(s.nbytes) for s in specs],
        )
        # Hooks on parameters outlive us otherwise; GradHooks does not refer to self.
        weakref.finalize(self, self._hooks.remove)

    # -- before a backward -------------------------------------------------------------

    def arm(self, output: object) -> None:
        """A synchronising forward returned ``output``: the next backward reduces."""
        self.phase.enter(Phase.ARMED)
        self.forwards += 1
        self.armed_count += 1
        self._probed_task = NO_TASK
        if self._expected.completes_at_end:
            self._expected.saw_outputs(output, self._hooks.nodes)
            probe_outputs(output, _weakly(self._expect_end))

    def rebuild_if_due(self) -> None:
        """Collective: adopt the layout that follows rank 0's ready order, once."""
        if self._rebuild_order is None or self.phase.now not in (
            Phase.IDLE,
            Phase.ARMED,
        ):
            return
        order, self._rebuild_order = self._rebuild_order, None
        mine = _layout.rebuilt_layout(
            self.specs, self.config.caps.rebuilt_limits(), order
        )
        # One message: indices in bucket order, then each bucket's length or 0.
        lengths = [len(plan.slots) for plan in mine.buckets]
        padding = [0] * (len(self.params) - len(lengths))
        indices = [i for members in mine.assignment for i in members]
        with self.watching("broadcasting the bucket layout"):
            agreed = broadcast_integers(
                indices + lengths + padding, self.group, self.specs[0].device
            )
        rest = iter(agreed[: len(self.params)])
        assignment = [
            [next(rest) for _ in range(length)]
            for length in agreed[len(self.params) :]
            if length
        ]
        self.layout = _layout.build_layout(self.specs, assignment)
        self._make_buckets()
        self.has_rebuilt = True

    def missing_names(self) -> list[str]:
        """Parameters whose gradients an open or paused reduction still lacks."""
        return [self.names[i] for i in self._countdown.missing()]

    # -- during a backward -------------------------------------------------------------

    def _on_unusual(self, i: int) -> None:
        """A grad hook fired, and its entry was not UNSET."""
        if self.phase.now in (Phase.IDLE, Phase.FINALIZING, Phase.FAILED):
            self._note_local(i)
            return
        with self._lock, self._failing():
            if self.phase.now is Phase.ARMED:
                self._open()
            elif self.phase.now is Phase.PENDING:
                self.phase.enter(Phase.REDUCING)
                self._countdown.resume(self._everyday_mark())
                self._expect_end()
            self._mark(i)

    def _note_local(self, i: int) -> None:
        if self.params[i].grad is None:
            return
        self.used_locally.add(i)
        # A local backward inside no_sync() with no forward behind it is meant so.
        if self.sync_enabled or self.forwards:
            self.unsynced.add(i)

    def _open(self) -> None:
        self.phase.enter(Phase.REDUCING)
        self._next_bucket = 0
        self._divisor = self.group.size()
        self._countdown.open(self.layout, self._expected.marks(self._everyday_mark()))
        self._absent = set(self._expected.absent())
        if self._probed_task == NO_TASK:
            self._expect_end()
        for i in self._expected.absent():
            self._count_missing(i)

    def _everyday_mark(self) -> Mark:
        return Mark.UNSET if self.recorder is None else Mark.TRACED

    def _mark(self, i: int) -> None:
        """Account for an arrival that the hook did not settle itself."""
        entry = self._countdown.entries[i]
        if entry is Mark.COUNTING:
            self._expected.count(i)
            self._note_used(i)
        elif entry is Mark.REPEATS:
            if self._expected.is_last_but_one(i):
                self._countdown.entries[i] = self._everyday_mark()
        elif entry is Mark.UNSET or entry is Mark.TRACED:
            self._record_arrival(i)
            self._countdown.arrive(
                i, self.params[i], at_once=is_copied_at_once(self.specs[i].nbytes)
            )
        elif i in self._absent and self._bucket_of(i).state is BucketState.FILLING:
            # Thought to be out of reach, but not reduced yet: take it.
            self._absent.discard(i)
            self._countdown.entries[i] = self.params[i].grad
            self._countdown.ready.append(i)
        else:
            raise self._marked_twice(i)

    def _note_used(self, i: int) -> None:
        if self.params[i].grad is not None:
            self.used_locally.add(i)

    def _count_missing(self, i: int) -> None:
        """A parameter that will not arrive contributes its present ``.grad``."""
        self._countdown.entries[i] = self.params[i].grad
        self._countdown.count(i)

    def _copy_now(self, i: int, grad: torch.Tensor) -> Entry:
        bucket = self._bucket_of(i)
        return bucket.copy_now(bucket.plan.indices.index(i), grad, self._divisor)

    def _on_full(self, number: int) -> None:
        with self._failing():
            bucket = self.buckets[number]
            entries = self._countdown.entries
            arrived = set(self._countdown.ready) if self._has_unused() else None
            self._record(Moment.FULL, number)
            bucket.flatten(
                [entries[i] for i in bucket.plan.indices],
                self._divisor,
                ()
                if arrived is None
                else {k for k, i in enumerate(bucket.plan.indices) if i not in arrived},
            )
            with self._lock:
                if self._launch_in_order():
                    self._after_last_launch()

    def _has_unused(self) -> bool:
        return self._expected.shares_used_map or isinstance(self._expected, StaticGraph)

    def _launch_in_order(self) -> bool:
        """Launch every full bucket whose predecessors are launched; True after the last."""
        before = self._next_bucket
        while (
            self._next_bucket < len(self.buckets)
            and self.buckets[self._next_bucket].state is BucketState.FULL
        ):
            number = self._next_bucket
            self._next_bucket += 1
            with self.watching(f"launching the all-reduce of bucket {number}"):
                work = self.buckets[number].launch(self.group)
            self.launched_count += 1
            self._record(Moment.LAUNCHED, number)
            if self.recorder is not None:
                work.get_future().add_done_callback(
                    lambda _, n=number: self._record(Moment.DONE, n)
                )
        return before < self._next_bucket == len(self.buckets)

    def _after_last_launch(self) -> None:
        self._launch_used_map()
        queue_final_callback(self._finalize)

    def _launch_used_map(self) -> None:
        if self._expected.shares_used_map and not self._used_map.is_launched:
            used = self._used_now()
            with self.watching("launching the all-reduce of the used-map"):
                self._used_map.launch(used, self.group)
            self.launched_count += 1

    def _used_now(self) -> set[int]:
        entries = self._countdown.entries
        arrived = {i for i in self._countdown.ready if entries[i] is not None}
        return arrived | self.used_locally

    # -- at the end of a backward ------------------------------------------------------

    def _expect_end(self) -> None:
        """Queue the end probe, once per graph task."""
        task = current_task()
        if task != self._probed_task:
            self._probed_task = task
            queue_final_callback(self._end_probe)

    def _end_probe(self) -> None:
        """The backward is over."""
        with self._lock, self._failing():
            self._probed_task = NO_TASK
            if self.phase.now is Phase.ARMED and self._expected.completes_at_end:
                # The backward passed our outputs, but no parameter was in its way.
                self._probed_task = current_task()
                self._open()
            is_open = self.phase.now is Phase.REDUCING
            if not is_open or self._next_bucket == len(self.buckets):
                return
            if self._expected.completes_at_end:
                self._complete()
            else:
                self.phase.enter(Phase.PENDING)
                self._countdown.pause()

    def _complete(self) -> None:
        """Fill in every missing slot; this launches what is left."""
        if self._expected.map_goes_first:
            self._launch_used_map()
        for i in self._countdown.missing():
            self._count_missing(i)

    def _finalize(self) -> None:
        with self._lock, self._failing():
            self.phase.enter(Phase.FINALIZING)
            arrived = set(self._countdown.ready)
            missing = [i for i in range(len(self.params)) if i not in arrived]
            unused = self._unused_everywhere(missing)
            for number, bucket in enumerate(self.buckets):
                with self.watching(f"waiting for the all-reduce of bucket {number}"):
                    bucket.complete()
                kept = {k for k, i in enumerate(bucket.plan.indices) if i in unused}
                bucket.unflatten(kept)
                self._record(Moment.COPIED_OUT, number)
            if not self.has_rebuilt and self._expected.keeps_ready_order:
                self._rebuild_order = [*self._countdown.ready, *missing]
            self._expected.ended(missing, unused)
            self._settle(unused)

    def _unused_everywhere(self, missing: Sequence[int]) -> frozenset[int]:
        """Parameters whose ``.grad`` stays as it is."""
        if not self._used_map.is_launched:
            return frozenset(self._expected.kept)
        with self.watching("waiting for the all-reduce of the used-map"):
            unused = self._used_map.unused_everywhere()
        return unused.intersection(missing)

    def _settle(self, unused: Collection[int]) -> None:
        """Back to IDLE: nothing is in flight, nothing is expected."""
        self._countdown.close()
        self.unsynced.intersection_update(unused)
        self.used_locally.clear()
        self.forwards = 0
        self.finalized_count += 1
        self.phase.enter(Phase.IDLE)

    # -- on demand ---------------------------------------------------------------------

    def reduce_now(self) -> None:
        """Collective: average the present ``.grad`` of every parameter."""
        was_armed = self.phase.now is Phase.ARMED
        forwards = self.forwards
        with self._lock, self._failing():
            self.phase.enter(Phase.REDUCING)
            self._next_bucket = 0
            self._divisor = self.group.size()
            grads = [param.grad for param in self.params]
            undecided = {i for i, grad in enumerate(grads) if grad is None}
            with torch.no_grad():
                for bucket in self.buckets:
                    indices = bucket.plan.indices
                    bucket.flatten([grads[i] for i in indices], self._divisor)
            self._launch_in_order()
            used = set(range(len(grads))) - undecided
            with self.watching("launching the all-reduce of the used-map"):
                self._used_map.launch(used, self.group)
            self.launched_count += 1
            self.phase.enter(Phase.FINALIZING)
            unused = self._unused_everywhere(sorted(undecided))
            for number, bucket in enumerate(self.buckets):
                with self.watching(f"waiting for the all-reduce of bucket {number}"):
                    bucket.complete()
                bucket.unflatten(
                    {k for k, i in enumerate(bucket.plan.indices) if i in unused}
                )
            self._settle(unused)
        if was_armed:
            self.phase.enter(Phase.ARMED)
            self.forwards = forwards

    def recover(self, group: ProcessGroup) -> None:
        """Drop whatever is in flight and start afresh on ``group``."""
        with self._lock:
            if self.phase.now is not Phase.FAILED:
                self.phase.enter(Phase.FAILED)
            fresh = group is not self.group
            self.group = group
            self.collective_failed = False
            self._used_map.drop()
            self._countdown.close()
            self._next_bucket = 0
            self._probed_task = NO_TASK
            if fresh:
                self._rebuild_order = None
            # New memory: an abandoned collective may still write to the old one.
            self._make_buckets()
            self.unsynced.clear()
            self.used_locally.clear()
            self.forwards = 0
            self.armed_count = self.finalized_count
            self.phase.enter(Phase.IDLE)

    def drain(self) -> None:
        """Wait for every launched collective and discard its result."""
        for number, bucket in enumerate(self.buckets):
            if bucket.state is BucketState.IN_FLIGHT:
                with self.watching(f"waiting for the all-reduce of bucket {number}"):
                    bucket.complete()
        with self.watching("waiting for the all-reduce of the used-map"):
            self._used_map.unused_everywhere()

    def remove_hooks(self) -> None:
        """Take the grad hooks off the parameters."""
        self._hooks.remove()

    # -- parts -------------------------------------------------------------------------

    def _make_buckets(self) -> None:
        old = self.buckets
        as_view = self.config.gradient_as_bucket_view
        if not as_view:
            self.buckets = old = []  # frees their memory before new memory is taken
        self.buckets = [
            make_bucket(plan, self.params, self.names, self.rank, as_view=as_view)
            for plan in self.layout.buckets
        ]
        self._countdown.adopt(self.layout, [b.streams.written_on for b in self.buckets])
        if old:
            views = {
                p: v
                for bucket in self.buckets
                for p, v in zip(bucket.params, bucket.views, strict=False)
            }
            with torch.no_grad():
                for bucket in old:
                    bucket.move_grads_to(views)

    def _bucket_of(self, i: int) -> AnyBucket:
        return self.buckets[self._countdown.bucket_of[i]]

    def _marked_twice(self, i: int) -> MarkedTwiceError | GraphChangedError:
        if isinstance(self._expected, StaticGraph):
            return GraphChangedError(
                explain(
                    self.rank,
                    "Your training graph has changed: a gradient arrived more often "
                    "than in the first backward of static_graph=True.",
                    names=[self.names[i]],
                    remedy="use static_graph only if every iteration uses the same "
                    "parameters equally often; call reset() on all ranks to go on",
                )
            )
        return MarkedTwiceError(
            explain(
                self.rank,
                "Expected to mark a variable ready only once, but a gradient arrived "
                "a second time in one reduction.",
                names=[self.names[i]],
                remedy="the parameter takes part in several backward calls of one "
                "forward, or in several reentrant checkpoints: use "
                "checkpoint(..., use_reentrant=False) or static_graph=True, or wrap "
                "all but the last backward in no_sync(); call reset() on all ranks "
                "to go on",
            )
        )

    @contextmanager
    def watching(self, doing: str) -> Iterator[None]:
        """Around every collective: its failure gets rank, place and remedy."""
        try:
            yield
        except Exception as error:
            self.collective_failed = True
            raise CollectiveError(
                explain(
                    self.rank,
                    f"A collective failed while {doing}: {error}",
                    expected=f"all {self.group.size()} ranks to take part in time",
                    remedy="look for the rank that died, raised, or took another "
                    "branch; then call reset() on all live ranks",
                )
            ) from error

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Whatever raises inside leaves the reducer FAILED."""
        try:
            yield
        except BaseException:
            self.phase.enter(Phase.FAILED)
            self._countdown.close()
            raise

    def _record(self, moment: Moment, index: int) -> None:
        if self.recorder is not None:
            self.recorder.record(moment, index, self.finalized_count)

    def _record_arrival(self, i: int) -> None:
        if self.recorder is not None:
            self._record(Moment.PARAM_READY, i)
            number = self._countdown.bucket_of[i]
            if self._countdown.pending[number] == len(self.buckets[number].plan.slots):
                self._record(Moment.FIRST_GRADIENT, number)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call a bound method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        target = reference()
        return None if target is None else target(*arguments)

    return call
