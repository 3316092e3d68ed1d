"""Runs tests that were written for one GPU per rank on the CPU.

Only where things are placed is changed: moves to a GPU do nothing, tensors asked for on
a GPU are made on the CPU, streams and events of an accelerator do nothing, the
constructor's `device_ids` and `output_device` are left out, and "needs a GPU" is no
reason to skip. No assertion is touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.testing._internal import common_distributed

_FACTORIES = (
    "arange", "empty", "eye", "full", "ones", "rand", "randint", "randn", "tensor",
    "zeros",
)  # fmt: skip


def lift_gpu_skips() -> None:
    """Call it before torch's test module is imported: its decorators decide then."""
    common_distributed.skip_if_no_gpu = lambda test: test
    common_distributed.skip_if_lt_x_gpu = lambda _gpus, **_: lambda test: test
    common_distributed.requires_nccl = lambda: lambda test: test
    # One "GPU" per rank, under the rank's own number.
    common_distributed.init_multigpu_helper = lambda world_size, _backend: {
        rank: [rank] for rank in range(world_size)
    }


def place_on_cpu() -> None:
    """Patch torch in this process, once all imports are over.

    Some modules compile functions when they are imported, and would find the patches.
    """
    _move_nothing()
    _make_on_cpu()
    _silence_cuda()


def leave_out_devices(wrapper: type[nn.Module]) -> None:
    """Let a wrapper be constructed with the devices of a GPU, on a CPU model."""
    construct = wrapper.__init__

    @functools.wraps(construct)
    def construct_on_cpu(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        # The tests pass both by name.
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        construct(self, *args, **kwargs)

    wrapper.__init__ = construct_on_cpu


def _move_nothing() -> None:
    torch.Tensor.cuda = lambda self, *_, **__: self
    nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.to = _with_places_on_cpu(torch.Tensor.to)
    nn.Module.to = _with_places_on_cpu(nn.Module.to)


def _make_on_cpu() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _with_places_on_cpu(getattr(torch, name)))


def _with_places_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    is_method = function.__name__ == "to"

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if is_method and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], "cpu", *args[2:])
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return on_cpu


def _is_gpu(place: Any) -> bool:
    if isinstance(place, int):  # `.to(rank)`
        return not isinstance(place, bool)
    if isinstance(place, torch.device):
        return place.type == "cuda"
    return isinstance(place, str) and place.startswith("cuda")


def _silence_cuda() -> None:
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: 0
    for name in ("device", "stream"):
        setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    # Without an accelerator all of these raise, also where torch's DDP uses them.
    torch.Stream = torch.Event = torch.cuda.Stream = _InOrder
    torch.accelerator.current_stream = _InOrder


class _InOrder:
    """A stream, or an event on one, of a device that does one thing after another."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _InOrder:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, *_: Any, **__: Any) -> None:
        pass

    record = synchronize = wait_event = wait_stream = wait

    def record_event(self, *_: Any) -> _InOrder:
        return self
