"""What a feature sees of a reduction, and where it may act.

Averages over items, the comparison of replicas, the optimizer guard, steps inside the
backward, the search for a layout, recordings, the watch of speed and torchft are
observers. The core calls them in the order of `BucketQueue.observers`. It knows one of
them by name, `ItemCounts`, because the divisor depends on it. Where one may act:

::

    begins      the first gradient of a backward is here, and nothing is set up yet
    launching   the first bucket is about to be launched
    finishing   the backward is over: all buckets are launched, none is waited for
    reduced     one bucket's averages are in ``.grad``         (only with `uses_grads`)
    finished    all averages are in ``.grad``; the reducer is still FINALIZING

`sync_gradients()`, and a rank without inputs inside `join()`, reduce without a backward
and begin with `launching`. If a reduction fails, the calls that are left are not made.
A `reset()` calls `abandon`, also if nothing has failed.

A backward that no reduction is open for is told by `added_locally` for each gradient,
and one that should have reduced, but came by no hook, by `ended_without_gradients`.
Whoever only wants to know when things happen has `sees_times`, and gets `happened` and
`enter`. These are sent from hot code, which asks `Observers.is_timed` first: a call for
nobody costs, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn

from minidp.trace import Moment, Recorder, StepEvent


class Observer:
    """Base of `BucketQueue.observers`; every method does nothing here.

    A method may start collectives in `launching`, which come before those of the
    buckets, and from `finishing` on, which come after them; never in `begins`, which
    not all ranks get. It may remove its observer from the list.
    """

    uses_grads = False  # reads or changes ``.grad`` in `reduced`
    sees_local_grads = False  # gets `added_locally`
    sees_times = False  # gets `happened` and `enter`
    sees_gradients = False  # and in `happened` each gradient, which slows down its hook

    def begins(self) -> None:
        """Note that a synchronised backward begins: its first gradient has come."""

    def launching(self) -> None:
        """Note that this backward's first bucket is about to be launched.

        Called at the same point on all ranks, which is the only one at which a
        collective of its own keeps its place among those of the buckets: Gloo and NCCL
        match collectives by their order. If all buckets are skipped, called as well.
        """

    def finishing(self, *, applies_grads: bool) -> None:
        """Note that all buckets are launched; none is waited for, or copied out.

        ``applies_grads``: some observer applies gradients in `reduced`, so that this is
        the last moment to refuse them.
        """

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """Use one bucket's averages, which `finish` has just written to ``.grad``.

        Called only if `uses_grads`, in bucket order, while later buckets may still be
        reduced; also for skipped buckets and unused parameters: ``.grad`` is as before.
        """

    def finished(self) -> None:
        """Note that a reduction's averages are all written; called once for each."""

    def added_locally(self, i: int, through_outputs: Collection[int]) -> None:
        """Note a gradient of parameter ``i`` that no reduction is open for.

        Called in its hook, only if `sees_local_grads`. ``through_outputs``: the running
        graph tasks that came through outputs of the module.
        """

    def ended_without_gradients(self) -> None:
        """Note that a backward ended that had to reduce, and called none of our hooks.

        The next backward still has to. Called before the engine returns.
        """

    def abandon(self) -> None:
        """Forget the reduction that runs, without waiting, as `reset()` has to."""

    def happened(self, moment: Moment, index: int) -> None:
        """Note an event of bucket ``index`` (of parameter ``index``: PARAM_READY).

        On any thread. Only if `sees_times`; PARAM_READY only if `sees_gradients`.
        """

    def enter(self, event: StepEvent) -> None:
        """Note an event of the step, on the thread that runs it; if `sees_times`."""


class Observers:
    """Hold the observers of one reducer, in order; tell them what happens."""

    def __init__(self) -> None:
        self.backward = 0  # number of the synchronised backward
        self._set(())

    def _set(self, everybody: tuple[Observer, ...]) -> None:
        self._all = everybody
        self._timed = [each for each in everybody if each.sees_times]
        self.of_local_grads = [each for each in everybody if each.sees_local_grads]
        self._of_gradients = [each for each in self._timed if each.sees_gradients]
        self.is_timed = bool(self._timed)  # somebody `sees_times`
        self.sees_gradients = bool(self._of_gradients)

    def __iter__(self) -> Iterator[Observer]:
        """Iterate over those of now: a call may add or remove an observer."""
        return iter(self._all)

    def append(self, observer: Observer, *, first: bool = False) -> None:
        """Add an observer as the last, or the first, one."""
        self._set((observer, *self._all) if first else (*self._all, observer))

    def remove(self, observer: Observer) -> None:
        """Remove an observer; do nothing if it is not among them."""
        self._set(tuple(each for each in self._all if each is not observer))

    def note(self, moment: Moment, index: int, *_future: object) -> None:
        """Send an event of a bucket or gradient; the callback of a future adds that."""
        is_gradient = moment is Moment.PARAM_READY
        for each in self._of_gradients if is_gradient else self._timed:
            each.happened(moment, index)

    def enter(self, event: StepEvent) -> None:
        """Send an event of the step."""
        for each in self._timed:
            each.enter(event)


class Recording(Observer):
    """Record all events of gradients and buckets for `DataParallel.set_recorder`."""

    sees_times = sees_gradients = True

    def __init__(self, recorder: Recorder, observers: Observers) -> None:
        self._recorder = recorder
        self._observers = observers

    def happened(self, moment: Moment, index: int) -> None:
        """Record the event, with the number of the backward."""
        self._recorder.record(moment, index, self._observers.backward)
