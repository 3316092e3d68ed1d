"""Who is measured: minidp and torch's DDP in their variants, and training without them.

Every function returns what `Implementation` wants: a wrap, module -> module.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minidp
from support.bound import BoundWatcher
from support.links import Link
from support.nets import Net
from support.progress import progress
from support.rounds import Contestant, Implementation, Where, Wrap

BARE = "no communication"
AFTER = "no overlap"
TORCH, TORCH_AGAIN = "torch", "torch again"
AUTO = "minidp auto"
LAST_CAP = {"DDP_SET_LAST_BUCKET_CAP": "1"}  # torch reads it at its rebuild
SETTLING = 52  # steps until the layout that bucket_cap_mb="auto" chose is in use


Carry = Callable[[torch.Tensor], torch.futures.Future[Any]]


def _all_reduce(values: torch.Tensor) -> torch.futures.Future[Any]:
    work = dist.all_reduce(values, async_op=True)
    assert work is not None
    return work.get_future()


def bare(module: nn.Module) -> nn.Module:
    """Nothing around the module: every rank trains for itself."""
    return module


def theirs(**options: Any) -> Wrap:
    """Torch's DDP."""
    return functools.partial(DistributedDataParallel, **options)


def ours(**options: Any) -> Wrap:
    """Minidp."""
    return functools.partial(minidp.DataParallel, **options)


class AfterBackward(nn.Module):
    """Averages all gradients in one all-reduce when the backward is over.

    Args:
        module: the replica; must be the same on all ranks already.
        carry: starts to add up a tensor over the ranks; None: an all-reduce.
    """

    def __init__(self, module: nn.Module, carry: Carry | None = None) -> None:
        super().__init__()
        self.module = module
        self._carry = carry or _all_reduce
        self._scale = 1 / dist.get_world_size()
        sizes = [param.numel() for param in module.parameters()]
        self._flat = torch.empty(sum(sizes), device=next(module.parameters()).device)
        self._parts = self._flat.split(sizes)

    def forward(self, *data: torch.Tensor) -> Any:
        """Whatever the module returns."""
        return self.module(*data)

    def finish_step(self) -> None:
        """Collective: average what the backward left."""
        params = list(self.module.parameters())
        for part, param in zip(self._parts, params, strict=True):
            torch.mul(param.grad.view(-1), self._scale, out=part)
        self._carry(self._flat).wait()
        for part, param in zip(self._parts, params, strict=True):
            param.grad.view(-1).copy_(part)


def has_batched_copy() -> bool:
    """Whether this torch knows the option (2.11 does not)."""
    known = inspect.signature(DistributedDataParallel).parameters
    return "batched_grad_copy" in known


def has_auto(**options: Any) -> bool:
    """Collective: whether this minidp accepts ``bucket_cap_mb="auto"``."""
    module = nn.Linear(1, 1)
    if dist.get_backend(options.get("process_group")) == "nccl":
        module.cuda()
    try:
        ours(bucket_cap_mb="auto", **options)(module)
    except TypeError:  # every rank rejects it
        return False
    return True


def torch_variants() -> dict[str, tuple[Wrap, Mapping[str, str]]]:
    """Torch's DDP with a wrap and an environment for each variant."""
    variants: dict[str, tuple[Wrap, Mapping[str, str]]] = {
        TORCH: (theirs(), {}),
        TORCH_AGAIN: (theirs(), {}),
        "torch view": (theirs(gradient_as_bucket_view=True), {}),
        "torch batched copy": (theirs(batched_grad_copy=True), {}),
        "torch last bucket cap": (theirs(), LAST_CAP),
    }
    if not has_batched_copy():
        del variants["torch batched copy"]
    return variants


def against_torch(
    name: str, wrap: Wrap, world_size: int, **more: Any
) -> Implementation:
    """An implementation whose gradients are compared with torch's default.

    A sum of two is the same in any order, so up to two ranks every bit must be. From
    three ranks on, where an element lies in its bucket decides the order.
    """
    is_same_layout = name in (TORCH, TORCH_AGAIN, "minidp")
    is_exact = world_size <= 2 or is_same_layout
    return Implementation(name, wrap, TORCH, is_exact=is_exact, **more)


def bounded(
    everyone: Sequence[Implementation], link: Link | None
) -> list[Implementation]:
    """The same; each step of those that communicate is held against its own bound."""
    if link is None:
        return list(everyone)
    watcher = functools.partial(BoundWatcher, link=link)
    return [
        each if each.name == BARE else dataclasses.replace(each, watcher=watcher)
        for each in everyone
    ]


def search(net: Net, where: Where, steps: int) -> Mapping[str, Any]:
    """Collective: the layout that ``bucket_cap_mb="auto"`` chooses.

    Nothing else runs meanwhile. What is timed later starts with it, so that all who are
    called auto have the same one.

    Args:
        net: the model, on the device.
        where: on which ranks.
        steps: until it has chosen.
    """
    contestant = Contestant(auto(ours, where.world_size), net, where)
    rank = dist.get_rank(where.group)
    with progress(rank, "auto searches", steps) as advance:
        for step in range(steps):
            generator = torch.Generator().manual_seed(step * where.world_size + rank)
            data = net.data(generator)
            contestant.warm_up([each.to(where.device) for each in data])
            advance()
    layout: Mapping[str, Any] = contestant.bucket_layout
    return layout


def auto(wrap_of: Callable[..., Wrap], world_size: int, **more: Any) -> Implementation:
    """Minidp that chooses its layout by itself, in its first `SETTLING` steps."""
    wrap = wrap_of(bucket_cap_mb="auto")
    return against_torch(AUTO, wrap, world_size, settling=SETTLING, **more)
