"""Launch buckets as gradients arrive, and finish each synchronised backward.

::

    arm              a synchronising forward ended                      data_parallel
    admit            a gradient that no hook may record by itself: the  grad hook
                     first of a backward, a local one, a second one ...
    on_bucket_ready  flatten a bucket, launch full ones in index order  grad hook
    on_backward_end  the backward ended: complete it, or enter PAUSED   end of task
    _finalize        wait, copy out, close                              end of task

`on_bucket_ready` queues `_finalize` with the last bucket, where torch queues its own. A
probe at the outputs of the forward, or the first hook, queues `on_backward_end`: it
finds a backward that ends although buckets are missing, and else does nothing. The
phases are drawn in `phase`.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from minidp import comm
from minidp.comm import ProcessGroup
from minidp.config import ReducerConfig
from minidp.errors import (
    CollectiveError,
    GradientError,
    MiniDPError,
    explain,
    incomplete_averages,
)
from minidp.layout import Layout, ParamSpec
from minidp.trace import Moment, StepEvent

from . import autograd
from .bucket import BucketState
from .bucket_queue import BucketQueue
from .entries import Entry, GradState, has_arrived, is_copied_at_once
from .grad_hooks import GradHooks, PendingGrads
from .incomplete import IncompleteAverages
from .ledger import Ledger
from .local_backwards import LocalBackwards
from .modes import Arrival, Decision, mode_for
from .phase import Phase, PhaseMachine
from .rebuild import RebuildPolicy, agreed_layout

logger = logging.getLogger("minidp")
Method = TypeVar("Method", bound=Callable[..., Any])


def _failing(method: Method) -> Method:
    """Let a method that raises put its reducer into FAILED, and raise the error again.

    If RPC is up the error is logged, too, because distributed autograd raises another
    one, without its text.
    """

    @autograd.untraced
    @functools.wraps(method)
    def guarded(self: Reducer, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except KeyboardInterrupt as error:
            self.fail(error)
            raise error.with_traceback(None) from None  # where we wait says nothing
        except BaseException as error:
            self.fail(error)
            if autograd.is_rpc_up():
                logger.error("%s", self.failure)
            if isinstance(error, MiniDPError):  # our frames say less than its text
                raise error.with_traceback(None)  # noqa: B904 -- its own cause stays
            raise

    return cast("Method", guarded)


class Reducer:
    """Average the gradients of one replica. It knows no module and no optimizer.

    The constructor allocates buckets, and attaches a grad hook to each parameter.

    Args:
        params: The parameters whose gradients are averaged, equally ordered on all
            ranks. Everything in the core goes by their index.
        specs: What the layout has to know of each of them.
        config: The options.
        communicator: The process group and its time limit.
        rebuild_policy: When to rebuild buckets; by default once.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        specs: Sequence[ParamSpec],
        config: ReducerConfig,
        communicator: comm.Communicator,
        rebuild_policy: RebuildPolicy | None = None,
    ) -> None:
        self.params = tuple(params)
        self.names = tuple(spec.name for spec in specs)
        self.communicator = communicator
        self.phase = PhaseMachine()
        self.ledger = Ledger()
        self.failure = ""  # the text of the error that led to FAILED
        self.incomplete = IncompleteAverages(self.params)
        self.queue = BucketQueue(self.params, specs, config, communicator, self.ledger)
        self.home = self.queue.home
        self.local_backwards = LocalBackwards(self.queue.observers, self.phase)
        self.mode = mode_for(len(params), config)
        # Parameters keep their hooks alive: a strong reference would keep us alive too.
        self.pending = PendingGrads(self.params, weakref.proxy(self))
        self.pending.adopt(self.queue.buckets)
        self.hooks = GradHooks(
            self.params, self.pending, as_view=config.gradient_as_bucket_view
        )
        weakref.finalize(self, _detach, self.hooks, self.pending)
        # Autograd has one thread per device; users may run several backwards. The
        # lock guards, in a backward, the phase, `_tasks`, and what the queue launched.
        self._lock = threading.RLock()
        # By graph task, the call of `on_backward_end` at its end. It is dead if the
        # backward raised.
        self._tasks: dict[int, weakref.ref[Callable[[], None]]] = {}
        self.is_manual = False  # `finalize_now` ends a backward, not autograd
        self._probe = functools.partial(_queue_end_callback, weakref.ref(self))
        self.rebuild_policy = rebuild_policy or RebuildPolicy(config.saved_layout)
        # Reducers of the same parameters, in other wrappers, with these parameters.
        self._neighbours: list[tuple[weakref.ref[Reducer], set[torch.Tensor]]] = []
        self._meet_neighbours()

    def _meet_neighbours(self) -> None:
        mine = set(self.params)
        for other in list(_alive):
            if shared := mine.intersection(other.params):
                self._neighbours.append((weakref.ref(other), {*shared}))
                other._neighbours.append((weakref.ref(self), {*shared}))
        _alive.add(self)

    @property
    def named(self) -> dict[str, torch.nn.Parameter]:
        """The parameters whose gradients are averaged, by name."""
        return dict(zip(self.names, self.params, strict=True))

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self.communicator.rank

    def arm(self, output: object) -> None:
        """Let the next backward reduce, and hook the output to see that start.

        It may search the graph. With ``skip_all_reduce_unused_params`` all ranks must
        call it together, because they exchange what their forwards have reached.
        """
        self.phase.enter(Phase.ARMED)
        if self.home.are_several:
            self.home.note()
        self.queue.grad_store.note_forward()
        self.mode.saw_outputs(output, self.hooks.nodes)
        if self.mode.shares_reach:
            reached = self.mode.reached(self.ledger.used_locally)
            with autograd.without_user_modes():
                self.queue.reach_map.relaunch(reached)
        autograd.probe_outputs(output, self._probe)

    def rebuild_if_due(self) -> None:
        """Use new buckets if a rebuild is due, by the layout of rank 0.

        All ranks must call it together; a rebuild is due on all of them or on none.
        """
        if self.rebuild_policy.is_due:
            mine = self.rebuild_policy.next_layout(self.queue.specs, self.queue.config)
            # Also if it is equal, as torch does: last bits change (see `kernels`).
            agreed = agreed_layout(mine, self.queue.specs, self.communicator)
            self.adopt(agreed, in_shared_memory=True)

    def adopt(self, layout: Layout, *, in_shared_memory: bool = False) -> None:
        """Replace the buckets, as `BucketQueue.adopt` says."""
        self.free_buckets()  # before new ones take memory
        with autograd.without_user_modes():
            self.queue.adopt(layout, in_shared_memory=in_shared_memory)
        self.pending.adopt(self.queue.buckets)

    def free_buckets(self) -> None:
        """Drop all buckets; `adopt` must follow before the next backward."""
        self.pending.collect_streams()
        self.pending.adopt(())
        self.queue.free()

    # -- a gradient arrives ------------------------------------------------------------

    @_failing
    def admit(self, i: int) -> bool:
        """Say what to do with a gradient that its hook may not record by itself.

        The first gradient of a backward opens it (ARMED), or resumes it (PAUSED).

        Returns:
            True if the hook shall record the gradient as usual. False if that was done
            here, or it was only counted (static graph), or it is local (IDLE,
            FINALIZING, FAILED).

        Raises:
            GradientError: The mode does not expect this gradient, or autograd is
                compiled.
        """
        if autograd.is_compiled_backward():
            raise autograd.compiled_backward(self.rank)
        with self._lock:
            if self.phase.now in (Phase.IDLE, Phase.FINALIZING, Phase.FAILED):
                self._note_local(i)
                return False
            if self.phase.now is not Phase.REDUCING and not _running(self._tasks):
                self.queue_end_callback()
            if self.phase.now is Phase.ARMED:
                self._open(i)
            elif self.phase.now is Phase.PAUSED:
                self.queue.grad_store.resume(i)
                self.phase.enter(Phase.REDUCING)
                self.pending.resume()
            if self.pending.entries[i] is GradState.UNSET:
                return True
            self._ask_mode(i)
        return False

    def _note_local(self, i: int) -> None:
        if self._has_gradient(i):
            self.ledger.used_locally.add(i)
            running = _running(self._tasks)
            for each in self.queue.observers.of_local_grads:
                each.added_locally(i, running)
        self.local_backwards.begin()

    def _has_gradient(self, i: int) -> bool:
        return self.params[
            i
        ].grad is not None or self.queue.grad_store.has_grad_elsewhere(i)

    def _ask_mode(self, i: int) -> None:
        """Let the mode decide what to do with a gradient, and do it."""
        queue, pending = self.queue, self.pending
        number = pending.bucket_of[i]
        arrival = Arrival(
            i,
            pending.entries[i],
            was_missing=i in pending.filled,
            bucket_is_open=queue.buckets[number].state is BucketState.FILLING,
            is_skipped=number in queue.skipped,
        )
        decision = self.mode.decide(arrival)
        if decision is Decision.RECORD:
            self._mark_ready(i)
        elif decision is Decision.COUNT_TO_LAST:
            pending.entries[i] = GradState.VIA_REDUCER
        elif decision is Decision.NOTE:
            if self._has_gradient(i):
                self.ledger.used_locally.add(i)
        elif decision is Decision.UNREACHED:
            raise _unreached(self.rank, self.names[i])
        elif decision is Decision.REFUSE:
            raise self.mode.twice(self.rank, self.names[i])
        # COUNT: the mode has counted the arrival, and nothing else is due

    def _open(self, first: int) -> None:
        """Enter REDUCING, in the hook of the first gradient.

        Gradients that this rank predicts to be missing are filled in at once, which may
        launch buckets. It may wait for what other ranks say they have reached.
        """
        queue, mode = self.queue, self.mode
        self.phase.enter(Phase.REDUCING)
        for observer in queue.observers.everybody:
            observer.begins()
        queue.grad_store.open(first)
        queue.start(shares_reach=mode.shares_reach)
        config = queue.config
        # Torch allocates a lazy bucket when its first gradient comes, and those that
        # are there then are divided, while others are multiplied by the reciprocal.
        is_exact = config.lazy_bucket_allocation and config.gradient_as_bucket_view
        sees_all = (
            queue.observers.sees_gradients or queue.grad_store.is_external or is_exact
        )
        usual = GradState.VIA_REDUCER if sees_all else GradState.UNSET
        at_once = (*self.hooks.hooked_by_others(), *self.pending.left_to_reducer)
        special = dict.fromkeys(at_once, GradState.VIA_REDUCER)
        if mode.counts_arrivals:
            special |= mode.first_entries()
        # Not in two steps: hooks on other threads read entries without the lock.
        self.pending.open(usual, special, queue.averaging.factors.pre)
        # A hook on another device may flatten a bucket.
        if self.home.are_several:
            self.home.add_to(bucket.streams for bucket in queue.buckets)
        for i in mode.absent:
            travels = queue.layout.bucket_of[i] not in queue.skipped
            self.pending.fill_missing(i, travels=travels)

    def _mark_ready(self, i: int) -> None:
        """Record a gradient that its hook does not record, and tell observers of it."""
        pending, queue = self.pending, self.queue
        if queue.observers.is_timed:
            queue.observers.on_bucket_event(Moment.PARAM_READY, i)
            number = pending.bucket_of[i]
            filled = sum(pending.bucket_of[j] == number for j in pending.filled)
            if pending.num_left[number] + filled == len(queue.buckets[number].params):
                queue.observers.on_bucket_event(Moment.FIRST_GRADIENT, number)
        pending.mark_ready(i, is_external=queue.grad_store.is_external)

    @_failing
    def on_bucket_ready(self, number: int, entries: Sequence[Entry]) -> None:
        """Flatten a bucket that is ready, and launch the buckets whose turn has come.

        After the last bucket a shared used-map is launched, and `_finalize` is queued
        for the end of the backward (or called, with `Mode.finishes_at_once`).
        """
        queue, bucket = self.queue, self.queue.buckets[number]
        with self._lock:
            with queue.grad_store.as_grads(bucket.params):
                if queue.grad_store.is_external:
                    entries = self.pending.reread(bucket.plan.indices)
                bucket.flatten(entries, queue.averaging.factors, self.pending.filled)
            if queue.launch_due():
                if self.mode.shares_used_map:
                    self.launch_used_map()
                if self.is_manual:  # the user calls `finalize_now`
                    pass
                elif self.mode.finishes_at_once:
                    self._finalize()
                else:
                    autograd.queue_final_callback(self._finalize)

    @_failing
    def refuse_compiled(self) -> None:
        """Refuse a backward under compiled autograd, and enter FAILED."""
        raise autograd.compiled_backward(self.rank)

    # -- a backward ends ---------------------------------------------------------------

    def queue_end_callback(self) -> None:
        """Queue `on_backward_end` for the end of this graph task, once."""
        task = autograd.current_task()
        if task in self._tasks:
            return
        with self._lock:
            if self.phase.now is Phase.ARMED and self.queue.observers.is_timed:
                self.queue.observers.on_step_event(StepEvent.BACKWARD_BEGIN)
            end = functools.partial(self.on_backward_end, task)
            self._tasks[task] = weakref.ref(end)
            autograd.queue_final_callback(end)

    @_failing
    def on_backward_end(self, task: int = autograd.NO_TASK) -> None:
        """Do what is to be done about missing gradients, at the end of a backward.

        If this was the last graph task that ran, the missing gradients are filled in,
        which launches the remaining buckets. If the mode does not allow that, the phase
        is PAUSED, until another backward brings them. If no gradient has come at all,
        observers are told. Nothing is waited for.
        """
        with self._lock:
            self._tasks.pop(task, None)
            if self._tasks and _running(self._tasks):
                return  # a task around this one, or on another thread, still runs
            self._tasks.clear()
            if self.phase.now is Phase.ARMED:  # torch.autograd.grad, or hooks are lost
                for observer in self.queue.observers.everybody:
                    observer.ended_without_gradients()
                self.queue.observers.on_step_event(StepEvent.BACKWARD_BYPASSED)
            if self.phase.now is not Phase.REDUCING or self.queue.is_launched:
                return
            if self.mode.fills_in_missing:
                self._fill_in_missing()
            else:
                self.phase.enter(Phase.PAUSED)
                self.pending.pause()
                for bucket in self.queue.buckets:  # .grad may be changed meanwhile
                    bucket.bring_the_rest()

    def _fill_in_missing(self) -> None:
        """Contribute ``.grad``, or zeros, for each missing gradient.

        This launches the remaining buckets.

        Raises:
            GradientError: The module was cast or moved, so that hooks are lost.
        """
        missing = self.pending.missing()
        if lost := [self.names[i] for i in self.hooks.lost(missing)]:
            raise _lost_hooks(self.rank, lost)
        if self.mode.shares_used_map and self.mode.map_goes_first:
            self.launch_used_map()
        copied = self._missing_to_copy_now(missing)
        for i in missing:  # the last one queues `_finalize`, which autograd still runs
            self.pending.fill_missing(i, copies=i in copied)

    def _missing_to_copy_now(self, missing: Sequence[int]) -> Collection[int]:
        """Return which ``.grad`` become views of their bucket before that is full.

        As in a usual backward this frees the memory of large ones, which a comm hook
        may need for itself. It saves no memory if ``.grad`` stays what it is.
        """
        queue = self.queue
        if not queue.config.gradient_as_bucket_view or queue.grad_store.is_external:
            return ()
        used = self.ledger.used_locally  # what all ranks hear of
        return {
            i
            for i in used.intersection(missing)
            if is_copied_at_once(self.params[i], as_view=True)
        }

    def launch_used_map(self) -> None:
        """Start to exchange which parameters this rank has used.

        All ranks do so once in each backward. Further calls do nothing.
        """
        used = self.pending.used() | self.ledger.used_locally
        with autograd.without_user_modes():
            self.queue.used_map.launch(used)

    def _untouched(self) -> Collection[int]:
        """Return the parameters whose ``.grad`` must stay as they are.

        No rank has used them. If this rank has missed any, it may wait for the others
        to say what they have used.

        Raises:
            GradientError: Other ranks have used a parameter that is frozen here.
            GraphChangedError: A later backward of a static graph uses a parameter that
                the first one has not used.
        """
        kept = self.mode.kept
        if not self.mode.shares_used_map:
            used = self.pending.used() if kept else set()
            # Kept and yet counted: a hook had set its gradient to None in the first.
            if late := used.intersection(kept) - self.pending.filled:
                raise self.mode.twice(self.rank, self.names[min(late)])
            return kept
        unused = self.queue.used_map.unused_everywhere()
        if self.queue.grad_store.is_external:
            self.queue.grad_store.check_used(self.queue.used_map.last_counts)
        used_by_others = self.pending.filled - unused
        frozen = [
            self.names[i] for i in used_by_others if not self.params[i].requires_grad
        ]
        if frozen:
            raise _frozen_here(self.rank, sorted(frozen))
        return unused

    @property
    def awaits_user(self) -> bool:
        """Whether all buckets are launched, and the user is to call `finalize_now`."""
        is_reducing = self.phase.now is Phase.REDUCING
        return self.is_manual and is_reducing and self.queue.is_launched

    @torch.no_grad()
    def finalize_now(self) -> None:
        """End a backward for which the user has to ask, as `awaits_user` says."""
        self._finalize()

    @_failing
    def _finalize(self) -> None:
        """Wait for all buckets, write averages to ``.grad``, and return to IDLE."""
        observers, mode = self.queue.observers, self.mode
        if observers.is_timed:
            observers.on_step_event(StepEvent.FINALIZE_BEGIN)
        with self._lock:
            self.phase.enter(Phase.FINALIZING)
            for neighbour, shared in self._neighbours:
                if (other := neighbour()) is not None:
                    self._refuse_views_of_both(other, shared)
            filled = sorted(self.pending.filled)
            lacks_some = mode.fills_in_missing or mode.kept
            untouched = self._untouched() if lacks_some else ()
            self.queue.finish(untouched)
            if mode.orders_buckets and not self.rebuild_policy.has_rebuilt:
                self.rebuild_policy.keep([*self.pending.ready, *filled])
            if lacks_some:  # not earlier: StaticGraph may then stop to share its map
                mode.ended(filled, untouched)
            self.pending.close()
            self.queue.grad_store.close()
            self._leave()
        if observers.is_timed:
            observers.on_step_event(StepEvent.FINALIZE_END)

    def _refuse_views_of_both(self, other: Reducer, shared: set[torch.Tensor]) -> None:
        """Raise a GradientError if this backward is also another one's, with views.

        With gradient views the ``.grad`` that one reads or writes is a bucket of the
        other, which travels meanwhile. It is an error only if a parameter of both
        (``shared``) has brought a gradient here and there.
        """
        has_views = any(
            each.queue.config.gradient_as_bucket_view for each in (self, other)
        )
        if not has_views or other.phase.now is not Phase.REDUCING:
            return
        both = self._arrived_among(shared) & other._arrived_among(shared)
        if both:
            names = [name for name, param in self.named.items() if param in both]
            raise _views_of_both(self.rank, names)

    def _arrived_among(self, shared: set[torch.Tensor]) -> set[torch.Tensor]:
        """Return which of the ``shared`` parameters have brought a gradient so far.

        The first backward of a static graph only counts what comes, and fills in
        everything at its end, so that there "filled in" does not mean missing.
        """
        entries, filled = self.pending.entries, self.pending.filled
        if self.mode.finishes_at_once:
            filled = set()
        return {
            param
            for i, param in enumerate(self.params)
            if param in shared and has_arrived(entries[i]) and i not in filled
        }

    # -- without a backward ------------------------------------------------------------

    @torch.no_grad()
    def reduce(
        self, grads: Sequence[torch.Tensor | None], used: Collection[int] | None
    ) -> Collection[int]:
        """Average gradients over the ranks into ``.grad``, without a backward.

        It waits for the averages, and counts as a synchronised backward. All ranks must
        call it together, after `BucketQueue.start`, as `average_now` and
        `shadow_backward` do in `minidp.data_parallel.sync_gradients`.

        Args:
            grads: A gradient for each parameter, or None for zeros.
            used: The parameters that this rank has used, by index, which the other
                ranks are told. With None nothing of this is exchanged.

        Returns:
            The indices of the parameters whose ``.grad`` was left unchanged.
        """
        queue, mode = self.queue, self.mode
        used_map = queue.used_map if mode.shares_used_map else queue.present_map
        self.phase.enter(Phase.REDUCING)
        if used is not None and mode.map_goes_first:
            used_map.launch(used)
        for number, bucket in enumerate(queue.buckets):
            if number not in queue.skipped:
                entries = [grads[i] for i in bucket.plan.indices]
                filled = [i for i in bucket.plan.indices if grads[i] is None]
                bucket.flatten(entries, queue.averaging.factors, filled)
        queue.launch_due()
        if used is not None:
            used_map.launch(used)
        self.phase.enter(Phase.FINALIZING)
        untouched = mode.kept if used is None else used_map.unused_everywhere()
        queue.finish(untouched)
        self._leave()
        return untouched

    def _leave(self) -> None:
        """Count the reduction, and return to IDLE."""
        self.phase.enter(Phase.IDLE)
        # The phase first, and the count last. A thread that asks for this rank's
        # progress reads them in the other order. So it may see the old count with IDLE,
        # but never the new one with FINALIZING, as if this rank were in the next one.
        self.ledger.count_backward()

    # -- failure -----------------------------------------------------------------------

    def check(self) -> None:
        """Fail if a collective was given up on a device, and no call has told it yet.

        On the CPU the wait for a collective raises, and nothing is left to do here.

        Raises:
            CollectiveError: A collective was given up. The text says who is missing. Or
                it was so before `reset`, an optimizer step has applied what was there
                of the averages, and nobody has loaded other parameters since.
        """
        is_lost = self.communicator.lost or self.incomplete.is_noted
        if not is_lost or self.phase.now is Phase.FAILED:
            return
        try:
            self.communicator.check()
            if self.incomplete.is_present():
                raise CollectiveError(incomplete_averages(self.rank))
        except CollectiveError as error:
            self.fail(error)
            raise
        self.incomplete.forget()

    def fail(self, error: BaseException) -> None:
        """Enter FAILED because of this error, and tell the other ranks of it."""
        self.phase.enter(Phase.FAILED)
        self.pending.close()
        # Collectives that may never finish: keep their group alive.
        works = [b.work for b in self.queue.buckets if b.work is not None]
        comm.keep_for_good(self.communicator.group, works)
        # Its text only: a traceback would keep us, and gradients, alive.
        self.failure = f"{type(error).__name__}: {error}"
        if self.communicator.has_applied_lost:
            self.incomplete.note()
        self.communicator.tell_others(error)

    def reset(self, group: ProcessGroup) -> None:
        """Begin anew on a process group, with new buckets and the same ``.grad``."""
        with self._lock:
            self.phase.enter(Phase.FAILED)
            self.failure = ""
            self.queue.reset(group)
            self.adopt(self.queue.layout)
            self._tasks.clear()
            self.ledger.reset()
            self.pending.close()
            self.queue.grad_store.close()
            self.phase.enter(Phase.IDLE)


_alive: weakref.WeakSet[Reducer] = weakref.WeakSet()


def _running(tasks: Mapping[int, Callable[[], object]]) -> list[int]:
    """Return the graph tasks that still run: those whose end callback is alive."""
    return [task for task, end in tasks.items() if end() is not None]


def _detach(hooks: GradHooks, pending: PendingGrads) -> None:
    """Remove the hooks of a dead reducer, and let one that still fires do nothing."""
    hooks.remove()
    pending.close()


@autograd.untraced
def _queue_end_callback(reference: weakref.ref[Reducer], _grads: Any) -> None:
    """Probe outputs: call `Reducer.queue_end_callback`, if the reducer still exists."""
    reducer = reference()
    if reducer is not None:
        if autograd.is_compiled_backward():  # even if no gradient comes
            reducer.refuse_compiled()
        reducer.queue_end_callback()


def _lost_hooks(rank: int, names: Sequence[str]) -> GradientError:
    """Return the error that hooks do not run any more, because a module was cast."""
    text = explain(
        rank,
        "Parameters lost their grad hooks, so their gradients cannot be averaged.",
        names=names,
        remedy="do not cast or move a module after wrapping it (.double(), .half(), "
        ".to()); wrap it again instead",
    )
    return GradientError(text)


def _views_of_both(rank: int, names: Sequence[str]) -> GradientError:
    """Return the error that a bucket of one wrapper is the ``.grad`` of another one."""
    text = explain(
        rank,
        "Two wrappers averaged the same parameters in one backward, and at least one "
        "has gradient_as_bucket_view=True: its bucket is the .grad that the other one "
        "reads and writes, and travels meanwhile.",
        names=names,
        remedy="leave that option out of both wrappers, or run a backward for each of "
        "the losses; call reset() on all ranks, and zero_grad(), to go on",
    )
    return GradientError(text)


def _unreached(rank: int, name: str) -> GradientError:
    """Return the error that a gradient came for a bucket that no rank reduces."""
    text = explain(
        rank,
        "A gradient arrived, but no rank's forward reached its parameter: its bucket "
        "is not reduced (skip_all_reduce_unused_params=True).",
        names=[name],
        remedy="make the loss of what forward() returns alone, or leave that option "
        "out; call reset() on all ranks to go on",
    )
    return GradientError(text)


def _frozen_here(rank: int, names: Sequence[str]) -> GradientError:
    """Return the error that parameters are frozen on this rank, but not on others."""
    text = explain(
        rank,
        "Parameters are frozen on this rank, but other ranks have gradients of them.",
        names=names,
        remedy="freeze and unfreeze on all ranks alike, best before wrapping; call "
        "reset() on all ranks to go on",
    )
    return GradientError(text)
