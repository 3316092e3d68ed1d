"""Reduce gradients without a backward, for ``sync_gradients()`` and ``join()``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from minidp.core import Phase, Reducer


def average_now(reducer: Reducer) -> None:
    """Collective: average every ``.grad`` over ranks now, without the comm hook; wait.

    A ``.grad`` that is None counts as zeros, but stays None if it is so on all ranks.
    Observers are called: optimizers of `step_in_backward` step. The backward of an
    earlier forward will still reduce. If this raises, the reducer is FAILED until
    `reset`.
    """
    armed, forwards = reducer.phase.now is Phase.ARMED, reducer.ledger.forwards
    grads = [param.grad for param in reducer.params]
    used = {i for i, grad in enumerate(grads) if grad is not None}
    with failing(reducer), reducer.queue.averaging.without_comm_hook():
        reducer.queue.start()
        _reduce(reducer, grads, used)
    if armed:  # a forward still waits for its backward
        reducer.phase.enter(Phase.ARMED)
        reducer.ledger.forwards = forwards


def shadow_backward(reducer: Reducer) -> None:
    """Collective: take part in the other ranks' backward with zeros; wait.

    Writes their averages to ``.grad``. Calls comm hook and observers, as a backward
    does; counts 0 items, and keeps this rank's own counts. If this raises, the reducer
    is FAILED until `reset`.
    """
    queue, expected = reducer.queue, reducer.expected
    everything = list(range(len(reducer.params)))
    items = queue.averaging.items  # this rank contributes 0; its own counts stay
    with failing(reducer), nullcontext() if items is None else items.aside():
        used = () if expected.shares_used_map else None
        if expected.shares_reach:
            queue.reach_map.relaunch(())
        queue.start(shares_reach=expected.shares_reach)
        unused = _reduce(reducer, [None] * len(everything), used)
        if not expected.shares_used_map and not reducer.rebuild_policy.is_due:
            reducer.rebuild_policy.keep(everything)
        expected.ended(everything, unused, contributed=False)


def _reduce(
    reducer: Reducer,
    grads: Sequence[torch.Tensor | None],
    used: Collection[int] | None,
) -> Collection[int]:
    """Collective: average ``grads`` (None: zeros) over ranks into ``.grad``; wait.

    Counts as a synchronised backward. ``used``: indices of parameters that this rank
    used, to tell the other ranks; None: ranks exchange no usage. Return the indices
    whose ``.grad`` was left unchanged.
    """
    queue, expected = reducer.queue, reducer.expected
    used_map = queue.used_map if expected.shares_used_map else queue.given_map
    reducer.phase.enter(Phase.REDUCING)
    with torch.no_grad():
        if used is not None and expected.map_goes_first:
            used_map.launch(used)
        for number, bucket in enumerate(queue.buckets):
            if number not in queue.skipped:
                entries = [grads[i] for i in bucket.plan.indices]
                filled = [i for i in bucket.plan.indices if grads[i] is None]
                bucket.flatten(entries, queue.averaging.factors, filled)
        queue.launch_due()
        if used is not None:
            used_map.launch(used)
        reducer.phase.enter(Phase.FINALIZING)
        untouched = expected.kept if used is None else used_map.unused_everywhere()
        queue.finish(untouched)
    reducer.ledger.settle(untouched)
    reducer.phase.enter(Phase.IDLE)
    return untouched


@contextmanager
def failing(reducer: Reducer, *, only_with_group: bool = False) -> Iterator[None]:
    """If the block raises, mark the reducer failed (until `reset`); tell other ranks.

    The error passes. ``only_with_group``: mark it only if a collective failed, which
    makes the group unusable.
    """
    try:
        yield
    except BaseException as error:
        if reducer.communicator.has_failed or not only_with_group:
            reducer.fail(error)
        raise
