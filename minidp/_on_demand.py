"""Reductions without a backward: ``sync_gradients()``, and the shadows of `_join`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from ._phase import Phase
from ._reducer import Reducer


def average_now(reducer: Reducer) -> None:
    """Collective: average the present ``.grad`` of every parameter over the ranks.

    Averaging a mixture of reduced and local parts is right for both: the reduced part
    is equal on all ranks and stays what it is. No comm hook takes part.
    """
    armed, forwards = reducer.phase.now is Phase.ARMED, reducer.ledger.forwards
    grads = [param.grad for param in reducer.params]
    used = {i for i, grad in enumerate(grads) if grad is not None}
    pipeline = reducer.pipeline
    with _failing_for_good(reducer), pipeline.averaging.without_comm_hook():
        pipeline.start()
        _reduce(reducer, grads, used)
    if armed:  # a forward still waits for its backward
        reducer.phase.enter(Phase.ARMED)
        reducer.ledger.forwards = forwards


def shadow_backward(reducer: Reducer) -> None:
    """Collective: what a backward does on a rank that has no gradients: zeros travel.

    The averages end up in ``.grad`` here as well.
    """
    pipeline, expected = reducer.pipeline, reducer.expected
    with _failing_for_good(reducer):
        used: Collection[int] | None = () if expected.shares_used_map else None
        nothing = [None] * len(reducer.params)
        if expected.shares_reach:
            pipeline.reach_map.relaunch((), pipeline.group)
        pipeline.start(pipeline.reach_map.unused_everywhere())
        unused = _reduce(reducer, nothing, used, map_goes_first=expected.map_goes_first)
        everything = list(range(len(reducer.params)))
        if expected.keeps_ready_order and not reducer.ready_order.is_due:
            reducer.ready_order.note(everything)
        expected.shadowed(everything, unused)


def _reduce(
    reducer: Reducer,
    grads: Sequence[torch.Tensor | None],
    used: Collection[int] | None,
    *,
    map_goes_first: bool = False,
) -> Collection[int]:
    """Reduce ``grads``; returns whose ``.grad`` was left alone.

    Args:
        reducer: not in a backward; its pipeline is started.
        grads: one per managed parameter.
        used: this rank's part of the used-map; None: there is none.
        map_goes_first: before the buckets.
    """
    pipeline = reducer.pipeline
    has_own = reducer.expected.shares_used_map
    used_map = pipeline.used_map if has_own else pipeline.reach_map
    reducer.phase.enter(Phase.REDUCING)
    with torch.no_grad():
        if used is not None and map_goes_first:
            used_map.launch(used, pipeline.group)
        for number, bucket in enumerate(pipeline.buckets):
            if number in pipeline.skipped:
                continue
            entries = [grads[i] for i in bucket.plan.indices]
            undecided = [k for k, entry in enumerate(entries) if entry is None]
            bucket.flatten(entries, pipeline.averaging.division, undecided)
        pipeline.launch_due()
        if used is not None:
            used_map.launch(used, pipeline.group)
        reducer.phase.enter(Phase.FINALIZING)
        untouched = reducer.expected.kept
        if used is not None:
            untouched = used_map.unused_everywhere()
        pipeline.finish(untouched)
    reducer.ledger.settle(untouched)
    reducer.phase.enter(Phase.IDLE)
    return untouched


@contextmanager
def failing_with_the_group(reducer: Reducer) -> Iterator[None]:
    """A failed collective of a forward leaves the reducer FAILED.

    On the broken group, buckets of the next backward would meet others.
    """
    try:
        yield
    except Exception as error:
        if reducer.pipeline.watch.has_failed:
            reducer.fail(error)
        raise


@contextmanager
def _failing_for_good(reducer: Reducer) -> Iterator[None]:
    """Whatever is raised inside leaves the reducer FAILED."""
    try:
        yield
    except BaseException as error:
        reducer.fail(error)
        raise
