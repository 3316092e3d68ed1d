"""Find, create and end process groups; exchange values through their store.

    rank 0   set topic/0 --.
    rank 1   set topic/1 --+--> store --> every rank reads all values that are there
    rank 2   (dead)                       in time, and knows which ranks are missing

A collective with a missing rank blocks until the backend's timeout and leaves the group
unusable. The store, torch's key-value server, still answers: the other ranks learn who
is missing, and go on.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d_C
from torch.distributed import ProcessGroup as ProcessGroup  # for all rooms
from torch.distributed import distributed_c10d as c10d

from minidp import world

from .work import Work, is_python_group, waiting

logger = logging.getLogger("minidp")
EXIT_SECONDS = 2.0
SETTLE_SECONDS = 0.05  # ten times the interpreter's switch interval
POLL_SECONDS = 0.02  # store.wait() would log each time it times out

# -- which group -----------------------------------------------------------------------


def is_initialized() -> bool:
    """Return whether there is a default process group."""
    return bool(dist.is_available() and dist.is_initialized())


def default_group() -> ProcessGroup:
    """Return the default process group; raise ValueError if there is none."""
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
    """Return a function that says whether today's default group still exists."""
    group = weakref.ref(default_group()) if is_initialized() else lambda: None
    return lambda: is_initialized() and group() is default_group()


def joined_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return ``group``, for None the default group; None if there is no default one."""
    if not is_initialized():
        return None
    return default_group() if group is None else group


def default_first_bucket_bytes() -> int:
    """Return torch's ``_DEFAULT_FIRST_BUCKET_BYTES``, which users may change."""
    return int(dist._DEFAULT_FIRST_BUCKET_BYTES)  # type: ignore[attr-defined]


def is_group(value: object) -> bool:
    """Return whether a value is a process group that this process belongs to."""
    return isinstance(value, dist.ProcessGroup)


def group_name(group: ProcessGroup) -> str:
    """Return the name of a group; empty if it has none."""
    try:
        return str(group.group_name)
    except (RuntimeError, ValueError):  # a Python group may not know its name
        return str(c10d._world.pg_names.get(group, ""))


def group_ranks(group: ProcessGroup) -> list[int]:
    """Return a group's global ranks, by group rank; [] if torch does not know it."""
    return list(c10d._world.pg_group_ranks.get(group, ()))  # in this order, as torch's


# -- its backend -----------------------------------------------------------------------


def backend_name(group: ProcessGroup) -> str:
    """Return the name of a group's backend, e.g. "gloo" or "cpu:gloo,cuda:nccl".

    "undefined" if the group was created without a name of a backend. For a group that
    torch does not know: its own ``name()``.
    """
    is_known = group in c10d._world.pg_map
    return str(dist.get_backend(group) if is_known else group.name())


def _backends(group: ProcessGroup) -> set[str]:
    """Return the names of a group's backends for all device types, e.g. {"gloo"}."""
    config = dist.get_backend_config(group)
    return {each.rpartition(":")[2] for each in config.split(",")}


def is_timed(group: ProcessGroup) -> bool:
    """Return whether waits can have a limit: several ranks, Gloo alone, in C++."""
    if group.size() == 1 or is_python_group(group):
        return False
    return _backends(group) == {"gloo"}


def is_plain_gloo(group: ProcessGroup) -> bool:
    """Return whether Gloo itself, not a class around it, reduces CPU tensors."""
    if is_python_group(group) or not dist.is_gloo_available():
        return False
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # none for CPU
        return False
    return type(backend) is dist.ProcessGroupGloo


def is_mixed(group: ProcessGroup) -> bool:
    """Return whether a group is a Python class, or serves several device types."""
    return is_python_group(group) or "," in dist.get_backend_config(group)


def is_builtin(group: ProcessGroup) -> bool:
    """Return whether a group has several ranks and only backends that torch ships."""
    if group.size() == 1 or group not in c10d._world.pg_map:
        return False  # torch does not know the backends of a Python group
    return _backends(group) <= {"gloo", "nccl", "mpi", "ucc", "xccl"}


def exchange_device(group: ProcessGroup, fallback: torch.device) -> torch.device:
    """Return CPU if the group's `backend_name` sends CPU tensors, else ``fallback``."""
    of_cpu, backend = ("gloo", "mpi", "ucc", "threaded"), backend_name(group)
    can = any(name in backend for name in of_cpu)
    return torch.device("cpu") if can else fallback


def group_timeout(group: ProcessGroup) -> timedelta:
    """Return the timeout of a group's collectives; 30 minutes if it tells none."""
    for device_type in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device_type)).options._timeout
        except (AttributeError, RuntimeError):
            continue  # the group has no backend for this device
    return timedelta(minutes=30)


# -- more groups over the same ranks ---------------------------------------------------


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
            c10d.GroupName(f"{_prefix(group)}/{key}"),
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
    _free_left_behind()
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
        # Not new_group(), see `fresh_group`. The backend alone has all methods of a
        # process group that are called here.
        with waiting():  # until all ranks are connected
            gloo: Any = dist.ProcessGroupGloo(
                store, group.rank(), group.size(), group_timeout(group)
            )
        made[purpose] = gloo
        _call_once_at_exit(_settle)
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


# -- stores ----------------------------------------------------------------------------

_marks: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
_own_stores: WeakKeyDictionary[c10d.Store, c10d.Store] = WeakKeyDictionary()
_warned_without_store = False


def mark_group(group: ProcessGroup, number: int) -> None:
    """Put ``number`` into all later store keys of a group; a second call does nothing.

    ``number``: rank 0's random one. Without it, after a restart by torchrun, a group
    would read keys that an old one left. Writes nothing to the store.
    """
    _marks.setdefault(group, f"{number:x}")


def _prefix(group: ProcessGroup) -> str:
    """Return what all store keys of a group begin with: its name, then its mark."""
    return f"minidp/{group_name(group)}/{_marks.get(group, '')}"


def group_store(group: ProcessGroup, prefix: str) -> c10d.Store:
    """Return torch's default store, with all keys under the group and ``prefix``."""
    store = c10d._get_default_store()
    return c10d.PrefixStore(f"{_prefix(group)}/{prefix}", store)


def own_store(group: ProcessGroup, prefix: str) -> c10d.Store:
    """Return `group_store` through a second connection, to use in another thread.

    The first call of the process opens that connection. RuntimeError if the store
    cannot be cloned: it serves one thread only.
    """
    shared: Any = c10d._get_default_store()
    if shared not in _own_stores:
        _own_stores[shared] = shared.clone()
    return c10d.PrefixStore(f"{_prefix(group)}/{prefix}", _own_stores[shared])


def launcher_store(prefix: str) -> c10d.Store | None:
    """Connect to torchrun's store; return it; None if torchrun keeps no such store.

    Keys are under ``prefix`` and the number of torchrun's restart. The store, in
    torchrun's process, outlives process groups.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = c10d_C.TCPStore(host, port, is_master=False)
    return c10d.PrefixStore(f"minidp/{prefix}/{attempt}", store)


def address_of(store: Any) -> tuple[str, int] | None:
    """Return host and port of a TCPStore, also inside PrefixStores; else None."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, c10d_C.TCPStore) else None


def has_store(group: ProcessGroup) -> bool:
    """Return whether all ranks of a group can reach torch's key-value store.

    Asks no rank: torch must know the group's name and all of its ranks (not so for
    torchft's groups). The first call opens a connection, which stays (`own_store`).
    """
    is_known = is_initialized() and bool(group_name(group))
    if not is_known or len(group_ranks(group)) != group.size():
        return False
    try:
        return own_store(group, "") is not None
    except RuntimeError:  # the store serves one thread only
        return False


def warn_without_store(group: ProcessGroup) -> None:
    """Log, once per process, what minidp cannot do for a group without a store."""
    global _warned_without_store
    if not _warned_without_store:
        _warned_without_store = True
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


def post_json(store: Any, topic: str, rank: int, value: Any) -> None:
    """Write this rank's value, which JSON can hold, to the store's ``topic/rank``."""
    store.set(f"{topic}/{rank}", json.dumps(value))


def read_json(store: Any, topic: str, ranks: Iterable[int]) -> dict[int, Any]:
    """Return the values that ``ranks`` have posted so far, by rank; do not wait."""
    keys = {rank: f"{topic}/{rank}" for rank in ranks}
    return {r: json.loads(store.get(k)) for r, k in keys.items() if store.check([k])}


def gather_json(
    store: Any, topic: str, ranks: Collection[int], seconds: float
) -> dict[int, Any]:
    """Wait up to ``seconds`` for all ``ranks`` to post; return what came, by rank."""
    deadline = world.now() + seconds
    found: dict[int, Any] = {}
    with waiting():
        while True:
            found |= read_json(store, topic, set(ranks) - found.keys())
            if len(found) == len(ranks) or world.now() > deadline:
                return dict(sorted(found.items()))
            world.sleep(POLL_SECONDS)


# -- the end ---------------------------------------------------------------------------

_left_behind: list[Work] = []
# Groups of works that had not ended. A reference of C's own outlives this list, which
# Python frees at exit.
_leaked: list[tuple[ProcessGroup, list[Work]]] = []


def keep_for_good(group: ProcessGroup, in_flight: Iterable[Work]) -> None:
    """Leak ``group`` until the process ends, if a work of ``in_flight`` still runs.

    Freeing a Gloo group waits for its works, up to 30 minutes (the timeout), also at
    exit; a leaked group delays the exit by 2 s at most. Keeps the works alive, too, but
    ignores those in shared memory. Does not wait.
    """
    works = [work for work in in_flight if getattr(work, "is_left_behind", True)]
    endless = [work for work in works if not work.is_completed()]
    if not endless:
        return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _leaked.append((group, endless))
    _call_once_at_exit(_wait_for_left_behind)
    # Works hold buckets: drop those that have ended since.
    _left_behind[:] = [work for work in _left_behind if not work.is_completed()]
    _left_behind.extend(endless)


def _free_left_behind() -> None:
    """Let go of leaked groups whose works have ended: others freed theirs, mostly."""
    for row in list(_leaked):
        if all(work.is_completed() for work in row[1]):
            _leaked.remove(row)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(row[0]))


def _call_once_at_exit(function: Any) -> None:
    """Let ``function`` run once at exit, before those that were registered earlier."""
    atexit.unregister(function)
    atexit.register(function)


def _settle() -> None:
    """Sleep 0.05 s at exit, so that Gloo's threads release the last collectives.

    Such a thread needs the GIL to free tensors: once the interpreter is finalizing,
    that aborts the process (2 of 70 short runs, also with torch's DDP).
    """
    world.sleep(SETTLE_SECONDS)


def _wait_for_left_behind() -> None:
    """At exit, wait up to 2 s in all for collectives that `keep_for_good` left running.

    They fail when other ranks end; if Python is finalizing then, the process aborts.
    """
    deadline = world.now() + EXIT_SECONDS
    while not all(work.is_completed() for work in _left_behind):
        if world.now() > deadline:
            break
        world.sleep(SETTLE_SECONDS)
