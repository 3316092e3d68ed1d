"""Process groups and their stores: which there are, how to make one, how to end one."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch._C import _distributed_c10d as c10d_C
from torch.distributed import distributed_c10d as c10d

from ._waiting import Work, is_done_within

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("minidp")
EXIT_SECONDS = 2.0
SETTLE_SECONDS = 0.05  # ten times what a thread waits for the interpreter


def default_group() -> ProcessGroup:
    """The default process group.

    Raises:
        ValueError: torch.distributed is not initialized.
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


def joined_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """``group`` or the default one; None while torch.distributed is not initialized."""
    if not is_initialized():
        return None
    return default_group() if group is None else group


def default_first_bucket_bytes() -> int:
    """Limit of the small first bucket; torch's constant, so that both can be set."""
    return int(dist._DEFAULT_FIRST_BUCKET_BYTES)  # type: ignore[attr-defined]


def is_group(value: object) -> bool:
    """Whether a value is a process group that this process belongs to."""
    return isinstance(value, dist.ProcessGroup)


def is_python_group(group: object) -> bool:
    """Whether a group is a subclass of ``dist.ProcessGroup``, written in Python."""
    return isinstance(group, dist.ProcessGroup) and type(group) is not dist.ProcessGroup


def group_name(group: ProcessGroup) -> str:
    """The name of a group; empty if it has none."""
    try:
        return str(group.group_name)
    except (RuntimeError, ValueError):  # in Python it may not know that it has one
        return str(c10d._world.pg_names.get(group, ""))


def group_ranks(group: ProcessGroup) -> list[int]:
    """The global ranks of a group, by group rank; empty if torch does not know it."""
    known = c10d._world.pg_group_ranks.get(group, {})
    return sorted(known, key=known.__getitem__)


def has_store(group: ProcessGroup) -> bool:
    """Whether all ranks of a group can talk through torch's store.

    Torch must know the group, by a name; and as many ranks of it as the group says that
    it has (some, of torchft, are registered on each rank alone, and change their size).
    """
    is_known = is_initialized() and bool(group_name(group))
    if not is_known or len(group_ranks(group)) != group.size():
        return False
    try:
        return own_store(group, "") is not None
    except RuntimeError:  # a store that cannot be shared with another thread
        return False


_told_without_store = False


def tell_without_store(group: ProcessGroup) -> None:
    """Log, once per process, what does not work on a group without a store."""
    global _told_without_store
    if not _told_without_store:
        _told_without_store = True
        logger.warning(
            "[rank %d] %s: the ranks of this process group have no store in common, "
            "because torch.distributed does not know the group on all of them (or its "
            "store serves one thread only). A collective that hangs ends when the "
            "group says so, without a report of who is missing; reset() keeps the "
            "group and cannot wait for other ranks. Groups that init_process_group() "
            "or new_group() return have all of that.",
            group.rank(),
            type(group).__name__,
        )


def fresh_group(group: ProcessGroup, key: str) -> ProcessGroup:
    """A new group over the same ranks, backend and timeout; its members call it.

    Args:
        group: the old one.
        key: the same on all ranks, and never used before in this group.
    """
    # Not new_group(), whose name for a group that only its members make depends on how
    # many groups a process is in: ranks that differ there would wait for each other.
    ranks = group_ranks(group)
    made = c10d._new_process_group_helper(
        len(ranks),
        group.rank(),
        ranks,
        dist.Backend(_backend_of(group)),
        c10d._get_default_store(),
        c10d.GroupName(f"{_prefix(group)}/{key}"),
        timeout=group_timeout(group),
    )
    created: ProcessGroup = made[0]
    c10d._world.pg_group_ranks[created] = {rank: i for i, rank in enumerate(ranks)}
    return created


_side_groups: WeakKeyDictionary[ProcessGroup, dict[str, ProcessGroup]] = (
    WeakKeyDictionary()
)
# Default group -> global ranks -> key of their last failure. A process that outlives
# its default group may meet new ones in the next, which know of no failure.
_renewals: WeakKeyDictionary[ProcessGroup, dict[frozenset[int], str]] = (
    WeakKeyDictionary()
)


def side_group(group: ProcessGroup, purpose: str) -> ProcessGroup:
    """Gloo between the same ranks once more, for a purpose; made by the first call.

    The group itself if its ranks have no store in common.

    Ranks whose graphs differ launch buckets at different points of a backward. On one
    group, the sums of a layer would then meet a bucket of another rank: gloo aborts the
    process, or adds them up if they are equally long. It is faster, too, not to queue
    behind the buckets.
    """
    if not has_store(group):
        return group
    made = _side_groups.setdefault(group, {})
    if purpose not in made:
        ranks = frozenset(group_ranks(group))
        newest_first = reversed(_renewals.get(default_group(), {}).items())
        key = next((key for members, key in newest_first if members >= ranks), "first")
        store = group_store(group, f"side/{purpose}/{key}")
        # Not new_group(), whose names depend on how many groups a process is in. The
        # backend alone has all that is called of a process group here.
        gloo: Any = dist.ProcessGroupGloo(
            store, group.rank(), group.size(), group_timeout(group)
        )
        made[purpose] = gloo
        atexit.unregister(_settle)  # once is enough
        atexit.register(_settle)
    return made[purpose]


def group_of_forwards(group: ProcessGroup) -> ProcessGroup:
    """For what forwards exchange: on Gloo a group of its own.

    Gloo counts the collectives of a group. If a rank had a forward more than the
    others, its buckets would meet other buckets of theirs: it adds them up, or aborts.
    """
    return side_group(group, "forwards") if is_timed(group) else group


def renew_side_groups(group: ProcessGroup, key: str) -> None:
    """After a failure: side groups within ``group`` are made anew when needed.

    Args:
        group: all of its ranks call this.
        key: the same on all ranks, and never used before.
    """
    members = frozenset(group_ranks(group))
    renewals = _renewals.setdefault(default_group(), {})
    renewals.pop(members, None)
    # Other objects count their resets as well, on groups of other names.
    renewals[members] = f"{group_name(group)}/{key}"
    known = c10d._world.pg_group_ranks  # without groups that were destroyed
    for other in list(_side_groups):
        if other not in known or members.issuperset(known[other]):
            _side_groups.pop(other, None)


def backend_name(group: ProcessGroup) -> str:
    """What the group's backend calls itself."""
    if group in c10d._world.pg_map:
        return str(dist.get_backend(group))
    return str(group.name())


def _backend_of(group: ProcessGroup) -> str:
    """What to ask for to get the same backends again."""
    name = backend_name(group)
    return dist.get_backend_config(group) if name == "undefined" else name


def group_timeout(group: ProcessGroup) -> timedelta:
    """How long collectives of a group may take."""
    for device_type in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device_type)).options
        except (AttributeError, RuntimeError):
            continue  # the group has no backend for this device
        return options._timeout
    return timedelta(minutes=30)


_marks: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()


def mark_group(group: ProcessGroup, number: int) -> None:
    """Tell this group from one of the same name that used the same store before.

    Torchrun keeps the store when it restarts the processes: their last words would be
    read by those that come after them.

    Args:
        group: all of its ranks call this.
        number: equal on all ranks; only the first one counts.
    """
    _marks.setdefault(group, f"{number:x}")


def _prefix(group: ProcessGroup) -> str:
    return f"minidp/{group_name(group)}/{_marks.get(group, '')}"


_own_stores: WeakKeyDictionary[c10d.Store, c10d.Store] = WeakKeyDictionary()


def own_store(group: ProcessGroup, prefix: str) -> c10d.Store:
    """The same with a connection of its own, for another thread.

    A store serves one call at a time, and some wait for minutes.
    """
    shared: Any = c10d._get_default_store()
    if shared not in _own_stores:
        _own_stores[shared] = shared.clone()
    return c10d.PrefixStore(f"{_prefix(group)}/{prefix}", _own_stores[shared])


def unprefixed(store: Any) -> Any:
    """The store below all prefixes."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return store


def address_of(store: object) -> tuple[str, int] | None:
    """Name and port of a store's host, if it has one."""
    return (store.host, store.port) if isinstance(store, c10d_C.TCPStore) else None


def is_initialized() -> bool:
    """Whether there is a default process group."""
    return bool(dist.is_available() and dist.is_initialized())


def group_store(group: ProcessGroup, prefix: str) -> c10d.Store:
    """A key-value store that outlives broken collectives of the group."""
    store = c10d._get_default_store()
    return c10d.PrefixStore(f"{_prefix(group)}/{prefix}", store)


def launcher_store(prefix: str) -> c10d.Store | None:
    """Torchrun's own store, which is there before and after the process group.

    None if this process was not started by torchrun, or torchrun keeps none.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = c10d_C.TCPStore(host, port, is_master=False)
    return c10d.PrefixStore(f"minidp/{prefix}/{attempt}", store)


def die_with_parent() -> None:
    """End when the process that started this one does, where the system can (Linux)."""
    processes: Any = torch.multiprocessing
    processes._prctl_pr_set_pdeathsig(signal.SIGKILL)


def exchange_device(group: ProcessGroup, fallback: torch.device) -> torch.device:
    """Where small host-side messages live: the CPU when the group can carry it."""
    backend = backend_name(group)
    if any(name in backend for name in ("gloo", "mpi", "ucc", "threaded")):
        return torch.device("cpu")
    return fallback


def is_timed(group: ProcessGroup) -> bool:
    """Whether one can wait a while for the collectives of a group.

    On an accelerator, waiting only orders streams.
    """
    if group.size() == 1 or is_python_group(group):
        return False
    # Without a name (init_process_group() chose), or of several: {device: backend}.
    backends = dist.get_backend_config(group).split(",")
    return all(each.rpartition(":")[2] == "gloo" for each in backends)


def is_mixed(group: ProcessGroup) -> bool:
    """Whether a group has several backends: the tensors decide who waits how.

    Or one that nobody knows.
    """
    if is_python_group(group):
        return True
    return len(set(dist.get_backend_config(group).split(","))) > 1


def is_builtin(group: ProcessGroup) -> bool:
    """Whether there are several ranks, and every backend between them is torch's."""
    if group.size() == 1 or group not in c10d._world.pg_map:
        return False  # torch does not know what a group of Python's own is made of
    known = {"gloo", "nccl", "mpi", "ucc", "xccl"}
    backends = dist.get_backend_config(group).split(",")
    return {b.rpartition(":")[2] for b in backends} <= known


_left_behind: list[Work] = []


def keep_for_good(group: ProcessGroup, in_flight: Iterable[Work]) -> None:
    """Never free a group with collectives that may not end.

    Gloo would wait for them, up to the group's timeout (half an hour by default), also
    at the end of the process.
    """
    endless = [work for work in in_flight if not work.is_completed()]
    if not endless:
        return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    atexit.unregister(_let_end)  # once is enough
    atexit.register(_let_end)
    # They hold buckets: those that have ended since are let go.
    _left_behind[:] = [work for work in _left_behind if not work.is_completed()]
    _left_behind.extend(endless)


def _settle() -> None:
    """At exit: give gloo's threads a moment to let go of the last collectives.

    A collective is over before the thread that ran it has dropped its tensors, for
    which it needs the interpreter. If that is being taken down by then, the process
    aborts, after all its work: torch's DDP did so in 2 of about 70 short runs.
    `destroy_process_group()` does not help where something in torch keeps the group.
    """
    time.sleep(SETTLE_SECONDS)


def _let_end() -> None:
    """At exit: wait a little for collectives that were left behind.

    When the other ranks end, so do they, with an error. If that calls something in
    Python while the interpreter is being taken down, the process aborts.
    """
    deadline = time.monotonic() + EXIT_SECONDS
    for work in _left_behind:
        is_done_within(work, max(0.001, deadline - time.monotonic()))


def end_group(group: ProcessGroup) -> None:
    """Take down a group whose collectives do not end (NCCL)."""
    group.abort()
