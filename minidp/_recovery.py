"""``reset()``: all ranks agree on what survived a failure, without any collective.

Collectives may be broken, so ranks talk through the process group's store. Each rank
publishes how many collectives it started and launched, and whether one failed. Equal
counts and no failure: every launched collective finds its peers, so it is awaited and
the group is kept. Otherwise some will never complete: they are abandoned, together with
the group and the memory they may still write to, and a fresh group takes over. What a
comm hook owes is abandoned too: only its author knows what it waits for.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from ._bucket import BucketState
from ._groups import fresh_group, group_store, has_store, renew_side_groups
from ._pipeline import Pipeline
from ._reducer import Reducer
from ._watch import Watch
from .errors import CollectiveError, explain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

POLL_SECONDS = 0.05
PATIENCE_SECONDS = 5.0  # for ranks that still find out who is missing


def agree_and_recover(reducer: Reducer, key: str) -> ProcessGroup:
    """Collective: bring a reducer back to IDLE on all ranks.

    Args:
        reducer: in any phase.
        key: the same on all ranks, and new for every reset.

    Returns:
        The group in use from now on: the old one or a fresh one. The old one if its
        ranks have no store in common: then nobody waits for anybody.

    Raises:
        CollectiveError: naming the ranks that did not call reset() in time.
    """
    pipeline = reducer.pipeline
    group = pipeline.group
    cause = f" after {reducer.failure}" if reducer.failure else ""
    pipeline.watch.lookout.give_up(f"it called reset(){cause}")
    if not has_store(group):
        reducer.restart(group)
        _start_over(reducer)
        return group
    is_lost = pipeline.watch.has_failed or _owes_to_hook(pipeline)
    tally = pipeline.watch.tally
    counted = [tally.started, tally.launched]
    mine = json.dumps([counted, is_lost, reducer.ledger.finalized])
    try:
        reports = _exchange(group_store(group, key), mine, group, pipeline.watch)
    except RuntimeError as error:
        if isinstance(error, CollectiveError):
            raise
        raise CollectiveError(
            explain(
                group.rank(),
                f"reset() lost the process group's store: {error}",
                remedy="the process that hosts the store is gone: restart the job",
            )
        ) from error
    counts = {tuple(counts) for counts, _, _ in reports}
    failed = any(has_failed for _, has_failed, _ in reports)
    if len(counts) == 1 and not failed:
        pipeline.drain()
    else:
        group = fresh_group(group, key)
    renew_side_groups(group, key)
    reducer.restart(group)
    # Some ranks may have finished a backward that others did not.
    reducer.ledger.agree_on(max(finalized for _, _, finalized in reports))
    _start_over(reducer)
    pipeline.watch.lookout.move_to(group, key)
    return group


def _start_over(reducer: Reducer) -> None:
    """Forget what only some ranks may have learned: layout, order, a static graph."""
    reducer.expected.forget()
    reducer.ready_order.start_over()
    reducer.pipeline.replan()
    reducer.countdown.adopt(reducer.pipeline.buckets)


def _owes_to_hook(pipeline: Pipeline) -> bool:
    """Whether a comm hook has results to bring; nobody knows if it ever will.

    A hook may issue its collectives late, at a call that an aborted backward does not
    reach.
    """
    return pipeline.averaging.hook_now is not None and any(
        bucket.state is BucketState.IN_FLIGHT for bucket in pipeline.buckets
    )


def _exchange(
    store: Store, mine: str, group: ProcessGroup, watch: Watch
) -> list[tuple[list[int], bool, int]]:
    """All ranks' reports, by rank."""
    # A peer may first have to run into the limit of a collective itself.
    seconds = 2 * watch.seconds + PATIENCE_SECONDS
    deadline = time.monotonic() + seconds
    store.set(str(group.rank()), mine)
    waiting = set(range(group.size()))
    while waiting and time.monotonic() < deadline:
        waiting = {rank for rank in waiting if not store.check([str(rank)])}
        if waiting:
            time.sleep(POLL_SECONDS)  # store.wait() would log every time it gives up
    if waiting:
        store.delete_key(str(group.rank()))  # a later reset() must not read it
        raise CollectiveError(
            explain(
                group.rank(),
                f"reset() waited {seconds:.0f} s in vain.",
                expected=f"all {group.size()} ranks of the group to call reset()",
                found=f"no call on rank(s) {', '.join(map(str, sorted(waiting)))}",
                remedy="a dead rank cannot be reset: restart the job",
            )
        )
    return [tuple(json.loads(store.get(str(r)))) for r in range(group.size())]
