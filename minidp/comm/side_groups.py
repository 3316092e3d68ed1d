"""Create groups beside a given one: the same ranks, for collectives of one purpose.

Gloo and NCCL match collectives by their order. What some ranks may start while others
are in a backward must therefore not go through the group of the buckets.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .backends import group_timeout, is_timed
from .endings import call_once_at_exit, settle
from .groups import ProcessGroup, default_group, group_name, group_ranks
from .stores import group_store, has_store
from .work import waiting

_side_groups: WeakKeyDictionary[ProcessGroup, dict[str, ProcessGroup]] = (
    WeakKeyDictionary()
)
# Default group -> global ranks -> key of these ranks' last failure. After a failure a
# process may join new ranks in another default group: they know of no failure.
_renewals: WeakKeyDictionary[ProcessGroup, dict[frozenset[int], str]] = (
    WeakKeyDictionary()
)


def side_group(group: ProcessGroup, purpose: str) -> ProcessGroup:
    """Return a Gloo group over the same ranks for ``purpose``; create it if missing.

    Collective when it creates one; the same one is returned until `renew_side_groups`.
    Returns ``group`` itself if not `has_store`. Not registered with torch: call its own
    methods. Keeps collectives apart from those of buckets (else, if graphs differ by
    rank, Gloo may match one with a bucket, and abort or add both up), and not queued
    behind them.
    """
    if not has_store(group):
        return group
    made = _side_groups.setdefault(group, {})
    if purpose not in made:
        ranks = frozenset(group_ranks(group))
        newest_first = reversed(_renewals.get(default_group(), {}).items())
        key = next((key for members, key in newest_first if members >= ranks), "first")
        store = group_store(group, f"side/{purpose}/{key}")
        # Not new_group(), see `fresh_group` in `replacements`. The backend alone has
        # all methods of a process group that are called here.
        with waiting():  # until all ranks are connected
            gloo: Any = dist.ProcessGroupGloo(
                store, group.rank(), group.size(), group_timeout(group)
            )
        made[purpose] = gloo
        call_once_at_exit(settle)
    return made[purpose]


def group_of_forwards(group: ProcessGroup) -> ProcessGroup:
    """Return the group for collectives in forwards: a `side_group` if `is_timed`.

    Else, or without a store, ``group``. On a Gloo group, after an extra forward on one
    rank, Gloo would match them with another rank's buckets. Collective when it creates
    the side group, in the first call.
    """
    return side_group(group, "forwards") if is_timed(group) else group


def renew_side_groups(group: ProcessGroup, key: str) -> None:
    """Forget the side groups of ``group``, and of all groups within its ranks.

    Creates none: the next `side_group` does. All ranks call this in reset(), and wait
    for no rank. ``key`` names the new ones: equal on all ranks, never used before. Also
    forgets side groups of groups that were destroyed.
    """
    members = frozenset(group_ranks(group))
    renewals = _renewals.setdefault(default_group(), {})
    renewals.pop(members, None)
    # With the group's name, because other objects use equal keys on other groups.
    renewals[members] = f"{group_name(group)}/{key}"
    known = c10d._world.pg_group_ranks  # without groups that were destroyed
    for other in list(_side_groups):
        if other not in known or members.issuperset(known[other]):
            _side_groups.pop(other, None)
