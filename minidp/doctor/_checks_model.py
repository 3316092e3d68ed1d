"""``doctor.check_model``: devices, replicas, batch norm, unused parameters, seeds."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from minidp._autograd import find_tensors, reachable_nodes
from minidp._desync import sum_of_bits
from minidp._overrides import aside
from minidp.attachment import straight_on

from ._checks_ranks import judge_owners, uuid_of
from ._consultation import (
    Consultation,
    Facts,
    collect,
    option,
    synchroniser,
    wrapped_module,
)
from ._findings import Finding, Report, failed, join, ok, skipped, warning
from ._random_streams import digest_of_states, dropouts, judge_streams, untouched

SMALL_BATCH = 16  # samples per rank below which batch norm's statistics are noisy


def examine_model(model: nn.Module, batch: Any, group: Any, seconds: float) -> Report:
    """All checks of a model; see `doctor.check_model`."""
    consultation = Consultation("minidp doctor: the model", group, seconds)
    module = wrapped_module(model)
    world_size = consultation.world_size
    consultation.findings += collect(
        {
            "devices": lambda: judge_devices(model, batch),
            "batch norm": lambda: judge_batch_norm(module, batch, world_size),
            "unused parameters": lambda: check_unused(model, batch),
        }
    )
    facts: dict[str, Any] = {"is_wrapped": synchroniser(model) is not None}
    facts["dropouts"] = dropouts(module)
    facts["streams"] = digest_of_states()
    facts["host"] = socket.gethostname()
    try:
        ignored = option(model, "parameters_to_ignore", default=())
        facts["shapes"], facts["sums"] = describe(module, ignored)
        facts["gpu"] = _gpu_of(module)
    except Exception as error:  # devices have said more about it
        facts["shapes"], facts["sums"], facts["gpu"] = {}, {}, ""
        found = f"cannot be read: {type(error).__name__}: {error}"
        consultation.findings.append(skipped("replicas", found))
    return consultation.conclude(facts, _judge_ranks)


def _judge_ranks(of_rank: Mapping[int, Facts]) -> list[Finding]:
    drops = sorted({name for facts in of_rank.values() for name in facts["dropouts"]})
    who = f"dropout ({join(drops, 3)}) runs" if drops else ""
    streams = {rank: facts["streams"] for rank, facts in of_rank.items()}
    owners = {rank: (facts["host"], facts["gpu"]) for rank, facts in of_rank.items()}
    findings = [judge_replicas(of_rank), judge_streams(streams, who)]
    if any(gpu for _, gpu in owners.values()):
        findings.append(judge_owners(owners))
    return findings


# ------------------------------------------------------------------------- devices


def judge_devices(model: nn.Module, batch: Any) -> list[Finding]:
    """Where each parameter and module buffer is, and whether the batch is there too."""
    check, module = "devices", wrapped_module(model)
    if any(isinstance(child, LazyModuleMixin) for child in module.modules()):
        remedy = "run one forward on a batch before wrapping and checking"
        return [failed(check, "the model has lazy modules: no shapes yet", remedy)]
    of_device: dict[torch.device, list[str]] = defaultdict(list)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        of_device[tensor.device].append(name)
    if not tensors:
        return [failed(check, "the model has no parameters", "is it the right one?")]
    places = "; ".join(
        f"{len(names)} on {device}" + (f" ({join(names, 4)})" if rare else "")
        for device, names in of_device.items()
        for rare in [len(of_device) > 1 and len(names) <= len(tensors) / 2]
    )
    found = f"{len(tensors)} parameters and module buffers: {places}"
    findings = [judge_places(found, of_device), *judge_own_gpu(of_device)]
    return [*findings, *_judge_batch_device(model, of_device, batch)]


def judge_places(found: str, of_device: Mapping[torch.device, list[str]]) -> Finding:
    """Whether one replica may be spread like this."""
    check, kinds = "devices", {device.type for device in of_device}
    if "meta" in kinds:
        remedy = (
            "tensors on meta hold no values: module.to_empty(device=...), then load"
        )
        return failed(check, found, remedy)
    if len(kinds) > 1:
        remedy = (
            "model.to(device) before wrapping; tensors made in __init__ belong in "
            "register_buffer(), so that they move along"
        )
        return failed(check, found, remedy)
    if len(of_device) > 1:
        remedy = "meant as a model-parallel replica? then leave device_ids out"
        return warning(check, found, remedy)
    return ok(check, found)


def judge_own_gpu(of_device: Mapping[torch.device, list[str]]) -> list[Finding]:
    """A GPU other than that of the local rank is probably another process's."""
    text = os.environ.get("LOCAL_RANK", "")
    if len(of_device) != 1 or not text.isdecimal() or torch.cuda.device_count() < 2:
        return []
    device = next(iter(of_device))
    if device.type != "cuda" or device.index == int(text):
        return []
    found = f"LOCAL_RANK is {text}, but the model is on {device}"
    remedy = "torch.cuda.set_device(LOCAL_RANK) first, then model.to('cuda')"
    return [warning("devices", found, remedy)]


def _judge_batch_device(
    model: nn.Module, of_device: Mapping[torch.device, list[str]], batch: Any
) -> list[Finding]:
    tensors = find_tensors(batch)
    moves = bool(option(model, "device_ids", default=None))
    if not tensors or len(of_device) > 1 or moves:
        return []
    device = next(iter(of_device))
    elsewhere = sorted({str(t.device) for t in tensors if t.device != device})
    if not elsewhere:
        return []
    found = f"the batch is on {join(elsewhere)}, the model on {device}"
    remedy = f"batch.to({str(device)!r}), or wrap with device_ids=[LOCAL_RANK]"
    return [failed("devices", found, remedy)]


def _gpu_of(module: nn.Module) -> str:
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return uuid_of(device) if device.type == "cuda" else ""


# ------------------------------------------------------------------------ replicas


def describe(
    module: nn.Module, ignored: Collection[str] = ()
) -> tuple[dict[str, str], dict[str, int]]:
    """By parameter: what it looks like, and a checksum of its values.

    Args:
        module: the bare module.
        ignored: parameters that are each rank's own: left out.
    """
    params = {n: p for n, p in module.named_parameters() if n not in ignored}
    shapes = {
        name: f"{tuple(param.shape)}, {param.dtype}, "
        + ("trainable" if param.requires_grad else "frozen")
        for name, param in params.items()
    }
    bits = {n: sum_of_bits(p) for n, p in params.items()}
    return shapes, {name: int(value) for name, value in bits.items()}


def judge_replicas(of_rank: Mapping[int, Facts]) -> Finding:
    """Whether all ranks hold the same model; once it is wrapped, the same values."""
    check, first = "replicas", min(of_rank)
    if len(of_rank) == 1:
        return ok(check, "one rank: nothing to compare")
    for rank, facts in of_rank.items():
        odd = _differing(of_rank[first]["shapes"], facts["shapes"])
        if odd:
            found = f"rank {rank} has other parameters than rank {first}: {join(odd)}"
            remedy = "build the same model on all ranks, in the same order"
            return failed(check, found, remedy)
    different = {
        rank: _differing(of_rank[first]["sums"], facts["sums"])
        for rank, facts in of_rank.items()
    }
    odd_ranks = [rank for rank, names in different.items() if names]
    if not odd_ranks:
        return ok(check, "the same values on all ranks")
    rank = odd_ranks[0]
    found = f"rank {rank} has other values than rank {first} in {join(different[rank])}"
    if not all(facts["is_wrapped"] for facts in of_rank.values()):
        return ok(check, f"{found}; wrapping brings rank 0's values to all (init_sync)")
    remedy = (
        "with init_sync=False seed all ranks alike before the model is made, or load "
        "the same checkpoint; after wrapping, change parameters on all ranks alike"
    )
    return failed(check, found, remedy)


def _differing(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    names = list(dict.fromkeys([*first, *other]))
    return [name for name in names if first.get(name) != other.get(name)]


# ----------------------------------------------------------------------- batch norm


def judge_batch_norm(module: nn.Module, batch: Any, world_size: int) -> Finding:
    """Whether batch norm sees enough samples on one rank."""
    check = "batch norm"
    layers = [
        name
        for name, child in module.named_modules()
        if isinstance(child, _BatchNorm)
        and not isinstance(child, nn.SyncBatchNorm)
        and child.training
    ]
    if not layers:
        synced = any(isinstance(m, nn.SyncBatchNorm) for m in module.modules())
        return ok(check, "synchronised" if synced else "none in training mode")
    samples = num_samples(batch)
    found = f"BatchNorm layers: {len(layers)}; samples per rank: {samples}"
    if world_size == 1:
        return ok(check, f"{found}; one rank")
    if samples is None:
        remedy = "pass a batch, so that its size is known"
        return skipped(check, f"BatchNorm layers: {len(layers)}", remedy)
    if samples < SMALL_BATCH:
        remedy = (
            f"each normalises over {samples} samples, not {samples * world_size}, and "
            f"with fewer than {SMALL_BATCH} statistics are noisy: model = "
            "minidp.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping"
        )
        return warning(check, found, remedy)
    return ok(check, found)


def num_samples(batch: Any) -> int | None:
    """Length of the first dimension of the first tensor that has one."""
    return next((len(t) for t in find_tensors(batch) if t.dim() > 0), None)


# ----------------------------------------------------------------- unused parameters


def check_unused(model: nn.Module, batch: Any) -> Finding:
    """Which parameters do not take part in the outputs of a forward on ``batch``."""
    check = "unused parameters"
    if batch is None:
        return skipped(check, "needs a forward", "pass a batch to check_model")
    module = wrapped_module(model)
    try:
        reached = _reached(module, batch)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        remedy = (
            "batch is what the model is called with: a tensor, a tuple of arguments "
            "or a dict of keyword arguments"
        )
        return failed(
            check, f"the forward raised {type(error).__name__}: {text}", remedy
        )
    if not reached:
        return skipped(check, "no tensor with a gradient found in what forward returns")
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        unused = [
            name
            for name, param in trainable.items()
            if get_gradient_edge(param).node not in reached
        ]
    return _judge_unused(model, unused, len(trainable))


def _judge_unused(model: nn.Module, unused: list[str], num_params: int) -> Finding:
    check = "unused parameters"
    is_set = bool(option(model, "find_unused_parameters", default=False))
    is_wrapped = synchroniser(model) is not None
    if unused and not is_set:
        found = f"{join(unused, 4)} of {num_params} take no part in the outputs"
        remedy = (
            "the second step will raise: freeze or remove them, or wrap with "
            f"find_unused_parameters=True{aside(find_unused_parameters=True)}"
        )
        return (
            failed(check, found, remedy)
            if is_wrapped
            else warning(check, found, remedy)
        )
    if unused:
        found = f"{join(unused, 4)} take no part, and find_unused_parameters is set"
        return ok(check, found)
    if is_set:
        found = "find_unused_parameters is set, but this batch uses every parameter"
        remedy = (
            "leave it out if that holds for every batch (doctor.watch looks at many): "
            "torch's DDP searches the graph in each forward"
        )
        return warning(check, found, remedy)
    return ok(check, f"none of {num_params} in this batch")


def _reached(module: nn.Module, batch: Any) -> set[Any]:
    with untouched(), _as_it_was(module), straight_on(module), torch.enable_grad():
        if isinstance(batch, dict):
            return reachable_nodes(module(**batch))
        if isinstance(batch, tuple | list):
            return reachable_nodes(module(*batch))
        return reachable_nodes(module(batch))


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Module buffers keep their values; layers that talk to other ranks stay silent."""
    buffers = [
        (child, name, value, value.detach().clone())
        for child in module.modules()
        for name, value in child._buffers.items()
        if value is not None
    ]
    talking = [
        child
        for child in module.modules()
        if isinstance(child, nn.SyncBatchNorm) and child.training
    ]
    try:
        _set_training(talking, is_training=False)
        yield
    finally:
        _set_training(talking, is_training=True)
        for child, name, value, copy in buffers:
            child._buffers[name] = value
            _restore(value, copy)


def _set_training(layers: Sequence[nn.Module], *, is_training: bool) -> None:
    for layer in layers:
        layer.training = is_training


@torch.no_grad()
def _restore(value: torch.Tensor, copy: torch.Tensor) -> None:
    if not value.is_meta and not torch.equal(value, copy):
        value.copy_(copy)
