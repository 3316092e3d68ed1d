"""``reset()``: the ranks agree whether their process group is still usable.

After an error some ranks may have launched collectives that others never will. Those
cannot complete, and a new collective on the same group would be matched with them. But
a collective cannot find that out, so the ranks talk through the store of the group.

Each rank publishes how many collectives it has started and launched, and whether one
has failed. If the counts are equal and none has failed, every launched one can
complete: the ranks wait for them and keep the group. Otherwise they create a new group
and abandon the old one, together with its collectives, the memory to which these may
still write, and the futures of comm hooks.
"""

from __future__ import annotations

from minidp import comm
from minidp.comm import ProcessGroup
from minidp.core import BucketState, Reducer
from minidp.errors import CollectiveError, explain

PATIENCE_SECONDS = 5.0  # for a rank that first reports who is missing


def agree_and_recover(reducer: Reducer, key: str) -> ProcessGroup:
    """Reset the reducer and its bucket layout; return its process group from now on.

    All ranks of the group must call it together. Ranks that share no store keep the old
    group, and do not wait for each other.

    Args:
        reducer: The reducer to reset.
        key: A prefix for keys in the store, equal on all ranks and new for each reset.

    Raises:
        CollectiveError: A rank does not call this in time, or the store is gone.
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
    """Publish this rank's progress, and wait for that of all ranks.

    Returns:
        For each rank: how many collectives it has started, how many of these are
        asynchronous, whether one has failed or may never end, and how many backwards it
        has finished.

    Raises:
        CollectiveError: A rank is late, or the store is gone.
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
