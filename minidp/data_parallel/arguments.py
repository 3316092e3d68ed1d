"""Check the constructor's arguments, in torch's order, without communication.

A rank whose arguments are refused must not leave the others waiting. So all checks are
made before anything is sent, and the constructor then tells the others why it leaves.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import ParamSpec

from minidp import accelerator, logical
from minidp.comm import (
    ProcessGroup,
    default_first_bucket_bytes,
    default_group,
)
from minidp.config import AUTO, OwnOptions, ReducerConfig, bucket_caps
from minidp.console import warn
from minidp.layout import read_plain, resumed_layout
from minidp.logical import LogicalOptions
from minidp.replica import (
    DETOUR,
    ManagedParameters,
    check_data,
    check_writable,
    examine,
)
from minidp.shared_memory import sharing_mode
from minidp.sync_batchnorm import SyncBatchNorm, refuse_torchs
from minidp.torch_compat import refuse_python_reducer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Given = ParamSpec("Given")
_NOT_KEPT = ("self", "module", "dim", "process_group", "device_mesh")
_FLAGS = (
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
    "lazy_bucket_allocation",
)
_OTHER_FLAGS = (
    *("init_sync", "broadcast_buffers", "forward_sync_buffers"),
    "check_finite_grads",
)


def suggesting(init: Callable[Given, None]) -> Callable[Given, None]:
    """Let a constructor's error about an unknown argument name the one that was meant.

    Nobody should have to search a table for a typo such as ``hang_timout=3``. Python's
    own error names it from 3.13 on.
    """
    known = list(inspect.signature(init).parameters)

    @functools.wraps(init)
    def suggested(*given: Given.args, **options: Given.kwargs) -> None:
        for name in options:
            if name not in known:
                meant = difflib.get_close_matches(name, known, n=1)
                hint = f". Did you mean {meant[0]!r}?" if meant else ""
                raise TypeError(
                    f"{init.__qualname__}() got an unexpected keyword argument "
                    f"{name!r}{hint}"
                )
        init(*given, **options)

    return suggested


def keep(values: Mapping[str, Any]) -> SimpleNamespace:
    """Return the options of the constructor, from its ``locals()``, in a namespace.

    The arguments that a copy does not take over are left out. An iterator in
    ``delay_all_reduce_named_params`` becomes a list, because copies read it again.
    """
    given = {name: values[name] for name in values if name not in _NOT_KEPT}
    pairs = given["delay_all_reduce_named_params"]
    if isinstance(pairs, Iterator):  # it can be read only once
        given["delay_all_reduce_named_params"] = list(pairs)
    return SimpleNamespace(**given)


class Devices(NamedTuple):
    """The checked device arguments, and the device of the first parameter."""

    device_ids: list[int] | None  # with None, inputs are not moved to `device`
    output_device: int | None  # for logging only: outputs are not moved
    device: torch.device  # of the first parameter
    is_multi_device: bool


@dataclass(frozen=True)
class Arguments:
    """The checked arguments of the constructor, of which `parts.build` makes parts."""

    replica: ManagedParameters
    devices: Devices
    config: ReducerConfig
    forward_sync: bool  # broadcast module buffers before forwards
    init_buffers: bool  # broadcast module buffers at construction
    own: OwnOptions
    logical: LogicalOptions | None

    @property
    def compared(self) -> dict[str, object]:
        """The options that must be equal on all ranks, under their names in errors."""
        config = self.config
        return {
            "find_unused_parameters": config.find_unused_parameters,
            "static_graph": config.static_graph,
            "bucket caps (bytes)": config.caps,
            "module buffers are broadcast at construction": self.init_buffers,
            "module buffers are broadcast before forwards": self.forward_sync,
            "skip_all_reduce_unused_params": config.skip_all_reduce_unused_params,
            "delayed": sorted(self.replica.delayed),
            "bucket_layout": config.saved_layout,
            "check_replicas_every": self.own.check_replicas_every,
            "average_over": self.own.average_over,
            "logical_ranks": self.logical and self.logical.compared,
            "audit_every": self.own.audit_steps,
            "audit_action": self.own.audit_action,
        }


def check(module: nn.Module, given: SimpleNamespace) -> Arguments:
    """Validate what `keep` has returned, and the module.

    This reads the file of ``bucket_layout``, and warns of what torch deprecates.

    Raises:
        TypeError, ValueError, RuntimeError: An argument or the module is bad. Where
            torch refuses it, too, the class of the error is torch's.
    """
    if getattr(getattr(module, DETOUR, None), "through", None) is not None:
        raise RuntimeError(
            "This module is synchronised already, by minidp.attach. What to do: call "
            "detach() of what attach() returned before it is wrapped."
        )
    sharing_mode()  # raise for a wrong word where other ranks are told
    names = (*_FLAGS, *_OTHER_FLAGS)
    flags = {name: _flag(name, getattr(given, name)) for name in names}
    replica = examine(module, delayed_parameters(given))
    devices = _check_devices(replica.parameters, given.device_ids, given.output_device)
    forward_sync, init_buffers = _buffer_flags(given)
    _refuse_mixed_precision(given.mixed_precision)
    refuse_python_reducer()
    if given.check_reduction:
        warn("The argument `check_reduction` is deprecated and ignored.", FutureWarning)
    check_data(replica.parameters)
    if flags["init_sync"]:
        check_writable(replica.parameters)
    if init_buffers and flags["init_sync"]:
        buffers = module.named_buffers()
        check_writable({n: b for n, b in buffers if n not in replica.ignored})
    _warn_of_wrappers_inside(replica)
    own = OwnOptions(**{f.name: getattr(given, f.name) for f in fields(OwnOptions)})
    layout = given.bucket_layout
    of_config: dict[str, Any] = {name: flags[name] for name in _FLAGS}
    config = ReducerConfig(
        caps=bucket_caps(
            default_first_bucket_bytes(),
            bucket_cap_mb=given.bucket_cap_mb,
            bucket_cap_mb_list=given.bucket_cap_mb_list,
        ),
        last_is_small=os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1",
        saved_layout=None if layout is None else read_plain(layout),
        tunes=given.bucket_cap_mb == AUTO,
        averages_items=own.average_over == "items",
        **of_config,
    )
    if config.saved_layout is not None:
        resumed_layout(config.saved_layout, replica.specs)
    refuse_torchs(module, devices.device)
    return Arguments(
        replica=replica,
        devices=devices,
        config=config,
        forward_sync=forward_sync,
        init_buffers=init_buffers,
        own=own,
        logical=_logical(given, replica, forward_sync=forward_sync),
    )


def _logical(
    given: SimpleNamespace, replica: ManagedParameters, *, forward_sync: bool
) -> LogicalOptions | None:
    """Return the options of logical ranks, or None without any.

    Raises:
        TypeError, ValueError: The argument is bad, or something does not go with it.
    """
    if given.logical_ranks is None:
        if given.audit_every:
            raise ValueError(
                "audit_every needs logical_ranks: only a logical rank has the same bits"
                " on any rank, so that another one can compute it again. What to do: "
                "pass logical_ranks, too, or leave audit_every out."
            )
        return None
    options = logical.read(given.logical_ranks, torch.initial_seed())
    named = dict(replica.module.named_buffers())
    has_buffers = any(name not in replica.ignored for name in named)
    layers = [*replica.module.modules()]
    norms = any(isinstance(layer, nn.SyncBatchNorm | SyncBatchNorm) for layer in layers)
    for is_wanted, name, why in (
        (
            any(s.sparse and s.device.type != "cpu" for s in replica.specs),
            "a sparse gradient on an accelerator",
            "nobody has tried yet",
        ),
        (norms, "SyncBatchNorm", "needs the batches of all logical ranks at once"),
        (
            any(isinstance(layer, DistributedDataParallel) for layer in layers),
            "a DistributedDataParallel inside the module",
            "averages over ranks in the turn of each logical rank",
        ),
        (
            has_buffers and not forward_sync,
            "forward_sync_buffers=False",
            "would give each rank the module buffers of other logical ranks",
        ),
    ):
        if is_wanted:
            raise ValueError(
                f"logical_ranks does not go with {name}, which {why}. What to do: "
                "leave one of the two out."
            )
    return options


def _flag(name: str, value: object) -> bool:
    """Return a flag as a bool, by the rule of torch's own constructor.

    Torch takes whatever is true or false by itself: numbers, numpy's bools, tensors of
    one element, None. A text is refused here, because "no" would count as true.
    """
    if value is not None and not hasattr(type(value), "__bool__"):
        raise TypeError(
            f"{name} must be True or False, but got {value!r} ({type(value).__name__})."
        )
    return bool(value)


def _refuse_mixed_precision(value: object) -> None:
    if value is not None:
        raise ValueError(
            f"mixed_precision must be None, but got {value!r}: minidp does not have "
            "this private option of torch. What to do: run the forward and the loss "
            "inside torch.autocast, which casts what the module computes. To send 16 "
            "bits for each gradient, call register_comm_hook(None, minidp.comm_hooks."
            "bf16_compress_hook)."
        )


def _warn_of_wrappers_inside(replica: ManagedParameters) -> None:
    """Warn if a part of the module, or all of it, is a wrapper that averages the same.

    A wrapper is right inside another one if each parameter is on the ignore list of one
    of them, for example because the two average over different ranks.
    """
    kinds = (DistributedDataParallel, nn.DataParallel)  # minidp's count as the former
    module, ours = replica.module, {id(param) for param in replica.managed.values()}
    for name, part in module.named_modules():
        if not isinstance(part, kinds):
            continue
        named = part.module.named_parameters()
        ignored = getattr(part, "parameters_to_ignore", ())
        if any(id(p) in ours and n not in ignored for n, p in named):
            where = f"its part {name}" if name else "the module"
            warn(
                f"{type(module).__name__} is wrapped although {where} is a wrapper "
                f"({type(part).__name__}): its gradients are averaged by both, which "
                "costs twice the communication and changes nothing. What to do: wrap "
                "the model once, with everything that it trains."
            )
            return


def delayed_parameters(given: SimpleNamespace) -> dict[str, nn.Parameter]:
    """Return ``delay_all_reduce_named_params`` as a dict, which is empty for None.

    Raises:
        ValueError: Only one of it and ``param_to_hook_all_reduce`` is given.
        TypeError: It does not consist of pairs (name, parameter), or the other argument
            is no tensor.
    """
    delayed, until = given.delay_all_reduce_named_params, given.param_to_hook_all_reduce
    if (delayed is None) != (until is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be "
            "set at the same time."
        )
    pairs = list(delayed or ())
    for pair in pairs:
        parts = pair if isinstance(pair, tuple | list) else (pair,)
        kinds = (str, nn.Parameter)
        if len(parts) != 2 or not all(map(isinstance, parts, kinds)):
            found = ", ".join(type(part).__name__ for part in parts)
            raise TypeError(
                "delay_all_reduce_named_params must be pairs (name, parameter), as "
                f"from named_parameters(), but got ({found})."
            )
    if until is not None and not isinstance(until, torch.Tensor):
        raise TypeError(
            f"param_to_hook_all_reduce must be a parameter, but got {until!r}."
        )
    return dict(pairs)


def some_device(module: object) -> torch.device:
    """Return a device on which to send the other ranks the error of a failed check."""
    params = module.parameters() if isinstance(module, nn.Module) else ()
    found = (param.device for param in params if not param.is_meta)
    return next(found, None) or accelerator.default_device()


def choose_group(
    process_group: ProcessGroup | None, device_mesh: DeviceMesh | None
) -> ProcessGroup:
    """Return the given group, that of a mesh, or the default group without either.

    Raises:
        RuntimeError: Both are given, or the mesh has several dimensions.
        TypeError: An argument is something else.
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
    if not isinstance(process_group, ProcessGroup):
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup of which this "
            f"process is a member, but got {process_group!r} "
            f"({type(process_group).__name__})."
        )
    return process_group


def expose_local_tensors(module: nn.Module, mesh: DeviceMesh) -> None:
    """Turn a module's DTensor parameters into local tensors, except in its forward.

    This is done only if the mesh is a slice of a larger one.
    """
    if mesh._get_root_mesh() != mesh:
        ddp: Any = importlib.import_module("torch.distributed.tensor.parallel.ddp")
        ddp._pre_dp_module_transform(module)


def _check_devices(
    parameters: Mapping[str, nn.Parameter], device_ids: Any, output_device: Any
) -> Devices:
    """Check the device arguments against the devices of the parameters.

    Raises:
        ValueError: There are several ``device_ids``. Or the parameters are on several
            types of device. Or a device is given though the parameters are on the CPU
            or on several devices.
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
    is_multi = len(devices) > 1
    if device_ids and types != {"cpu"} and not is_multi:
        inputs = _index(device_ids[0])
        output = inputs if output_device is None else _index(output_device)
        return Devices([inputs], output, devices[0], is_multi)
    if device_ids or (output_device is not None and output_device != "cpu"):
        raise ValueError(
            "DataParallel device_ids and output_device arguments only work with "
            "single-device/multiple-device GPU modules or CPU modules, but got "
            f"device_ids {device_ids}, output_device {output_device}, and module "
            f"parameters on {sorted(map(str, devices))}. Leave both at None here."
        )
    return Devices(None, None, devices[0], is_multi)


def _index(device: Any) -> int:
    """Return the index of a device, which is 1 for "cuda:1".

    Raises:
        ValueError: The device has no index.
    """
    index = device if isinstance(device, int) else torch.device(device).index
    if index is None:
        raise ValueError(f"A device with an index was expected, but got {device!r}.")
    return int(index)


def _buffer_flags(given: SimpleNamespace) -> tuple[bool, bool]:
    """Return whether module buffers are broadcast before forwards, and at construction.

    If ``broadcast_buffers`` alone is given, it decides on both. Otherwise they are
    broadcast at construction, and before forwards unless ``forward_sync_buffers`` is
    false. As in torch, ``broadcast_buffers`` gets a FutureWarning.
    """
    old, new = given.broadcast_buffers, given.forward_sync_buffers
    if old is not None and new is None:
        warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` for the "
            "broadcasts before forwards; construction then always broadcasts.",
            FutureWarning,
        )
        return bool(old), bool(old)
    if old is not None:
        warn(
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified; "
            "`broadcast_buffers` is deprecated and ignored.",
            FutureWarning,
        )
    return new is None or bool(new), True
