"""What a feature sees of a reduction, and where it may act.

What is not needed by every training is an observer. The core calls the observers in the
order of `BucketQueue.observers`. It knows one of them by name, `ItemCounts`, because
the divisor depends on it. These are the moments of a reduction, in order, and the
methods that call::

    begins      the first gradient of a backward is here, and     Reducer._open
                the phase is REDUCING; divisor and comm hook are
                still those of the last backward, all entries CLOSED
    launching   the first bucket is about to be launched          BucketQueue.launch_due
    finishing   the backward is over: all buckets are launched,   BucketQueue.finish
                and none was waited for
    reduced     one bucket's averages are in ``.grad`` (called    BucketQueue.finish
                only with `uses_grads`)
    finished    all averages are in ``.grad``; the reducer is     BucketQueue.finish
                still FINALIZING

`sync_gradients()`, and a rank without inputs inside `join()`, reduce without a backward
and begin with `launching`. If a reduction fails, the calls that are left are not made.
`BucketQueue.reset` calls `abandon`, also if nothing has failed. An observer that leaves
during a reduction still gets the calls of that one.

Two calls are about backwards that do not reduce. `added_locally` tells of each gradient
that comes while no reduction is open; its hook makes the call (`Reducer.admit`).
`ended_without_gradients` tells of a backward that should have reduced, but called none
of our hooks; it comes at the end of that backward (`Reducer.on_backward_end`).

Whoever only wants to know when things happen has `sees_times`. It gets the events that
`minidp.trace` lists: those of a bucket by `on_bucket_event`, those of a step by
`on_step_event`. What runs for each gradient or bucket asks `Observers.is_timed` first,
because even a call for nobody costs time. Not all events come from the core: the
wrapper sends where its forward begins, the loop over logical ranks its turns, the guard
where an optimizer steps, and divided steps when values of parameters come back.

Who observes what:

======================  ================  ==============================================
class                   room              methods
======================  ================  ==============================================
ItemCounts              core              launching, finishing, abandon
StepInBackward          data_parallel     reduced, finished
ShardedStep             sharded           begins, added_locally, launching, finishing,
                                          finished, abandon
EarlySteps              sharded           reduced, finished, abandon
LogicalRanks            logical           begins, added_locally, finished, abandon
AutotunePolicy          autotune          finished: counts backwards between trials
LocalActs               guard             added_locally, ended_without_gradients,
                                          finished, abandon
AskInBackward           guard             begins, once: asks other ranks, by the store
LookAgain               guard             finished, once: for parameters that joined
ReplicaCheck            replica           begins: posts by the store that this rank has
                                          come; finished, where a comparison is due
_PlantedOptimizers      torch_compat      reduced, finished
LogsUnused              torch_compat      finished
_Commits                torchft           finished
Stopwatch, SpeedWatch   overlap, speed    on_bucket_event, on_step_event
RecorderObserver        core              begins, on_bucket_event
======================  ================  ==============================================
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from minidp.accelerator import Timer, has_streams
from minidp.trace import Moment, Recorder, StepEvent

from .ledger import Ledger


class Observer:
    """The base class of observers, in which every method does nothing.

    An observer may start collectives in `launching`, where they come before those of
    the buckets, and from `finishing` on, where they come after them. It must not in
    `begins`, which not all ranks get. Any method may remove its observer from the list.
    """

    uses_grads = False  # reads or changes ``.grad`` in `reduced`
    sees_local_grads = False  # gets `added_locally`
    sees_times = False  # gets `on_bucket_event` and `on_step_event`
    # `on_bucket_event` also gets each gradient; this makes grad hooks slower.
    sees_gradients = False

    def begins(self) -> None:
        """Note that a synchronised backward begins: its first gradient has come.

        The other ranks may be anywhere, so no collective may be started here.
        """

    def launching(self) -> None:
        """Note that this backward's first bucket is about to be launched.

        All ranks call it at the same point, which is the only one at which a collective
        of an observer keeps its place among those of the buckets: Gloo and NCCL match
        collectives by their order. It is called even if all buckets are skipped.
        """

    def finishing(self, *, applies_grads: bool) -> None:
        """Note that all buckets are launched, and none was waited for or copied out.

        Args:
            applies_grads: Whether some observer uses averages as soon as they are there
                (`uses_grads`), so that this is the last moment to refuse them.
        """

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """Use one bucket's averages, which `finish` has just written to ``.grad``.

        It is called only if `uses_grads`, in bucket order, while later buckets may
        still be reduced. Skipped buckets and unused parameters are not left out: their
        ``.grad`` is as it was before.
        """

    def finished(self) -> None:
        """Note that all averages are written; this is called once per reduction."""

    def added_locally(self, i: int, through_outputs: Collection[int]) -> None:
        """Note a gradient that stays local, because no reduction is open.

        It is called in the hook of the parameter, only if `sees_local_grads`.

        Args:
            i: The index of the parameter.
            through_outputs: The graph tasks that run now and came through an output of
                the module, by their ids.
        """

    def ended_without_gradients(self) -> None:
        """Note that a backward ended that had to reduce, and called none of our hooks.

        It was `torch.autograd.grad`, which leaves ``.grad`` alone, or the hooks are
        lost, for example because the module was cast. The reducer stays ARMED for the
        next backward. This is called before the engine returns.
        """

    def abandon(self) -> None:
        """Forget the reduction that runs, if one does, without waiting for others.

        Every `reset()` calls it.
        """

    def on_bucket_event(self, moment: Moment, index: int) -> None:
        """Note an event of a bucket or of one gradient, on any thread.

        It is called only if `sees_times`. PARAM_READY needs `sees_gradients`, too.
        FIRST_GRADIENT comes reliably only while some observer has that, because
        otherwise most hooks record their gradients without telling the reducer.

        Args:
            moment: What happened.
            index: The number of the bucket, or with PARAM_READY the parameter's index.
        """

    def on_step_event(self, event: StepEvent, leaf: int | None = None) -> None:
        """Note an event of the step, on the thread where it happens.

        It is called only if `sees_times`.

        Args:
            event: What happened.
            leaf: Whose turn begins or ends: the number of a logical rank. None with
                other events.
        """


class Observers:
    """The observers of one reducer, in order, and who of them is told what."""

    def __init__(self) -> None:
        self._witness: Observer | None = None
        self._set(())

    def _set(self, everybody: tuple[Observer, ...]) -> None:
        # Replaced, never changed: whoever iterates over it may add or remove one.
        self.everybody = everybody
        self._timed = [each for each in everybody if each.sees_times]
        self.of_local_grads = [each for each in everybody if each.sees_local_grads]
        if self._witness is not None:
            self.of_local_grads = [self._witness]
        self._of_gradients = [each for each in self._timed if each.sees_gradients]
        self.is_timed = bool(self._timed)  # somebody `sees_times`
        self.sees_gradients = bool(self._of_gradients)

    def append(self, observer: Observer, *, first: bool = False) -> None:
        """Add an observer as the last, or the first, one."""
        self._set((observer, *self.everybody) if first else (*self.everybody, observer))

    def remove(self, observer: Observer) -> None:
        """Remove an observer; do nothing if it is not among them."""
        self._set(tuple(each for each in self.everybody if each is not observer))

    def tell_only(self, witness: Observer) -> None:
        """Tell one observer alone of local gradients, until `tell_all`."""
        self._witness = witness
        self._set(self.everybody)

    def tell_all(self) -> None:
        """Tell all observers again of local gradients that `sees_local_grads`."""
        self._witness = None
        self._set(self.everybody)

    def on_bucket_event(self, moment: Moment, index: int, *_future: object) -> None:
        """Tell observers of an event of a bucket or of a gradient.

        As the callback of a future it gets the future, too, and ignores it.
        """
        is_gradient = moment is Moment.PARAM_READY
        for each in self._of_gradients if is_gradient else self._timed:
            each.on_bucket_event(moment, index)

    def on_step_event(self, event: StepEvent, leaf: int | None = None) -> None:
        """Tell observers of an event of the step, if any of them `sees_times`."""
        for each in self._timed:
            each.on_step_event(event, leaf)


class RecorderObserver(Observer):
    """The observer that records events for `DataParallel.set_recorder`."""

    sees_times = sees_gradients = True

    def __init__(
        self, recorder: Recorder, ledger: Ledger, device: torch.device
    ) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._timer: Timer | None = None
        if has_streams(device) and not recorder.has_own_clock:
            self._timer = Timer(device)
            self._origin_ns = time.perf_counter_ns()
            self._anchor = self._timer.mark()

    def begins(self) -> None:
        """Mark the start of a backward, near which its events are measured."""
        if self._timer is not None:
            self._anchor = self._timer.mark()

    def on_bucket_event(self, moment: Moment, index: int) -> None:
        """Record the event, with the number of the backward."""
        when = None
        if self._timer is not None:
            when = partial(self._when, self._timer, self._timer.mark(), self._anchor)
        self._recorder.record(moment, index, self._ledger.finalized, when)

    def _when(self, timer: Timer, mark: Any, anchor: Any) -> int:
        timer.settle()
        return self._origin_ns + timer.nanoseconds(mark, anchor)
