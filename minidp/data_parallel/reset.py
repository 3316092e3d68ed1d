"""``reset()``: ranks agree through the store whether their group is still usable.

Each rank publishes how many collectives it started and launched, and whether one
failed. If counts are equal and none failed, every launched one can complete: ranks wait
and keep the group. Otherwise they create a fresh group, and abandon the old one with
its collectives, the memory that these may still write to, and futures of comm hooks.
"""

from __future__ import annotations

from minidp import comm
from minidp.comm import ProcessGroup
from minidp.core import BucketState, Reducer
from minidp.errors import CollectiveError, explain

PATIENCE_SECONDS = 5.0  # a rank may first report who is missing


def agree_and_recover(reducer: Reducer, key: str) -> ProcessGroup:
    """Collective: reset the reducer and its bucket layout; return its process group.

    The old group, after waiting for launched collectives, if all ranks launched equally
    many and none failed; a fresh one otherwise. Ranks that share no store keep the old
    one, and do not wait for each other. Tells others first that this rank gave up.
    CollectiveError if a rank does not call this in time. ``key``: store prefix, equal
    on all ranks, new for each reset.
    """
    queue, communicator = reducer.queue, reducer.communicator
    group = queue.communicator.group
    cause = f" after {reducer.failure}" if reducer.failure else ""
    communicator.peers.give_up(f"it called reset(){cause}")
    comm.free_replaced()  # by earlier resets
    reports = _exchange(reducer, key) if comm.has_store(group) else []
    if reports:
        started, launched, lost, _ = zip(*reports, strict=True)
        if any(lost) or len({*zip(started, launched, strict=True)}) > 1:
            comm.note_replaced(group)
            group = comm.fresh_group(group, key)
        else:
            queue.drain()
        comm.renew_side_groups(group, key)
    reducer.reset(group)
    # What this rank learned in training: static graph, ready order, layout.
    reducer.expected.reset()
    reducer.rebuild_policy.reset()
    if reports:
        # Some ranks may have finished a backward that others did not.
        reducer.ledger.agree_on(max(finalized for *_, finalized in reports))
        communicator.peers.move_to(group, key)
    # Without a store ranks do not wait for each other: they may not gather, either.
    reducer.adopt(queue.configure(queue.config), shares=bool(reports))
    return group


def _exchange(reducer: Reducer, key: str) -> list[tuple[int, int, bool, int]]:
    """Publish this rank's progress, wait for all ranks'; return a tuple per rank.

    (collectives started; of these asynchronous; True if one failed or may never end;
    backwards finished). CollectiveError if a rank is late, or the store is gone.
    """
    communicator = reducer.communicator
    group, tally = communicator.group, communicator.tally
    queue, is_lost = reducer.queue, communicator.has_failed
    if queue.averaging.active_comm_hook is not None:
        # A hook's future may wait for a later call, which an aborted backward skips.
        is_lost |= any(b.state is BucketState.IN_FLIGHT for b in queue.buckets)
    mine = (tally.started, tally.launched, is_lost, reducer.ledger.finalized)
    # A peer may first have to run into the limit of a collective itself.
    seconds = 2 * communicator.seconds + PATIENCE_SECONDS
    ranks = range(group.size())
    try:
        store = comm.group_store(group, key)
        comm.post_json(store, "reset", group.rank(), mine)
        reports = comm.gather_json(store, "reset", ranks, seconds)
        missing = [str(rank) for rank in ranks if rank not in reports]
        if missing:
            # A later reset() must not read it.
            store.delete_key(f"reset/{group.rank()}")
    except RuntimeError as error:
        raise CollectiveError(
            explain(
                group.rank(),
                f"reset() lost the process group's store: {error}",
                remedy="the process that hosts the store is gone: restart the job",
            )
        ) from error
    if missing:
        raise CollectiveError(
            explain(
                group.rank(),
                f"reset() waited {seconds:.0f} s in vain.",
                expected=f"all {group.size()} ranks of the group to call reset()",
                found=f"no call on rank(s) {', '.join(missing)}",
                remedy="a dead rank cannot be reset: restart the job",
            )
        )
    return list(reports.values())
