"""Create groups of the same ranks beside a given one, each for one purpose.

Gloo and NCCL match collectives by their order. What some ranks may start while others
are in a backward must therefore not go through the group of the buckets.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from minidp import world

from .backends import group_timeout, is_timed, sends_from_cpu
from .endings import call_once_at_exit, settle
from .groups import (
    ProcessGroup,
    default_group,
    group_name,
    group_ranks,
    groups_beside,
)
from .stores import group_store, has_store, key_prefix
from .work import in_time

_CPU = torch.device("cpu")
_BACK = "the way back"
# For each default group, the key of the last failure of some global ranks. After a
# failure a process may join new ranks in another default group, and these know of no
# failure.
_renewals: WeakKeyDictionary[ProcessGroup, dict[frozenset[int], str]] = (
    WeakKeyDictionary()
)


def side_group(group: ProcessGroup, purpose: str) -> ProcessGroup:
    """Return a Gloo group over the same ranks, for collectives of one purpose.

    Its collectives cannot be confused with those of buckets, and do not queue behind
    them. In the group of the buckets, if the graphs of the ranks differ, Gloo might
    match one with a bucket, and abort the process or add both up.

    The first call for a purpose creates the group, so all ranks must make it together;
    they wait for each other until they are connected. Later calls return the same
    group, until `renew_side_groups`.

    Args:
        group: The group whose ranks take part. If they have no store in common
            (`has_store`), it is returned itself.
        purpose: Names the group. It is the same text on all ranks.

    Returns:
        A group that torch.distributed does not know: only its own methods can be used.
    """
    if not has_store(group):
        return group
    made = groups_beside().setdefault(group, {})
    if purpose not in made:
        ranks = frozenset(group_ranks(group))
        newest_first = reversed(_renewals.get(default_group(), {}).items())
        key = next((key for members, key in newest_first if members >= ranks), "first")
        place = f"side/{purpose}/{key}"

        def connected() -> Any:
            # Not new_group(), see `fresh_group` in `replacements`. The backend alone
            # has all methods of a process group that are called here.
            store, timeout = group_store(group, place), group_timeout(group)
            return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)

        name = f"{key_prefix(group)}/{place}"
        size = group.size()
        made[purpose] = in_time(
            lambda: world.connect(connected, name, size, is_listed=False)
        )
        call_once_at_exit(settle)
    return made[purpose]


def group_of_forwards(group: ProcessGroup) -> ProcessGroup:
    """Return the group for the collectives of forwards.

    On Gloo it is a `side_group`. There a rank that runs one forward more than the
    others would otherwise have its collectives matched with the buckets of the others.
    All ranks must make the first call together, because it creates the group. On other
    backends, and without a store, it is ``group`` itself.
    """
    return side_group(group, "forwards") if is_timed(group) else group


def group_of_agreements(group: ProcessGroup) -> ProcessGroup:
    """Return the group for what ranks tell each other while buckets are on their way.

    On Gloo it is a `side_group`, because in ``group`` a small message would queue
    behind the buckets. All ranks must make the first call together, because it creates
    the group. On other backends it is ``group`` itself.
    """
    return side_group(group, "agreements") if is_timed(group) else group


def connect_both_ways(group: ProcessGroup, device: torch.device) -> None:
    """Give the messages of `way_back` connections of their own, on Gloo.

    All ranks must call it together; they wait for each other until they are connected.

    Args:
        group: The group whose ranks take part.
        device: Where the tensors lie that travel. Only those of the CPU need it.
    """
    if device.type == "cpu" and is_timed(group, device):
        side_group(group, _BACK)


def way_back(group: ProcessGroup) -> ProcessGroup | None:
    """Return the group for large messages to lower ranks, if one was connected.

    Gloo sends when the receiver has said, on the same connection, that it is ready.
    This word queues behind what the receiver itself sends there. So if two ranks have
    large messages for each other, and one of them begins a moment earlier, they travel
    one after the other, and half of the link idles. Both travel at once if messages to
    higher ranks have one connection, and those to lower ranks another one: 13.5 MiB
    each way take 120 ms at 1 Gbit/s in place of 245 (the link alone takes 117).
    """
    return groups_beside().get(group, {}).get(_BACK)


def way_of_hosts(
    group: ProcessGroup, device: torch.device
) -> tuple[ProcessGroup, torch.device]:
    """Return how hosts tell each other what no device needs to know.

    A message through a device would let the host wait for all that is queued there. So
    it goes from CPU to CPU. A group that cannot do that (NCCL alone) has a side group
    of Gloo for it. All ranks must make the first call together, because that creates
    the side group.

    Args:
        group: The group whose ranks take part.
        device: Their device.

    Returns:
        The group, and the device on which a message has to lie. It is ``device`` if
        there is no other way.
    """
    if device.type == "cpu" or sends_from_cpu(group):
        return group, _CPU
    if has_store(group):
        return side_group(group, "messages of the hosts"), _CPU
    return group, device


def renew_side_groups(group: ProcessGroup, key: str) -> None:
    """Forget the side groups of a group, because collectives in them may have failed.

    All ranks call this in `reset()`, and wait for nobody: the next `side_group` creates
    a new one. Forgotten are also those of all groups within the same ranks, which may
    have failed with them, and of groups that were destroyed.

    Args:
        group: The group.
        key: A name for the new side groups, which must be the same on all ranks, and
            must not have been used before.
    """
    members = frozenset(group_ranks(group))
    renewals = _renewals.setdefault(default_group(), {})
    renewals.pop(members, None)
    # With the group's name, because other objects use equal keys on other groups.
    renewals[members] = f"{group_name(group)}/{key}"
    known = c10d._world.pg_group_ranks  # without groups that were destroyed
    for other in list(groups_beside()):
        if other not in known or members.issuperset(known[other]):
            groups_beside().pop(other, None)
