"""Random constructor arguments, right and wrong, and what may come of them.

A call is plain data: the name of a module and, by argument, the name of a value, so
that Hypothesis can shrink and print it. `try_call` makes the call in a group of one
rank, which costs a millisecond, and says what happened.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.parameter import is_lazy

from minidp import DataParallel

# Of the constructor's docstring. InternalError is an AssertionError: never.
DOCUMENTED = (TypeError, ValueError, RuntimeError)

# --------------------------------------------------------------------------- modules


class Bag(nn.Module):
    """A module whose loss is 3 * sum of |p|^2: each trainable p has gradient 6 p."""

    def __init__(self, *tensors):
        super().__init__()
        self.w = nn.ParameterList(tensors)

    def forward(self, x):
        trained = [p for p in self.parameters() if p.requires_grad]
        terms = [(p * p.conj()).real.float().sum() for p in trained]
        return sum(terms, x.sum() * 0) * 3


def values(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype)


def bag(**extras):
    """Make a `Bag` of two parameters; ``extras`` are set as its attributes."""
    made = Bag(values(3, 2), values(5))
    for name, value in extras.items():
        setattr(made, name, value)
    return made


def with_buffer(value):
    made = bag()
    made.register_buffer("extra", value)
    return made


def with_ignored(names):
    return bag(_ddp_params_and_buffers_to_ignore=names)


def frozen(tensor):
    return nn.Parameter(tensor, requires_grad=False)


def parameter(*shape, **options):
    return nn.Parameter(torch.ones(*shape, **options))


def meta(*shape):
    return torch.empty(*shape, device="meta")


def shared():
    made = bag()
    made.again = made.w[0]
    made.inner = Bag(made.w[0], values(2))
    return made


def with_grads():
    made = bag()
    for param in made.parameters():
        param.grad = torch.ones_like(param)
    return made


def deaf(tensor):
    made = bag()
    made.w.append(tensor)
    return made


@torch.inference_mode()
def in_inference_mode():
    return torch.ones(2)


# Modules that can be wrapped ...
GOOD = {
    "two parameters": bag,
    "many dtypes": lambda: Bag(
        values(2), values(3, dtype=torch.float64), values(2, dtype=torch.complex64)
    ),
    "empty and scalar": lambda: Bag(values(0, 3), values(), values(4)),
    "one frozen": lambda: Bag(values(2), frozen(values(3))),
    "frozen integers": lambda: Bag(values(2), frozen(torch.arange(3))),
    "shared": shared,
    "strides": lambda: Bag(values(4, 6).t(), values(4, 6)[:, ::2]),
    "batch norm": lambda: bag(norm=nn.BatchNorm1d(3)),
    "NaN": lambda: Bag(values(2) / 0 * 0, values(2)),
    "ignores one": lambda: with_ignored(["w.0"]),
    "ignores strangers": lambda: with_ignored(["", "w", "x.y"]),
    "buffer ignored": lambda: with_ignored(("extra",)),
    "boolean buffer": lambda: with_buffer(torch.tensor([True])),
    "empty buffer": lambda: with_buffer(torch.empty(0)),
    "None buffer": lambda: with_buffer(None),
    "has .grad": with_grads,
    "in eval mode": lambda: bag().eval(),
    "wrapped": lambda: DataParallel(bag()),
}
# ... and modules, or things, that cannot be, or that need not train afterwards. No
# quantised module buffer yet: its broadcast before a forward ends the process.
BAD = {
    "None": lambda: None,
    "a class": lambda: nn.Linear,
    "a function": lambda: torch.relu,
    "a tensor": lambda: torch.ones(2),
    "a parameter": lambda: parameter(2),
    "a list": lambda: [bag()],
    "no parameters": nn.ReLU,
    "all frozen": lambda: Bag(frozen(values(2))),
    "all ignored": lambda: with_ignored(["w.0", "w.1"]),
    "meta": lambda: Bag(values(2), meta(2)),
    "meta, frozen": lambda: Bag(values(2), frozen(meta(2))),
    "all meta": lambda: nn.Linear(2, 2, device="meta"),
    "meta buffer": lambda: with_buffer(meta(2)),
    "lazy": lambda: bag(lazy=nn.LazyLinear(2)),
    "only lazy": lambda: nn.LazyLinear(2),
    "lazy buffers": lambda: bag(lazy=nn.LazyBatchNorm1d(affine=False)),
    "sparse buffer": lambda: with_buffer(torch.eye(2).to_sparse()),
    "nested buffer": lambda: with_buffer(
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    ),
    "expanded": lambda: deaf(torch.ones(1).expand(3)),
    "expanded buffer": lambda: with_buffer(torch.ones(1).expand(3)),
    "sparse parameter": lambda: deaf(torch.eye(2).to_sparse()),
    "inference buffer": lambda: with_buffer(in_inference_mode()),
    "buffer with a graph": lambda: with_buffer(torch.ones(2, requires_grad=True) * 2),
    "ignores numbers": lambda: with_ignored([1, 2.5, None]),
    "ignores a number": lambda: with_ignored(5),
    "ignores None": lambda: with_ignored(None),
    "ignores a string": lambda: with_ignored("w.0"),
    "ignores lists": lambda: with_ignored([["w.0"]]),
    "ignores parameters": lambda: with_ignored(list(bag().parameters())),
    "sparse embedding": lambda: bag(table=nn.Embedding(3, 2, sparse=True)),
    "torch's SyncBatchNorm": lambda: bag(norm=nn.SyncBatchNorm(3)),
    "torch's DDP": lambda: DistributedDataParallel(bag()),
    "torch.compile": lambda: torch.compile(bag(), backend="eager"),
}
MODULES = GOOD | BAD

# -------------------------------------------------- values: lambdas take the module

_NAN, _INF = float("nan"), float("inf")
_PLAIN = (
    *(None, True, False, 0, 1, -1, -0.5, 1e-300, 1e308, 2**63, _NAN, _INF, -_INF, 1j),
    *("", "x", "cuda:0", "cpu", b"x", "\ud800"),
    *([], [0], [0, 1], [None], ["x"], [_NAN], [1e308], [-1.0, 1], [True], [[1]]),
    *((), {}, {1: 2}, {"w.0"}, range(3), int, len, ..., torch.float16),
    *(torch.device("cuda", 0), torch.device("meta")),
    *(np.float64(1.5), np.int64(1), np.ones(2), np.ones(0)),
)
# Wrong nearly everywhere.
JUNK = {repr(value): value for value in _PLAIN} | {
    "10**400": 10**400,
    "[10**400]": [10**400],
    "a generator": lambda _: (i for i in range(2)),
    "object": object(),
    "a tensor": lambda _: torch.tensor(1.0),
    "two tensors": lambda _: torch.tensor([1.0, 0.0]),
    "no tensors": lambda _: torch.empty(0),
    "meta tensor": lambda _: meta(2),
    "a parameter": lambda _: parameter(2),
    "a module": lambda _: nn.Linear(1, 1),
}


@cache
def mesh(*shape):
    """Return a mesh on the CPU; one for each shape, because it makes groups."""
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))


class HalfMesh:
    """Has `get_group` and nothing else of a mesh."""

    def get_group(self, mesh_dim=None):
        return dist.group.WORLD


def pairs(module):
    return list(module.named_parameters()) if isinstance(module, nn.Module) else []


def own_layout(module):
    """Return a bucket layout with one bucket for all trainable parameters."""
    names = [name for name, param in pairs(module) if param.requires_grad]
    return {"format": 1, "rebuilt": True, "buckets": [names]}


SWITCH = {"on": True, "off": False}
# What each argument may well be given; the rest of its values is junk.
SENSIBLE = {
    "device_ids": {"none": None, "empty": []},
    "output_device": {"none": None, "'cpu'": "cpu"},
    "dim": {"0": 0},
    "process_group": {
        "world": lambda _: dist.group.WORLD,
        "NON_GROUP_MEMBER": lambda _: dist.GroupMember.NON_GROUP_MEMBER,
        "a store": lambda _: dist.HashStore(),
        "a bare group": lambda _: dist.ProcessGroup(0, 1),
        "a backend": lambda _: dist.group.WORLD._get_backend(torch.device("cpu")),
        "options": lambda _: dist.BroadcastOptions(),
        "a name": "gloo",
    },
    "bucket_cap_mb": {"25": 25, "tiny": 8 / 2**20, "0": 0, "auto": "auto"},
    "delay_all_reduce_named_params": {
        "own": lambda m: pairs(m)[:1],
        "all": lambda m: pairs(m),
        "own, lazily": lambda m: iter(pairs(m)),
        "twice": lambda m: pairs(m)[:1] * 2,
        "renamed": lambda m: [("other", p) for _, p in pairs(m)],
        "only names": lambda m: [name for name, _ in pairs(m)],
        "only parameters": lambda m: [p for _, p in pairs(m)],
        "swapped": lambda m: [(p, n) for n, p in pairs(m)],
        "triples": lambda m: [(n, p, 0) for n, p in pairs(m)],
        "a stranger": lambda _: [("stranger", parameter(2))],
        "a namesake": lambda _: [("w.0", parameter(2))],
        "a meta stranger": lambda _: [("stranger", parameter(2, device="meta"))],
        "a lazy stranger": lambda _: [("stranger", nn.UninitializedParameter())],
        "a frozen stranger": lambda _: [("stranger", frozen(torch.ones(2)))],
        "a plain tensor": lambda _: [("stranger", torch.ones(2))],
        "no pairs": [],
        "a dict": lambda m: dict(pairs(m)),
    },
    "param_to_hook_all_reduce": {"own": lambda m: next((p for _, p in pairs(m)), None)},
    "mixed_precision": {
        "bf16": _MixedPrecision(torch.bfloat16, torch.float32, torch.float32),
        "none of it": _MixedPrecision(None, None, None),
        "a dtype": torch.bfloat16,
        "None": None,
    },
    "device_mesh": {
        "a mesh": lambda _: mesh(1),
        "2-D": lambda _: mesh(1, 1),
        "half a mesh": lambda _: HalfMesh(),
    },
    "bucket_cap_mb_list": {"two": [8 / 2**20, 1.0], "a tuple": (1,)},
    "unsynced": {"raise": "raise", "warn": "warn", "ignore": "ignore"},
    "average_over": {"ranks": "ranks"},  # "items" needs counts
    "hang_timeout": {"5": 5, "none": None},
    "check_replicas_every": {"2": 2, "0": 0},
    "bucket_layout": {
        "own": own_layout,
        "of another": {"format": 1, "rebuilt": True, "buckets": [["w"]]},
        "no file": "no/such/file.json",
    },
    **dict.fromkeys(
        ("broadcast_buffers", "init_sync", "find_unused_parameters"), SWITCH
    ),
    **dict.fromkeys(("check_reduction", "gradient_as_bucket_view"), SWITCH),
    **dict.fromkeys(("static_graph", "skip_all_reduce_unused_params"), SWITCH),
    **dict.fromkeys(("batched_grad_copy", "forward_sync_buffers"), SWITCH),
    "check_finite_grads": SWITCH,
}


@dataclass(frozen=True)
class Call:
    """``DataParallel(module, **arguments)``, by the names of what is passed."""

    module: str = "two parameters"
    arguments: tuple[tuple[str, str], ...] = ()


def _one_argument(name):
    sensible = st.sampled_from(sorted(SENSIBLE[name]))
    return st.tuples(st.just(name), sensible | st.sampled_from(sorted(JUNK)))


calls = st.builds(
    Call,
    module=st.sampled_from(sorted(GOOD)) | st.sampled_from(sorted(MODULES)),
    arguments=st.lists(
        st.sampled_from(sorted(SENSIBLE)).flatmap(_one_argument),
        max_size=5,
        unique_by=lambda pair: pair[0],
    ).map(tuple),
)

# ---------------------------------------------------------------------------- a call


class Broken(AssertionError):
    """A law that `try_call` or `try_hook` checks does not hold."""


def try_call(call: Call) -> str:
    """Make the call, check the laws, and say what happened in a word.

    Laws: documented exceptions only; after one, the module is as before and can be
    wrapped rightly; without one, it trains rightly or says why not; in the end no hook
    is left.
    """
    module = MODULES[call.module]()
    nodes, before = nodes_of(module), look(module)
    arguments = _arguments(call, module)
    try:
        ddp = DataParallel(module, **arguments)
    except DOCUMENTED as error:
        outcome = _name_of(error)
        if look(module) != before:
            raise Broken(f"{outcome}, but the module is not what it was") from None
    else:
        outcome = _train_one(ddp, call)
        _drop_grads(ddp)
        del ddp
    if call.module in GOOD:
        _wrap_rightly(module)
    if hooks_on(nodes):
        gc.collect()
    left = hooks_on(nodes)
    if left and call.module not in ("wrapped", "torch's DDP"):
        raise Broken(f"hooks are left on parameters {left} after {outcome}")
    return outcome


def make(call: Call) -> tuple[Any, dict[str, Any]]:
    """Build the module and the arguments of a call."""
    module = MODULES[call.module]()
    return module, _arguments(call, module)


def _arguments(call, module):
    made = {}
    for name, key in call.arguments:
        value = (JUNK | SENSIBLE[name])[key]
        made[name] = value(module) if isinstance(value, FunctionType) else value
    return made


def _name_of(error):
    if "INTERNAL ASSERT" in str(error):
        raise error
    return type(error).__name__


def _train_one(ddp, call):
    """Run one backward of an accepted wrapper; return the outcome in a word."""
    ddp.zero_grad()
    try:
        ddp(torch.ones(1)).sum().backward()
    except DOCUMENTED as error:
        return f"accepted, then {_name_of(error)}"
    if call.module not in GOOD:
        return "accepted, bad"
    _check_gradients(ddp, "as asked for")
    return "accepted"


def _drop_grads(module):
    for param in module.parameters():
        param.grad = None


def _wrap_rightly(module):
    _drop_grads(module)
    ddp = DataParallel(module)
    ddp(torch.ones(1)).sum().backward()
    _check_gradients(ddp, "wrapped once more")
    if ddp._reducer.hooks.hooked_by_others() and not isinstance(module, DataParallel):
        gc.collect()
        if ddp._reducer.hooks.hooked_by_others():
            raise Broken("other hooks are on the parameters")
    _drop_grads(module)


def _check_gradients(ddp, when):
    for name, param in ddp.named_parameters():
        if not (param.requires_grad and name.startswith("module.w.")):
            continue
        found, expected = param.grad, 6 * param.detach()
        if found is None or not torch.allclose(found, expected, equal_nan=True):
            raise Broken(f"{when}: {name}.grad is {found}, expected {expected}")


def _is_module(thing):
    return isinstance(thing, nn.Module) and "_parameters" in thing.__dict__


def nodes_of(module: Any) -> list[Any]:
    """Return the AccumulateGrad nodes of a module: their hooks live as long as they."""
    params = module.parameters() if _is_module(module) else ()
    return [
        get_gradient_edge(p).node
        for p in params
        if p.requires_grad and p.is_leaf
        if p.layout is torch.strided and not is_lazy(p)
    ]


def hooks_on(nodes: list[Any]) -> list[int]:
    """Return the indices of the nodes that carry Python hooks."""
    found = []
    for i, node in enumerate(nodes):
        handle = node.register_hook(lambda *_: None)
        if len(handle.hooks_dict_ref() or ()) > 1:
            found.append(i)
        handle.remove()
    return found


def look(module: Any) -> Any:
    """Return the identities of all parts of a module, to be compared later."""
    if not _is_module(module):
        return None
    modules = [
        (name, {key: _kept(value) for key, value in m.__dict__.items()})
        for name, m in module.named_modules()
    ]
    tensors = [
        (
            *(name, id(t), str(t.grad) if t.is_leaf else "", t.requires_grad),
            *(sorted(map(str, t.__dict__)), str(t._backward_hooks)),
            str(getattr(t, "_post_accumulate_grad_hooks", None)),
        )
        for name, t in [*module.named_parameters(), *module.named_buffers()]
    ]
    return modules, tensors


def _kept(value):
    return (id(value), len(value)) if isinstance(value, dict) else id(value)


def dies(reference: weakref.ref[Any]) -> bool:
    """Whether an object is dead, at the latest after a garbage collection."""
    if reference() is not None:
        gc.collect()
    return reference() is None
