"""The constructor's arguments: checks in torch's order, and what follows from them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ._collectives import default_first_bucket_bytes, default_group, is_group
from ._layout import ParamSpec
from .config import ReducerConfig, Unsynced, bucket_caps, unsynced_policy
from .sync_batchnorm import refuse_torchs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

IGNORE_ATTRIBUTE = "_ddp_params_and_buffers_to_ignore"  # torch's name, set by users


@dataclass(frozen=True)
class Given:
    """The constructor's arguments as given, less module, group and mesh."""

    device_ids: Any
    output_device: Any
    broadcast_buffers: bool | None
    init_sync: bool
    bucket_cap_mb: float | None
    bucket_cap_mb_list: Sequence[float] | None
    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    forward_sync_buffers: bool | None
    unsynced: object
    unsupported: Mapping[str, object]


@dataclass(frozen=True)
class Checked:
    """What a `DataParallel` is built from, once nothing is wrong with it."""

    replica: Replica
    devices: Devices
    config: ReducerConfig
    forward_sync: bool  # broadcast module buffers before forwards
    init_buffers: bool  # broadcast module buffers at construction
    unsynced: Unsynced


def check(module: nn.Module, given: Given) -> Checked:
    """All checks that need no other rank, in torch's order.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: see the parts.
    """
    refuse_unsupported(given.unsupported)
    replica = examine(module)
    devices = check_devices(replica.parameters, given.device_ids, given.output_device)
    forward_sync, init_buffers = buffer_flags(
        broadcast_buffers=given.broadcast_buffers,
        forward_sync_buffers=given.forward_sync_buffers,
    )
    if given.check_reduction:
        warnings.warn(
            "The argument `check_reduction` is deprecated and ignored.",
            FutureWarning,
            stacklevel=3,
        )
    check_data(replica.parameters)
    caps = bucket_caps(
        given.bucket_cap_mb, given.bucket_cap_mb_list, default_first_bucket_bytes()
    )
    config = ReducerConfig(
        caps,
        bool(given.find_unused_parameters),
        bool(given.static_graph),
        bool(given.gradient_as_bucket_view),
    )
    refuse_torchs(module, devices.device)
    return Checked(
        replica,
        devices,
        config,
        forward_sync,
        init_buffers,
        unsynced_policy(given.unsynced),
    )


def some_device(module: object) -> torch.device:
    """Where a module lives, or would: for messages sent although checks failed."""
    if isinstance(module, nn.Module):
        for tensor in module.parameters():
            if not tensor.is_meta:
                return tensor.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_group(
    process_group: ProcessGroup | None, device_mesh: DeviceMesh | None
) -> ProcessGroup:
    """The group to reduce over.

    Raises:
        RuntimeError: both arguments given, or a mesh of several dimensions.
        ValueError: no default group, or this process is not a member.
        TypeError: not a process group.
    """
    if process_group is not None and device_mesh is not None:
        raise RuntimeError(
            "Cannot specify both process_group and device_mesh arguments."
        )
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {device_mesh}."
            )
        return device_mesh.get_group(mesh_dim=0)
    if process_group is None:
        return default_group()
    if not is_group(process_group):
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup of which this "
            f"process is a member, but got {process_group!r} "
            f"({type(process_group).__name__})."
        )
    return process_group


def refuse_unsupported(arguments: Mapping[str, object]) -> None:
    """Arguments of torch's DDP that minidp does not have yet.

    Raises:
        ValueError: one of the delayed all-reduce arguments without the other.
        NotImplementedError: any of them is used.
    """
    delayed = arguments["delay_all_reduce_named_params"] is not None
    if delayed != (arguments["param_to_hook_all_reduce"] is not None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be "
            "set at the same time."
        )
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"minidp.DataParallel does not support {name} yet; leave it at its "
                "default, or use torch's DistributedDataParallel for this model."
            )


@dataclass(frozen=True)
class Replica:
    """The parts of a module that take part in synchronisation."""

    parameters: Mapping[str, nn.Parameter]  # frozen ones included
    managed: Mapping[str, nn.Parameter]  # trainable, in parameter-index order
    sparse: frozenset[str]  # names of managed parameters with sparse gradients
    ignored: frozenset[str]

    @property
    def specs(self) -> list[ParamSpec]:
        """The managed parameters, as the layout sees them."""
        return [
            ParamSpec(
                name,
                tuple(param.shape),
                tuple(param.stride()),
                param.dtype,
                param.device,
                name in self.sparse,
            )
            for name, param in self.managed.items()
        ]


def examine(module: nn.Module) -> Replica:
    """Find what takes part: everything that is not on the module's ignore list.

    A root-level parameter may be listed as ``w`` or ``.w``.

    Raises:
        TypeError: not a module.
        RuntimeError: nothing is trainable.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, but got {type(module).__name__}."
        )
    listed = frozenset(getattr(module, IGNORE_ATTRIBUTE, ()))
    ignored = frozenset(name.removeprefix(".") for name in listed)
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    if ignored - known:
        warnings.warn(
            "The module's ignore list names parameters or buffers that it does not "
            f"have: {', '.join(sorted(ignored - known))}.",
            stacklevel=4,
        )
    parameters = {n: p for n, p in module.named_parameters() if n not in ignored}
    managed: dict[str, nn.Parameter] = {}
    sparse = set()
    seen: set[int] = set()
    for name, owner, param in _owned_parameters(module):
        if name in ignored or id(param) in seen or not param.requires_grad:
            continue
        seen.add(id(param))
        managed[name] = param
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse:
            sparse.add(name)
    if not managed:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any "
            "parameter that requires a gradient. (Every parameter of this module is "
            "frozen or on the ignore list.)"
        )
    return Replica(parameters, managed, frozenset(sparse), ignored)


def check_data(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that cannot be broadcast or reduced.

    Raises:
        RuntimeError: uninitialized (lazy) or meta parameters.
        NotImplementedError: DTensor parameters.
    """
    lazy = [n for n, p in parameters.items() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with "
            "`DataParallel`. Run a dummy forward pass to correctly initialize the "
            f"modules. Uninitialized: {', '.join(lazy)}."
        )
    meta = [name for name, param in parameters.items() if param.is_meta]
    if meta:
        raise RuntimeError(
            "Parameters on the meta device have no data to synchronise: "
            f"{', '.join(meta)}. Materialise them first, for example with "
            "module.to_empty(device=...) and an initialisation."
        )
    dtensors = [n for n, p in parameters.items() if type(p.data).__name__ == "DTensor"]
    if dtensors:
        raise NotImplementedError(
            "minidp.DataParallel does not support DTensor parameters yet: "
            f"{', '.join(dtensors)}."
        )


def _owned_parameters(
    module: nn.Module,
) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    for prefix, owner in module.named_modules():
        for short, param in owner.named_parameters(recurse=False):
            yield (f"{prefix}.{short}" if prefix else short), owner, param


@dataclass(frozen=True)
class Devices:
    """Where the module lives and where inputs go."""

    device_ids: list[int] | None  # None: inputs are not moved
    output_device: int | None
    device: torch.device  # of the first parameter
    is_multi_device: bool


def check_devices(
    parameters: Mapping[str, nn.Parameter], device_ids: Any, output_device: Any
) -> Devices:
    """Check ``device_ids`` and ``output_device`` against the module.

    Raises:
        ValueError: several device ids, several device types, or ids for a module that
            is not on a single accelerator.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            "device_ids can only be None or contain a single element, but got "
            f"{device_ids}."
        )
    devices = list(dict.fromkeys(param.device for param in parameters.values()))
    types = {device.type for device in devices}
    if len(types) != 1:
        raise ValueError(
            "DataParallel's input module must be on the same type of devices, but "
            f"input module parameters locate in {types}."
        )
    first = devices[0]
    is_multi = len(devices) > 1
    if not device_ids or first.type == "cpu" or is_multi:
        if device_ids or (output_device is not None and output_device != "cpu"):
            raise ValueError(
                "DataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got "
                f"device_ids {device_ids}, output_device {output_device}, and module "
                f"parameters on {sorted(map(str, devices))}. Leave both at None here."
            )
        return Devices(None, None, first, is_multi)
    moved_to = _index(device_ids[0])
    output = moved_to if output_device is None else _index(output_device)
    return Devices([moved_to], output, first, is_multi)


def _index(device: Any) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    if index is None:
        raise ValueError(f"A device with an index was expected, but got {device!r}.")
    return int(index)


def buffer_flags(
    *, broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> tuple[bool, bool]:
    """(broadcast before forwards, broadcast at construction), with torch's warnings."""
    if broadcast_buffers is None:
        return (True if forward_sync_buffers is None else forward_sync_buffers), True
    if forward_sync_buffers is None:
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` for the "
            "broadcasts before forwards; construction then always broadcasts.",
            FutureWarning,
            stacklevel=4,
        )
        return broadcast_buffers, broadcast_buffers
    warnings.warn(
        "Both `broadcast_buffers` and `forward_sync_buffers` were specified; "
        "`broadcast_buffers` is deprecated and ignored.",
        FutureWarning,
        stacklevel=4,
    )
    return forward_sync_buffers, True


def move_inputs(value: Any, device: torch.device) -> Any:
    """Move tensors (also inside tuples, lists, dicts) to ``device``; keep the rest."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return value.to(device)  # type: ignore[arg-type]  # also takes devices
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move_inputs(item, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(move_inputs(item, device) for item in value)
    if isinstance(value, dict):
        return type(value)((k, move_inputs(item, device)) for k, item in value.items())
    return value


def module_buffers(module: nn.Module, ignored: frozenset[str]) -> dict[str, Any]:
    """Module buffers that take part, non-persistent ones included."""
    return {n: b for n, b in module.named_buffers() if n not in ignored}
