"""Flatten buckets, launch them strictly in index order, wait, copy out.

::

    full:      bucket 2   bucket 0   bucket 1
    launched:             0          1, 2         same order on every rank

======================  ======================  ======================
mode                    division                collective
======================  ======================  ======================
default                 each gradient           all-reduce (SUM)
``batched_grad_copy``   whole buffer            all-reduce (SUM)
with a comm hook        what the hook does      what the hook does
======================  ======================  ======================
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidp import comm
from minidp.comm import ProcessGroup
from minidp.config import ReducerConfig
from minidp.layout import Layout, ParamSpec, initial_layout, resumed_layout
from minidp.trace import Moment, Tracer, traced

from .bucket import Bucket, BucketState, DenseBucket
from .grad_hooks import Entry
from .sparse_bucket import SparseBucket


class Observer:
    """Be called by `BucketQueue.finish` per bucket and at the end; here no-op."""

    uses_grads = False  # reads or changes ``.grad`` in `reduced`

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """Called per bucket, in order, when averages are in ``.grad`` of ``params``.

        Only if `uses_grads`. Also for skipped buckets and unused parameters, whose
        ``.grad`` is as before.
        """

    def finished(self) -> None:
        """Called once, after the last bucket is reduced."""


class Averaging:
    """Hold by what a reducer averages, and why memory is not shared.

    Over items, gradients travel divided by the ranks, so that 16 bits do not overflow;
    the other factor, ranks / items, comes with the first dense bucket.
    """

    def __init__(self, communicator: comm.Communicator, *, over_items: bool) -> None:
        self._communicator = communicator
        self.items = comm.ItemCounts(communicator) if over_items else None
        self.num_contributors: int | None = None  # ranks to average over; None: all
        self.comm_hook: comm.CommHook | None = None
        self.active_comm_hook: comm.CommHook | None = None  # `comm_hook` at `begin`
        self.copy_divisor = 1  # of this backward's gradients; 1 if a comm hook divides
        self.wait_description = ""
        self.no_shared_memory = ""  # why buckets use the group; empty: shared

    @property
    def divisor(self) -> int:
        """The number of ranks to average over: `num_contributors`, or group size."""
        return self.num_contributors or self._communicator.size

    @property
    def seat(self) -> tuple[int, int]:
        """This rank's number among those that average, and how many these are."""
        return self._communicator.rank, self._communicator.size

    def begin(self) -> None:
        """Set `active_comm_hook`, `copy_divisor`, `wait_description` for a backward."""
        hook = self.active_comm_hook = self.comm_hook
        self.copy_divisor = self.divisor if hook is None or self.items else 1
        self.wait_description = "waiting for the all-reduce"
        if hook is not None:
            self.wait_description = f"waiting for the comm hook {hook.name}, call"

    def register(self, hook: comm.CommHook) -> None:
        """Set the comm hook; RuntimeError if there is one, or if it averages items."""
        if self.comm_hook is not None:
            text = "register_comm_hook or register_builtin_comm_hook can only be called"
            name = self.comm_hook.name
            raise RuntimeError(f"{text} once, and {name} is registered.")
        if self.items is not None:
            raise RuntimeError(
                f'The comm hook {hook.name} cannot be registered: average_over="items" '
                "sends counts in a bucket, which a hook might change. What to do: "
                "average over ranks, or use no hook."
            )
        self.comm_hook = hook

    def share(
        self, layout: Layout, maps: Sequence[comm.UsedMap], *, asks: bool
    ) -> list[comm.SharedBuffer]:
        """Return buffers for the dense buckets; [] if `no_shared_memory` says why not.

        A collective if ``asks``; else there are none. ``maps`` get buffers, too.
        """
        dense = [plan for plan in layout.buckets if not plan.sparse]
        found: list[comm.SharedBuffer] | str = "ranks have not looked for it yet"
        if self.comm_hook is not None:
            found = "a comm hook is registered"
        elif asks:
            shapes = [(plan.length, plan.dtype) for plan in dense]
            device = layout.buckets[0].device
            found = comm.share(shapes, self._communicator, device, maps)
        self.no_shared_memory = found if isinstance(found, str) else ""
        return [] if isinstance(found, str) else found

    @contextmanager
    def without_comm_hook(self) -> Iterator[None]:
        """Return a context in which no comm hook is registered; restore it after."""
        hook, self.comm_hook = self.comm_hook, None
        try:
            yield
        finally:
            self.comm_hook = hook


class BucketQueue:
    """Launch, finish and rebuild one reducer's buckets; knows no phases."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        specs: Sequence[ParamSpec],
        config: ReducerConfig,
        communicator: comm.Communicator,
    ) -> None:
        self.communicator = communicator
        self.averaging = Averaging(communicator, over_items=config.averages_items)
        self.tracer = Tracer()
        self.checks_finite = False
        self.skipped: Collection[int] = ()  # bucket numbers that no rank launches now
        self.observers: list[Observer] = []
        self.owed: list[torch.futures.Future[Any]] = []  # `finish` waits for these
        shared = (len(params), specs[0].device, communicator)
        self.used_map = comm.UsedMap(*shared)
        # For forwards that share what they reach, and reductions without a backward.
        self.reach_map = comm.UsedMap(*shared, uses_forward_group=True)
        self._params = params
        self.specs = specs
        self.config = config
        self.next = 0  # the bucket to launch next
        self._context: comm.ContextGrads | None = None
        self._summing: list[comm.Work] = []  # in shared memory: they need our help
        self.buckets: list[Bucket] = []
        self.adopt(self.configure(config))

    # -- launch ------------------------------------------------------------------------

    def start(
        self,
        *,
        shares_reach: bool = False,
        context: comm.ContextGrads | None = None,
    ) -> None:
        """Begin a synchronised backward: fix skipped buckets, divisor and comm hook.

        With ``shares_reach`` skips buckets of parameters that no rank's forward
        reached; may wait. ``context``: the RPC context that holds the gradients; None:
        ``.grad`` does.
        """
        if (context is None) != (self._context is None):
            for bucket in self.buckets:
                bucket.set_apart(apart=context is not None)
        self._context = context
        self.next = 0
        self._summing.clear()
        self.skipped = ()
        if shares_reach and (absent := self.reach_map.unused_everywhere()):
            plans = enumerate(self.layout.buckets)
            self.skipped = {n for n, plan in plans if absent.issuperset(plan.indices)}
        self.averaging.begin()

    def copy_now(self, i: int, grad: Tensor) -> Entry:
        """Call and return `Bucket.copy_now` for ``i``: COPIED, or ``grad`` uncopied."""
        bucket = self.buckets[self.layout.bucket_of[i]]
        return bucket.copy_now(bucket.position[i], grad, self.averaging.copy_divisor)

    @traced("flatten", before=Moment.FULL)
    def flatten(
        self, number: int, entries: Sequence[Entry], filled: Collection[int]
    ) -> None:
        """Copy ``entries`` into a bucket (`Bucket.flatten`); `launch_due` comes next.

        ``filled``: indices of parameters that did not arrive.
        """
        bucket, undecided = self.buckets[number], set[int]()
        if filled:
            undecided = {bucket.position[i] for i in filled if i in bucket.position}
        bucket.flatten(entries, self.averaging.copy_divisor, undecided)

    def launch_due(self) -> bool:
        """Launch buckets in index order, while the next one is FULL or skipped.

        Return True only from the call that reaches the end.
        """
        before = self.next
        if self._summing:
            self._summing = [each for each in self._summing if not each.is_completed()]
        while self.next < len(self.buckets):
            number = self.next
            if number not in self.skipped:
                if self.buckets[number].state is not BucketState.FULL:
                    break
                self._launch(number)
            self.next += 1
        is_launched = before < self.next == len(self.buckets)
        items = self.averaging.items
        if is_launched and items is not None and not items.is_sent:
            items.send(self.layout.buckets[0].device)
        return is_launched

    # The event comes first: the collective may be over when this thread runs again.
    @traced("launch", before=Moment.LAUNCHED)
    def _launch(self, number: int) -> None:
        bucket, hook = self.buckets[number], self.averaging.active_comm_hook
        if bucket.plan.tail and self.averaging.items is not None:
            with bucket.on_stream():
                self.averaging.items.write(bucket.tail)
        if self.checks_finite:
            with bucket.on_stream():  # after the kernels that filled it
                _check_finite(bucket, self.tracer.backward, comm.BEFORE)
        with self.communicator.watching("launching the all-reduce", number):
            if hook is None:
                work = bucket.all_reduce()
                if bucket.shared is not None:
                    self._summing.append(work)
            else:
                following = range(number + 1, len(self.buckets))
                is_last = all(later in self.skipped for later in following)
                divisor, group = self.averaging.divisor, self.communicator.group
                if self.averaging.items is not None:
                    divisor = 1  # the buffer is divided already
                turn = comm.Turn(number, is_last, divisor, group)
                work = bucket.run_hook(hook, turn)
            self.communicator.note_started(work)
        if self.tracer.is_on:
            done = partial(self.tracer.note, Moment.DONE, number)
            work.get_future().add_done_callback(done)

    # -- wait --------------------------------------------------------------------------

    def finish(self, untouched: Collection[int]) -> None:
        """Per bucket wait, write averages, call `Observer.reduced`; last `finished`.

        The ``.grad`` of parameters in ``untouched`` are not written. In the end wait
        for the futures in `owed`, and count the backward.
        """
        observers = tuple(self.observers)  # a call may remove its observer
        steppers = [observer for observer in observers if observer.uses_grads]
        if self.averaging.items is not None:
            _receive_counts(self, self.averaging.items)
            if steppers:  # they apply gradients before any guard sees them
                self.averaging.items.check()
        for number, bucket in enumerate(self.buckets):
            if number not in self.skipped:
                slots = bucket.position.items() if untouched else ()
                kept = [k for i, k in slots if i in untouched]
                if not (kept or self._context) and isinstance(bucket, DenseBucket):
                    bucket.offer_grads()
                if bucket.state is BucketState.IN_FLIGHT:  # not waited for above
                    self._wait(number)
                self._copy_out(number, kept)
            for stepper in steppers:
                stepper.reduced(bucket.params)
        for observer in observers:
            observer.finished()
        owed, self.owed = self.owed, []
        for future in owed:
            with self.communicator.watching("waiting for what a hook owes"):
                comm.wait_for(comm.FutureWork(future))
        self.tracer.backward += 1

    @traced("wait")
    def _wait(self, number: int) -> None:
        with self.communicator.watching(self.averaging.wait_description, number):
            self.buckets[number].wait()

    @traced("copy out", after=Moment.COPIED_OUT)
    def _copy_out(self, number: int, kept: Sequence[int]) -> None:
        bucket, into = self.buckets[number], None
        if self.checks_finite and self.averaging.active_comm_hook is not None:
            _check_finite(bucket, self.tracer.backward, comm.AFTER)
        if self._context is not None:
            into = self._context.to_write(bucket.params, bucket.names, kept)
        bucket.unflatten(kept, into)

    # -- other buckets, another group --------------------------------------------------

    def configure(self, config: ReducerConfig) -> Layout:
        """Use ``config`` from now on; return its first layout, which is not adopted."""
        self.config = config
        self.used_map.uses_forward_group = config.static_graph  # in one backward only
        if config.saved_layout is not None:
            return resumed_layout(config.saved_layout, self.specs)
        one_bucket = config.follows_ready_order
        limits = config.caps.initial_limits(one_bucket=one_bucket)
        return initial_layout(self.specs, limits)

    def adopt(self, layout: Layout, *, shares: bool = False) -> None:
        """Replace all buckets by new ones of ``layout``; move gradient views there.

        With ``shares`` a collective: buckets lie in shared memory if all ranks can.
        """
        self.buckets, self._summing = [], []  # frees memory before we take new memory
        maps = self.used_map, self.reach_map
        for used_map in maps:
            used_map.use(None)
        self._context = None  # new buckets are not set apart
        if self.averaging.items is not None:
            layout = layout.with_tail(self.averaging.items.tail)
        self.layout = layout
        names = [spec.name for spec in self.specs]
        shared = (self._params, names, self.communicator, self.config)
        buffers = iter(self.averaging.share(layout, maps, asks=shares))
        self.buckets = [
            SparseBucket(plan, *shared)
            if plan.sparse
            else DenseBucket(plan, *shared, next(buffers, None))
            for plan in layout.buckets
        ]
        if self.averaging.items is not None:  # those that have arrived when counts go
            params = next((b.params for b in self.buckets if b.plan.tail), ())
            self.averaging.items.samples = sorted(params, key=Tensor.numel)[:3]
        if self.config.gradient_as_bucket_view:
            for bucket in self.buckets:
                bucket.alias_grads_to_views()

    def drain(self) -> None:
        """Wait for collectives in flight (buckets, used-maps), but copy nothing out."""
        for number, bucket in enumerate(self.buckets):
            if bucket.state is BucketState.IN_FLIGHT:
                self._wait(number)
        self.used_map.settle()
        self.reach_map.settle()
        if self.averaging.items is not None:
            self.averaging.items.settle()

    def reset(self, group: ProcessGroup) -> None:
        """Move to ``group`` with new buckets of the same layout.

        Resets the communicator; drops collectives in flight, and `owed`, without
        waiting. A comm hook whose state is the old group gets the new one.
        """
        hook = self.averaging.comm_hook
        if hook is not None:
            hook.replace_group(self.communicator.group, group)
        self.communicator.reset(group)
        self.next = 0
        self.owed = []
        self.skipped = ()
        self.used_map.drop()
        self.reach_map.drop()
        if self.averaging.items is not None:
            self.averaging.items.reset()
        self.adopt(self.layout)


def _receive_counts(queue: BucketQueue, items: comm.ItemCounts) -> None:
    """Wait for all ranks' counts; tell the buckets by what to multiply averages."""
    tail = None
    for number, bucket in enumerate(queue.buckets):
        if bucket.plan.tail and number not in queue.skipped:
            queue._wait(number)
            tail = bucket.tail
    factor = items.read(tail, queue.averaging.copy_divisor)
    for bucket in queue.buckets:
        bucket.factor = factor
        bucket.is_alone &= isinstance(factor, float) and factor == 1.0


def _check_finite(bucket: Bucket, step: int, when: str) -> None:
    parts = dict(zip(bucket.names, bucket.views or [bucket.payload], strict=True))
    comm.refuse_nonfinite(bucket.payload, parts, bucket.communicator.rank, step, when)
