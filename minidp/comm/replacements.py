"""Create a group in place of one that failed, and free groups that were replaced."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d_C
from torch.distributed import distributed_c10d as c10d

from minidp import world

from .backends import backend_name, group_timeout
from .collectives import all_reduce
from .endings import free_left_behind
from .groups import ProcessGroup, default_group, group_name, group_ranks
from .stores import key_prefix
from .work import in_time, waiting


def fresh_group(
    group: ProcessGroup,
    key: str,
    device: torch.device | None = None,
    seconds: float | None = None,
) -> ProcessGroup:
    """Create a group of the same ranks, with the same backend and timeout.

    All ranks of the group must call it together. They wait for each other until they
    are connected, also on a device, if one is given. There the first collective would
    wait for that otherwise, and nothing could end that wait if a rank never came.

    The new group is known to torch.distributed, and the old one stays as it is, because
    other objects may use it.

    Args:
        group: The group to replace.
        key: A name for the new one, which must be the same on all ranks, and must not
            have been used with ``group`` before.
        device: A device on which the new group will have collectives.
        seconds: How long to wait for the other ranks, if not for the group's timeout.

    Raises:
        TimeoutError: A rank does not come in so many seconds.
    """
    # new_group() names a group by the number of groups in this process: ranks whose
    # numbers differ would wait for each other.
    ranks, backend = group_ranks(group), backend_name(group)
    config = dist.get_backend_config(group) if backend == "undefined" else backend
    prefix = key_prefix(group)
    # A group that replaces a replacement is named by the first one, or names would grow
    # with each failure. Others may use the same key on the first one, so the name of
    # the group goes in, too, as a number.
    place = _fresh.get(group, prefix)
    number = hashlib.sha256(prefix.encode()).hexdigest()[:12]
    name = f"{place}/{key}" if place == prefix else f"{place}/{number}/{key}"

    def connected() -> ProcessGroup:
        made: ProcessGroup = c10d._new_process_group_helper(
            len(ranks),
            group.rank(),
            ranks,
            dist.Backend(config),
            c10d._get_default_store(),
            c10d.GroupName(name),
            timeout=group_timeout(group),
        )[0]
        return made

    def connect() -> ProcessGroup:
        return world.connect(connected, name, len(ranks), is_listed=True)

    with _unbound(), waiting():  # until all ranks are connected
        # On a device nothing is connected yet, and a thread has another current device.
        created = connect() if device else in_time(connect, seconds)
    c10d._world.pg_group_ranks[created] = {rank: i for i, rank in enumerate(ranks)}
    _fresh[created] = place
    if device is not None:
        with waiting():
            all_reduce(torch.zeros(1, device=device), created)
    return created


@contextmanager
def _unbound() -> Iterator[None]:
    """Let no new group share what the default group has.

    If the default group is bound to a device, NCCL would split its communicator, which
    may have been aborted.
    """
    default = default_group()
    device = default.bound_device_id
    if device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


# The groups that `fresh_group` created, with the store's place of the first group that
# was replaced.
_fresh: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
# Those of them that were replaced since.
_replaced: world.PerProcess[list[ref[ProcessGroup]]] = world.PerProcess(list)


def note_replaced(group: ProcessGroup) -> None:
    """Let `free_replaced` free a group, if it was created by `fresh_group`."""
    if group in _fresh:
        _replaced().append(ref(group))


def free_replaced() -> None:
    """Free the replaced groups that nobody holds but torch's tables.

    Each group has threads and connections, and each `reset` may create one, so that
    they would add up. One with which users have wrapped other models stays.
    """
    free_left_behind()
    replaced = _replaced()
    for each in list(replaced):
        if _is_freed(each):
            replaced.remove(each)


def _is_freed(replaced: ref[ProcessGroup]) -> bool:
    """Take a group out of torch's tables, and put it back if somebody else holds it.

    Return whether it is gone.
    """
    group = replaced()
    if group is None or group not in c10d._world.pg_map:
        return True  # a user has destroyed it
    torchs, name = c10d._world, group_name(group)
    tables: list[Any] = [torchs.pg_map, torchs.pg_names, torchs.pg_group_ranks]
    tables += [torchs.pg_backend_config, torchs.pg_to_tag]
    rows = [(table, table.pop(group)) for table in tables if group in table]
    tagged = [members for members in torchs.tags_to_pg.values() if group in members]
    for members in tagged:
        members.remove(group)
    del group
    if (group := replaced()) is None:
        c10d_C._unregister_process_group(c10d.GroupName(name))
        return True
    for table, row in rows:
        table[group] = row
    for members in tagged:
        members.append(group)
    return False
