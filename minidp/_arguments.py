"""The constructor's arguments: checks in torch's order, and what follows from them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ._groups import default_first_bucket_bytes, default_group, is_group
from ._managed import DETOUR, Replica, check_data, examine
from ._mixed_precision import Precision, precision_from
from ._overrides import replacements
from ._saved_layout import read_plain, resumed_layout
from ._warn import warn
from .config import ReducerConfig, Safety, bucket_caps, is_auto
from .sync_batchnorm import refuse_torchs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Given:
    """The constructor's arguments as given, less module, group and mesh."""

    device_ids: Any
    output_device: Any
    broadcast_buffers: bool | None
    init_sync: bool
    bucket_cap_mb: float | Literal["auto"] | None
    bucket_cap_mb_list: Sequence[float] | None
    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    batched_grad_copy: bool
    forward_sync_buffers: bool | None
    safety: Mapping[str, Any]  # arguments of `Safety`
    delayed: object  # delay_all_reduce_named_params
    delayed_until: object  # param_to_hook_all_reduce
    mixed_precision: object
    skip_all_reduce_unused_params: bool
    bucket_layout: object

    @property
    def delayed_by_name(self) -> dict[str, nn.Parameter]:
        """Parameters that travel last."""
        return check_delayed(self.delayed, self.delayed_until)


@dataclass(frozen=True)
class Checked:
    """What a `DataParallel` is built from, once nothing is wrong with it."""

    replica: Replica
    devices: Devices
    config: ReducerConfig
    forward_sync: bool  # broadcast module buffers before forwards
    init_buffers: bool  # broadcast module buffers at construction
    safety: Safety
    precision: Precision | None


def replaced(given: Given) -> Given:
    """The same with what the user says in environment variables (`_overrides`).

    Raises:
        ValueError: naming a variable that makes no sense.
    """
    others = replacements()
    safety = {name: others.pop(name) for name in given.safety if name in others}
    return replace(given, safety={**given.safety, **safety}, **others)


def check(module: nn.Module, given: Given) -> Checked:
    """All checks that need no other rank, in torch's order.

    Raises:
        ValueError, TypeError, RuntimeError: see the parts.
    """
    if getattr(getattr(module, DETOUR, None), "through", None) is not None:
        raise RuntimeError(
            "This module is synchronised already, by minidp.attach. What to do: call "
            "detach() of what attach() returned before it is wrapped."
        )
    replica = examine(module, given.delayed_by_name)
    devices = check_devices(replica.parameters, given.device_ids, given.output_device)
    forward_sync, init_buffers = buffer_flags(
        broadcast_buffers=given.broadcast_buffers,
        forward_sync_buffers=given.forward_sync_buffers,
    )
    if given.check_reduction:
        warn(
            "The argument `check_reduction` is deprecated and ignored.",
            FutureWarning,
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
        bool(given.skip_all_reduce_unused_params),
        bool(given.batched_grad_copy),
        os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1",
        None if given.bucket_layout is None else read_plain(given.bucket_layout),
        is_auto(given.bucket_cap_mb),
    )
    if config.saved_layout is not None:
        resumed_layout(config.saved_layout, replica.specs)
    refuse_torchs(module, devices.device)
    return Checked(
        replica,
        devices,
        config,
        forward_sync,
        init_buffers,
        Safety(**given.safety),
        precision_from(given.mixed_precision),
    )


def as_list(pairs: Any) -> Any:
    """An iterator can be read only once: what it gives. Others stay as they are."""
    return list(pairs) if isinstance(pairs, Iterator) else pairs


def check_delayed(delayed: Any, until: Any) -> dict[str, nn.Parameter]:
    """Parameters whose reduction comes last, by name.

    Args:
        delayed: pairs of names and parameters, or None.
        until: torch starts the reduction when this parameter's gradient arrives. Here
            it starts when all delayed gradients and all other buckets are there.

    Raises:
        ValueError: one of the two without the other.
        TypeError: not pairs of names and parameters, or not a parameter.
    """
    if (delayed is None) != (until is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be "
            "set at the same time."
        )
    pairs = list(delayed or ())
    for pair in pairs:
        if not (
            isinstance(pair, tuple | list)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], nn.Parameter)
        ):
            raise TypeError(
                "delay_all_reduce_named_params must be pairs (name, parameter), as "
                f"from named_parameters(), but got {_kinds(pair)}."
            )
    if until is not None and not isinstance(until, torch.Tensor):
        raise TypeError(
            f"param_to_hook_all_reduce must be a parameter, but got {until!r}."
        )
    return dict(pairs)


def _kinds(value: Any) -> str:
    """What a value is, without printing tensors."""
    if isinstance(value, tuple | list):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__


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
        if not (hasattr(device_mesh, "get_group") and hasattr(device_mesh, "ndim")):
            raise TypeError(
                "device_mesh must be a torch.distributed.device_mesh.DeviceMesh, but "
                f"got {device_mesh!r}."
            )
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
        return forward_sync_buffers is None or bool(forward_sync_buffers), True
    if forward_sync_buffers is None:
        warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` for the "
            "broadcasts before forwards; construction then always broadcasts.",
            FutureWarning,
        )
        return bool(broadcast_buffers), bool(broadcast_buffers)
    warn(
        "Both `broadcast_buffers` and `forward_sync_buffers` were specified; "
        "`broadcast_buffers` is deprecated and ignored.",
        FutureWarning,
    )
    return bool(forward_sync_buffers), True
