"""Wrapping and training inside a user's contexts, with the bits of torch's DDP outside.

A default device, a mode that sees each function, a transform of `torch.func`, inference
mode: what minidp allocates for itself must not come from there. Torch's DDP, without
any context, is what gradients are compared with.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minidp import SyncBatchNorm
from tests.support.both import error_of, grads, same, wrapped
from tests.support.combined import combined
from tests.support.ranks import on_ranks


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class SeesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class RefusesOperators(TorchDispatchMode):
    """Around what is no business of the user's: nothing may come by."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"the user's mode sees {function}")


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


Context = Callable[[], Any]
# Where a model can be wrapped, and trained; where it can only be wrapped.
CONTEXTS: dict[str, Context] = {
    "meta": lambda: torch.device("meta"),
    "default meta": lambda: default_device("meta"),
    "default float64": lambda: default_dtype(torch.float64),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "function mode": SeesFunctions,
    "dispatch mode": SeesOperators,
    "deterministic": deterministic,
    "anomaly": torch.autograd.detect_anomaly,
}
FOR_WRAPPING: dict[str, Context] = CONTEXTS | {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "fake": FakeTensorMode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "transform": lambda: inside_grad(),
}


@contextlib.contextmanager
def inside_grad() -> Iterator[None]:
    """The inside of a `torch.func.grad`."""
    level = torch._C._functorch._grad_increment_nesting()
    assert level == 1
    try:
        yield
    finally:
        torch._C._functorch._grad_decrement_nesting()


class Net(nn.Module):
    """Has buffers, a layer that some steps leave out, and several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(3, 40, dtype=torch.float32)
        self.norm = nn.BatchNorm1d(40, dtype=torch.float32)
        self.large = nn.Linear(40, 600, dtype=torch.float32)
        self.last = nn.Linear(600, 2, dtype=torch.float64)
        self.spare = nn.Linear(40, 600, dtype=torch.float32)

    def forward(self, x: torch.Tensor, *, spare: bool = False) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        x = self.large(x) + self.spare(x) if spare else self.large(x)
        return self.last(x.double())


MODES: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    {"static_graph": True},
]


def trained(
    ctx: Any, wrap: Any, mode: dict[str, Any], wrapping: Context, training: Context
) -> list[Any]:
    """Gradients and buffers of some steps, wrapped in one context, run in another."""
    net = Net()
    with wrapping():
        model = wrap(net, **mode)
    random = torch.Generator().manual_seed(ctx.rank)
    history = []
    for step in range(5):
        model.zero_grad()
        x = torch.randn(6, 3, generator=random, dtype=torch.float32)
        may_spare = "find_unused_parameters" in mode
        options = {"spare": not may_spare or (step + ctx.rank) % 3 == 0}
        with training():
            loss = model(x, **options).square().mean()
            loss.backward()
        history.append((loss.detach(), grads(net), [*map(torch.clone, net.buffers())]))
    return history


def on_torch(ctx: Any, mode: dict[str, Any]) -> list[Any]:
    mode = {name: mode[name] for name in mode if not name.startswith("skip")}
    wrap = lambda net, **mode: DistributedDataParallel(  # noqa: E731
        net, process_group=ctx.group, **mode
    )
    nothing = contextlib.nullcontext
    return trained(ctx, wrap, mode, nothing, nothing)


def by_ours(ctx: Any, **more: Any) -> Any:
    return lambda net, **mode: wrapped(ctx, net, **(mode | more))


@on_ranks(1, 2)
@pytest.mark.parametrize(("name", "mode"), combined(FOR_WRAPPING, MODES))
def test_wrapped_inside(ctx, mode, name):
    theirs = on_torch(ctx, mode)
    wrap = by_ours(ctx, check_replicas_every=1)
    ours = trained(ctx, wrap, mode, FOR_WRAPPING[name], contextlib.nullcontext)
    assert same(theirs, ours)


@on_ranks(1, 2)
@pytest.mark.parametrize(("name", "mode"), combined(CONTEXTS, MODES))
def test_trained_inside(ctx, mode, name):
    theirs = on_torch(ctx, mode)
    wrap = by_ours(ctx, check_replicas_every=1)
    ours = trained(ctx, wrap, mode, CONTEXTS[name], CONTEXTS[name])
    assert same(theirs, ours)


@on_ranks(2)
@pytest.mark.parametrize("name", CONTEXTS)
def test_items_counted_inside(ctx, name):
    found = []
    for context in (contextlib.nullcontext, CONTEXTS[name]):
        net = Net()
        with context():
            model = wrapped(ctx, net, average_over="items")
        x = torch.linspace(0, 1, 18, dtype=torch.float32).view(6, 3)
        n = torch.tensor(ctx.rank * 3.0, dtype=torch.float32)
        for _ in range(3):
            model.zero_grad()
            with context():
                loss = model(x, spare=True).square().mean()
                model.weigh_loss(loss, n).backward()
                total = model.item_totals
        assert total.count == 3.0
        found.append((grads(net), total.mean_loss))
    assert same(*found)


# -- a due rebuild, and module buffers, in a forward that is not for training ----------


def of_grad(model: Any, x: torch.Tensor) -> None:
    torch.func.grad(lambda x: model(x, spare=True).sum())(x)


def of_vmap(model: Any, x: torch.Tensor) -> None:
    torch.func.vmap(lambda x: model(x, spare=True), randomness="different")(x[None])


def of_jvp(model: Any, x: torch.Tensor) -> None:
    torch.func.jvp(lambda x: model(x, spare=True), (x,), (x,))


def of_functional_call(model: Any, x: torch.Tensor) -> None:
    values = dict(model.named_parameters())
    torch.func.functional_call(model, values, (x,), {"spare": True})


def of_fake(model: Any, x: torch.Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(x, spare=True)


def of_inference(model: Any, x: torch.Tensor) -> None:
    with torch.inference_mode():
        model(x, spare=True)


def of_counting(model: Any, x: torch.Tensor) -> None:
    with SeesOperators(), SeesFunctions(), torch.device("meta"):
        model(x, spare=True)


@on_ranks(1, 2)
@pytest.mark.parametrize("mode", MODES[:3], ids=str)
@pytest.mark.parametrize(
    "call",
    [of_grad, of_vmap, of_jvp, of_functional_call, of_fake, of_inference, of_counting],
)
@pytest.mark.parametrize("is_training", [False, True], ids=["eval", "train"])
def test_a_forward_elsewhere_leaves_nothing_behind(ctx, mode, call, is_training):
    """After the first backward buckets are due to be rebuilt: whoever comes does it."""
    if is_training and call in (of_vmap, of_jvp, of_grad):
        return  # batch norm changes its buffers: an error of torch's
    histories = []
    for is_other in (False, True):
        net = Net()
        model = wrapped(ctx, net, **mode, check_replicas_every=1)
        random = torch.Generator().manual_seed(ctx.rank)
        history = []
        for step in range(4):
            x = torch.randn(6, 3, generator=random, dtype=torch.float32)
            if is_other and step in (1, 2):
                buffers = copy.deepcopy(dict(net.named_buffers()))
                model.train(is_training)
                call(model, x)
                model.train()
                model.require_forward_param_sync = True  # as if it had not been
                with torch.no_grad():
                    for name, value in net.named_buffers():
                        value.copy_(buffers[name])
            model.zero_grad()
            model(x, spare=True).square().mean().backward()
            history.append((grads(net), [*map(torch.clone, net.buffers())]))
        histories.append(history)
    assert same(*histories)


@on_ranks(2)
def test_a_users_mode_does_not_see_what_is_ours(ctx):
    model = wrapped(ctx, Net(), check_replicas_every=1)
    x = torch.randn(6, 3)
    model(x, spare=True).sum().backward()
    net, model.module = model.module, nn.Identity()  # the user has nothing to do
    with RefusesOperators():
        model(x)  # rebuilds
    model.module = net
    assert model._reducer.rebuild_policy.has_rebuilt


@on_ranks(2)
@pytest.mark.parametrize("name", CONTEXTS)
def test_sync_batch_norm_inside(ctx, name):
    found = []
    for context in (contextlib.nullcontext, CONTEXTS[name]):
        net = SyncBatchNorm.convert_sync_batchnorm(Net(), ctx.group)
        with context():
            model = wrapped(ctx, net)
        x = torch.linspace(0, 1 + ctx.rank, 18, dtype=torch.float32).view(6, 3)
        with context():
            model(x, spare=True).square().mean().backward()
        found.append((grads(net), [*net.buffers()]))
    assert same(*found)


@on_ranks(2)
def test_reset_and_gradients_by_hand_inside(ctx):
    found = []
    for context in (
        contextlib.nullcontext,
        CONTEXTS["meta"],
        CONTEXTS["dispatch mode"],
    ):
        net = Net()
        model = wrapped(ctx, net, find_unused_parameters=True)
        x = torch.linspace(0, 1 + ctx.rank, 18, dtype=torch.float32).view(6, 3)
        with context():
            model.reset()
            with model.no_sync():
                model(x).square().mean().backward()
            model.sync_gradients()
            twin = copy.deepcopy(model)
        twin.zero_grad()
        twin(x).square().mean().backward()
        found.append((grads(net), grads(twin.module)))
    assert same(*found[:2])
    assert same(found[0], found[2])


@on_ranks(2)
def test_parameters_of_inference_mode_are_refused(ctx):
    with torch.inference_mode():
        net = nn.Linear(2, 2)
        error = error_of(lambda: wrapped(ctx, net))
    assert "inference" in error
