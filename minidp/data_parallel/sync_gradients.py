"""Reduce gradients without a backward, for ``sync_gradients()`` and ``join()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from minidp.core import Phase, Reducer


def average_now(reducer: Reducer) -> None:
    """Average every ``.grad`` over the ranks now, and wait for it.

    All ranks must call it together. A ``.grad`` that is None counts as zeros, but stays
    None if it is so on all ranks. The comm hook is left out. Observers are called, so
    that optimizers of `step_in_backward` step. The backward of an earlier forward will
    still reduce. If this raises, the reducer is FAILED until `reset`.
    """
    armed, forwards = reducer.phase.now is Phase.ARMED, reducer.ledger.forwards
    grads = [param.grad for param in reducer.params]
    used = {i for i, grad in enumerate(grads) if grad is not None}
    with failing(reducer), reducer.queue.averaging.without_comm_hook():
        reducer.queue.start()
        reducer.reduce(grads, used)
    if armed:  # a forward still waits for its backward
        reducer.phase.enter(Phase.ARMED)
        reducer.ledger.forwards = forwards


def shadow_backward(reducer: Reducer) -> None:
    """Take part with zeros in the backward of the other ranks, and wait for it.

    It must be called while the others run one synchronised backward. ``.grad`` gets
    their averages, for optimizers that join, too. The comm hook and observers are
    called as in a backward. This rank counts as one with 0 items, and keeps its own
    counts for later. If this raises, the reducer is FAILED until `reset`.
    """
    queue, mode = reducer.queue, reducer.mode
    everything = list(range(len(reducer.params)))
    items = queue.averaging.items  # this rank contributes 0; its own counts stay
    with failing(reducer), nullcontext() if items is None else items.counting_zero():
        used = () if mode.shares_used_map else None
        if mode.shares_reach:
            queue.reach_map.relaunch(())
        queue.start(shares_reach=mode.shares_reach)
        unused = reducer.reduce([None] * len(everything), used)
        if not mode.shares_used_map and not reducer.rebuild_policy.is_due:
            reducer.rebuild_policy.keep(everything)
        mode.shadowed(unused)


@contextmanager
def failing(reducer: Reducer, *, only_with_group: bool = False) -> Iterator[None]:
    """Let an error in the block mark the reducer as failed, and tell the other ranks.

    The error passes on.

    Args:
        reducer: The reducer.
        only_with_group: Whether to mark it only if a collective has failed. Any other
            error leaves the group usable.
    """
    try:
        yield
    except BaseException as error:
        if reducer.communicator.has_failed or not only_with_group:
            reducer.fail(error)
        raise
