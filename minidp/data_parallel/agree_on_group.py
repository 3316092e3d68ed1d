"""``reset()``: the ranks agree whether their process group is still usable.

After an error some ranks may have launched collectives that others never will. Those
cannot complete, and a new collective on the same group would be matched with them. But
a collective cannot find that out, so the ranks talk through the store of the group.

Each rank publishes how many collectives it has started and launched, and whether one
has failed. If the counts are equal and none has failed, every launched one can
complete: the ranks wait for them and keep the group. Otherwise they create a new group
and abandon the old one, together with its collectives, the memory to which these may
still write, and the futures of comm hooks.

Wrappers may share a process group. A collective that one of them has left in it would
be matched with those of the others, so the counts of all of them decide, and all of
them leave a group that is unusable, each in its own ``reset()``.

On a device a group that is left is aborted first, because streams wait for its kernels,
and so would all that is queued later. What waited behind them then runs with incomplete
averages. So each rank also publishes whether an optimizer step is among that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from minidp import comm
from minidp.comm import Communicator, ProcessGroup
from minidp.core import BucketState, Reducer
from minidp.errors import CollectiveError, explain

PATIENCE_SECONDS = 5.0  # for a rank that first reports who is missing
# For a device that is behind its host: see `agree_and_reset`.
CATCH_UP_SECONDS = 2.0


class _Report(NamedTuple):
    """What a rank publishes in a reset, as JSON."""

    # Of each wrapper on the group, by its place in the store: how many collectives it
    # has started, and how many of these are asynchronous.
    counts: dict[str, tuple[int, int]]
    is_lost: bool  # a collective has failed, or may never end
    finalized: int  # backwards
    # Whether parameters hold an incomplete average already, or will if the group is
    # left.
    is_wrong: bool
    becomes_wrong: bool


def agree_and_reset(
    reducer: Reducer,
    key: str,
    sharing: Mapping[str, Communicator],
    beside: Mapping[str, Communicator],
) -> tuple[ProcessGroup, list[int]]:
    """Reset a reducer and its bucket layout, and return its group from now on.

    The second part of the result are the ranks whose parameters hold an incomplete
    average, because an optimizer step was queued behind a collective that was given up.

    All ranks of the group must call it together. Ranks that share no store keep the old
    group, and do not wait for each other.

    Args:
        reducer: The reducer to reset.
        key: A prefix for keys in the store, equal on all ranks and new for each reset.
        sharing: All wrappers on the same group, this one included, by a key that is
            equal on all ranks. If the group is left, their resets leave it, too.
        beside: All other wrappers over the same ranks, whatever their groups, by a key
            that is equal on all ranks. Ranks that wait in one of them are told that
            this rank does not come.

    Raises:
        CollectiveError: A rank does not call this in time, or the store is gone.
    """
    queue, communicator = reducer.queue, reducer.communicator
    group = queue.communicator.group
    cause = f" after {reducer.failure}" if reducer.failure else ""
    # A host that raises may be ahead of its device, which still averages the gradients
    # of steps before. Nothing is wrong with those, but the others abort the group as
    # soon as they hear of this rank, and would cut them off.
    for each in sharing.values():
        each.let_finish(CATCH_UP_SECONDS)
    # Another rank may wait for this one in a bucket of another wrapper.
    for each in (communicator, *beside.values()):
        each.peers.give_up(f"it called reset(){cause}")
    comm.free_replaced()  # by earlier resets
    reports = _exchange(reducer, key, sharing) if comm.has_store(group) else []
    wrong = [rank for rank, each in enumerate(reports) if each.is_wrong]
    if reports:
        if _is_unusable(reports):
            wrong = [r for r, each in enumerate(reports) if each.becomes_wrong]
            for each in sharing.values():
                each.has_failed = True
            if communicator.is_on_device:
                _abort(group, communicator, sharing)
            if group.rank() in wrong:
                reducer.incomplete.note()
            comm.note_replaced(group)
            device = communicator.device if communicator.is_on_device else None
            group = _fresh_group(communicator, key, device)
        else:
            queue.drain()
        comm.renew_side_groups(group, key)
    reducer.reset(group)
    # What this rank learned in training: static graph, ready order, layout.
    reducer.mode.reset()
    reducer.rebuild_policy.reset()
    if reports:
        # Some ranks may have finished a backward that others did not.
        reducer.ledger.agree_on(max(each.finalized for each in reports))
        communicator.peers.move_to(group, key)
        # All ranks have met here, so what they gave up in other wrappers is over.
        for place, each in beside.items():
            each.peers.move_to(each.group, f"{key}/{place}")
    # Without a store ranks do not wait for each other: they may not gather, either.
    reducer.adopt(queue.configure(queue.config), in_shared_memory=bool(reports))
    return group, wrong


def _fresh_group(
    communicator: Communicator, key: str, device: torch.device | None
) -> ProcessGroup:
    """Return a group in place of the communicator's, when all ranks are connected.

    Raises:
        CollectiveError: A rank that has come to the reset does not connect.
    """
    seconds = _patience(communicator)
    try:
        return comm.fresh_group(communicator.group, key, device, seconds)
    except TimeoutError as error:
        raise CollectiveError(
            explain(
                communicator.rank,
                f"reset() waited {seconds:.0f} s in vain for the connections of a new "
                "process group.",
                expected=f"all {communicator.size} ranks, which have called reset(), "
                "to connect",
                remedy="a dead rank cannot be reset: restart the job",
            )
        ) from error


def _patience(communicator: Communicator) -> float:
    """Return how many seconds to wait for the other ranks.

    A peer may first have to run into the limit of a collective itself.
    """
    return 2 * communicator.seconds + PATIENCE_SECONDS


def _abort(
    group: ProcessGroup, communicator: Communicator, sharing: Mapping[str, Communicator]
) -> None:
    """Let the device go on with what is queued behind collectives of the group.

    The other wrappers on the group are told, because theirs are ended, too.

    Raises:
        CollectiveError: The group has no abort.
    """
    for each in sharing.values():
        if each is not communicator:
            each.lose("Another wrapper on the same process group was reset.")
    if not comm.abort(group):
        raise CollectiveError(
            explain(
                group.rank(),
                "reset() cannot abort the process group, and a collective in it, which "
                "cannot complete, may hold up the device.",
                remedy="restart the job",
            )
        )


def _is_unusable(reports: list[_Report]) -> bool:
    """Return whether a new collective may meet one that cannot complete.

    A wrapper that lives on some ranks only, because the others have collected it
    already or have never made this copy of it, proves nothing.
    """
    if any(each.is_lost for each in reports):
        return True
    everywhere = set.intersection(*({*each.counts} for each in reports))
    counts = [[each.counts[place] for place in everywhere] for each in reports]
    return any(each != counts[0] for each in counts)


def _exchange(
    reducer: Reducer, key: str, sharing: Mapping[str, Communicator]
) -> list[_Report]:
    """Publish this rank's progress, wait for that of all ranks, and return it all.

    Raises:
        CollectiveError: A rank is late, or the store is gone.
    """
    communicator, queue = reducer.communicator, reducer.queue
    group, users = communicator.group, sharing.items()
    is_lost = any(each.has_failed for _, each in users)
    if queue.averaging.active_comm_hook is not None:
        # A hook's future may wait for a later call, which an aborted backward skips.
        is_lost |= any(b.state is BucketState.IN_FLIGHT for b in queue.buckets)
    tallies = {place: each.tally for place, each in users}
    counts = {place: (t.started, t.launched) for place, t in tallies.items()}
    is_wrong = reducer.incomplete.is_present()
    becomes_wrong = is_wrong or (
        not reducer.incomplete.is_noted and communicator.would_apply_lost()
    )
    mine = _Report(counts, is_lost, reducer.ledger.finalized, is_wrong, becomes_wrong)
    seconds = _patience(communicator)
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
    return [_Report(*report) for report in reports.values()]
