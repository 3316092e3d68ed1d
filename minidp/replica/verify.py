"""Verify that all ranks have the same tensors; broadcast one rank's values."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

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
    from .parameters import Replica

GREETING = -1  # torch's DDP sends its number of parameters where this is expected
# Kind of a wrapper until `start_equal` gives it a name that no other had. Torchrun
# keeps the store when it restarts processes: the attempt tells old keys from new ones.
WRAPPED = f"wrapped in attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
_REJECTED = "rejected"
_objects: Counter[tuple[str, str]] = Counter()  # (group name, kind) -> objects so far


def next_key(group: ProcessGroup, kind: str) -> str:
    """Count an object of ``kind`` on ``group`` here; return a store key, ``kind/n``.

    No communication: it is equal on ranks that make as many of them.
    """
    _objects[group_name(group), kind] += 1
    return f"{kind}/{_objects[group_name(group), kind]}"


def start_equal(
    replica: Replica,
    module_buffers: Mapping[str, torch.Tensor],
    group: ProcessGroup,
    *,
    options: Mapping[str, object],
    device: torch.device,
    sends_buffers: bool,
) -> str:
    """Collective: compare shapes, dtypes, options of all ranks; copy rank 0's values.

    Into all parameters that are not ignored, frozen ones included, and with
    ``sends_buffers`` into module buffers. Raises as `verify`. Return a name for the
    wrapper's store keys, equal on all ranks.
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
    """Return shape, layout, dtype and device type of a tensor, as a text to compare."""
    is_dense = tensor.layout is torch.strided
    layout = f"stride {tuple(tensor.stride())}" if is_dense else str(tensor.layout)
    return (
        f"shape {tuple(tensor.shape)}, {layout}, {tensor.dtype}, "
        f"on {tensor.device.type}"
    )


def verify(
    mine: Mapping[str, str] | Exception, group: ProcessGroup, device: torch.device
) -> int:
    """Collective: ReplicaMismatchError on all ranks if their texts ``mine`` differ.

    Also if a rank wraps in torch's DDP. ``mine``: texts that describe this replica, by
    name; or the error with which this rank rejected its arguments: then the other ranks
    raise, and here the caller does. Return a number that is equal on all ranks and new
    for each call with this group. From the first call on, its store keys hold a random
    number.
    """
    rejected = isinstance(mine, Exception)
    # Torch's constructor begins alike: else gloo would abort at the first mismatch.
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
    place = (group_name(group), "verified")
    head = [digest, len(buffer), _objects[place] + 1, secrets.randbits(62)]
    heads = gather_integers(head, group, device)
    _objects[place] = max(number for _, _, number, _ in heads)
    mark_group(group, heads[0][3])
    if rejected or any(each[:2] != heads[0][:2] for each in heads):
        lengths = [length for _, length, *_ in heads]
        texts = gather_bytes(buffer, lengths, group, device)
        if not rejected:
            replicas = [json.loads(each) for each in texts]
            raise ReplicaMismatchError(_explain_difference(replicas, group.rank()))
    return _objects[place]


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
    """Return a text: which rank rejected its arguments, or is the first to differ."""
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
        place = "" if twin == name else f"{twin} (another registration order): "
        what = (
            f"Expected {name}: {here} (rank 0); found on rank {other}: {place}{there}."
        )
    return explain(
        rank,
        f"DataParallel expects the same model and options on all ranks. {what}",
        remedy="build the module identically on every rank, then wrap it",
    )
