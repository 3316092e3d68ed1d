"""Find process groups, and say who is in one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup as ProcessGroup  # for all rooms
from torch.distributed import distributed_c10d as c10d

from minidp import world

# Of each group the groups over the same ranks that were made beside it, by purpose.
groups_beside: world.PerProcess[
    WeakKeyDictionary[ProcessGroup, dict[str, ProcessGroup]]
] = world.PerProcess(WeakKeyDictionary)


def is_initialized() -> bool:
    """Return whether there is a default process group."""
    return bool(dist.is_available() and dist.is_initialized())


def default_group() -> ProcessGroup:
    """Return the default process group.

    Raises:
        ValueError: There is none.
    """
    if not is_initialized():
        raise ValueError(
            "Default process group has not been initialized: call "
            "torch.distributed.init_process_group() first (torchrun sets the "
            "environment variables that it reads), or pass process_group."
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def lifetime_of_default_group() -> Callable[[], bool]:
    """Return a function that says whether the present default group still exists."""
    group = weakref.ref(default_group()) if is_initialized() else lambda: None
    return lambda: is_initialized() and group() is default_group()


def joined_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return a group, or the default group for None.

    The result is None if torch.distributed is not initialised, whatever was asked for.
    """
    if not is_initialized():
        return None
    return default_group() if group is None else group


def default_first_bucket_bytes() -> int:
    """Return torch's ``_DEFAULT_FIRST_BUCKET_BYTES``, which users may change."""
    return int(dist._DEFAULT_FIRST_BUCKET_BYTES)  # type: ignore[attr-defined]


def group_name(group: ProcessGroup) -> str:
    """Return the name of a group, or "" if it has none."""
    try:
        return str(group.group_name)
    except (RuntimeError, ValueError):  # a Python group may not know its name
        return str(c10d._world.pg_names.get(group, ""))


def group_ranks(group: ProcessGroup) -> list[int]:
    """Return the global ranks of a group's members, in the order of their group ranks.

    The list is empty for a group that torch does not know.
    """
    return list(c10d._world.pg_group_ranks.get(group, ()))  # in this order, as torch's
