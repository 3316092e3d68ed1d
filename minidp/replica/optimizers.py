"""Compare what the optimizers did on each rank, and copy their state between ranks.

Equal parameters are not enough to go on with: a rank that has missed a step has another
momentum, and perhaps another learning rate, and so its next step would differ.

Two ranks have the same optimizer if its class is the same and it holds the same of the
averaged parameters, in whatever groups and order, and beside whatever parameters of the
rank's own. Only optimizers that all ranks have are looked at, because those that share
the work among ranks (ZeRO) hold other parameters on each. State and settings are
compared and copied only for the classes of ``torch.optim``, whose next step depends on
nothing else. Of other classes nobody knows whether their state is meant to differ.

To be sent, an optimizer's state becomes plain data that JSON can hold, with its tensors
in a list beside it (`_plain`); the receiver turns it into values again (`_made`).
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from minidp.comm import (
    ProcessGroup,
    broadcast_coalesced,
    exchange_device,
    gather_bytes,
)

from .digest import sum_of_bits
from .objects import Survey, held_by
from .schedulers import (
    by_path,
    class_of,
    find_schedulers,
    progress_of,
    set_state,
    state_of,
)

_OPAQUE = {"opaque": True}  # stands for a value that cannot be compared or sent


class OptimizerFacts(NamedTuple):
    """What one rank knows of one optimizer, as plain data that JSON can hold."""

    name: str  # of its class
    steps: int  # that it has made since the ranks last agreed
    is_known: bool  # whether it is of torch.optim: its state can be compared and copied
    has_state: bool
    # By name of each parameter that it holds: the settings of its group, as text (the
    # learning rate, for example), or "" if the class is not known.
    settings: Mapping[str, str]
    state: Mapping[str, str]  # by name of the parameter, as text with checksums
    schedulers: Mapping[str, list[int]]  # how far they are, see `progress_of`
    # What objects of other classes count that step it (`Survey.steppers_of`), likewise.
    steppers: Mapping[str, list[int]]
    # The attributes of its own that an optimizer of another class has, as text.
    attributes: str
    # Names of what its next step may depend on and cannot be compared: another class,
    # if it has a state or attributes of unknown kinds; hooks of the user in its step.
    hidden: Sequence[str]
    last_step: Sequence[int]  # when that was, in increasing order; empty: never


def find_optimizers(params: Iterable[torch.Tensor], survey: Survey) -> list[Optimizer]:
    """Return all optimizers of this process that hold some of ``params``."""
    ids = {id(param) for param in params}
    return [each for each in survey.of(Optimizer) if held_by(each) & ids]


def by_key(
    optimizers: Iterable[Optimizer], params: Sequence[torch.Tensor]
) -> dict[str, list[Optimizer]]:
    """Return the optimizers by a key, which is equal on all ranks for the same one.

    It tells nothing of the order of the parameters. Several optimizers under one key
    hold the same of ``params``; these come in their given order.

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
    found: dict[str, list[Optimizer]] = {}
    for optimizer in every:
        held = sorted(index[each] for each in held_by(optimizer) & index.keys())
        if id(optimizer) in inner or not held:
            continue
        digest = hashlib.sha256(json.dumps(held).encode()).hexdigest()[:12]
        key = f"{type(optimizer).__qualname__}/{digest}"
        found.setdefault(key, []).append(optimizer)
    return found


def facts_of(
    optimizer: Optimizer,
    steps: int,
    params: Mapping[str, torch.Tensor],
    schedulers: Iterable[LRScheduler],
    steppers: Iterable[object] = (),
    last_step: Sequence[int] = (),
) -> OptimizerFacts:
    """Describe an optimizer, as far as it concerns ``params``, which come by name."""
    is_known = can_copy_optimizer(optimizer)
    state, settings = {}, {}
    if is_known:
        own = {name: optimizer.state.get(param) for name, param in params.items()}
        # A float in the state may be a loss (LBFGS keeps it), which each rank has its
        # own of. So only the other values are compared.
        state = {name: _text(_without_floats(v)) for name, v in own.items() if v}
    for group in _groups_of(optimizer, params):
        text = _text(group.settings) if is_known else ""
        settings.update(dict.fromkeys(group.names, text))
    has_state = any(optimizer.state.get(param) for param in params.values())
    name, attributes, hidden = type(optimizer).__name__, "", []
    if not is_known:
        own = _own_attributes(optimizer)
        attributes = _text(own)
        hidden += [name] if has_state or _is_opaque(_plain(own, [])) else []
    if _has_hooks(optimizer):
        hidden.append(f"hooks in the step of {name}")
    return OptimizerFacts(
        name,
        steps,
        is_known,
        has_state,
        settings,
        state,
        progress_of(schedulers),
        progress_of(steppers),
        attributes,
        hidden,
        last_step,
    )


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return what a class has beside what those of torch and schedulers set."""
    usual, own = _usual_attributes(), vars(optimizer).items()
    return {name: value for name, value in own if name not in usual}


@functools.cache  # not when this is imported: torch would load its compiler
def _usual_attributes() -> frozenset[str]:
    made_by_torch = vars(torch.optim.SGD([torch.zeros(1, device="cpu")]))
    return frozenset({*made_by_torch, "step", "_opt_called"})


def _has_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks run in an optimizer's step that are not minidp's."""
    # A class whose constructor does not call that of Optimizer has none of them.
    named = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = [hook for n in named for hook in vars(optimizer).get(n, {}).values()]
    return any(
        not getattr(hook, "__module__", "").startswith("minidp.") for hook in hooks
    )


def can_copy_optimizer(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is of ``torch.optim``, whose whole state we know."""
    # Some of these classes name the package as their module, the others a part of it.
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def copy_optimizers(
    optimizers: Mapping[str, Sequence[Optimizer]],
    params: Mapping[str, torch.Tensor],
    group: ProcessGroup,
    root: int,
    survey: Survey,
) -> list[str]:
    """Give all ranks the state and settings that optimizers have on rank ``root``.

    Their learning rate schedulers come with them, as far as `by_path` finds them. All
    ranks must call this together. It returns the names of optimizers that hold values
    which cannot be sent, or whose groups are not those of this rank's.

    Args:
        optimizers: Optimizers of ``torch.optim``, under the same keys on all ranks.
            Rank ``root`` has one under each. Where another rank has several, any of
            them may be the one that it uses, so each gets the same. The settings of
            their groups are replaced.
        params: Parameters by name. The optimizers' state of these is replaced.
        group: The group of all replicas.
        root: The rank whose state all others get.
        survey: Where schedulers are found.
    """
    tensors: list[torch.Tensor] = []
    every = [each for alike in optimizers.values() for each in alike]
    scheduled = find_schedulers(every, survey)
    schedulers = {each: by_path(scheduled.get(each, ())) for each in every}
    plan = {
        key: _plan_of(alike[0], params, schedulers[alike[0]], tensors)
        for key, alike in sorted(optimizers.items())
    }
    some = next(iter(params.values()))
    device = exchange_device(group, some.device)
    mine = json.dumps(plan).encode() if group.rank() == root else b""
    plan = json.loads(gather_bytes(mine, group, device)[root])
    names = {key: type(alike[0]).__name__ for key, alike in optimizers.items()}
    lost = {name for key, whole in plan.items() for name in _lost(names[key], whole)}
    if group.rank() == root:
        broadcast_coalesced(tensors, group, root)
        return sorted(lost)
    received = [
        _Received(sent, optimizers[key], params, schedulers, names[key])
        for key, sent in sorted(plan.items())
    ]
    tensors = [each for one in received for each in one.tensors]
    broadcast_coalesced(tensors, group, root)
    for one in received:
        one.finish()
    return sorted(lost.union(one.name for one in received if one.is_incomplete))


def _plan_of(
    optimizer: Optimizer,
    params: Mapping[str, torch.Tensor],
    schedulers: Mapping[str, LRScheduler],
    tensors: list[torch.Tensor],
) -> dict[str, Any]:
    """Return an optimizer as plain data; its tensors are appended to ``tensors``."""
    return {
        "state": {
            n: _plain(optimizer.state.get(p), tensors) for n, p in params.items()
        },
        "groups": [
            {"names": group.names, "settings": _plain(group.settings, tensors)}
            for group in _groups_of(optimizer, params)
        ],
        "schedulers": {
            path: _plain(state_of(each), tensors) for path, each in schedulers.items()
        },
    }


def _lost(name: str, sent: Mapping[str, Any]) -> list[str]:
    """Return the names of an optimizer and of its schedulers that were not sent whole.

    A value that is no plain data stays what it is on each rank.
    """
    progress = sent["schedulers"].items()
    schedulers = [class_of(path) for path, plain in progress if _is_opaque(plain)]
    own = [sent["state"], [group["settings"] for group in sent["groups"]]]
    return [*schedulers, *([name] if _is_opaque(own) else [])]


class _Received:
    """What a rank gets for its optimizers of one key, which are all alike.

    The constructor makes all values, with the first of these optimizers in mind, whose
    tensors are used again where they fit. Those in ``tensors``, which are in the order
    of the sender, are still to be filled. Then `finish` writes the values to all of
    these optimizers.
    """

    def __init__(
        self,
        sent: Mapping[str, Any],
        alike: Sequence[Optimizer],
        params: Mapping[str, torch.Tensor],
        schedulers: Mapping[Optimizer, Mapping[str, LRScheduler]],
        name: str,
    ) -> None:
        self.name, self.is_incomplete = name, False
        self.tensors: list[torch.Tensor] = []
        self._alike, self._schedulers = alike, schedulers
        self._params = params
        first, *_ = alike
        some = next(iter(params.values()))
        self._state: dict[torch.Tensor, Any] = {}
        for param_name, param in params.items():
            old = first.state.get(param)
            plain = sent["state"][param_name]
            self._state[param] = _made(plain, old, param, self.tensors)
        own = _groups_of(first, params)
        own_names = [group.names for group in own]
        self._names = [group["names"] for group in sent["groups"]]
        self._settings: list[dict[str, Any]] = []
        for place, group in enumerate(sent["groups"]):
            fitting = _fitting(group["names"], place, own_names)
            old = own[fitting[0]].settings if fitting else {}
            self._settings.append(_made(group["settings"], old, some, self.tensors))
        self._progress: dict[str, Any] = {}
        for path, plain in sent["schedulers"].items():
            mine = schedulers[first].get(path)
            old = {} if mine is None else state_of(mine)
            self._progress[path] = _made(plain, old, some, self.tensors)

    def finish(self) -> None:
        """Write what was received to the optimizers and to their schedulers."""
        for number, optimizer in enumerate(self._alike):
            # What was made is handed out once. Others get copies.
            of_own = copy.deepcopy if number else _itself
            for param, made in self._state.items():
                if made is None:
                    optimizer.state.pop(param, None)
                else:
                    optimizer.state[param] = of_own(made)
            self._set_groups(optimizer, of_own)
            for path, scheduler in self._schedulers[optimizer].items():
                if path in self._progress:
                    set_state(scheduler, of_own(self._progress[path]))

    def _set_groups(
        self, optimizer: Optimizer, of_own: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        """Give each group the settings that its parameters have on the sender.

        A group without parameters of ours gets those of the group at its place.
        """
        used: set[int] = set()
        for place, group in enumerate(_groups_of(optimizer, self._params)):
            fitting = _fitting(group.names, place, self._names)
            if not fitting:
                continue
            number, made = fitting[0], self._settings[fitting[0]]
            texts = {_text(self._settings[each]) for each in fitting}
            self.is_incomplete |= len(texts) > 1
            group.update(copy.deepcopy(made) if number in used else of_own(made))
            used.add(number)


def _fitting(
    names: Sequence[str], place: int, others: Sequence[Sequence[str]]
) -> list[int]:
    """Return which groups of another rank fit to one: by parameters, or by place.

    Args:
        names: The names of its parameters, sorted.
        place: Its place.
        others: The names in the other groups, likewise.
    """
    if place < len(others) and others[place] == names:
        return [place]
    return [number for number, each in enumerate(others) if {*names} & {*each}]


def _itself(value: Any) -> Any:
    return value


class _Group(NamedTuple):
    """A group of an optimizer, without what differs between equal replicas."""

    names: list[str]  # of the parameters that are averaged, sorted
    settings: dict[str, Any]
    update: Callable[[dict[str, Any]], None]


def _groups_of(
    optimizer: Optimizer, params: Mapping[str, torch.Tensor]
) -> list[_Group]:
    # A learning rate scheduler adds `initial_lr`, and not all ranks have made one.
    left_out = ("params", "initial_lr", "param_names")
    names = {id(param): name for name, param in params.items()}
    return [
        _Group(
            sorted(names[id(each)] for each in group["params"] if id(each) in names),
            {name: value for name, value in group.items() if name not in left_out},
            group.update,
        )
        for group in optimizer.param_groups
    ]


def _text(value: Any) -> str:
    """Return a text that differs if the value does, with checksums for its tensors."""
    tensors: list[torch.Tensor] = []
    plain = json.dumps(_plain(value, tensors), sort_keys=True)
    return f"{plain} {[int(sum_of_bits(tensor)) for tensor in tensors]}"


def _without_floats(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: v for key, v in state.items() if not isinstance(v, float)}


def _plain(
    value: Any, tensors: list[torch.Tensor], inside: tuple[int, ...] = ()
) -> Any:
    """Return a value as plain data, and append its tensors to ``tensors``, in order.

    A value that is ``inside`` itself, given by ids, has an end there.
    """
    if id(value) in inside:
        return _OPAQUE
    inside = (*inside, id(value)) if isinstance(value, dict | list | tuple) else inside
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            return _OPAQUE
        tensors.append(value)
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": dtype, "shape": [*value.shape], "is_cpu": value.is_cpu}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        items = sorted(value.items())
        return {"dict": {key: _plain(v, tensors, inside) for key, v in items}}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_plain(each, tensors, inside) for each in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, Real):  # of numpy, say
        return {"value": int(value) if isinstance(value, Integral) else float(value)}
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
            items = plain[kind.__name__]
            fits = isinstance(old, kind) and len(old) == len(items)
            olds = old if fits else [None] * len(items)
            pairs = zip(items, olds, strict=True)
            return kind(_made(item, before, param, tensors) for item, before in pairs)
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
