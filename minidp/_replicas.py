"""Replicas start equal and stay equal: verify, broadcast state, module buffers."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ._collectives import broadcast_coalesced, gather_bytes, gather_integers
from ._groups import exchange_device, group_name, mark_group
from ._other_class import meets_torchs_class
from .errors import ReplicaMismatchError, explain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ._arguments import Checked
    from ._managed import Replica

# Kind of an object until `start_equal` gives it a name that no other had. Torchrun
# keeps the store when it restarts processes, so that theirs could be an old one.
WRAPPED = f"wrapped in attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
MESSAGE_BYTES = 250 * 2**20  # one coalesced broadcast


@dataclass(frozen=True)
class Description:
    """What must be equal on all ranks, as plain data: (kind, name) -> properties."""

    tensors: Mapping[str, str]  # "parameter a.weight" -> "shape ..., dtype ..."
    options: Mapping[str, str]  # "find_unused_parameters" -> "False"

    def to_json(self) -> dict[str, Any]:
        """For the exchange; keeps the order of tensors."""
        return {
            "tensors": list(self.tensors.items()),
            "options": list(self.options.items()),
        }


def describe(
    parameters: Mapping[str, nn.Parameter],
    module_buffers: Mapping[str, torch.Tensor],
    sparse: Sequence[str],
    options: Mapping[str, object],
) -> Description:
    """Describe one replica.

    Args:
        parameters: all parameters that take part, frozen ones included.
        module_buffers: all module buffers that take part.
        sparse: names of parameters with sparse gradients.
        options: constructor arguments that change what is sent.
    """
    tensors = {}
    for name, param in parameters.items():
        text = _describe_tensor(param)
        text += ", trainable" if param.requires_grad else ", frozen"
        tensors[f"parameter {name}"] = text + (", sparse" if name in sparse else "")
    for name, value in module_buffers.items():
        tensors[f"module buffer {name}"] = _describe_tensor(value)
    return Description(tensors, {key: str(value) for key, value in options.items()})


def _describe_tensor(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f", {tensor.layout}"
    stride = f", stride {tuple(tensor.stride())}" if not layout else ""
    return (
        f"shape {tuple(tensor.shape)}{stride}{layout}, {tensor.dtype}, "
        f"on {tensor.device.type}"
    )


_objects: Counter[tuple[str, str]] = Counter()  # (group name, kind) -> objects so far


def next_key(group: ProcessGroup, kind: str) -> str:
    """A name for an object of a kind, equal on all ranks that make them alike."""
    _objects[group_name(group), kind] += 1
    return f"{kind}/{_objects[group_name(group), kind]}"


def verify(
    mine: Description | Exception, group: ProcessGroup, device: torch.device
) -> int:
    """Collective: compare the replicas; every rank raises when any two differ.

    The usual case costs two all-gathers of a few integers; a difference sends texts.

    Args:
        mine: this replica, or the error with which this rank rejected its arguments.
        group: the ranks.
        device: of the parameters, for backends that cannot send from the CPU.

    Returns:
        How many comparisons this group has seen: equal on all ranks, new each time.

    Raises:
        ReplicaMismatchError: naming ranks and what differs; not if ``mine`` is one.
    """
    rejected = isinstance(mine, Exception)
    if meets_torchs_class(group, device, raises=not rejected):
        return 0
    text = f"{type(mine).__name__}: {mine}"
    content = {"rejected": text} if isinstance(mine, Exception) else mine.to_json()
    payload = json.dumps(content).encode()
    digest = int.from_bytes(hashlib.sha256(payload).digest()[:8], "big", signed=True)
    device = exchange_device(group, device)
    place = (group_name(group), "verified")
    head = [digest, len(payload), _objects[place] + 1, secrets.randbits(62)]
    heads = gather_integers(head, group, device)
    _objects[place] = max(number for _, _, number, _ in heads)
    mark_group(group, heads[0][3])
    if all(head[:2] == heads[0][:2] for head in heads) and not rejected:
        return _objects[place]
    texts = gather_bytes(payload, [length for _, length, *_ in heads], group, device)
    if not rejected:
        replicas = [json.loads(text) for text in texts]
        raise ReplicaMismatchError(_first_difference(replicas, group.rank()))
    return _objects[place]


def _first_difference(replicas: Sequence[dict[str, Any]], rank: int) -> str:
    for other, replica in enumerate(replicas):
        if "rejected" in replica:
            return explain(
                rank,
                f"rank {other} rejected its arguments: {replica['rejected']}",
                remedy=f"look at the traceback of rank {other}",
            )
    for other, replica in enumerate(replicas):
        difference = _difference(replicas[0], replica, other)
        if difference:
            return explain(
                rank,
                "DataParallel expects the same model and options on all ranks. "
                + difference,
                remedy="build the module identically on every rank, then wrap it",
            )
    return explain(rank, "The replicas' descriptions differ, but no line of them does.")


def _difference(root: dict[str, Any], replica: dict[str, Any], other: int) -> str:
    """How one rank differs from rank 0, in a sentence; empty when it does not."""
    for key, what in (("tensors", ""), ("options", "option ")):
        ours, theirs = root[key], replica[key]
        lost = [name for name, _ in ours if name not in dict(theirs)]
        extra = [name for name, _ in theirs if name not in dict(ours)]
        if lost or extra:
            return (
                f"Expected rank 0's {len(ours)} parameters and module buffers; rank "
                f"{other} has {len(theirs)}, lacks [{', '.join(lost)}] and has "
                f"besides [{', '.join(extra)}]."
            )
        for position, ((name, expected), (found_name, found)) in enumerate(
            zip(ours, theirs, strict=True)
        ):
            if name != found_name:
                return (
                    f"Expected {name} at position {position}, as on rank 0; rank "
                    f"{other} has {found_name} there (another registration order)."
                )
            if expected != found:
                return (
                    f"Expected {what}{name}: {expected} (rank 0); found on rank "
                    f"{other}: {found}."
                )
    return ""


def start_equal(
    checked: Checked, module_buffers: Mapping[str, torch.Tensor], group: ProcessGroup
) -> str:
    """Collective: verify that the replicas are alike, then take rank 0's state.

    Returns:
        A name for the object, equal on all ranks.

    Raises:
        ReplicaMismatchError: they are not, or a rank rejected its arguments.
    """
    replica, config = checked.replica, checked.config
    options = {
        "find_unused_parameters": config.find_unused_parameters,
        "static_graph": config.static_graph,
        "bucket caps (bytes)": config.caps,
        "module buffers are broadcast at construction": checked.init_buffers,
        "module buffers are broadcast before forwards": checked.forward_sync,
        "skip_all_reduce_unused_params": config.skip_all_reduce_unused_params,
        "delayed": sorted(replica.delayed),
        "mixed_precision": checked.precision,
        "bucket_layout": config.saved_layout,
        "check_replicas_every": checked.safety.check_replicas_every,
    }
    mine = describe(replica.parameters, module_buffers, sorted(replica.sparse), options)
    number = verify(mine, group, checked.devices.device)
    state: list[torch.Tensor] = list(replica.parameters.values())
    if checked.init_buffers:
        state += module_buffers.values()
    broadcast_state(state, group)
    return f"verified/{number}"


def take_delayed(replica: Replica, group: ProcessGroup) -> None:
    """Collective: rank 0's values of parameters that travel last."""
    broadcast_state([replica.managed[name] for name in replica.delayed], group)


def broadcast_state(
    tensors: Sequence[torch.Tensor], group: ProcessGroup, root: int = 0
) -> None:
    """Collective: overwrite parameters or module buffers with the root's."""
    broadcast_coalesced(tensors, group, MESSAGE_BYTES, root)
