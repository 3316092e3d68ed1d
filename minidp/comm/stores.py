"""Exchange values through torch's key-value store, which outlives a failed group.

    rank 0   set topic/0 --.
    rank 1   set topic/1 --+--> store --> every rank reads all values that are there
    rank 2   (dead)                       in time, and knows which ranks are missing

A collective with a missing rank blocks until the backend's timeout and leaves the group
unusable. The store still answers: the other ranks learn who is missing, and go on.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch._C import _distributed_c10d as c10d_C
from torch.distributed import distributed_c10d as c10d

from minidp import world

from .groups import ProcessGroup, group_name, group_ranks, is_initialized
from .work import waiting

logger = logging.getLogger("minidp")
LONGEST_POLL_SECONDS = 0.25
POLL_SECONDS = 0.02  # store.wait() would log each time it times out

_marks: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
_own_stores: WeakKeyDictionary[c10d.Store, c10d.Store] = WeakKeyDictionary()
_warned_without_store = False


def mark_group(group: ProcessGroup, number: int) -> None:
    """Put a number into all later store keys of a group, unless one is there already.

    Without it a group that torchrun has restarted would read the keys that an old one
    has left. Nothing is written to the store.

    Args:
        group: The group.
        number: A random number that rank 0 has drawn.
    """
    _marks.setdefault(group, f"{number:x}")


def key_prefix(group: ProcessGroup) -> str:
    """Return what all store keys of a group begin with: its name, then its mark."""
    return f"minidp/{group_name(group)}/{_marks.get(group, '')}"


def group_store(group: ProcessGroup, prefix: str) -> c10d.Store:
    """Return torch's default store, with all keys under the group and ``prefix``."""
    store = c10d._get_default_store()
    return c10d.PrefixStore(f"{key_prefix(group)}/{prefix}", store)


def own_store(group: ProcessGroup, prefix: str) -> c10d.Store:
    """Return `group_store` through a second connection, for use in another thread.

    The first call of the process opens that connection.

    Raises:
        RuntimeError: The store serves one thread only, and cannot be cloned.
    """
    shared: Any = c10d._get_default_store()
    if shared not in _own_stores:
        _own_stores[shared] = shared.clone()
    return c10d.PrefixStore(f"{key_prefix(group)}/{prefix}", _own_stores[shared])


def launcher_store(prefix: str) -> c10d.Store | None:
    """Connect to torchrun's store, which lives in its process and outlives groups.

    All keys are under ``prefix`` and the number of torchrun's restart. The result is
    None if torchrun keeps no such store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = c10d_C.TCPStore(host, port, is_master=False)
    return c10d.PrefixStore(f"minidp/{prefix}/{attempt}", store)


def address_of(store: Any) -> tuple[str, int] | None:
    """Return host and port of a TCPStore, even inside PrefixStores, or None."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, c10d_C.TCPStore) else None


def has_store(group: ProcessGroup) -> bool:
    """Return whether all ranks of a group can reach torch's key-value store.

    Torch must know the group's name and all of its ranks, which it does not for groups
    of torchft. No rank is asked. The first call opens a connection, which stays
    (`own_store`).
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
    """Return the values that ``ranks`` have posted so far, by rank."""
    keys = {rank: f"{topic}/{rank}" for rank in ranks}
    return {r: json.loads(store.get(k)) for r, k in keys.items() if store.check([k])}


def gather_json(
    store: Any, topic: str, ranks: Collection[int], seconds: float
) -> dict[int, Any]:
    """Wait at most so long for all ``ranks`` to post, and return what came, by rank."""
    began = world.now()
    found: dict[int, Any] = {}
    with waiting():
        while True:
            found |= read_json(store, topic, set(ranks) - found.keys())
            waited = world.now() - began
            if len(found) == len(ranks) or waited > seconds:
                return dict(sorted(found.items()))
            # Whoever waits for a minute asks four times a second.
            world.sleep(min(max(POLL_SECONDS, waited / 20), LONGEST_POLL_SECONDS))
