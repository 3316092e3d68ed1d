"""What carries the messages of a group: its backends, their devices and errors."""

from __future__ import annotations

import builtins
import re
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from minidp.accelerator import has_streams

from .groups import ProcessGroup
from .work import is_python_group

# What a collective that fails may raise: c10d's errors are RuntimeErrors, and a
# TimeoutError is an OSError.
OF_COLLECTIVES = (RuntimeError, OSError)
_IN_CALLBACK = re.compile(r"when running the callback: (\w+)")


def may_come_from_collective(error: BaseException | None) -> bool:
    """Return whether a collective may have raised an error that a comm hook ended with.

    If not, a line of the hook has. Torch makes a RuntimeError of what the callback of a
    future raises, and its text names the type.
    """
    text = ""
    with suppress(Exception):  # the text of a user's error may raise
        text = str(error)
    in_callbacks = _IN_CALLBACK.findall(text)
    if not isinstance(error, OF_COLLECTIVES) or not in_callbacks:
        return isinstance(error, OF_COLLECTIVES)
    first = in_callbacks[-1]  # the others are callbacks of callbacks
    kind = getattr(builtins, first, None) or getattr(dist, first, None)
    return isinstance(kind, type) and issubclass(kind, OF_COLLECTIVES)


def backend_name(group: ProcessGroup) -> str:
    """Return the name of a group's backend, e.g. "gloo" or "cpu:gloo,cuda:nccl".

    It is "undefined" if the group was created without the name of a backend. A group
    that torch does not know is asked for its own ``name()``.
    """
    is_known = group in c10d._world.pg_map
    return str(dist.get_backend(group) if is_known else group.name())


def _backends(group: ProcessGroup) -> set[str]:
    """Return the names of a group's backends for all device types, e.g. {"gloo"}."""
    config = dist.get_backend_config(group)
    return {each.rpartition(":")[2] for each in config.split(",")}


def is_timed(group: ProcessGroup, device: torch.device | None = None) -> bool:
    """Return whether the host can wait for a group's collectives with a time limit.

    It can on Gloo. A group that is written in Python has no such wait, and one rank
    waits for nobody.

    Args:
        group: The group.
        device: Where the tensors lie that travel. Without it they may lie anywhere, so
            that all of the group's backends have to be Gloo.
    """
    if group.size() == 1 or is_python_group(group):
        return False
    names = _backends(group) if device is None else {backend_of(group, device)}
    return names == {"gloo"}


def streams_wait(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether streams wait for a group's collectives on a device, and no host.

    Of a group that is written in Python nobody knows it.
    """
    if not has_streams(device) or is_python_group(group):
        return False
    return backend_of(group, device) != "gloo"


def backend_of(group: ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend for a device, or "" if the group has none for it.

    A group that was made without the name of a backend has one for each type of device,
    such as "cpu:gloo,cuda:nccl".
    """
    pairs = (each.split(":") for each in dist.get_backend_config(group).split(","))
    return {pair[0]: pair[-1] for pair in pairs}.get(device.type, "")


def is_plain_gloo(group: ProcessGroup) -> bool:
    """Return whether Gloo itself, not a class around it, reduces CPU tensors."""
    if is_python_group(group) or not dist.is_gloo_available():
        return False
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # none for CPU
        return False
    return type(backend) is dist.ProcessGroupGloo


def is_builtin(group: ProcessGroup) -> bool:
    """Return whether a group has several ranks and only backends that torch ships."""
    if group.size() == 1 or group not in c10d._world.pg_map:
        return False  # torch does not know the backends of a Python group
    return _backends(group) <= {"gloo", "nccl", "mpi", "ucc", "xccl"}


def sends_from_cpu(group: ProcessGroup) -> bool:
    """Return whether a group has a backend that sends tensors of the CPU."""
    if is_python_group(group):
        meta = torch.device("meta")
        return exchange_device(group, meta) != meta
    return torch.device("cpu") in group._device_types


def exchange_device(group: ProcessGroup, fallback: torch.device) -> torch.device:
    """Return the device on which a small message for this group should lie.

    It is the CPU if the backend can send from there, and ``fallback`` otherwise.
    """
    of_cpu, backend = ("gloo", "mpi", "ucc", "threaded"), backend_name(group)
    can = any(name in backend for name in of_cpu)
    return torch.device("cpu") if can else fallback


def group_timeout(group: ProcessGroup) -> timedelta:
    """Return the timeout of a group's collectives, or 30 minutes if it tells none."""
    with suppress(AttributeError, RuntimeError):  # a group that is written in Python
        # The CPU comes first: the host can wait for that backend.
        for device in sorted(group._device_types, key=lambda each: each.type != "cpu"):
            with suppress(AttributeError, RuntimeError):  # a backend without options
                return group._get_backend(device).options._timeout
    return timedelta(minutes=30)
