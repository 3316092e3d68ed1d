"""From "gradient i is ready" to launched buckets and a finished backward.

    arm            a synchronising forward ended                        data_parallel
    _on_unusual    first gradient of a backward: open the countdown     grad hook
    _on_full       flatten a bucket, launch what is due, in index order grad hook
    end_now        the backward is over: complete it, or note PENDING   final callback
    _finalize      wait, copy out, close                                final callback

The final callback is queued when the last bucket is launched, which is where torch
queues its own. The end probe finds out that a backward is over although buckets are
missing; it sits in the outermost graph task, behind the outputs of the forward.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from ._arrivals import Callbacks, Mark, is_copied_at_once
from ._autograd import (
    NO_TASK,
    GradHooks,
    current_task,
    probe_outputs,
    queue_final_callback,
)
from ._autotune import Tuner
from ._compiled_backward import accept, is_compiled_backward
from ._countdown import Countdown
from ._dist_autograd import (
    ContextGrads,
    NotedContexts,
    is_rpc_up,
    mixed_backwards,
    partly_used,
    stepping,
)
from ._expectation import expectation_for
from ._labels import label
from ._layout import ParamSpec
from ._ledger import Ledger, Origin
from ._local_backwards import LocalBackwards
from ._phase import Phase, PhaseBox
from ._pipeline import Pipeline
from ._rebuild import ReadyOrder
from ._untraced import untraced
from ._watch import Watch
from .config import ReducerConfig
from .errors import GradientError, frozen_here, lost_hooks
from .trace import Moment, StepPhase

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


logger = logging.getLogger("minidp")
Method = TypeVar("Method", bound=Callable[..., None])


def _failing(method: Method) -> Method:
    """Whatever a method raises leaves the reducer FAILED."""

    @untraced
    @functools.wraps(method)
    def guarded(self: Reducer, *arguments: Any) -> None:
        try:
            method(self, *arguments)
        except KeyboardInterrupt as error:
            self.fail(error)
            raise error.with_traceback(None) from None  # where we wait says nothing
        except BaseException as error:
            self.fail(error)
            if is_rpc_up():  # distributed autograd raises without the text
                logger.error("%s", self.failure)
            raise

    return cast("Method", guarded)


class Reducer:
    """Reduces the gradients of one replica; knows no module and no optimizer.

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
        self.params = tuple(params)
        self.names = tuple(spec.name for spec in specs)
        self.rank = watch.group.rank()
        self.phase = PhaseBox()
        self.ledger = Ledger()
        self.failure = ""  # what made it FAILED
        self.pipeline = Pipeline(self.params, specs, config, watch)
        self.local_backwards = LocalBackwards(self.pipeline.tracer, self.phase)
        self.expected = expectation_for(len(params), config)
        callbacks = Callbacks(_weakly(self._on_full), _weakly(self._on_unusual))
        self.countdown = Countdown(self.params, callbacks, self.pipeline.copy_now)
        self.countdown.adopt(self.pipeline.buckets)
        self.hooks = GradHooks(self.params, self.countdown)
        self._contexts = NotedContexts(self.params, self.hooks.nodes, self.rank)
        weakref.finalize(self, self.hooks.remove)  # they would outlive us otherwise
        # CUDA runs one autograd thread per device; a user, several backwards.
        self._lock = threading.RLock()
        # Graph tasks at whose end `end_now` will run. Only the task holds its callback:
        # if the backward raises, the reference dies.
        self._tasks: dict[int, weakref.ref[Callable[[], None]]] = {}
        self._context: ContextGrads | None = None  # of this backward, if it has one
        self._probe = _weakly(self._expect_end)  # once: marking code takes time
        self.ready_order = ReadyOrder(config.saved_layout)
        if config.tunes and watch.group.size() > 1:
            self.ready_order = Tuner(config.saved_layout, self.pipeline, self.hooks)

    def arm(self, output: object) -> None:
        """A synchronising forward returned ``output``: the next backward reduces."""
        self.phase.enter(Phase.ARMED)
        self._contexts.note_forward()
        self.expected.saw_outputs(output, self.hooks.nodes)
        if self.expected.shares_reach:
            away = {*self.expected.absent()} - self.ledger.used_locally
            within = {*range(len(self.params))} - away
            self.pipeline.reach_map.relaunch(within, self.pipeline.group)
        probe_outputs(output, self._probe)

    def rebuild_if_due(self) -> None:
        """Collective: adopt the layout that rank 0 chose, if that is due."""
        if self.ready_order.is_due:
            pipeline = self.pipeline
            mine = self.ready_order.next_layout(pipeline.specs, pipeline.config)
            self.countdown.arrivals.forget_slots()
            pipeline.rebuild(mine)
            self.countdown.adopt(self.pipeline.buckets)

    @_failing
    def _on_unusual(self, i: int) -> None:
        """A grad hook fired, and its entry was not UNSET."""
        with self._lock:
            if self.phase.now in (Phase.IDLE, Phase.FINALIZING, Phase.FAILED):
                if self._contexts.has_gradient(i):
                    self.ledger.note_local(i, *_origin(self.params[i], self._tasks))
                self.local_backwards.begin()
                return
            if self.phase.now is not Phase.REDUCING and not self._tasks:
                self._expect_end()
            if self.phase.now is Phase.ARMED:
                self._open(i)
            elif self.phase.now is Phase.PENDING:
                if self._contexts.of_backward(i) != self._context:
                    raise GradientError(mixed_backwards(self.rank, self.names[i]))
                self.phase.enter(Phase.REDUCING)
                self.countdown.resume()
            self._mark(i)

    def _open(self, first: int) -> None:
        """The first gradient of a synchronised backward is here."""
        if is_compiled_backward():
            accept(self.rank, needs_end=self.expected.completes_at_end)
        self._context = self._contexts.of_backward(first)
        if self._context and any(each.uses_grads for each in self.pipeline.observers):
            raise GradientError(stepping(self.rank))
        self.phase.enter(Phase.REDUCING)
        self.pipeline.start(
            self.pipeline.reach_map.unused_everywhere(), context=self._context
        )
        is_traced = self.pipeline.tracer.recorder is not None or self._context
        marks = self.expected.marks(Mark.TRACED if is_traced else Mark.UNSET)
        for i in self.hooks.shared():
            marks[i] = Mark.TRACED if marks[i] is Mark.UNSET else marks[i]
        self.countdown.open(marks, self.pipeline.averaging.division.at_copy)
        for i in self.expected.absent():
            travels = self.pipeline.layout.bucket_of[i] not in self.pipeline.skipped
            self.countdown.fill_missing(i, self.params[i].grad, travels=travels)

    def _mark(self, i: int) -> None:
        """Account for an arrival that the grad hook did not settle itself."""
        countdown, entry = self.countdown, self.countdown.entries[i]
        if entry is Mark.COUNTING:
            self.expected.count(i)
            if self._contexts.has_gradient(i):
                self.ledger.used_locally.add(i)
        elif entry is Mark.REPEATS:
            if self.expected.is_last_but_one(i):
                countdown.entries[i] = Mark.TRACED
        elif entry is Mark.UNSET or entry is Mark.TRACED:
            self.pipeline.tracer.note(Moment.PARAM_READY, i)
            if countdown.is_first(i):
                bucket = self.pipeline.layout.bucket_of[i]
                self.pipeline.tracer.note(Moment.FIRST_GRADIENT, bucket)
            at_once = entry is Mark.TRACED or is_copied_at_once(self.params[i])
            countdown.arrive(i, self.params[i].grad, at_once=at_once)
        elif (
            self.expected.may_guess_wrong
            and i in countdown.filled
            and self.pipeline.is_filling(i)
        ):
            # Thought to be out of reach, but its bucket still waits: take it.
            countdown.arrive_after_all(i, self.params[i].grad)
        else:
            raise self.expected.twice(self.rank, self.names[i])

    @_failing
    def _on_full(self, number: int) -> None:
        """The last gradient of a bucket is here."""
        self.pipeline.tracer.note(Moment.FULL, number)
        bucket = self.pipeline.buckets[number]
        filled = self.countdown.filled
        undecided = {bucket.position[i] for i in filled if i in bucket.position}
        entries = self.countdown.of_bucket(number)
        if self._context is not None:
            entries = self._context.read(bucket.params)
            for i, grad in zip(bucket.plan.indices, entries, strict=True):
                self.countdown.entries[i] = grad
        with label("flatten", number):
            bucket.flatten(entries, self.pipeline.averaging.division, undecided)
        with self._lock:
            if self.pipeline.launch_due():
                self._launch_used_map()
                if is_compiled_backward():  # where everything has arrived by now
                    self._finalize()
                else:
                    queue_final_callback(self._finalize)

    def _launch_used_map(self) -> None:
        if self.expected.shares_used_map:
            used = self.countdown.used() | self.ledger.used_locally
            self.pipeline.used_map.launch(used, self.pipeline.group)

    def _expect_end(self, _grads: object = None) -> None:
        """Queue the end probe, once per graph task."""
        task = current_task()
        if task in self._tasks:
            return
        with self._lock:
            if self.phase.now is Phase.ARMED:
                self.pipeline.tracer.enter(StepPhase.BACKWARD_BEGIN)
            end = functools.partial(self.end_now, task)
            self._tasks[task] = weakref.ref(end)
            queue_final_callback(end)

    @_failing
    def end_now(self, task: int = NO_TASK) -> None:
        """The backward is over, unless another one of the same forward still runs.

        Args:
            task: the graph task that ends.
        """
        with self._lock:
            self._tasks.pop(task, None)
            if any(end() is not None for end in self._tasks.values()):
                return  # around this one (reentrant checkpoint), or on another thread
            self._tasks.clear()
            if self.phase.now is Phase.ARMED:  # torch.autograd.grad, or hooks are lost
                self.ledger.note_bypass(self.params)
                self.pipeline.tracer.enter(StepPhase.BACKWARD_BYPASSED)
            if self.phase.now is not Phase.REDUCING or self.pipeline.is_launched:
                return
            if self.expected.completes_at_end:
                self._complete()
            else:
                self.phase.enter(Phase.PENDING)
                self.countdown.pause()

    def _complete(self) -> None:
        """Fill in what did not arrive; this launches the rest."""
        missing = self.countdown.missing()
        lost = [self.names[i] for i in self.hooks.lost(missing)]
        if lost:
            raise GradientError(lost_hooks(self.rank, lost))
        if self.expected.map_goes_first:
            self._launch_used_map()
        for i in missing:
            self.countdown.fill_missing(i, self.params[i].grad)

    @_failing
    def _finalize(self) -> None:
        self.pipeline.tracer.enter(StepPhase.FINALIZE_BEGIN)
        with self._lock:
            self.phase.enter(Phase.FINALIZING)
            missing = sorted(self.countdown.filled)
            unused = self.pipeline.used_map.unused_everywhere()
            untouched = unused if self.expected.shares_used_map else self.expected.kept
            if self._context and self.expected.shares_used_map:
                _refuse_partly_used(self)
            _refuse_frozen(self, {*missing} - {*untouched})
            _refuse_late(self, untouched)
            self.pipeline.finish(untouched)
            if self.expected.keeps_ready_order and not self.ready_order.has_rebuilt:
                self.ready_order.note([*self.countdown.ready, *missing])
            self.expected.ended(missing, untouched)
            self.countdown.close()
            self.ledger.settle(untouched)
            self._contexts.forget()
            self._context = None
            self.phase.enter(Phase.IDLE)
        self.pipeline.tracer.enter(StepPhase.FINALIZE_END)

    def fail(self, error: BaseException) -> None:
        """Only `restart` leads out."""
        self.phase.enter(Phase.FAILED)
        self.countdown.close()
        self.pipeline.abandon()
        # Its text only: a traceback would keep us, and gradients, alive.
        self.failure = f"{type(error).__name__}: {error}"
        self.tell_others(error)

    def tell_others(self, error: BaseException) -> None:
        """They need not wait for this rank any more."""
        self.pipeline.watch.lookout.give_up(f"{type(error).__name__}: {error}")

    def restart(self, group: ProcessGroup) -> None:
        """Back to IDLE on ``group``, whatever happened."""
        with self._lock:
            self.phase.enter(Phase.FAILED)
            self.failure, self.rank = "", group.rank()
            self._contexts.rank = self.rank
            self.pipeline.restart(group)
            self.countdown.adopt(self.pipeline.buckets)
            self._tasks.clear()
            self._contexts.forget()
            self._context = None
            self.ledger.forget()
            self.phase.enter(Phase.IDLE)


def _origin(
    param: torch.Tensor, tasks: Mapping[int, Callable[[], object]]
) -> tuple[int, Origin]:
    """Of a local gradient: its parameter's version, and where it came from.

    Args:
        param: the parameter.
        tasks: graph tasks that have passed the probes behind our outputs, if they live.
    """
    through_outputs = [task for task, end in tasks.items() if end() is not None]
    if not through_outputs:
        return param._version, Origin.OUTSIDE
    is_again = current_task() in through_outputs
    return param._version, Origin.AGAIN if is_again else Origin.NESTED


def _refuse_frozen(reducer: Reducer, others: Collection[int]) -> None:
    """Gradients that only other ranks have must not be of parameters frozen here."""
    frozen = [reducer.names[i] for i in others if not reducer.params[i].requires_grad]
    if frozen and reducer.expected.shares_used_map:
        raise GradientError(frozen_here(reducer.rank, sorted(frozen)))


def _refuse_partly_used(reducer: Reducer) -> None:
    """Distributed autograd: all ranks raise, before any has written averages."""
    counts = reducer.pipeline.used_map.last_counts.tolist()
    num_ranks = reducer.pipeline.group.size()
    names = [reducer.names[i] for i, n in enumerate(counts) if 0 < n < num_ranks]
    if names:
        raise GradientError(partly_used(reducer.rank, names))


def _refuse_late(reducer: Reducer, untouched: Collection[int]) -> None:
    """What no rank used in the first backward of a static graph is used now.

    Its ``.grad`` would stay local. (A hook may have nulled it the first time.)
    """
    if untouched and not reducer.expected.shares_used_map:
        late = reducer.countdown.used().intersection(untouched)
        late -= reducer.countdown.filled
        if late:
            raise reducer.expected.twice(reducer.rank, reducer.names[min(late)])


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call a bound method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    @untraced
    def call(*arguments: Any) -> Any:
        target = reference()
        return None if target is None else target(*arguments)

    return call
