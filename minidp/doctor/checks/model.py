"""Check devices, replicas, batch norm, unused parameters and seeds of a model."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel

from minidp import accelerator, randomness
from minidp.attachment import attached_to, straight_on
from minidp.config import hint_from_outside
from minidp.core import find_tensors, reachable_nodes
from minidp.doctor.findings import Finding, failed, ok, skipped, warning
from minidp.doctor.words import differing, in_words, join
from minidp.replica import sum_of_bits

from .ranks import digest_of_states, judge_streams

SMALL_BATCH = 16  # with fewer samples per rank, statistics of batch norm are noisy
Facts = Mapping[int, Mapping[str, Any]]  # results of `read_model` by rank


def synchroniser(model: nn.Module) -> nn.Module | None:
    """Return the DDP object of a model (itself, or one attached to it), or None."""
    is_wrapper = isinstance(model, DistributedDataParallel)
    return model if is_wrapper else attached_to(model)


def option(model: nn.Module, name: str, *, default: Any) -> Any:
    """Return an attribute of the model's DDP object, or ``default``."""
    # A compiled model has no DDP object here, but forwards attributes to it.
    wrapper = synchroniser(model)
    return getattr(model if wrapper is None else wrapper, name, default)


def wrapped_module(model: nn.Module) -> nn.Module:
    """Return the module inside a wrapper, or the model if it has none."""
    if not isinstance(model, DistributedDataParallel):
        return model
    module: nn.Module = model.module
    return module


def judge_devices(model: nn.Module, batch: Any) -> Iterator[Finding]:
    """Judge on which devices the model and the batch are."""
    module = wrapped_module(model)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if any(isinstance(child, LazyModuleMixin) for child in module.modules()):
        remedy = "run one forward on a batch before wrapping and checking"
        yield failed("the model has lazy modules: no shapes yet", remedy)
        return
    if not tensors:
        yield failed("the model has no parameters", "pass the model that is trained")
        return
    of_device: dict[torch.device, list[str]] = defaultdict(list)
    for name, tensor in tensors:
        of_device[tensor.device].append(name)
    yield judge_places(of_device)
    if len(of_device) == 1:
        (device,) = of_device
        yield from judge_own_gpu(device)
        elsewhere = {str(t.device) for t in find_tensors(batch) if t.device != device}
        if elsewhere and not option(model, "device_ids", default=None):
            found = f"the batch is on {join(elsewhere)}, the model on {device}"
            remedy = f"batch.to({str(device)!r}), or wrap with device_ids=[LOCAL_RANK]"
            yield failed(found, remedy)


def judge_places(of_device: Mapping[torch.device, list[str]]) -> Finding:
    """Judge where the tensors of a model are, from their names by device."""
    places = (
        f"{len(names)} on {device}" + f" ({join(names, 4)})" * (len(of_device) > 1)
        for device, names in of_device.items()
    )
    found = f"parameters and module buffers: {'; '.join(places)}"
    kinds = {device.type for device in of_device}
    if "meta" in kinds:
        remedy = (
            "call module.to_empty(device=...), then load values: tensors on meta have "
            "none"
        )
        return failed(found, remedy)
    if len(kinds) > 1:
        remedy = (
            "call model.to(device), and let __init__ register the tensors that it "
            "makes by register_buffer()"
        )
        return failed(found, remedy)
    if len(of_device) > 1:
        remedy = "meant as a model-parallel replica? then leave device_ids out"
        return warning(found, remedy)
    return ok(found)


def judge_own_gpu(device: torch.device) -> Iterator[Finding]:
    """Warn if the model is on another GPU than the one with the number LOCAL_RANK."""
    rank, count = os.environ.get("LOCAL_RANK", ""), accelerator.count()
    is_gpu = accelerator.has_streams(device) and count > 1 and rank.isdecimal()
    if is_gpu and device.index != int(rank):
        found = f"LOCAL_RANK is {rank}, but the model is on {device}"
        remedy = (
            "call torch.accelerator.set_device_index(LOCAL_RANK) first, then "
            f"model.to('{device.type}')"
        )
        yield warning(found, remedy)


def judge_batch_norm(module: nn.Module, batch: Any, world_size: int) -> Finding:
    """Warn if batch norm sees so few samples that its statistics are noisy."""
    synced = [m for m in module.modules() if isinstance(m, nn.SyncBatchNorm)]
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training]
    num_layers = len({*norms} - {*synced})
    if not num_layers:
        return ok("synchronised" if synced else "none in training mode")
    samples = next((len(t) for t in find_tensors(batch) if t.dim() > 0), None)
    found = f"BatchNorm layers: {num_layers}; samples per rank: {samples}"
    if world_size == 1:
        return ok(f"{found}; one rank")
    if samples is None:
        return skipped(found, "pass a batch, so that its size is known")
    if samples < SMALL_BATCH:
        remedy = (
            f"each normalises over {samples} samples, not {samples * world_size}, and "
            f"with fewer than {SMALL_BATCH} statistics are noisy: call model = "
            "minidp.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping"
        )
        return warning(found, remedy)
    return ok(found)


def check_unused(model: nn.Module, batch: Any) -> Finding:
    """Run one forward, and judge whether ``find_unused_parameters`` is set rightly.

    The graph of the outputs tells which parameters are used. Without the option the
    second step would raise if one is not; with it, but without need, each step is slow.
    """
    if batch is None:
        return skipped("needs a forward", "pass a batch to check_model")
    module = wrapped_module(model)
    try:
        is_many, is_dict = isinstance(batch, tuple | list), isinstance(batch, dict)
        given = tuple(batch) if is_many else () if is_dict else (batch,)
        buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
        with _as_it_was(module), straight_on(module), torch.enable_grad():
            named = batch if is_dict else None
            outputs = functional_call(module, buffers, given, named)
            reached = reachable_nodes(outputs)
    except Exception as error:
        remedy = "batch is what the model is called with: a tensor, a tuple or a dict"
        return failed(f"the forward raised {in_words(error)}", remedy)
    if not reached:
        return skipped("no tensor with a gradient found in what forward returns")
    params = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    with torch.enable_grad():
        unused = [n for n, p in params if get_gradient_edge(p).node not in reached]
    is_set = option(model, "find_unused_parameters", default=False)
    if unused and not is_set:
        remedy = (
            "the second step will raise: freeze or remove them, or wrap with "
            f"find_unused_parameters=True{hint_from_outside(find_unused_parameters=True)}"
        )
        found = f"{join(unused, 4)} of {len(params)} take no part in the outputs"
        return (warning if synchroniser(model) is None else failed)(found, remedy)
    if is_set and not unused:
        remedy = (
            "leave it out if no batch needs it, because it is slow (doctor.watch looks "
            "at many batches)"
        )
        found = "find_unused_parameters is set, but this batch uses every parameter"
        return warning(found, remedy)
    if is_set:
        return ok(f"{join(unused, 4)} take no part: find_unused_parameters is needed")
    return ok(f"none of {len(params)} in this batch")


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Let a forward in the block leave no trace, and wait for no other rank.

    SyncBatchNorm would communicate, so it is in eval mode meanwhile. Afterwards it and
    the random states are what they were.
    """
    norms = (m for m in module.modules() if isinstance(m, nn.SyncBatchNorm))
    synced = [layer for layer in norms if layer.training]
    try:
        for layer in synced:
            layer.training = False
        with randomness.kept():
            yield
    finally:
        for layer in synced:
            layer.training = True


def read_model(model: nn.Module) -> dict[str, Any]:
    """Return the facts of a model, for `COMPARED`.

    If its parameters cannot be read, "unreadable" says why.
    """
    module = wrapped_module(model)
    drops = [n for n, m in module.named_modules() if isinstance(m, _DropoutNd) and m.p]
    facts: dict[str, Any] = {
        "is_wrapped": synchroniser(model) is not None,
        "streams": digest_of_states(),
        "draws": f"dropout ({join(sorted(drops), 3)}) runs" if drops else "",
        "unreadable": "",
    }
    try:
        ignored = option(model, "parameters_to_ignore", default=())
        params = {n: p for n, p in module.named_parameters() if n not in ignored}
        facts["shapes"] = {
            name: f"{tuple(p.shape)}, {p.dtype}, trainable: {p.requires_grad}"
            for name, p in params.items()
        }
        facts["sums"] = {name: int(sum_of_bits(p)) for name, p in params.items()}
    except Exception as error:  # the check of devices has found the cause
        facts["unreadable"] = in_words(error)
    return facts


def judge_replicas(of_rank: Facts) -> Finding:
    """Judge whether the parameters of all ranks, except ignored ones, are the same.

    Before wrapping, other values are no mistake: the constructor copies rank 0's.
    """
    first, model = min(of_rank), of_rank[min(of_rank)]
    for rank, facts in of_rank.items():
        if facts["unreadable"]:
            return skipped(f"cannot be read on rank {rank}: {facts['unreadable']}")
    for rank, facts in of_rank.items():
        if names := differing([model["shapes"], facts["shapes"]]):
            found = f"rank {rank} has other parameters than rank {first}: {join(names)}"
            return failed(found, "build the same model on all ranks, in the same order")
    odd_values = {r: differing([model["sums"], f["sums"]]) for r, f in of_rank.items()}
    rank = next((rank for rank, names in odd_values.items() if names), first)
    if rank == first:
        return ok("the same values on all ranks")
    odd = join(odd_values[rank])
    found = f"rank {rank} has different values than rank {first} in {odd}"
    if not all(facts["is_wrapped"] for facts in of_rank.values()):
        return ok(f"{found}; wrapping brings rank 0's values to all (init_sync)")
    remedy = (
        "with init_sync=False seed all ranks alike before the model is made, or load "
        "the same checkpoint; after wrapping, change parameters on all ranks alike"
    )
    return failed(found, remedy)


COMPARED = {
    "replicas": judge_replicas,
    "random streams": judge_streams,
}
