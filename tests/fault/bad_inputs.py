"""Random constructor arguments, right and wrong, and what may come of them.

A call is plain data: the name of a module and, by argument, the name of a value, so
that Hypothesis can shrink and print it. `try_call` makes the call in a group of one
rank, which costs a millisecond, and says what happened.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
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
    """Its loss is 3 * sum of |p|^2 over what is trainable: each gradient is 6 p."""

    def __init__(self, *tensors: Any) -> None:
        super().__init__()
        self.w = nn.ParameterList(tensors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        terms = [(p * p.conj()).real.float() for p in self.parameters() if _trains(p)]
        return sum((term.sum() for term in terms), x.sum() * 0) * 3


def _trains(param: torch.Tensor) -> bool:
    return param.requires_grad


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def bag(**extras: Any) -> Bag:
    """Two parameters, and what else there is."""
    made = Bag(values(3, 2), values(5))
    for name, value in extras.items():
        setattr(made, name, value)
    return made


def with_buffer(value: Any) -> Bag:
    made = bag()
    made.register_buffer("extra", value)
    return made


def with_ignored(names: Any) -> Bag:
    return bag(_ddp_params_and_buffers_to_ignore=names)


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def shared() -> Bag:
    made = bag()
    made.again = made.w[0]
    made.inner = Bag(made.w[0], values(2))
    return made


def deaf(tensor: torch.Tensor) -> Bag:
    made = bag()
    made.w.append(tensor)
    return made


# Modules that can be wrapped ...
GOOD: dict[str, Callable[[], Any]] = {
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
    "buffer ignored": lambda: bag(_ddp_params_and_buffers_to_ignore=("extra",)),
    "boolean buffer": lambda: with_buffer(torch.tensor([True])),
    "empty buffer": lambda: with_buffer(torch.empty(0)),
    "None buffer": lambda: with_buffer(None),
    "has .grad": lambda: _with_grads(bag()),
    "in eval mode": lambda: bag().eval(),
    "wrapped": lambda: DataParallel(bag()),
}


def _with_grads(module: nn.Module) -> nn.Module:
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    return module


# ... and modules, or things, that cannot be, or that need not train afterwards.
BAD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a class": lambda: nn.Linear,
    "a function": lambda: torch.relu,
    "a tensor": lambda: torch.ones(2),
    "a parameter": lambda: nn.Parameter(torch.ones(2)),
    "a list": lambda: [bag()],
    "no parameters": nn.ReLU,
    "all frozen": lambda: Bag(frozen(values(2))),
    "all ignored": lambda: with_ignored(["w.0", "w.1"]),
    "meta": lambda: Bag(values(2), torch.empty(2, device="meta")),
    "meta, frozen": lambda: Bag(values(2), frozen(torch.empty(2, device="meta"))),
    "all meta": lambda: nn.Linear(2, 2, device="meta"),
    "meta buffer": lambda: with_buffer(torch.empty(2, device="meta")),
    "lazy": lambda: bag(lazy=nn.LazyLinear(2)),
    "only lazy": lambda: nn.LazyLinear(2),
    "lazy buffers": lambda: bag(lazy=nn.LazyBatchNorm1d(affine=False)),
    "sparse buffer": lambda: with_buffer(torch.eye(2).to_sparse()),
    # No quantised module buffer yet: its broadcast before a forward ends the process.
    "nested buffer": lambda: with_buffer(
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    ),
    "expanded": lambda: deaf(torch.ones(1).expand(3)),
    "expanded buffer": lambda: with_buffer(torch.ones(1).expand(3)),
    "sparse parameter": lambda: deaf(torch.eye(2).to_sparse()),
    "inference buffer": lambda: with_buffer(_in_inference_mode()),
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


def _in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


MODULES = GOOD | BAD

# ---------------------------------------------------------------------------- values

# Wrong nearly everywhere; each takes the module, for values that belong to it.
JUNK: dict[str, Callable[[Any], Any]] = {
    "None": lambda _: None,
    "True": lambda _: True,
    "False": lambda _: False,
    "0": lambda _: 0,
    "1": lambda _: 1,
    "-1": lambda _: -1,
    "-0.5": lambda _: -0.5,
    "1e-300": lambda _: 1e-300,
    "1e308": lambda _: 1e308,
    "10**400": lambda _: 10**400,
    "2**63": lambda _: 2**63,
    "nan": lambda _: float("nan"),
    "inf": lambda _: float("inf"),
    "-inf": lambda _: -float("inf"),
    "1j": lambda _: 1j,
    "''": lambda _: "",
    "'x'": lambda _: "x",
    "'cuda:0'": lambda _: "cuda:0",
    "'cpu'": lambda _: "cpu",
    "b'x'": lambda _: b"x",
    "lone surrogate": lambda _: "\ud800",
    "[]": lambda _: [],
    "[0]": lambda _: [0],
    "[0, 1]": lambda _: [0, 1],
    "[None]": lambda _: [None],
    "['x']": lambda _: ["x"],
    "[nan]": lambda _: [float("nan")],
    "[1e308]": lambda _: [1e308],
    "[10**400]": lambda _: [10**400],
    "[-1.0, 1]": lambda _: [-1.0, 1],
    "[True]": lambda _: [True],
    "[[1]]": lambda _: [[1]],
    "()": lambda _: (),
    "{}": lambda _: {},
    "{1: 2}": lambda _: {1: 2},
    "a set": lambda _: {"w.0", 1},
    "a generator": lambda _: (i for i in range(2)),
    "range": lambda _: range(3),
    "object": lambda _: object(),
    "a class": lambda _: int,
    "a function": lambda _: len,
    "a tensor": lambda _: torch.tensor(1.0),
    "two tensors": lambda _: torch.tensor([1.0, 0.0]),
    "no tensors": lambda _: torch.empty(0),
    "meta tensor": lambda _: torch.empty(2, device="meta"),
    "a parameter": lambda _: nn.Parameter(torch.ones(2)),
    "a module": lambda _: nn.Linear(1, 1),
    "numpy float": lambda _: np.float64(1.5),
    "numpy int": lambda _: np.int64(1),
    "numpy array": lambda _: np.ones(2),
    "numpy nothing": lambda _: np.ones(0),
    "a dtype": lambda _: torch.float16,
    "a device": lambda _: torch.device("cuda", 0),
    "meta device": lambda _: torch.device("meta"),
    "Ellipsis": lambda _: ...,
}

SWITCH: dict[str, Callable[[Any], Any]] = {
    "on": lambda _: True,
    "off": lambda _: False,
}
GROUPS: dict[str, Callable[[Any], Any]] = {
    "world": lambda _: dist.group.WORLD,
    "NON_GROUP_MEMBER": lambda _: dist.GroupMember.NON_GROUP_MEMBER,
    "a store": lambda _: dist.HashStore(),
    "a bare group": lambda _: dist.ProcessGroup(0, 1),
    "a backend": lambda _: dist.group.WORLD._get_backend(torch.device("cpu")),
    "options": lambda _: dist.BroadcastOptions(),
    "a name": lambda _: "gloo",
}
_meshes: dict[str, Any] = {}


def mesh(*shape: int) -> Any:
    """One per process: each makes groups."""
    name = str(shape)
    if name not in _meshes:
        dims = tuple("abc"[: len(shape)])
        _meshes[name] = init_device_mesh("cpu", shape, mesh_dim_names=dims)
    return _meshes[name]


class HalfMesh:
    """Has a group, and nothing else of a mesh."""

    def get_group(self, mesh_dim: Any = None) -> Any:
        return dist.group.WORLD


def pairs(module: Any) -> list[Any]:
    return list(module.named_parameters()) if isinstance(module, nn.Module) else []


def first_of(module: Any) -> Any:
    return next((p for _, p in pairs(module)), None)


STRANGE_PAIRS: dict[str, Callable[[Any], Any]] = {
    "own": lambda m: pairs(m)[:1],
    "all": pairs,
    "own, lazily": lambda m: iter(pairs(m)),
    "twice": lambda m: pairs(m)[:1] * 2,
    "renamed": lambda m: [("other", p) for _, p in pairs(m)],
    "only names": lambda m: [name for name, _ in pairs(m)],
    "only parameters": lambda m: [p for _, p in pairs(m)],
    "swapped": lambda m: [(p, n) for n, p in pairs(m)],
    "triples": lambda m: [(n, p, 0) for n, p in pairs(m)],
    "a stranger": lambda _: [("stranger", nn.Parameter(torch.ones(2)))],
    "a namesake": lambda _: [("w.0", nn.Parameter(torch.ones(2)))],
    "a meta stranger": lambda _: [
        ("stranger", nn.Parameter(torch.empty(2, device="meta")))
    ],
    "a lazy stranger": lambda _: [("stranger", nn.UninitializedParameter())],
    "a frozen stranger": lambda _: [("stranger", frozen(torch.ones(2)))],
    "a plain tensor": lambda _: [("stranger", torch.ones(2))],
    "no pairs": lambda _: [],
    "a dict": lambda m: dict(pairs(m)),
}
PRECISIONS: dict[str, Callable[[Any], Any]] = {
    "bf16": lambda _: _MixedPrecision(torch.bfloat16, torch.float32, torch.float32),
    "none of it": lambda _: _MixedPrecision(None, None, None),
    "integers": lambda _: _MixedPrecision(torch.int32, torch.int32, torch.int32),
    "names": lambda _: _MixedPrecision("float16", "float16", "float16"),
    "complex": lambda _: _MixedPrecision(torch.complex64, None, None),
}


def own_layout(module: Any) -> Any:
    """One bucket for everything that is trained, of whatever dtypes."""
    names = [name for name, param in pairs(module) if param.requires_grad]
    return {"format": 1, "rebuilt": True, "buckets": [names]}


# What each argument may well be given; the rest of its values is junk.
SENSIBLE: dict[str, dict[str, Callable[[Any], Any]]] = {
    "device_ids": {"none": lambda _: None, "empty": lambda _: []},
    "output_device": {"none": lambda _: None, "'cpu'": lambda _: "cpu"},
    "dim": {"0": lambda _: 0},
    "broadcast_buffers": SWITCH,
    "init_sync": SWITCH,
    "process_group": GROUPS,
    "bucket_cap_mb": {
        "25": lambda _: 25,
        "tiny": lambda _: 8 / 2**20,
        "0": lambda _: 0,
        "auto": lambda _: "auto",
    },
    "find_unused_parameters": SWITCH,
    "check_reduction": SWITCH,
    "gradient_as_bucket_view": SWITCH,
    "static_graph": SWITCH,
    "delay_all_reduce_named_params": STRANGE_PAIRS,
    "param_to_hook_all_reduce": {"own": first_of},
    "mixed_precision": PRECISIONS,
    "device_mesh": {
        "a mesh": lambda _: mesh(1),
        "2-D": lambda _: mesh(1, 1),
        "half a mesh": lambda _: HalfMesh(),
    },
    "skip_all_reduce_unused_params": SWITCH,
    "bucket_cap_mb_list": {
        "two": lambda _: [8 / 2**20, 1.0],
        "a tuple": lambda _: (1,),
    },
    "batched_grad_copy": SWITCH,
    "forward_sync_buffers": SWITCH,
    "unsynced": {
        "raise": lambda _: "raise",
        "warn": lambda _: "warn",
        "ignore": lambda _: "ignore",
    },
    "hang_timeout": {"5": lambda _: 5, "none": lambda _: None},
    "check_replicas_every": {"2": lambda _: 2, "0": lambda _: 0},
    "check_finite_grads": SWITCH,
    "bucket_layout": {
        "own": own_layout,
        "of another": lambda _: {"format": 1, "rebuilt": True, "buckets": [["w"]]},
        "no file": lambda _: "no/such/file.json",
    },
}


@dataclass(frozen=True)
class Call:
    """``DataParallel(module, **arguments)``, by the names of what is passed."""

    module: str
    arguments: tuple[tuple[str, str], ...]


def _one_argument(name: str) -> st.SearchStrategy[tuple[str, str]]:
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
    """A law does not hold."""


def try_call(call: Call) -> str:
    """Make the call, check the laws, and say what happened in a word.

    Laws: documented exceptions only; after one, the module is as before and can be
    wrapped rightly; without one, it trains rightly or says why not; in the end no hook
    is left.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = MODULES[call.module]()
        nodes = nodes_of(module)
        before = look(module)
        outcome, ddp = _construct(call, module)
        if ddp is None:
            if look(module) != before:
                raise Broken(f"{outcome}, but the module is not what it was")
        else:
            outcome = _train_one(ddp, call)
            _drop(ddp)
        del ddp
        if call.module in GOOD:
            _wrap_rightly(module)
        left = hooks_on(nodes)
        if left:
            gc.collect()
            left = hooks_on(nodes)
        if left and call.module != "wrapped" and call.module != "torch's DDP":
            raise Broken(f"hooks are left on parameters {left} after {outcome}")
        return outcome


def make(call: Call) -> tuple[Any, dict[str, Any]]:
    """Module and arguments."""
    module = MODULES[call.module]()
    return module, _arguments(call, module)


def _arguments(call: Call, module: Any) -> dict[str, Any]:
    made = {}
    for name, value in call.arguments:
        build = SENSIBLE[name].get(value) or JUNK[value]
        made[name] = build(module)
    return made


def _construct(call: Call, module: Any) -> tuple[str, Any]:
    arguments = _arguments(call, module)
    try:
        return "accepted", DataParallel(module, **arguments)
    except DOCUMENTED as error:
        if "INTERNAL ASSERT" in str(error):
            raise
        return type(error).__name__, None


def _train_one(ddp: DataParallel, call: Call) -> str:
    """One step of what was accepted."""
    ddp.zero_grad()
    try:
        ddp(torch.ones(1)).sum().backward()
    except DOCUMENTED as error:
        if "INTERNAL ASSERT" in str(error):
            raise
        return f"accepted, then {type(error).__name__}"
    if call.module not in GOOD:
        return "accepted, bad"
    low = "mixed_precision" in dict(call.arguments)
    _check_gradients(ddp, "as asked for", tolerance=0.02 if low else 0.0)
    return "accepted"


def _drop(ddp: DataParallel) -> None:
    """Nothing may be left of it but what the caller holds."""
    for param in ddp.parameters():
        param.grad = None


def _wrap_rightly(module: nn.Module) -> None:
    for param in module.parameters():
        param.grad = None
    ddp = DataParallel(module)
    ddp(torch.ones(1)).sum().backward()
    _check_gradients(ddp, "wrapped once more")
    if ddp._reducer.hooks.shared() and not isinstance(module, DataParallel):
        gc.collect()
        if ddp._reducer.hooks.shared():
            raise Broken("other hooks are on the parameters")
    for param in module.parameters():
        param.grad = None


def _check_gradients(ddp: DataParallel, when: str, tolerance: float = 0.0) -> None:
    for name, param in ddp.named_parameters():
        if not (param.requires_grad and name.startswith("module.w.")):
            continue
        found, expected = param.grad, 6 * param.detach()
        if found is None or not torch.allclose(
            found, expected, rtol=1e-5 + tolerance, atol=1e-6, equal_nan=True
        ):
            raise Broken(f"{when}: {name}.grad is {found}, expected {expected}")


def nodes_of(module: Any) -> list[Any]:
    """The AccumulateGrad nodes, kept alive, so that no hook can hide by their death."""
    if not isinstance(module, nn.Module) or "_parameters" not in module.__dict__:
        return []
    return [
        get_gradient_edge(p).node
        for p in module.parameters()
        if p.requires_grad and p.is_leaf and _has_data(p)
    ]


def _has_data(param: torch.Tensor) -> bool:
    return param.layout is torch.strided and not is_lazy(param)


def hooks_on(nodes: list[Any]) -> list[int]:
    """Which nodes carry Python hooks."""
    found = []
    for i, node in enumerate(nodes):
        handle = node.register_hook(_nothing)
        if len(handle.hooks_dict_ref() or ()) > 1:
            found.append(i)
        handle.remove()
    return found


def _nothing(*_: Any) -> None:
    pass


def look(module: Any) -> Any:
    """What a failed constructor must not have changed."""
    if not isinstance(module, nn.Module) or "_parameters" not in module.__dict__:
        return None
    modules = [
        (
            name,
            {key: _kept(value) for key, value in m.__dict__.items()},
        )
        for name, m in module.named_modules()
    ]
    tensors = [
        (
            name,
            id(t),
            str(t.grad) if t.is_leaf else "",
            t.requires_grad,
            sorted(map(str, t.__dict__)),
            str(t._backward_hooks),
            str(getattr(t, "_post_accumulate_grad_hooks", None)),
        )
        for name, t in [*module.named_parameters(), *module.named_buffers()]
    ]
    return modules, tensors


def _kept(value: Any) -> Any:
    return (id(value), len(value)) if isinstance(value, dict) else id(value)


def dies(reference: weakref.ref[Any]) -> bool:
    """Whether nothing is left of an object, at the latest after a collection."""
    if reference() is not None:
        gc.collect()
    return reference() is None
