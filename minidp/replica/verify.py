"""Verify that all ranks wrap the same module, and give all of them rank 0's values.

A wrong model on one rank would otherwise show much later: as a hang, or as an abort of
Gloo, which cannot receive fewer bytes than were sent. So each rank describes its
replica in texts, the ranks compare a checksum of these first, and only if it differs
are the texts themselves exchanged, to say in an error what is different.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from minidp import world
from minidp.comm import (
    ProcessGroup,
    broadcast_coalesced,
    exchange_device,
    gather_bytes,
    gather_integers,
    group_name,
    mark_group,
)
from minidp.errors import ReplicaMismatchError, explain

if TYPE_CHECKING:
    from .parameters import ManagedParameters

GREETING = -1  # torch's DDP sends its number of parameters where this is expected
# The kind of a wrapper's store keys until `start_equal` gives the wrapper a name that
# no other had. Torchrun keeps the store when it restarts processes, so the number of
# the attempt has to tell the old keys from the new ones.
WRAPPED = f"wrapped in attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
_REJECTED = "rejected"
# By a group's name and a kind of objects, how many of them there were so far.
_objects: world.PerProcess[Counter[tuple[str, str]]] = world.PerProcess(Counter)


def next_key(group: ProcessGroup, kind: str) -> str:
    """Return a key of the group's store, ``kind/n``, for a new object of ``kind``.

    Each rank counts for itself, without communication. So the key is equal on all ranks
    that have made equally many such objects.
    """
    objects = _objects()
    objects[group_name(group), kind] += 1
    return f"{kind}/{objects[group_name(group), kind]}"


def start_equal(
    replica: ManagedParameters,
    module_buffers: Mapping[str, torch.Tensor],
    group: ProcessGroup,
    *,
    options: Mapping[str, object],
    device: torch.device,
    sends_buffers: bool,
) -> str:
    """Check that all ranks wrap the same module, then copy rank 0's values to all.

    The ranks compare shapes, dtypes and options. Then every parameter that is not
    ignored gets rank 0's values, frozen ones included, and with ``sends_buffers`` the
    module buffers get them, too. All ranks must call this together. It returns a name
    for the wrapper's store keys, which is equal on all ranks.

    Raises:
        ReplicaMismatchError: The ranks differ, as `verify` finds out.
    """
    mine = {}
    for name, param in replica.parameters.items():
        kind = "trainable" if param.requires_grad else "frozen"
        kind += ", sparse" if name in replica.sparse else ""
        mine[f"parameter {name}"] = f"{_describe(param)}, {kind}"
    for name, value in module_buffers.items():
        mine[f"module buffer {name}"] = _describe(value)
    mine |= {f"option {name}": str(value) for name, value in options.items()}
    number = verify(mine, group, device)
    buffers = module_buffers.values() if sends_buffers else ()
    broadcast_coalesced([*replica.parameters.values(), *buffers], group)
    return f"verified/{number}"


def _describe(tensor: torch.Tensor) -> str:
    is_dense = tensor.layout is torch.strided
    layout = f"stride {tuple(tensor.stride())}" if is_dense else str(tensor.layout)
    return (
        f"shape {tuple(tensor.shape)}, {layout}, {tensor.dtype}, "
        f"on {tensor.device.type}"
    )


def verify(
    mine: Mapping[str, str] | Exception, group: ProcessGroup, device: torch.device
) -> int:
    """Raise the same error on all ranks if what they wrap differs between them.

    All ranks must call this together. It returns a number that is equal on all ranks
    and new for each call with this group. From the first call on, the group's store
    keys hold a random number, so that no other group uses the same ones.

    Args:
        mine: Texts that describe this replica, by name. Or the error with which this
            rank rejected its arguments: then the other ranks raise here, and on this
            rank the caller raises that error.
        group: The group of all replicas.
        device: The device of the replica, on which integers are exchanged.

    Raises:
        ReplicaMismatchError: The texts differ, another rank rejected its arguments, or
            another rank wraps its module in torch's DDP.
    """
    rejected = isinstance(mine, Exception)
    # Torch's constructor also begins by gathering one integer per rank. A rank that
    # wraps in torch's DDP can therefore be told from ours here; later, Gloo would
    # abort.
    greetings = gather_integers([GREETING], group, device)
    torchs = [rank for rank, (value,) in enumerate(greetings) if value != GREETING]
    if torchs and rejected:
        return 0
    if torchs:
        raise ReplicaMismatchError(_explain_other_class(group.rank(), torchs))
    text = {_REJECTED: f"{type(mine).__name__}: {mine}"} if rejected else mine
    buffer = json.dumps(text).encode()
    digest = int.from_bytes(hashlib.sha256(buffer).digest()[:8], "big", signed=True)
    device = exchange_device(group, device)
    place, objects = (group_name(group), "verified"), _objects()
    head = [digest, len(buffer), objects[place] + 1, secrets.randbits(62)]
    heads = gather_integers(head, group, device)
    objects[place] = max(number for _, _, number, _ in heads)
    mark_group(group, heads[0][3])
    if rejected or any(each[:2] != heads[0][:2] for each in heads):
        lengths = [length for _, length, *_ in heads]
        texts = gather_bytes(buffer, group, device, lengths)
        if not rejected:
            replicas = [json.loads(each) for each in texts]
            raise ReplicaMismatchError(_explain_difference(replicas, group.rank()))
    return objects[place]


def _explain_other_class(own_rank: int, torchs: Sequence[int]) -> str:
    return explain(
        own_rank,
        "The model is wrapped by torch's DistributedDataParallel on rank "
        f"{', '.join(map(str, torchs))}, but by minidp.DataParallel here.",
        expected="the same class on all ranks",
        remedy="start all ranks in the same way. `minidp run` and swap() do not reach "
        "a process that is started with python -I, -E or -S, or with an environment of "
        "its own (PYTHONPATH): start that one with `python -m minidp.run SCRIPT`, too",
    )


def _explain_difference(replicas: Sequence[dict[str, str]], rank: int) -> str:
    for other, replica in enumerate(replicas):
        if _REJECTED in replica:
            return explain(
                rank,
                f"rank {other} rejected its arguments: {replica[_REJECTED]}",
                remedy=f"look at the traceback of rank {other}",
            )
    items = [[*each.items()] for each in replicas]  # their order counts, too
    other = next(r for r, each in enumerate(items) if each != items[0])
    root, found = replicas[0], replicas[other]
    if root.keys() != found.keys():
        lacks = ", ".join(name for name in root if name not in found)
        has = ", ".join(name for name in found if name not in root)
        parts = [f"lacks {lacks} of rank 0"] if lacks else []
        parts += [f"has {has}, which rank 0 lacks"] if has else []
        what = f"Rank {other} {', and '.join(parts)}."
    else:
        pairs = zip(items[0], items[other], strict=True)
        (name, here), (twin, there) = next((a, b) for a, b in pairs if a != b)
        place = "" if twin == name else f"{twin} (a different registration order): "
        what = (
            f"Expected {name}: {here} (rank 0); found on rank {other}: {place}{there}."
        )
    return explain(
        rank,
        f"DataParallel expects the same model and options on all ranks. {what}",
        remedy="build the module identically on every rank, then wrap it",
    )
