"""Create a group in place of one that failed; free it when nobody needs it any more."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet, ref

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d_C
from torch.distributed import distributed_c10d as c10d

from .backends import backend_name, group_timeout
from .endings import free_left_behind
from .groups import ProcessGroup, group_name, group_ranks
from .stores import key_prefix
from .work import waiting


def fresh_group(group: ProcessGroup, key: str) -> ProcessGroup:
    """Collective: create a group of the same ranks, backend and timeout; return it.

    Registered with torch.distributed; ``group`` stays as it is. ``key`` names the new
    one: the same on all ranks, never used before in ``group``.
    """
    # new_group() names a group by the number of groups in this process: ranks whose
    # numbers differ would wait for each other.
    ranks, name = group_ranks(group), backend_name(group)
    config = dist.get_backend_config(group) if name == "undefined" else name
    with waiting():  # until all ranks are connected
        created: ProcessGroup = c10d._new_process_group_helper(
            len(ranks),
            group.rank(),
            ranks,
            dist.Backend(config),
            c10d._get_default_store(),
            c10d.GroupName(f"{key_prefix(group)}/{key}"),
            timeout=group_timeout(group),
        )[0]
    c10d._world.pg_group_ranks[created] = {rank: i for i, rank in enumerate(ranks)}
    _fresh.add(created)
    return created


_fresh: WeakSet[ProcessGroup] = WeakSet()  # that `fresh_group` created
_replaced: list[ref[ProcessGroup]] = []  # of these


def note_replaced(group: ProcessGroup) -> None:
    """Let `free_replaced` free ``group`` later, if `fresh_group` created it."""
    if group in _fresh:
        _replaced.append(ref(group))


def free_replaced() -> None:
    """Free groups that were replaced, and that nobody but torch's tables holds.

    Each has threads and connections, and each `reset` may create one. Users may have
    wrapped other models with it, though: such a group stays registered.
    """
    free_left_behind()
    for each in list(_replaced):
        if _is_freed(each):
            _replaced.remove(each)


def _is_freed(replaced: ref[ProcessGroup]) -> bool:
    """Take a group out of torch's tables, and put it back if it then still lives."""
    group = replaced()
    if group is None or group not in c10d._world.pg_map:
        return True  # a user has destroyed it
    world, name = c10d._world, group_name(group)
    tables: list[Any] = [world.pg_map, world.pg_names, world.pg_group_ranks]
    tables += [world.pg_backend_config, world.pg_to_tag]
    rows = [(table, table.pop(group)) for table in tables if group in table]
    tagged = [members for members in world.tags_to_pg.values() if group in members]
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
