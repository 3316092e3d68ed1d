"""The matrix: wrong uses of data parallelism, each written once for both wrappers.

A pattern trains two ranks on different data: a right step, the wrong one, then right
steps again, so that an error may come late. Its row says how torch 2.13 ends. minidp
must end in right gradients or in a named error, and must train right after reset().
"""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.fault.outcomes import Outcome
from tests.fault.play import Loss, Net, Play, plain

RIGHT, ERROR, LATE = Outcome.RIGHT, Outcome.ERROR, Outcome.LATE
NAMED, SILENT, HANG, CRASH = (
    Outcome.NAMED,
    Outcome.SILENT,
    Outcome.HANG,
    Outcome.CRASH,
)
DEFAULT: dict[str, Any] = {}
FIND = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
VIEW = {"gradient_as_bucket_view": True}
MODES = {"default": DEFAULT, "find_unused": FIND, "static_graph": STATIC, "views": VIEW}
BOTH = frozenset({0, 1})
SECOND = frozenset({1})
OF_A, OF_B = ("a.weight", "a.bias"), ("b.weight", "b.bias")
OF_AB = OF_A + OF_B


@dataclass(frozen=True)
class Pattern:
    """One row."""

    name: str
    run: Callable[[Play], None]
    torch: Outcome  # how torch's DDP ends
    names: tuple[str, ...] = ()  # one of these parameters is named in the error
    culprits: frozenset[int] = BOTH
    options: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)  # options torch lacks
    is_legal: bool = False  # right, and not a word


PATTERNS: list[Pattern] = []


def add(name: str, run: Callable[[Play], None], ends: Outcome, **more: Any) -> None:
    PATTERNS.append(Pattern(name, run, ends, **more))


def in_modes(
    name: str,
    run: Callable[[Play], None],
    ends: Iterable[Outcome],
    modes: str = "default find_unused static_graph views",
    **more: Any,
) -> None:
    for mode, end in zip(modes.split(), ends, strict=True):
        suffix = "" if mode == "default" else f", {mode}"
        add(f"{name}{suffix}", run, end, options=MODES[mode], **more)


# -- a parameter is unused -------------------------------------------------------------


def uses(*of_rank: str) -> Loss:
    def loss(module: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
        return module(x, of_rank[rank]).pow(2).sum()

    return loss


def unused(*of_rank: str, is_last: bool = False) -> Callable[[Play], None]:
    def run(stage: Play) -> None:
        stage.begin()
        stage.train()
        stage.loss, before = uses(*of_rank), stage.loss
        stage.undo.append(lambda: setattr(stage, "loss", before))
        stage.train()
        if not is_last:
            stage.loss = before
            stage.train(2)

    return run


in_modes(
    "unused on one rank",
    unused("ab", "a"),
    [HANG, RIGHT, HANG, HANG],
    names=OF_B,
    culprits=SECOND,
)
in_modes("unused on all ranks", unused("a", "a"), [LATE, RIGHT, LATE, LATE], names=OF_B)
in_modes(
    "unused on one rank, in the last step",
    unused("ab", "a", is_last=True),
    [HANG, RIGHT],
    "default find_unused",
    names=OF_B,
    culprits=SECOND,
)
in_modes(
    "unused on all ranks, in the last step",
    unused("a", "a", is_last=True),
    [SILENT, RIGHT, SILENT, SILENT],
    names=OF_B,
)
in_modes(
    "other layer unused on each rank",
    unused("a", "b"),
    [LATE, RIGHT, LATE, LATE],
    names=OF_AB,
)


# -- distributed autograd: gradients live in a context of RPC --------------------------


@contextlib.contextmanager
def worker_of_rpc() -> Iterator[None]:
    """This process alone is a world of RPC; contexts need no other workers."""
    with tempfile.TemporaryDirectory() as folder:
        init_method = f"file://{folder}/rpc"
        options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
        rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
        try:
            yield
        finally:
            rpc.shutdown()


def in_a_context(stage: Play) -> None:
    stage.begin()
    stage.train()
    with worker_of_rpc():
        for _ in range(2):
            with dist_autograd.context() as context:
                loss = plain(stage.model, stage.x(), stage.rank)
                dist_autograd.backward(context, [loss])
                found = dist_autograd.get_gradients(context)
                for param in stage.model.parameters():
                    param.grad = found[param].clone()
            stage.update()
    stage.train(2)


in_modes("backward of distributed autograd", in_a_context, [RIGHT] * 4)


# -- backwards that do not belong to a forward -----------------------------------------


def other_method(stage: Play) -> None:
    stage.begin()
    stage.train()
    stage.model.zero_grad()
    stage.model.module.other(stage.x()).pow(2).sum().backward()
    stage.update(plain)
    stage.train(2)


def other_method_besides(stage: Play) -> None:
    stage.begin()
    stage.train()
    stage.model.zero_grad()
    plain(stage.model, stage.x(), stage.rank).backward()
    stage.model.module.other(stage.x()).pow(2).sum().backward()
    stage.update(lambda m, x, r: plain(m, x, r) * 2)
    stage.train(2)


def part_called(stage: Play) -> None:
    stage.begin()
    stage.train()
    stage.model.zero_grad()
    plain(stage.model, stage.x(), stage.rank).backward()
    stage.model.module.b(stage.x()).sum().backward()
    stage.update(lambda m, x, r: plain(m, x, r) + m.b(x).sum())
    stage.train(2)


in_modes("method other than forward", other_method, [SILENT] * 4, names=OF_AB)
in_modes("... after the main backward", other_method_besides, [SILENT] * 4, names=OF_AB)
in_modes("a part of .module called alone", part_called, [SILENT] * 4, names=OF_B)


def two_and_two(stage: Play) -> None:
    stage.begin()
    stage.train(2)
    stage.model.zero_grad()
    losses = [plain(stage.model, stage.x(), stage.rank) for _ in range(2)]
    for loss in losses:
        loss.backward()
    stage.update(lambda m, x, r: plain(m, x, r) * 2)
    stage.train(2)


def two_and_two_by_hand(stage: Play) -> None:
    stage.begin()
    stage.train(2)
    stage.model.zero_grad()
    losses = [plain(stage.model, stage.x(), stage.rank) for _ in range(2)]
    for loss in losses:
        loss.backward()
    by_hand(stage)
    stage.train(2)


def by_hand(stage: Play, *, drops_grads: bool = True) -> None:
    """A step that no optimizer makes: drift by it alone is reported one step later."""
    with torch.no_grad():
        for param in stage.model.parameters():
            if param.grad is not None:
                param -= 0.1 * param.grad
                if drops_grads:
                    param.grad = None


def retained(stage: Play) -> None:
    stage.begin()
    stage.train(2)
    stage.model.zero_grad()
    loss = plain(stage.model, stage.x(), stage.rank)
    loss.backward(retain_graph=True)
    loss.backward()
    stage.update(lambda m, x, r: plain(m, x, r) * 2)
    stage.train(2)


def stray(stage: Play) -> None:
    """Its gradients are averaged together with those of the main one."""
    stage.begin()
    stage.train(2)
    stage.model.zero_grad()
    plain(stage.model.module, stage.x(), stage.rank).backward()
    plain(stage.model, stage.x(), stage.rank).backward()
    stage.update(lambda m, x, r: plain(m, x, r) * 2)
    stage.train(2)


def penalty_of(param: torch.Tensor) -> torch.Tensor:
    return param.square().sum()


def stray_on_one_rank(stage: Play) -> None:
    stage.begin()
    stage.train(2)
    stage.model.zero_grad()
    plain(stage.model, stage.x(), stage.rank).backward()
    if stage.rank == 1:
        penalty_of(stage.model.module.b.weight).backward()
    stage.update(plain)
    stage.train(2)


def stray_before_zero_grad(stage: Play) -> None:
    """Legal: a penalty's gradient is looked at, and dropped."""
    stage.begin()
    stage.train(2)
    if stage.rank == 1:
        penalty_of(stage.model.module.b.weight).backward()
    stage.train(2)


in_modes("two forwards, then two backwards", two_and_two, [SILENT] * 4, names=OF_AB)
in_modes("retained graph, backward twice", retained, [SILENT] * 4, names=OF_AB)
in_modes("stray backward before the main one", stray, [RIGHT] * 4)
in_modes(
    "stray backward on one rank, after the main one",
    stray_on_one_rank,
    [SILENT] * 4,
    names=OF_B,
    culprits=SECOND,
)
in_modes("penalty on one rank before zero_grad", stray_before_zero_grad, [RIGHT] * 4)


# -- no_sync ---------------------------------------------------------------------------


def quiet(*, forward: bool, backward: bool) -> Callable[[Play], None]:
    def run(stage: Play) -> None:
        stage.begin()
        stage.train(2)
        stage.model.zero_grad()
        stage.model.require_backward_grad_sync = not forward
        loss = plain(stage.model, stage.x(), stage.rank)
        stage.model.require_backward_grad_sync = not backward
        loss.backward()
        stage.model.require_backward_grad_sync = True
        stage.update(plain)
        stage.train(2)

    return run


in_modes(
    "no_sync() around the forward only",
    quiet(forward=True, backward=False),
    [SILENT] * 4,
    names=OF_AB,
)
in_modes(
    "no_sync() around the backward only",
    quiet(forward=False, backward=True),
    [RIGHT] * 4,
)
in_modes(
    "no_sync() around both, then step",
    quiet(forward=True, backward=True),
    [SILENT] * 4,
    names=OF_AB,
)


def local_sgd(stage: Play) -> None:
    """Legal: replicas differ on purpose until they are averaged."""
    stage.begin()
    stage.train()
    with stage.model.no_sync():
        for _ in range(2):
            stage.model.zero_grad()
            plain(stage.model, stage.x(), stage.rank).backward()
            stage.optimizer.step()
    for param in stage.model.parameters():
        torch.distributed.all_reduce(param.data, group=stage.group)
        param.data.div_(2)
    stage.train(2)


def forward_between(stage: Play) -> None:
    stage.begin()
    for _ in range(3):
        stage.model.zero_grad()
        plain(stage.model, stage.x(), stage.rank).backward()
        stage.model(stage.x())
        stage.update(plain)


def indented(*, is_averaged: bool) -> Callable[[Play], None]:
    """Steps inside no_sync(), then a synchronised one: averaged before, or not."""

    def run(stage: Play) -> None:
        stage.begin()
        for k in range(6):
            stage.model.require_backward_grad_sync = k % 3 == 2
            if k % 3 == 2 and is_averaged:
                average_parameters(stage)
            stage.model.zero_grad()
            plain(stage.model, stage.x(), stage.rank).backward()
            if k % 3 == 2 or not is_averaged:
                stage.update(None)
            else:
                stage.optimizer.step()
        stage.model.require_backward_grad_sync = True

    return run


def average_parameters(stage: Play) -> None:
    for param in stage.model.parameters():
        torch.distributed.all_reduce(param.data, group=stage.group)
        param.data.div_(2)


def post_local_sgd(stage: Play) -> None:
    """Legal: a hook that averages over few ranks (here one), then parameters."""
    stage.begin()

    def hook(_state, bucket):  # torch reads annotations
        if stage.is_over:
            torch.distributed.all_reduce(
                bucket.buffer().div_(2), group=stage.model.process_group
            )
        return bring(bucket.buffer())

    stage.model.register_comm_hook(None, hook)
    for k in range(12):
        stage.model.zero_grad()
        plain(stage.model, stage.x(), stage.rank).backward()
        stage.optimizer.step()
        if k % 4 == 3:
            average_parameters(stage)
            stage.stepped()


in_modes("local SGD inside no_sync()", local_sgd, [RIGHT] * 4, is_legal=True)
in_modes(
    "local SGD, averaged before each synchronised step",
    indented(is_averaged=True),
    [RIGHT] * 4,
    is_legal=True,
)
in_modes(
    "post-local SGD with a comm hook",
    post_local_sgd,
    [RIGHT, RIGHT],
    "default views",
    is_legal=True,
)
in_modes(
    "optimizer.step() indented into no_sync()",
    indented(is_averaged=False),
    [SILENT] * 4,
    names=OF_AB,
)
in_modes("a forward between backward and step", forward_between, [RIGHT] * 4)


# -- zeroed gradients ------------------------------------------------------------------


def all_skip_backward(stage: Play) -> None:
    """Legal: a loss that is NaN on all ranks, say. Momentum moves the parameters."""
    stage.begin()
    stage.optimizer = torch.optim.SGD(stage.model.parameters(), 0.1, momentum=0.9)
    stage.train()
    for _ in range(2):
        stage.model.zero_grad(set_to_none=False)
        plain(stage.model, stage.x(), stage.rank)
        stage.update(None)
    stage.train(2)


def drops_accumulated(stage: Play) -> None:
    """Legal: what was accumulated is thrown away on all ranks."""
    stage.begin()
    stage.optimizer = torch.optim.SGD(stage.model.parameters(), 0.1, momentum=0.9)
    stage.train()
    for _ in range(2):
        with stage.model.no_sync():
            plain(stage.model, stage.x(), stage.rank).backward()
        stage.model.zero_grad(set_to_none=False)
        stage.update(None)
    stage.train(2)


def moved_weights(move: Callable[[Play], None]) -> Callable[[Play], None]:
    """Legal: other weights for a forward, on each rank its own; then back."""

    def run(stage: Play) -> None:
        stage.begin()
        for _ in range(3):
            before = [param.detach().clone() for param in stage.model.parameters()]
            with torch.no_grad():
                move(stage)
            stage.model.zero_grad(set_to_none=False)
            plain(stage.model, stage.x(), stage.rank).backward()
            with torch.no_grad():
                for param, old in zip(stage.model.parameters(), before, strict=True):
                    param.copy_(old)
            stage.update(None)

    return run


def climb(stage: Play) -> None:
    """Sharpness-aware minimisation: to the worst case nearby, for this rank's data."""
    with torch.enable_grad(), stage.model.no_sync():
        plain(stage.model, stage.x(), stage.rank).backward()
    for param in stage.model.parameters():
        param += 0.05 * param.grad


def disturb(stage: Play) -> None:
    generator = torch.Generator().manual_seed(stage.rank)
    for param in stage.model.parameters():
        param += 0.1 * torch.randn(param.shape, generator=generator)


in_modes(
    "all ranks skip a backward, gradients zeroed",
    all_skip_backward,
    [RIGHT] * 4,
    is_legal=True,
)
in_modes(
    "all ranks drop accumulated gradients, zeroed",
    drops_accumulated,
    [RIGHT] * 4,
    is_legal=True,
)
in_modes(
    "sharpness-aware minimisation, gradients zeroed",
    moved_weights(climb),
    [RIGHT, RIGHT, ERROR, RIGHT],
    is_legal=True,
)
in_modes(
    "weights disturbed on each rank for the forward",
    moved_weights(disturb),
    [RIGHT] * 4,
    is_legal=True,
)


# -- one replica changes ---------------------------------------------------------------


def checkpoint_on_one(stage: Play) -> None:
    stage.begin()
    if stage.rank == 1:
        state = stage.model.state_dict()
        stage.model.load_state_dict({name: v + 0.5 for name, v in state.items()})
    stage.train(3)


def frozen_part_on_one(stage: Play) -> None:
    """A pretrained backbone, loaded after wrapping."""
    module = Net()
    module.a.requires_grad_(False)
    stage.begin(module)
    if stage.rank == 1:
        module.a.load_state_dict({n: v + 0.5 for n, v in module.a.state_dict().items()})
    stage.train(3)


def changed_by_hand(stage: Play) -> None:
    stage.begin()
    if stage.rank == 1:
        stage.model.module.b.weight.data[0, 0] += 0.5
    stage.train(3)


in_modes(
    "checkpoint loaded on one rank, after wrapping",
    checkpoint_on_one,
    [SILENT] * 4,
    names=OF_AB,
)
add("... of a frozen part", frozen_part_on_one, SILENT, names=OF_A)
in_modes("one replica changed by hand", changed_by_hand, [SILENT] * 4, names=OF_B)


# -- gradients by other ways -----------------------------------------------------------


def grad_function(stage: Play) -> None:
    stage.begin()
    stage.train(2)
    params = list(stage.model.parameters())
    grads = torch.autograd.grad(plain(stage.model, stage.x(), stage.rank), params)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    stage.update(plain)
    stage.train(2)


def grad_function_by_hand(stage: Play) -> None:
    stage.begin()
    stage.train(2)
    stage.model.zero_grad()
    params = list(stage.model.parameters())
    grads = torch.autograd.grad(plain(stage.model, stage.x(), stage.rank), params)
    with torch.no_grad():
        for param, grad in zip(params, grads, strict=True):
            param -= 0.1 * grad
    stage.train(2)


def penalised(module: nn.Module, x: torch.Tensor, _rank: int) -> torch.Tensor:
    x = x.clone().requires_grad_()
    out = module(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.pow(2).sum() + slope.pow(2).sum()


def gradient_penalty(stage: Play) -> None:
    """Legal, on all ranks or on one."""
    stage.begin()
    stage.train()
    stage.loss = penalised
    stage.train(2)
    stage.loss = lambda m, x, rank: (plain if rank else penalised)(m, x, rank)
    stage.train(2)


in_modes("torch.autograd.grad into .grad", grad_function, [SILENT] * 4, names=OF_AB)
in_modes(
    "torch.autograd.grad, applied by hand",
    grad_function_by_hand,
    [SILENT] * 4,
    names=OF_AB,
)
in_modes(
    "gradient penalty by torch.autograd.grad",
    gradient_penalty,
    [RIGHT, RIGHT, RIGHT, RIGHT],
)


def step_by_hand_of(
    wrong: Callable[[Play], None], *, drops_grads: bool = True
) -> Callable[[Play], None]:
    def run(stage: Play) -> None:
        stage.begin()
        stage.train(2)
        stage.model.zero_grad()
        wrong(stage)
        by_hand(stage, drops_grads=drops_grads)
        stage.train(2)

    return run


def call_method(stage: Play) -> None:
    stage.model.module.other(stage.x()).pow(2).sum().backward()


def call_quietly(stage: Play) -> None:
    with stage.model.no_sync():
        plain(stage.model, stage.x(), stage.rank).backward()


add(
    "two forwards, then two backwards, applied by hand",
    two_and_two_by_hand,
    SILENT,
    names=OF_AB,
)
add(
    "method other than forward, applied by hand",
    step_by_hand_of(call_method),
    SILENT,
    names=OF_AB,
)
add(
    "no_sync() around both, applied by hand",
    step_by_hand_of(call_quietly, drops_grads=False),
    SILENT,
    names=OF_AB,
)


def unused_by_hand(stage: Play) -> None:
    stage.model(stage.x(), "a").pow(2).sum().backward()


add(
    "unused on all ranks, applied by hand",
    step_by_hand_of(unused_by_hand),
    ERROR,
    names=OF_B,
)


def fast_weights(stage: Play) -> None:
    """Legal: the other tensors are made from the parameters."""
    stage.begin()
    stage.train()

    def loss(module: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
        inner = module.module if module is stage.model else module
        prefix = "module." if module is stage.model else ""
        fast = {prefix + n: p * 0.5 for n, p in inner.named_parameters()}
        return functional_call(module, fast, (x,)).pow(2).sum()

    stage.loss = loss
    stage.train(3)
    stage.loss = plain
    stage.train(1)


def foreign_weights(stage: Play, *, use_optimizer: bool) -> None:
    stage.begin()
    stage.train()
    own = dict(stage.model.named_parameters())
    others = {n: p.detach().clone().requires_grad_() for n, p in own.items()}
    optimizer = torch.optim.SGD(others.values(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        functional_call(stage.model, others, (stage.x(),)).pow(2).sum().backward()
        if use_optimizer:
            optimizer.step()
        with torch.no_grad():
            for name, param in own.items():  # what the others have become
                if not use_optimizer:
                    others[name] -= 0.1 * others[name].grad
                param.copy_(others[name])
        stage.stepped()
    stage.train(2)


in_modes(
    "functional_call with tensors made from the parameters",
    fast_weights,
    [RIGHT] * 4,
)
add(
    "functional_call with tensors of their own",
    lambda stage: foreign_weights(stage, use_optimizer=True),
    SILENT,
    names=OF_AB,
)
add(
    "... applied by hand",
    lambda stage: foreign_weights(stage, use_optimizer=False),
    SILENT,
    names=OF_AB,
)


# -- the module changes after wrapping -------------------------------------------------


def changes(
    change: Callable[[Play], None],
    back: Callable[[Play], None] | None = None,
    *,
    new_optimizer: bool = True,
    is_by_hand: bool = False,
) -> Callable[[Play], None]:
    """Train, change the module, train on; without a way back, wrap again."""

    def run(stage: Play) -> None:
        module = Net()
        if change is unfreeze:
            module.b.requires_grad_(False)
        stage.begin(module)
        stage.train(2)
        change(stage)
        stage.wraps_again = back is None
        if back is not None:
            stage.undo.append(lambda: back(stage))
        if new_optimizer:
            stage.optimizer = stage.sgd()
        dtype = next(stage.model.parameters()).dtype
        for k in range(3):
            stage.model.zero_grad()
            plain(stage.model, stage.x().to(dtype), stage.rank).backward()
            if not is_by_hand:
                stage.update(None)
                continue
            by_hand(stage)
            if k:  # only the next forward can tell
                stage.stepped()

    return run


def freeze(stage: Play) -> None:
    stage.model.module.b.requires_grad_(False)


def freeze_on_one(stage: Play) -> None:
    stage.model.module.b.requires_grad_(stage.rank == 0)


def unfreeze(stage: Play) -> None:
    stage.model.module.b.requires_grad_(True)


def insert(stage: Play) -> None:
    """A layer more."""

    class Longer(Net):
        def forward(self, x: torch.Tensor, use: str = "abc") -> torch.Tensor:
            return super().forward(x, use)

    stage.model.module.c = nn.Linear(3, 3)
    stage.model.module.__class__ = Longer


def insert_parameter(stage: Play) -> None:
    class Scaled(Net):
        def forward(self, x: torch.Tensor, use: str = "ab") -> torch.Tensor:
            return super().forward(x, use) * self.scale

    stage.model.module.scale = nn.Parameter(torch.ones(3))
    stage.model.module.__class__ = Scaled


def replace(stage: Play) -> None:
    torch.manual_seed(1)
    stage.model.module.b = nn.Linear(3, 3)


def replace_parameter(stage: Play) -> None:
    stage.model.module.b.weight = nn.Parameter(torch.ones(3, 3))


def to_double(stage: Play) -> None:
    stage.undo.append(stage.model.float)
    stage.model.double()


def part_to_double(stage: Play) -> None:
    layer = stage.model.module.b
    handle = layer.register_forward_pre_hook(lambda _m, xs: (xs[0].double(),))
    stage.undo += [handle.remove, layer.float]
    layer.double()


def part_back(stage: Play) -> None:
    stage.model.module.b.double()
    stage.model.module.b.float()


def to_half(stage: Play) -> None:
    stage.undo.append(stage.model.float)
    stage.model.half()


def to_bfloat(stage: Play) -> None:
    stage.undo.append(stage.model.float)
    stage.model.to(torch.bfloat16)


def and_back(stage: Play) -> None:
    stage.model.to(torch.float64)
    stage.model.to(torch.float32)


def to_nothing(stage: Play) -> None:
    stage.model.to(torch.float32).to("cpu")


in_modes(
    "frozen after wrapping",
    changes(freeze, unfreeze),
    [LATE, RIGHT, LATE, LATE],
    names=OF_B,
)
in_modes(
    "frozen on one rank",
    changes(freeze_on_one, unfreeze),
    [HANG, SILENT],
    "default find_unused",
    names=OF_B,
    culprits=SECOND,
)
in_modes("unfrozen after wrapping", changes(unfreeze), [SILENT] * 4, names=OF_B)
in_modes(
    "layer added after wrapping", changes(insert), [SILENT] * 4, names=("c.weight",)
)
add("parameter added", changes(insert_parameter), SILENT, names=("scale",))
in_modes(
    "layer replaced after wrapping",
    changes(replace),
    [LATE, SILENT, LATE, LATE],
    names=OF_B,
)
add("parameter replaced", changes(replace_parameter), LATE, names=OF_B)
add(
    "layer replaced, optimizer of before",
    changes(replace, new_optimizer=False),
    LATE,
    names=OF_B,
)
for what, change in {
    "unfrozen": unfreeze,
    "layer added": insert,
    "layer replaced": replace,
}.items():
    in_modes(
        f"{what}, applied by hand",
        changes(change, is_by_hand=True),
        [ERROR if change is replace else SILENT, SILENT],
        "default find_unused",
        names=(*OF_B, "c.weight"),
    )
for what, change in {
    ".double()": to_double,
    ".half()": to_half,
    ".to(bfloat16)": to_bfloat,
    ".to(float64) and back": and_back,
}.items():
    few = "default find_unused"
    modes = few if change in (to_half, to_bfloat) else " ".join(MODES)
    in_modes(
        f"{what} after wrapping",
        changes(change),
        [SILENT] * len(modes.split()),
        modes,
        names=OF_AB,
    )
    add(
        f"{what} after wrapping, optimizer of before",
        changes(change, new_optimizer=False),
        SILENT,
        names=OF_AB,
    )
    add(
        f"{what} after wrapping, applied by hand",
        changes(change, is_by_hand=True),
        SILENT,
        names=OF_AB,
    )
in_modes(
    "a layer .double() after wrapping",
    changes(part_to_double),
    [LATE, ERROR, LATE, LATE],
    names=OF_B,
)
in_modes(
    "a layer .double().float() after wrapping",
    changes(part_back),
    [LATE, SILENT, LATE, LATE],
    names=OF_B,
)
add(".to() of what it is already", changes(to_nothing, to_nothing), RIGHT)


# -- several backward calls ------------------------------------------------------------


class Heads(nn.Module):
    """A shared trunk (if any) and two outputs."""

    def __init__(self, *, has_trunk: bool) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3) if has_trunk else nn.Identity()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.a(x), self.b(x)


def both_heads(module: nn.Module, x: torch.Tensor, _rank: int) -> torch.Tensor:
    first, second = module(x)
    return first.pow(2).sum() + second.pow(2).sum()


def head_by_head(*, has_trunk: bool) -> Callable[[Play], None]:
    def run(stage: Play) -> None:
        stage.loss = both_heads
        stage.begin(Heads(has_trunk=has_trunk))
        if not stage._options.get("static_graph"):
            stage.train(2)
        for _ in range(3):
            stage.model.zero_grad()
            first, second = stage.model(stage.x())
            first.pow(2).sum().backward(retain_graph=True)
            second.pow(2).sum().backward()
            stage.update(both_heads)

    return run


HEADS = (*OF_AB, "trunk.weight", "trunk.bias")
in_modes(
    "backward calls on disjoint parameters",
    head_by_head(has_trunk=False),
    [RIGHT, LATE, SILENT, RIGHT],
    names=HEADS,
)
in_modes(
    "backward calls on overlapping parameters",
    head_by_head(has_trunk=True),
    [ERROR, LATE, LATE, ERROR],
    names=HEADS,
)


class Checkpointed(nn.Module):
    def __init__(self, calls: int, *, use_reentrant: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.calls, self.use_reentrant = calls, use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(self.calls):
            x = checkpoint(self.a, x, use_reentrant=self.use_reentrant)
        return self.b(x)


def checkpointed(calls: int, *, use_reentrant: bool) -> Callable[[Play], None]:
    def run(stage: Play) -> None:
        stage.begin(Checkpointed(calls, use_reentrant=use_reentrant))
        stage.undo.append(lambda: setattr(stage.model.module, "use_reentrant", False))
        stage.train(4)

    return run


in_modes(
    "reentrant checkpoint of a shared layer",
    checkpointed(2, use_reentrant=True),
    [SILENT, ERROR, RIGHT, SILENT],
    names=OF_A,
)
in_modes(
    "reentrant checkpoint",
    checkpointed(1, use_reentrant=True),
    [RIGHT, ERROR, RIGHT, RIGHT],
)
in_modes(
    "checkpoint of a shared layer",
    checkpointed(2, use_reentrant=False),
    [RIGHT] * 4,
)


# -- static graph ----------------------------------------------------------------------


def one_more(stage: Play) -> None:
    stage.loss = uses("a", "a")
    stage.begin()
    stage.train(3)
    stage.loss = uses("ab", "ab")
    stage.train(2)


def quiet_at_first(stage: Play) -> None:
    stage.begin()
    with stage.model.no_sync():
        plain(stage.model, stage.x(), stage.rank).backward()
    stage.model.zero_grad()
    stage.train(4)


@dataclass
class Box:
    value: torch.Tensor


class Boxed(Net):
    def forward(self, x: torch.Tensor, use: str = "ab") -> Any:
        return Box(super().forward(x, use))


def boxed(stage: Play) -> None:
    stage.loss = lambda m, x, _rank: m(x).value.pow(2).sum()
    stage.begin(Boxed())
    stage.train(4)


def repeated(stage: Play) -> None:
    """A layer is used twice from some step on."""
    stage.begin()
    stage.train(3)
    stage.loss = uses("abb", "abb")
    stage.undo.append(lambda: setattr(stage, "loss", plain))
    stage.train(2)


add("static graph: a parameter more", one_more, ERROR, options=STATIC, names=OF_B)
in_modes("a layer used twice later on", repeated, [RIGHT, RIGHT, RIGHT, RIGHT])
in_modes("first backward under no_sync()", quiet_at_first, [RIGHT, RIGHT, ERROR, RIGHT])
in_modes("output is a dataclass", boxed, [RIGHT, RIGHT, SILENT, RIGHT])


# -- copies, wrappers, hooks, optimizers -----------------------------------------------


def copied(make: Callable[[Any], Any]) -> Callable[[Play], None]:
    def run(stage: Play) -> None:
        stage.begin()
        stage.train(3)
        stage.model = make(stage.model)
        stage.optimizer = stage.sgd()
        stage.train(3)

    return run


def by_pickle(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


in_modes(
    "deepcopy of a trained object", copied(copy.deepcopy), [RIGHT, RIGHT, SILENT, RIGHT]
)
in_modes(
    "unpickle of a trained object", copied(by_pickle), [RIGHT, RIGHT, SILENT, RIGHT]
)


def wrapped_twice(stage: Play) -> None:
    stage.begin()
    inner = stage.model
    stage.model = stage.wrap(inner)
    outer, stage.model.module = stage.model, inner
    stage.undo.append(lambda: setattr(stage, "model", inner))
    for _ in range(3):
        inner.module.zero_grad()
        outer(stage.x()).pow(2).sum().backward()
        stage.model = inner
        stage.update(plain)
        stage.model = outer


in_modes("wrapped twice", wrapped_twice, [RIGHT, RIGHT, RIGHT, ERROR], names=OF_AB)


def wrapped_again(stage: Play) -> None:
    """Legal: the old object is still there, somewhere."""
    old = stage.begin()
    stage.train()
    stage.model = stage.wrap(old.module)
    stage.train(2)
    stage.undo.append(lambda: old)  # keeps it


def wrapped_again_and_gone_around(stage: Play) -> None:
    wrapped_again(stage)
    stage.model.zero_grad()
    plain(stage.model.module, stage.x(), stage.rank).backward()
    stage.update(plain)


def interrupted(stage: Play) -> None:
    """Ctrl-C on all ranks, and on with the next batch (a notebook)."""

    def ctrl_c(_grad: torch.Tensor) -> None:
        raise KeyboardInterrupt

    stage.begin()
    stage.train(2)
    handle = stage.model.module.a.weight.register_hook(ctrl_c)
    try:
        plain(stage.model, stage.x(), stage.rank).backward()
    except KeyboardInterrupt:
        handle.remove()
    stage.train(2)


in_modes("two live wrappers, the new one is used", wrapped_again, [RIGHT] * 4)
in_modes(
    "two live wrappers, .module is called",
    wrapped_again_and_gone_around,
    [SILENT] * 4,
    names=OF_AB,
)
in_modes("backward interrupted by Ctrl-C", interrupted, [ERROR] * 4, names=OF_A)


def grad_hook(
    act: Callable[[nn.Parameter], None], ranks: frozenset[int], loss: Loss | None
) -> Callable[[Play], None]:
    def run(stage: Play) -> None:
        stage.begin()
        weight = stage.model.module.b.weight

        def hook(param: nn.Parameter) -> None:
            if stage.rank in ranks and not stage.is_over:
                act(param)

        stage.train()
        weight.register_post_accumulate_grad_hook(hook)
        for _ in range(3):
            stage.model.zero_grad()
            plain(stage.model, stage.x(), stage.rank).backward()
            stage.update(loss)

    return run


def drop(param: nn.Parameter) -> None:
    param.grad = None


def swap(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad.clone()


def share(param: nn.Parameter) -> None:
    param.grad = torch.zeros(1).expand(3, 3)


in_modes(
    "a hook sets .grad to None on one rank",
    grad_hook(drop, SECOND, None),
    [RIGHT] * 4,
    names=OF_B,
    culprits=SECOND,
)
in_modes(
    "a hook sets .grad to None on all ranks",
    grad_hook(drop, BOTH, None),
    [RIGHT] * 4,
    names=OF_B,
)
in_modes("a hook replaces .grad", grad_hook(swap, SECOND, plain), [RIGHT] * 4)
in_modes(
    "a hook replaces .grad by an expanded tensor",
    grad_hook(share, SECOND, None),
    [HANG, HANG, HANG, RIGHT],
)


def foreign_optimizer(stage: Play) -> None:
    """It holds parameters that the model has no more."""
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.b = nn.Linear(3, 3)
    stage.begin(module)
    stage.optimizer = optimizer
    stage.train(3)


def optimizer_of_a_copy(stage: Play) -> None:
    module = Net()
    optimizer = torch.optim.SGD(copy.deepcopy(module).parameters(), lr=0.1)
    stage.begin(module)
    stage.optimizer = optimizer
    stage.train(3)


add("optimizer built before a layer was replaced and wrapped", foreign_optimizer, RIGHT)
add("optimizer of a copy", optimizer_of_a_copy, RIGHT)


# -- ranks that differ -----------------------------------------------------------------


def fewer_steps(stage: Play) -> None:
    stage.begin()
    stage.train(2)
    stage.train(2 - stage.rank)


def skips_a_step(stage: Play) -> None:
    """Continue on one rank: a batch that is thrown away."""
    stage.begin()
    stage.train(2)
    if stage.rank == 0:
        stage.train()
    stage.train(2)


def skips_backward(stage: Play) -> None:
    """And steps all the same: weight decay, momentum."""
    stage.begin()
    stage.optimizer = torch.optim.SGD(stage.model.parameters(), 0.1, momentum=0.9)
    stage.train(2)
    stage.model.zero_grad(set_to_none=False)
    loss = plain(stage.model, stage.x(), stage.rank)
    if stage.rank == 0:
        loss.backward()
    stage.update(plain)
    stage.train(2)


def quiet_on_one(stage: Play) -> None:
    stage.begin()
    stage.train(2)
    stage.model.zero_grad()
    stage.model.require_backward_grad_sync = stage.rank == 0
    plain(stage.model, stage.x(), stage.rank).backward()
    stage.model.require_backward_grad_sync = True
    stage.update(plain)
    stage.train(2)


add("one rank makes fewer steps", fewer_steps, HANG, culprits=SECOND)
add("one rank skips a step, and goes on", skips_a_step, HANG, culprits=SECOND)
add("one rank has no backward", skips_backward, HANG, culprits=SECOND, names=OF_AB)
add("one rank is under no_sync()", quiet_on_one, HANG, culprits=SECOND, names=OF_AB)


def takes_another_branch(stage: Play) -> None:
    """The same parameters, in another order: nothing is wrong with that."""
    stage.begin()
    stage.train(2)
    stage.loss = uses("ab", "ba")
    stage.train(3)


in_modes("ranks take different branches", takes_another_branch, [RIGHT] * 4)


class Odd(Net):
    """Differs on rank 1 by what one of the functions below did to it."""

    def forward(self, x: torch.Tensor, use: str = "ab") -> torch.Tensor:
        for layer in self.children():
            if list(layer.parameters()):
                x = torch.tanh(layer(x.to(next(layer.parameters()).dtype)))
        return x


def other_order(module: Odd) -> None:
    first = module.a
    del module.a
    module.a = first


def other_shape(module: Odd) -> None:
    module.a, module.b = nn.Linear(3, 5), nn.Linear(5, 3)


def other_dtype(module: Odd) -> None:
    module.b.double()


def other_strides(module: Odd) -> None:
    module.b.weight = nn.Parameter(module.b.weight.detach().t())


def other_names(module: Odd) -> None:
    module.c, module.b = module.b, nn.Identity()


def layer_more(module: Odd) -> None:
    module.c = nn.Linear(3, 3)


def frozen_layer(module: Odd) -> None:
    module.b.requires_grad_(False)


def buffer_more(module: Odd) -> None:
    module.register_buffer("extra", torch.zeros(2))


def buffer_shape(module: Odd) -> None:
    module.register_buffer("mean", torch.zeros(5))


def odd_module(differ: Callable[[Odd], None]) -> Callable[[Play], None]:
    def run(stage: Play) -> None:
        module = Odd()
        module.register_buffer("mean", torch.zeros(2))
        if stage.rank == 1:
            differ(module)
        stage.begin(module)
        for _ in range(2):
            stage.model.zero_grad()
            plain(stage.model, stage.x(), stage.rank).backward()
            stage.update(None)

    return run


for differ, end in [
    (other_order, SILENT),
    (other_shape, HANG),
    (other_dtype, CRASH),
    (other_strides, HANG),
    (other_names, SILENT),
    (layer_more, ERROR),
    (frozen_layer, ERROR),
    (buffer_more, RIGHT),
    (buffer_shape, RIGHT),
]:
    what = differ.__name__.replace("_", " ")
    add(f"one rank's module differs: {what}", odd_module(differ), end)


def odd_options(
    first: dict[str, Any], second: dict[str, Any]
) -> Callable[[Play], None]:
    def run(stage: Play) -> None:
        stage.begin(**(second if stage.rank else first))
        stage.train(4)

    return run


for what, first, second, end in [
    ("bucket_cap_mb", {**FIND, "bucket_cap_mb": 0}, FIND, HANG),
    ("find_unused_parameters", FIND, DEFAULT, HANG),
    ("static_graph", STATIC, DEFAULT, CRASH),
    ("gradient_as_bucket_view", VIEW, DEFAULT, RIGHT),
]:
    add(f"ranks differ in {what}", odd_options(first, second), end)


def odd_ignore_list(stage: Play) -> None:
    module = Net()
    if stage.rank == 1:
        module._ddp_params_and_buffers_to_ignore = ["b.weight", "b.bias"]
    stage.begin(module)
    stage.train(2)


add("ranks differ in what they ignore", odd_ignore_list, ERROR)


def bad_argument(stage: Play) -> None:
    stage.begin(bucket_cap_mb="many" if stage.rank else 25)
    stage.train(2)


add("one rank's arguments are rejected", bad_argument, HANG, culprits=SECOND)


# -- comm hooks ------------------------------------------------------------------------


def comm_hook(
    act: Callable[[torch.Tensor], Any], ranks: frozenset[int]
) -> Callable[[Play], None]:
    """A hook that averages as it should, but for one step on some ranks."""

    def run(stage: Play) -> None:
        stage.begin()
        is_wrong: list[bool] = []

        def hook(_state, bucket):  # torch reads annotations
            averaged = bucket.buffer().div_(stage.world_size)
            work = torch.distributed.all_reduce(
                averaged, group=stage.model.process_group, async_op=True
            )
            assert work is not None
            if is_wrong and stage.rank in ranks and not stage.is_over:
                work.wait()
                return act(averaged)
            return work.get_future().then(lambda done: done.value()[0])

        stage.model.register_comm_hook(None, hook)
        stage.train(2)
        is_wrong.append(True)
        stage.train()
        is_wrong.clear()
        stage.train(2)

    return run


def bring(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def fail(_buffer: torch.Tensor) -> Any:
    raise ValueError("user code")


def fail_later(buffer: torch.Tensor) -> Any:
    return bring(buffer).then(fail)


def forget(_buffer: torch.Tensor) -> Any:
    return None


for what, act, ends in [
    ("raises", fail, [ERROR, HANG]),
    ("'s future raises", fail_later, [ERROR, HANG]),
    ("returns None", forget, [CRASH, CRASH]),
    ("returns a tensor", lambda buffer: buffer, [ERROR, HANG]),
    ("'s future brings None", lambda _buffer: bring(None), [ERROR, HANG]),
    ("'s future brings a list", lambda buffer: bring([buffer]), [ERROR, HANG]),
    (
        "'s future is too short",
        lambda buffer: bring(buffer[:-1].clone()),
        [ERROR, HANG],
    ),
    (
        "'s future is too long",
        lambda buffer: bring(torch.cat([buffer, buffer])),
        [RIGHT, RIGHT],
    ),
    (
        "'s future has another dtype",
        lambda buffer: bring(buffer.double()),
        [RIGHT, RIGHT],
    ),
    (
        "brings NaN",
        lambda buffer: bring(torch.full_like(buffer, float("nan"))),
        [SILENT, SILENT],
    ),
]:
    for where, ranks, end in [
        ("on all ranks", BOTH, ends[0]),
        ("on one rank", SECOND, ends[1]),
    ]:
        is_nan = what == "brings NaN"
        add(
            f"comm hook {what} {where}".replace(" '", "'"),
            comm_hook(act, ranks),
            end,
            names=OF_AB,
            culprits=ranks,
            ours={"check_finite_grads": True} if is_nan else {},
        )

BY_NAME = {pattern.name: pattern for pattern in PATTERNS}
