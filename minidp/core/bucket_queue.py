"""Launch full buckets in index order, wait for them, and write averages to ``.grad``.

Backends match collectives by the order in which each rank starts them. Buckets may
become full in another order on each rank, so a full bucket waits until those before it
are launched::

    full:      bucket 2   bucket 0   bucket 1
    launched:             0          1, 2         the same order on every rank

A bucket is reduced by an all-reduce, which sums values that are divided already, or by
the comm hook, which gets them undivided (see `averaging`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from minidp import comm
from minidp.accelerator import HomeStreams
from minidp.comm import ProcessGroup
from minidp.config import ReducerConfig
from minidp.hooks import HookInFlight
from minidp.layout import Layout, ParamSpec, initial_layout, resumed_layout

from .averaging import Averaging
from .bucket import Bucket, BucketState
from .dense_bucket import DenseBucket
from .entries import Entry
from .exchange import Exchange
from .grad_store import GradStore
from .item_counts import ItemCounts
from .ledger import Ledger
from .nonfinite import AFTER, BEFORE, refuse_nonfinite
from .observer import Observer, Observers
from .sparse_bucket import SparseBucket
from .used_map import UsedMap


class BucketQueue:
    """The buckets of one reducer, in the order in which they are launched.

    The constructor allocates the first ones.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        specs: Sequence[ParamSpec],
        config: ReducerConfig,
        communicator: comm.Communicator,
        ledger: Ledger,
    ) -> None:
        self.communicator = communicator
        self.ledger = ledger
        self.averaging = Averaging(
            communicator, specs[0].device, batched=config.batched_grad_copy
        )
        self.checks_finite = False
        self.skipped: Collection[int] = ()  # bucket numbers that no rank launches now
        self.observers = Observers()
        # Observers that have not been told yet that this backward launches.
        self._untold: list[Observer] = []
        # Parameters whose ``.grad`` the last `finish` did not write.
        self.untouched: Collection[int] = ()
        # What buffer hooks have returned (`_register_buffer_comm_hook`). `finish` waits
        # for these.
        self.buffer_hook_futures: list[torch.futures.Future[Any]] = []
        common = (len(params), specs[0].device, communicator)
        self.used_map = UsedMap("the used-map", *common)
        reach, present = "the map of reached parameters", "the map of present gradients"
        self.reach_map = UsedMap(reach, *common, uses_forward_group=True)
        self.present_map = UsedMap(present, *common, uses_forward_group=True)
        maps = self.used_map, self.reach_map, self.present_map
        self.exchanges: list[Exchange] = [each.exchange for each in maps]
        self._params = params
        self.specs = specs
        self.config = config
        self.next = 0  # the bucket to launch next
        self.home = HomeStreams(dict.fromkeys(spec.device for spec in specs))
        self.grad_store = GradStore()
        # Sums in shared memory: no thread of their own adds, so `launch_due` asks them,
        # and each time they go on a little (`SharedWork.needs_asking`).
        self._summing: list[Any] = []
        self.buckets: list[Bucket] = []
        # A feature may replace these two before `adopt`.
        self.arrange: Callable[[Layout], Layout] = _as_it_is
        self.dense_bucket: Callable[..., DenseBucket] = DenseBucket
        if config.averages_items:
            items = ItemCounts(
                communicator,
                self.averaging.device,
                lambda: self.buckets[0].params,
                self.home,
            )
            self.averaging.items = items
            self.observers.append(items)
            self.exchanges.append(items.exchange)
        self.adopt(self.configure(config))

    # -- launch ------------------------------------------------------------------------

    def start(self, *, shares_reach: bool = False) -> None:
        """Begin a synchronised backward: choose skipped buckets, divisor and comm hook.

        With ``shares_reach`` buckets are skipped that no rank's forward has reached.
        This may wait for what the other ranks say they have reached.
        """
        self.next = 0
        self._summing.clear()
        self._untold = [*self.observers.everybody]
        self.skipped = ()
        if shares_reach and (unreached := self.reach_map.unused_everywhere()):
            self.skipped = {
                plan.number
                for plan in self.layout.buckets
                if unreached.issuperset(plan.indices)
            }
        self.averaging.begin()

    def copy_now(self, i: int, grad: Tensor) -> Entry:
        """Copy a gradient to its bucket and return COPIED, or return it for later."""
        bucket = self.buckets[self.layout.bucket_of[i]]
        return bucket.copy_now(bucket.position[i], grad, self.averaging.factors.pre)

    @property
    def is_launched(self) -> bool:
        """Whether all buckets of this reduction are launched, or skipped."""
        return self.next == len(self.buckets)

    def launch_due(self) -> bool:
        """Launch buckets in index order, as long as the next one is full or skipped.

        All ranks launch the same buckets, in the same order, whenever they are full
        there. It does not wait. Observers are told of the first launch.

        Returns:
            Whether this call has launched the last bucket.

        Raises:
            NonFiniteGradientError: A bucket holds NaN or infinity (`checks_finite`).
        """
        before = self.next
        if self._summing:  # the question also adds this rank's part to the sum
            self._summing = [each for each in self._summing if not each.is_completed()]
        for number in range(before, len(self.buckets)):
            bucket = self.buckets[number]
            if number not in self.skipped:
                if bucket.state is not BucketState.FULL:
                    break
                self._launch(bucket)
            self.next = number + 1
        has_launched_last = before < self.next and self.is_launched
        if has_launched_last:
            self._tell_launching()  # if all were skipped
        return has_launched_last

    def _launch(self, bucket: Bucket) -> None:
        self._tell_launching()
        with bucket.on_stream():  # after the kernels that filled it
            self.averaging.add_earlier_sums(
                bucket.plan, bucket.views or [bucket.payload]
            )
            if self.checks_finite:
                self._check_finite(bucket, BEFORE)
        rest = range(bucket.plan.number + 1, len(self.buckets))
        has_hook = self.averaging.active_comm_hook is not None
        is_last = has_hook and all(later in self.skipped for later in rest)
        bucket.launch(self.averaging, is_last=is_last)
        if getattr(bucket.work, "needs_asking", False):
            self._summing.append(bucket.work)

    def _tell_launching(self) -> None:
        while self._untold:
            self._untold.pop(0).launching()

    # -- wait --------------------------------------------------------------------------

    def finish(self, untouched: Collection[int]) -> None:
        """End a reduction: wait for each bucket and write its averages to ``.grad``.

        Skipped buckets and ``untouched`` parameters keep their ``.grad``. Observers
        hear of it before (`finishing`), after each bucket (`reduced`) and at the end
        (`finished`). Then it waits for the futures of buffer hooks.
        """
        self.untouched = untouched
        observers = self.observers.everybody
        steppers = [observer for observer in observers if observer.uses_grads]
        for observer in observers:
            observer.finishing(applies_grads=bool(steppers))
        self._meet_failed_hooks()
        for number, bucket in enumerate(self.buckets):
            if number not in self.skipped:
                with self.grad_store.as_grads(bucket.params):
                    self._finish(bucket, untouched)
            for stepper in steppers:
                stepper.reduced(bucket.params)
        for observer in observers:
            observer.finished()
        self._summing.clear()
        futures, self.buffer_hook_futures = self.buffer_hook_futures, []
        for future in futures:
            with self.communicator.watching("waiting for a buffer hook's future"):
                comm.wait_for(comm.FutureWork(future))

    def _meet_failed_hooks(self) -> None:
        """Raise the error of a comm hook whose future has failed by now.

        A hook that fails for one bucket may have started nothing for it, and then an
        earlier bucket, for which we would wait first, may never be there. All buckets
        are launched before, so that ranks whose hooks fail alike stay alike.
        """
        if self.averaging.active_comm_hook is None:
            return
        for bucket in self.buckets:
            if isinstance(bucket.work, HookInFlight) and bucket.work.has_failed():
                bucket.wait(self.averaging.wait_description)  # which raises

    def _finish(self, bucket: Bucket, untouched: Collection[int]) -> None:
        """Wait for a bucket, and write its averages to ``.grad``."""
        bucket.scale = self.averaging.scale
        slots = bucket.position.items() if untouched else ()
        untouched_slots = [k for i, k in slots if i in untouched]
        sees_sums = self.averaging.sees_sums  # so that they must be in the buffer
        if bucket.shared is not None:
            bucket.shared.into = None
            may_offer = not sees_sums and not untouched_slots
            if may_offer and isinstance(bucket, DenseBucket):
                bucket.offer_grads(bucket.shared)
        bucket.wait(self.averaging.wait_description)
        if sees_sums:
            self.averaging.arrived(bucket.plan, bucket.payload)
        if self.checks_finite and self.averaging.active_comm_hook is not None:
            self._check_finite(bucket, AFTER)
        bucket.copy_out(untouched_slots)

    def _check_finite(self, bucket: Bucket, when: str) -> None:
        bucket.bring_the_rest()
        parts = dict(zip(bucket.names, bucket.views or [bucket.payload], strict=True))
        rank, step = self.communicator.rank, self.ledger.finalized
        refuse_nonfinite(bucket.payload, parts, rank, step, when)

    # -- other buckets, another group --------------------------------------------------

    def configure(self, config: ReducerConfig) -> Layout:
        """Use other options from now on, and return their first layout for `adopt`."""
        self.config = config
        # A static graph exchanges it in one backward only.
        self.used_map.exchange.uses_forward_group = config.static_graph
        if config.saved_layout is not None:
            return resumed_layout(config.saved_layout, self.specs)
        one_bucket = config.follows_ready_order
        limits = config.caps.initial_limits(one_bucket=one_bucket)
        return initial_layout(self.specs, limits)

    def adopt(self, layout: Layout, *, in_shared_memory: bool = False) -> None:
        """Make the buckets of a layout, and move gradient views there.

        The buckets before must be freed already, because the memory is needed twice
        otherwise.

        Args:
            layout: Which parameters each bucket has.
            in_shared_memory: Whether to use shared memory, if all ranks can. To find
                that out all ranks must call this together, and they wait for each
                other.
        """
        for each in self.exchanges:
            each.use(None)
        self.layout = layout = self.arrange(layout)
        is_lazy = self.config.lazy_bucket_allocation
        buffers = iter(
            self.averaging.share(
                layout, self.exchanges, asks=in_shared_memory and not is_lazy
            )
        )
        if is_lazy:
            why = "lazy_bucket_allocation takes memory only while it is used"
            self.averaging.no_shared_memory = why
        for plan in layout.buckets:
            named = {self.specs[i].name: self._params[i] for i in plan.indices}
            common = (plan, named, self.communicator, self.config, self.observers)
            self.buckets.append(
                SparseBucket(*common)
                if plan.sparse
                else self.dense_bucket(*common, next(buffers, None))
            )
        if self.config.gradient_as_bucket_view:
            for bucket in self.buckets:
                bucket.alias_grads_to_views()

    def free(self) -> None:
        """Drop all buckets, so that others can use the memory until `adopt`."""
        for bucket in self.buckets:
            bucket.let_go()
        self.buckets, self._summing = [], []

    def drain(self) -> None:
        """Wait for all collectives in flight, without writing to ``.grad``."""
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.wait(self.averaging.wait_description)
        for each in self.exchanges:
            each.settle()

    def reset(self, group: ProcessGroup) -> None:
        """Move to a process group, for which the caller adopts new buckets.

        Collectives that are in flight, and futures of buffer hooks, are dropped without
        waiting. A comm hook whose state is the old group gets the new one.
        """
        hook = self.averaging.comm_hook
        if hook is not None:
            hook.replace_group(self.communicator.group, group)
        self.communicator.reset(group)
        self.next = 0
        self.buffer_hook_futures = []
        self.skipped = ()
        for each in self.exchanges:
            each.drop()
        for observer in self.observers.everybody:
            observer.abandon()


def _as_it_is(layout: Layout) -> Layout:
    return layout
