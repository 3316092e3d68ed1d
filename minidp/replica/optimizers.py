"""Compare what the optimizers did on each rank, and copy their state between ranks.

Equal parameters are not enough to go on with: a rank that has missed a step has another
momentum, and perhaps another learning rate, and so its next step would differ.

Two ranks have the same optimizer if its class and the parameters in its groups are the
same. Only optimizers that all ranks have are looked at, because those that share the
work among ranks (ZeRO) hold other parameters on each. State and settings are compared
and copied only for the classes of ``torch.optim``, whose next step depends on nothing
else. Of other classes nobody knows whether their state is meant to differ.

To be sent, an optimizer's state becomes plain data that JSON can hold, with its tensors
in a list beside it (`_plain`); the receiver turns it into values again (`_made`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from minidp.comm import (
    ProcessGroup,
    broadcast_coalesced,
    exchange_device,
    gather_bytes,
)

from .digest import sum_of_bits
from .objects import Survey
from .schedulers import by_path, find_schedulers, progress_of, set_state, state_of

_OPAQUE = {"opaque": True}  # stands for a value that cannot be compared or sent


class OptimizerFacts(NamedTuple):
    """What one rank knows of one optimizer, as plain data that JSON can hold."""

    name: str  # of its class
    steps: int  # that it has made since the ranks last agreed
    is_known: bool  # whether it is of torch.optim: its state can be compared and copied
    has_state: bool
    settings: str  # of its groups, as text: the learning rate, for example
    state: Mapping[str, str]  # by name of the parameter, as text with checksums
    schedulers: Mapping[str, list[int]]  # how far they are, see `progress_of`
    # Whether nothing else is known that its next step depends on: its class is of
    # torch.optim, no hook of the user runs in its step, and no loss is scaled.
    is_whole: bool


def find_optimizers(params: Iterable[torch.Tensor], survey: Survey) -> list[Optimizer]:
    """Return all optimizers of this process that hold some of ``params``."""
    ids = {id(param) for param in params}
    return [each for each in survey.of(Optimizer) if _held(each) & ids]


def by_key(
    optimizers: Iterable[Optimizer], params: Sequence[torch.Tensor]
) -> dict[str, Optimizer]:
    """Return the optimizers by a key, which is equal on all ranks for the same one.

    Those inside an optimizer of ``torch.distributed`` are left out, because that one
    divides their work among the ranks.
    """
    index = {id(param): i for i, param in enumerate(params)}
    every = list(optimizers)
    inner = {
        id(value)
        for outer in every
        if type(outer).__module__.startswith("torch.distributed.")
        for value in vars(outer).values()
    }
    found: dict[str, Optimizer] = {}
    for optimizer in every:
        if id(optimizer) in inner or not _held(optimizer) & index.keys():
            continue
        places = [
            [index.get(id(param), -1) for param in group["params"]]
            for group in optimizer.param_groups
        ]
        digest = hashlib.sha256(json.dumps(places).encode()).hexdigest()[:12]
        key, number = f"{type(optimizer).__qualname__}/{digest}", 0
        while f"{key}/{number}" in found:  # two that are alike, in their given order
            number += 1
        found[f"{key}/{number}"] = optimizer
    return found


def facts_of(
    optimizer: Optimizer,
    steps: int,
    params: Mapping[str, torch.Tensor],
    schedulers: Iterable[LRScheduler],
    *,
    is_scaled: bool,
) -> OptimizerFacts:
    """Describe an optimizer, as far as it concerns ``params``, which come by name."""
    is_known = can_copy_optimizer(optimizer)
    state, settings = {}, ""
    if is_known:
        own = {name: optimizer.state.get(param) for name, param in params.items()}
        # A float in the state may be a loss (LBFGS keeps it), which each rank has its
        # own of. So only the other values are compared.
        state = {name: _text(_without_floats(v)) for name, v in own.items() if v}
        settings = json.dumps([_text(each) for each in _settings(optimizer)])
    has_state = any(optimizer.state.get(param) for param in params.values())
    name = type(optimizer).__name__
    progress = progress_of(schedulers)
    is_whole = is_known and not is_scaled and not _has_hooks(optimizer)
    return OptimizerFacts(
        name, steps, is_known, has_state, settings, state, progress, is_whole
    )


def _has_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks run in an optimizer's step that are not minidp's."""
    hooks = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    ]
    return any(
        not getattr(hook, "__module__", "").startswith("minidp.") for hook in hooks
    )


def can_copy_optimizer(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is of ``torch.optim``, whose whole state we know."""
    # Some of these classes name the package as their module, the others a part of it.
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def has_grad_scaler(survey: Survey) -> bool:
    """Return whether this process has scaled a loss with a `GradScaler`."""
    every = survey.of(GradScaler)
    return any(getattr(scaler, "_scale", None) is not None for scaler in every)


def scale_anew(optimizers: Iterable[Optimizer], survey: Survey) -> None:
    """Let scalers unscale the next gradients of these optimizers.

    A scaler takes note that it has unscaled gradients, until its ``update()``. If
    ``step()`` raises in between, it would not unscale those of the next backward.
    """
    for scaler in survey.of(GradScaler):
        for optimizer in optimizers:
            scaler._per_optimizer_states.pop(id(optimizer), None)


def copy_optimizers(
    optimizers: Mapping[str, Optimizer],
    params: Mapping[str, torch.Tensor],
    group: ProcessGroup,
    root: int,
    survey: Survey,
) -> list[str]:
    """Give all ranks the state and settings that optimizers have on rank ``root``.

    Their learning rate schedulers come with them, as far as `by_path` finds them. All
    ranks must call this together. It returns the names of optimizers that hold values
    which cannot be sent.

    Args:
        optimizers: Optimizers of ``torch.optim``, under the same keys on all ranks. The
            settings of their groups are replaced.
        params: Parameters by name. The optimizers' state of these is replaced.
        group: The group of all replicas.
        root: The rank whose state all others get.
        survey: Where schedulers are found.
    """
    tensors: list[torch.Tensor] = []
    scheduled = find_schedulers(optimizers.values(), survey)
    schedulers = {key: by_path(scheduled.get(o, ())) for key, o in optimizers.items()}
    plan = {
        key: {
            "state": {n: _plain(o.state.get(p), tensors) for n, p in params.items()},
            "settings": [_plain(each, tensors) for each in _settings(o)],
            "schedulers": {
                path: _plain(state_of(each), tensors)
                for path, each in schedulers[key].items()
            },
        }
        for key, o in sorted(optimizers.items())
    }
    device = exchange_device(group, next(iter(params.values())).device)
    mine = json.dumps(plan).encode() if group.rank() == root else b""
    plan = json.loads(gather_bytes(mine, group, device)[root])
    if group.rank() != root:
        tensors = []
    opaque = set()
    first = next(iter(params.values()))
    for key, optimizer in sorted(optimizers.items()):
        whole, is_root = plan[key], group.rank() == root
        if _is_opaque(whole):
            opaque.add(type(optimizer).__name__)
        if is_root:
            continue
        for name, param in params.items():
            old = optimizer.state.get(param)
            new = _made(whole["state"][name], old, param, tensors)
            if new is None:
                optimizer.state.pop(param, None)
            else:
                optimizer.state[param] = new
        for mine_of, sent in zip(
            optimizer.param_groups, whole["settings"], strict=True
        ):
            first = next(iter(mine_of["params"]), first)
            mine_of.update(_made(sent, dict(mine_of), first, tensors))
        for path, sent in whole["schedulers"].items():
            scheduler = schedulers[key].get(path)
            old = {} if scheduler is None else state_of(scheduler)
            new = _made(sent, old, first, tensors)
            if scheduler is not None:
                set_state(scheduler, new)
    broadcast_coalesced(tensors, group, root)
    return sorted(opaque)


def _held(optimizer: Optimizer) -> set[int]:
    # An optimizer whose constructor has not run to its end has no groups.
    groups = vars(optimizer).get("param_groups", ())
    return {id(param) for group in groups for param in group["params"]}


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    # A learning rate scheduler adds `initial_lr`, and not all ranks have made one.
    left_out = ("params", "initial_lr", "param_names")
    return [
        {name: value for name, value in group.items() if name not in left_out}
        for group in optimizer.param_groups
    ]


def _text(value: Any) -> str:
    """Return a text that differs if the value does, with checksums for its tensors."""
    tensors: list[torch.Tensor] = []
    plain = json.dumps(_plain(value, tensors), sort_keys=True)
    return f"{plain} {[int(sum_of_bits(tensor)) for tensor in tensors]}"


def _without_floats(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: v for key, v in state.items() if not isinstance(v, float)}


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value as plain data, and append its tensors to ``tensors``, in order."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.layout is not torch.strided or value.is_quantized:
            return _OPAQUE
        tensors.append(value)
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": dtype, "shape": [*value.shape], "is_cpu": value.is_cpu}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {k: _plain(v, tensors) for k, v in sorted(value.items())}}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_plain(each, tensors) for each in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    return _OPAQUE


def _is_opaque(plain: Any) -> bool:
    if isinstance(plain, dict):
        return plain == _OPAQUE or any(map(_is_opaque, plain.values()))
    return isinstance(plain, list) and any(map(_is_opaque, plain))


def _made(
    plain: Any, old: Any, param: torch.Tensor, tensors: list[torch.Tensor]
) -> Any:
    """Return the value that `_plain` described, with tensors still to be filled.

    These are appended to ``tensors``, in order. Tensors of the ``old`` value are used
    again if they fit, and so is everything that could not be sent.
    """
    if plain == _OPAQUE:
        return old
    if "value" in plain:
        return plain["value"]
    if "dict" in plain:
        before: Callable[[str], Any] = old.get if isinstance(old, dict) else _nothing
        return {
            key: _made(each, before(key), param, tensors)
            for key, each in plain["dict"].items()
        }
    for kind in (list, tuple):
        if kind.__name__ in plain:
            return kind(_made(e, None, param, tensors) for e in plain[kind.__name__])
    shape, dtype = torch.Size(plain["shape"]), getattr(torch, plain["tensor"])
    device = torch.device("cpu") if plain["is_cpu"] else param.device
    fits = isinstance(old, torch.Tensor) and old.shape == shape and old.dtype is dtype
    if not fits or old.device != device:
        # A tensor like the parameter gets its strides, too: they decide how fast a step
        # of the optimizer is.
        alike = shape == param.shape
        old = (
            torch.empty_like(param, dtype=dtype, device=device, requires_grad=False)
            if alike
            else torch.empty(shape, dtype=dtype, device=device)
        ).detach()
    tensors.append(old)
    return old


def _nothing(_key: str) -> None:
    return None
