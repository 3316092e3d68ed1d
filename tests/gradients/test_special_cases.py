"""Cases that words of steps do not reach, on torch's DDP and on minidp side by side."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minidp import DataParallel, comm_hooks
from tests.support.both import (
    MODES,
    Scalars,
    error_of,
    grads,
    history_of,
    modes,
    on_both,
    same,
    wrapped,
    x_of,
)
from tests.support.ranks import as_in_torch, on_ranks

views = pytest.mark.parametrize("view", [False, True])


# -- checkpointing ---------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A layer, then others under checkpoints, which may be several times the same."""

    def __init__(self, order: str, *, reentrant: bool = True) -> None:
        super().__init__()
        self.first, self.again, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.layers = {"a": self.again, "b": self.last}
        self.order, self.reentrant = order, reentrant
        if "b" not in order:
            del self.last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for name in self.order:
            x = checkpoint(self.layers[name], x, use_reentrant=self.reentrant)
        return x.pow(2).sum()


def checkpointed(ctx, wrap, mode, order, reentrant):
    ddp = wrap(Checkpointed(order, reentrant=reentrant), **mode)
    return history_of(ddp, lambda n: ddp(torch.ones(2, 4) * (ctx.rank + n + 1)), 4)


@as_in_torch(2)
def test_checkpoints_of_a_static_graph(ctx, wrap):
    return checkpointed(ctx, wrap, {"static_graph": True}, "aaab", True)


@on_ranks(2)
@modes
@pytest.mark.parametrize("order", ["a", "aa"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_matrix_is_at_least_as_good_as_torchs(ctx, mode, order, reentrant):
    """Torch raises 'marked twice' in three cells; minidp in two of them."""
    theirs, ours = on_both(ctx, checkpointed, mode, order, reentrant)
    if reentrant and order == "aa" and "static_graph" not in mode:
        assert ours.startswith("MarkedTwiceError")
        assert "again." in ours
        assert isinstance(theirs, str)
        return None
    assert not isinstance(ours, str)
    is_torch_wrong = isinstance(theirs, str)
    assert is_torch_wrong <= (mode == {"find_unused_parameters": True})
    assert is_torch_wrong or same(theirs, ours)
    return ours


# -- gradients of unusual kinds --------------------------------------------------------


# Torch 2.12 says so, though there is one cycle.
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
@pytest.mark.parametrize("batched", [False, True])
def test_gradients_are_copied_back_in_one_call(lone_group, batched):
    """Per bucket, as torch 2.15 does with ``batched_grad_copy``; here in any case."""
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(20)])
    ddp = DataParallel(net, batched_grad_copy=batched)
    ddp(torch.ones(1, 3)).sum().backward()
    loss = ddp(torch.ones(1, 3)).sum()
    with torch.profiler.profile() as profile:
        loss.backward()
    copies = [event for event in profile.events() if "copy" in event.name]
    together = [each for each in copies if each.name == "aten::_foreach_copy_"]
    alone = [each for each in copies if each.cpu_parent not in together]
    assert len(together) <= 2  # into the bucket, and back
    assert len([each for each in alone if each not in together]) < 5


@on_ranks(1, 2, 3)
@views
def test_create_graph(ctx, view):
    """First and second order; torch fails as soon as two gradients share a bucket."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    alone = copy.deepcopy(net)
    ddp = wrapped(ctx, net, gradient_as_bucket_view=view, init_sync=False)
    size, history = ctx.world_size, []

    def local(x: torch.Tensor, **options: bool) -> Any:
        loss = alone(x).pow(2).sum()
        return torch.autograd.grad(loss, alone.parameters(), **options)

    def second_of(first: Any, module: nn.Module, divisor: int) -> Any:
        total = sum((g * w).sum() for g, w in zip(first, weights, strict=True))
        params = list(module.parameters())
        return torch.autograd.grad(total / divisor, params, allow_unused=True)

    for step in range(3):
        x = torch.linspace(-1, 1, 6).reshape(2, 3)
        inputs = [x * (rank + 1 + step) for rank in range(size)]
        ddp(inputs[ctx.rank]).pow(2).sum().backward(create_graph=True)
        mean = [sum(g) / size for g in zip(*map(local, inputs), strict=True)]
        averaged = [p.grad for p in ddp.parameters()]
        # The history of an averaged gradient is this rank's alone, scaled.
        own = local(inputs[ctx.rank], create_graph=True)
        weights = [m.detach() for m in mean]
        second, oracle = second_of(averaged, ddp, 1), second_of(own, alone, size)
        for found, expected in zip((*averaged, *second), (*mean, *oracle), strict=True):
            if expected is not None:
                torch.testing.assert_close(found.detach(), expected)
        history.append([g.detach().clone() for g in averaged])
        for p in ddp.parameters():
            p.grad = None
    return history


def penalised(ctx, wrap, mode, ranks):
    ddp = wrap(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), **mode)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    history = []
    for step in range(3):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 6).reshape(2, 3) * (ctx.rank + 1 + step)
        x.requires_grad_()
        out = ddp(x)
        loss = out.mean()
        if ctx.rank in ranks:
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = loss + slope.pow(2).sum()
        loss.backward()
        history.append(grads(ddp))
        optimizer.step()
    return history


@on_ranks(2)
@modes
@pytest.mark.parametrize("ranks", [[0, 1], [0]])
def test_gradient_penalty(ctx, mode, ranks):
    """``torch.autograd.grad`` through the outputs is no backward of ours."""
    if "static_graph" in mode:  # torch drifts, and desynchronises its collectives
        return penalised(ctx, partial(wrapped, ctx), mode, ranks)
    theirs, ours = on_both(ctx, penalised, mode, ranks)
    assert same(theirs, ours)
    assert isinstance(ours, list)
    return ours


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=True)
        self.head = nn.Linear(2, 1)

    def forward(self, index: torch.Tensor, *, use_table: bool = True) -> torch.Tensor:
        x = self.table(index) if use_table else torch.ones(1, 2)
        return self.head(x).sum()


@on_ranks(2)
def test_sparse_gradient_missing_on_one_rank_is_averaged(ctx):
    """Torch raises on that rank and its peer dies of it."""
    ddp = wrapped(ctx, Embeds(), find_unused_parameters=True)
    nn.init.ones_(ddp.module.head.weight)
    uses = [ctx.rank == 0, ctx.rank == 0, False]
    history = history_of(
        ddp, lambda n: ddp(torch.tensor([2]), use_table=uses[n]), len(uses)
    )
    expected = torch.zeros(6, 2)
    expected[2] = 0.5
    found = [None if step[0] is None else step[0].to_dense() for step in history]
    assert same(found, [expected, expected, None])


class TwoTables(nn.Module):
    """Two sparse embeddings whose sum is used: their gradients share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = (nn.Embedding(5, 3, sparse=True) for _ in range(2))

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return (self.tokens(i) + self.places(i)).sum()


@on_ranks(2)
@pytest.mark.parametrize("use_hook", [False, True])
def test_difference_sparse_gradients_that_share_memory(ctx, use_hook):
    """Torch divides the shared values twice, or reduces them twice."""
    ddp = wrapped(ctx, TwoTables())
    if use_hook:
        ddp.register_comm_hook(None, comm_hooks.all_reduce_hook)
    history = history_of(ddp, lambda _: ddp(torch.tensor([ctx.rank, ctx.rank + 1])))
    assert [grad.to_dense().sum() for step in history for grad in step] == [6.0] * 6


class Sized(nn.Module):
    """One large layer and small ones with as many elements together."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(128, 128))
        small = [nn.Parameter(torch.ones(64, 64)) for _ in range(4)]
        self.small = nn.ParameterList(small)

    def forward(self, x: torch.Tensor, *, use_large: bool = True) -> torch.Tensor:
        if use_large:
            return (self.large * x).sum()
        return sum((p * x).sum() for p in self.small)


@as_in_torch(2, 3)
@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_large_beside_missing_small(ctx, wrap, option):
    ddp = wrap(Sized(), **{option: True})
    history = history_of(ddp, lambda _: ddp(x_of(ctx)))
    if option != "static_graph":
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(x_of(ctx)).backward()
        ddp(x_of(ctx), use_large=False).backward()
        history.append(grads(ddp))
    return history


# -- parameters of two wrappers --------------------------------------------------------


class Head(nn.Module):
    """Has a layer of its own, and one that it may share with another `Head`."""

    def __init__(self, shared: nn.Module, *, comes_first: bool) -> None:
        super().__init__()
        layers = {"own": nn.Linear(16, 4), "shared": shared}
        for name in sorted(layers, reverse=comes_first):
            self.add_module(name, layers[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(torch.tanh(self.shared(x)))


STATIC = {"static_graph": True}
PAIRS = [
    ({}, STATIC),
    (STATIC, {}),
    (STATIC, STATIC),
    (STATIC, {"find_unused_parameters": True}),
    ({}, {"find_unused_parameters": True}),
]


@as_in_torch(3)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("swaps_wraps", [False, True])
@pytest.mark.parametrize("swaps_forwards", [False, True])
def test_one_backward_of_two_wrappers(ctx, wrap, pair, swaps_wraps, swaps_forwards):
    """Each averages the shared layer; which of them writes ``.grad`` last, shows.

    The layer lies in other places of their buckets, so that three ranks add up its
    elements in another order.
    """
    shared = nn.Linear(8, 16)
    heads = [Head(shared, comes_first=is_first) for is_first in (True, False)]
    wrapped: list[Any] = [None, None]
    for k in (1, 0) if swaps_wraps else (0, 1):
        wrapped[k] = wrap(heads[k], **pair[k])
    random = torch.Generator().manual_seed(ctx.rank)
    history = []
    for _ in range(3):
        losses = [torch.zeros(())] * 2
        for k in (1, 0) if swaps_forwards else (0, 1):
            wrapped[k].zero_grad()
            x = torch.randn(5, 8, generator=random)
            losses[k] = wrapped[k](x).square().mean()
        sum(losses).backward()
        history.append([grads(head) for head in heads])
    return history


VIEWS = {"gradient_as_bucket_view": True}


@on_ranks(2)
@pytest.mark.parametrize(
    "pair", [({}, VIEWS), (VIEWS, VIEWS), (VIEWS, STATIC)], ids=str
)
@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("is_one", [True, False], ids=["one backward", "two"])
def test_views_of_two_wrappers(ctx, pair, swaps, is_one):
    """Garbage with torch's DDP, if one backward has both; right in a backward each."""
    shared = nn.Linear(8, 16)
    heads = [Head(shared, comes_first=is_first) for is_first in (True, False)]
    pairs = list(zip(heads, pair, strict=True))
    models = [wrapped(ctx, head, **mode) for head, mode in pairs[:: -1 if swaps else 1]]
    x = torch.randn(5, 8)
    losses = [lambda model=model: model(x).square().mean() for model in models]
    if is_one:
        error = error_of(lambda: sum(loss() for loss in losses).backward())
        assert error.startswith(
            f"GradientError: [rank {ctx.rank}] Two wrappers averaged"
        )
        assert "Parameters: shared.weight, shared.bias." in error
        for model in models:
            model.reset()
            model.zero_grad()
    if pair[0] != {}:
        return  # torch refuses two that have views
    alone = copy.deepcopy(nn.ModuleList(heads))
    for _ in range(3):
        alone.zero_grad()
        for model in models:
            model.zero_grad()
        for loss in losses:
            loss().backward()
        sum(head(x).square().mean() for head in alone).backward()
        for ours, theirs in zip(heads, alone, strict=True):
            for a, b in zip(grads(ours), grads(theirs), strict=True):
                assert torch.allclose(a, b)


# -- user hooks ------------------------------------------------------------------------


HOOKS = [("", "n"), ("n", ""), ("tp", "tp"), ("p", "pn"), ("tn", "tp"), ("", "nn")]
# With views a late node hook would write to a buffer that is on its way, in torch too.
HOOKS_AND_MODES = [
    (before, after, mode)
    for (before, after), mode in itertools.product(HOOKS, MODES)
    if "n" not in after or "gradient_as_bucket_view" not in mode
]


@as_in_torch(3)
@pytest.mark.parametrize(("before", "after", "mode"), HOOKS_AND_MODES)
def test_hooked(ctx, wrap, before, after, mode):
    """Large and small gradients, scaled by tensor, post-accumulate and node hooks."""
    module = nn.Sequential(nn.Linear(3, 130), nn.Linear(130, 130))
    keep: list[Any] = []

    def install(kinds: str, factor: float) -> None:
        def scale(p: nn.Parameter) -> None:
            p.grad.mul_(factor)

        for param in module.parameters():
            node = torch.autograd.graph.get_gradient_edge(param).node
            for kind in kinds:
                if kind == "t":
                    param.register_hook(lambda g: g * factor)
                if kind == "p":
                    param.register_post_accumulate_grad_hook(scale)
                if kind == "n":
                    keep.append(node)
                    node.register_hook(lambda _i, _o, p=param: scale(p))

    install(before, 3.0)
    ddp = wrap(module, **mode)
    install(after, 5.0)
    return history_of(ddp, lambda n: ddp(torch.ones(2, 3) * (ctx.rank + 1 + n)).sum())


@as_in_torch(2)
@modes
def test_nulled(ctx, wrap, mode):
    ddp = wrap(Scalars(3), **mode)
    if ctx.rank == 1:
        victim = ddp.module.w[1]
        victim.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return history_of(ddp, lambda _: ddp(x_of(ctx)).sum())


# -- outputs ---------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    value: torch.Tensor


class Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


# What a forward returns of its layers a, b, c, and the loss of that.
KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda a, b, c: a, lambda out: out.sum()),
    "tuple": (lambda a, b, c: (a, b), lambda out: out[0].sum()),
    "dict": (
        lambda a, b, c: {"a": a, "nested": [b, 3]},
        lambda out: out["a"].sum() + out["nested"][0].pow(2).sum(),
    ),
    "dataclass": (lambda a, b, c: Output(a + b), lambda out: out.value.pow(2).sum()),
    "leaf": (
        lambda a, b, c: (a + b, c.bias),
        lambda out: out[0].pow(2).sum() + out[1].sum(),
    ),
    "object": (lambda a, b, c: Box(a + b), lambda out: out.value.pow(2).sum()),
}
UNUSED = {"tensor": [2, 3, 4, 5], "tuple": [2, 3, 4, 5], "leaf": [4]}  # else [4, 5]


class Shapes(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2) for _ in range(3))
        self.made, _ = KINDS[kind]

    def forward(self, x: torch.Tensor) -> Any:
        return self.made(self.a(x), self.b(x), self.c)


def outputs(ctx, wrap, kind, mode):
    ddp, (_, loss) = wrap(Shapes(kind), **{mode: True}), KINDS[kind]
    x = torch.ones(1, 2)
    return history_of(ddp, lambda n: loss(ddp(x * (ctx.rank + 1 + n))), 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mode", "torch_is_wrong"),
    [
        # Torch fails with a leaf parameter or an opaque object among the outputs,
        ("find_unused_parameters", ("leaf", "object")),
        # never synchronises a dataclass or object, and fails with a spare output.
        ("static_graph", ("dataclass", "object", "leaf", "tuple")),
    ],
)
def test_any_output(pool, kind, mode, torch_is_wrong):
    results = pool.run(on_both, 2, outputs, kind, mode)
    for theirs, ours in results:
        assert not isinstance(ours, str), ours
        assert kind in torch_is_wrong or same(theirs, ours), f"{theirs} != {ours}"
    (_, first), (_, second) = results
    assert same(first, second)
    if mode == "find_unused_parameters":
        unused = [i for i, grad in enumerate(first[-1]) if grad is None]
        assert unused == UNUSED.get(kind, [4, 5])


@modes
def test_outputs_are_the_very_objects_of_the_module(lone_group, mode):
    ddp = DataParallel(Shapes("tuple"), **mode)
    kept: list[Any] = []
    ddp.module.register_forward_hook(lambda _m, _i, out: kept.append(out))
    assert ddp(torch.ones(1, 2)) is kept[0]


@on_ranks(2)
def test_nothing_is_predicted_from_an_output_that_cannot_be_seen(ctx):
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0}
    ddp = wrapped(ctx, Shapes("object"), **options)
    for made in (lambda a, b, c: Box(a + b), lambda a, b, c: Box(a)) * 2:
        ddp.zero_grad()
        ddp.module.made = made
        ddp(torch.ones(1, 2) * (ctx.rank + 1)).value.sum().backward()
    missing = [g is None for g in grads(ddp)]
    assert missing == [False, False, True, True, True, True]
    ddp.zero_grad()
    ddp.module.made = lambda a, b, c: Box(a + b)
    ddp(torch.ones(1, 2) * (ctx.rank + 1)).value.sum().backward()
    assert all(g is not None for g in grads(ddp)[:4])
    return grads(ddp)[:4]


# -- groups and layout -----------------------------------------------------------------


def train_on(ctx, group):
    torch.manual_seed(ctx.rank)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    ddp = DataParallel(net, process_group=group, bucket_cap_mb=0)
    history = history_of(ddp, lambda n: ddp(torch.randn(4, 3) + n).pow(2).sum(), 4)
    return history[-1], [p.detach().clone() for p in ddp.parameters()]


@on_ranks((1, 2))
def test_subgroup_that_lacks_rank_0(ctx):
    return train_on(ctx, ctx.group)


def train_on_pair(ctx):
    return train_on(ctx, ctx.subgroups[(0, 1) if ctx.rank < 2 else (2, 3)])


def test_two_disjoint_groups_train_at_once(pool):
    results = pool.run(train_on_pair, 4)
    assert same(results[0], results[1])
    assert same(results[2], results[3])
    assert not same(results[0], results[2])


class Ordered(nn.Module):
    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.rand(40)) for _ in order])
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = torch.tanh(x * self.w[i])
        return x.sum()


@as_in_torch(2, 3, 4)
def test_rank_dependent_order(ctx, wrap):
    order = [0, 1, 2, 3, 4] if ctx.rank == 0 else [2, 0, 4, 3, 1]
    ddp = wrap(Ordered(order), bucket_cap_mb=200 / 2**20)
    x = torch.linspace(0.1, 1, 40)
    return history_of(ddp, lambda n: ddp(x * (ctx.rank + n + 1)), 4)


def test_gradients_are_views_with_stable_addresses(lone_group):
    conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    net = nn.Sequential(conv, nn.Flatten())
    ddp, addresses = DataParallel(net, gradient_as_bucket_view=True), []
    for step in range(4):
        ddp.zero_grad(set_to_none=step % 2 == 0)
        ddp(torch.randn(1, 2, 3, 3)).sum().backward()
        bucket, weight = ddp._reducer.queue.buckets[0], conv.weight
        for p, view in zip(bucket.params, bucket.views, strict=True):
            assert p.grad is view
        assert weight.grad.stride() == weight.stride()
        addresses.append(weight.grad.data_ptr())
    assert len(set(addresses[1:])) == 1  # buckets are rebuilt after the first


# -- other uses ------------------------------------------------------------------------


@as_in_torch(2)
def test_nested(ctx, wrap):
    ddp = wrap(nn.Sequential(wrap(Scalars(1)), Scalars(1)))
    return history_of(ddp, lambda _: ddp(x_of(ctx)).sum()), list(ddp.state_dict())


@as_in_torch(2)
def test_called_directly(ctx, wrap):
    ddp, x = wrap(Scalars(2)), x_of(ctx)
    history: list[Any] = []
    ddp.module(x).sum().backward()  # nothing announced: local
    history.append(grads(ddp))
    ddp.zero_grad()
    ddp(x)
    ddp.module(x).sum().backward()  # still announced: reduced
    history.append(grads(ddp))
    with torch.inference_mode():
        history.append(ddp(x).clone())
    ddp.eval()
    return history + history_of(ddp, lambda _: ddp(x).sum(), 1)


@on_ranks(3)
def test_globally_unused_gradient_views_do_not_drift(ctx):
    """Torch re-averages them in place, which changes bits at three ranks."""
    net = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    ddp = wrapped(ctx, net, **options)
    x = torch.randn(2, 50, generator=torch.Generator().manual_seed(ctx.rank))
    ddp(x).pow(2).sum().backward()
    before = grads(net[1])
    net[1].forward = lambda y: y
    for _ in range(3):
        ddp(x).pow(2).sum().backward()
    assert same(before, grads(net[1]))


@as_in_torch(2)
@views
def test_two_heads_with_zeroing(ctx, wrap, view):
    """Gradients are read before the user may zero them."""
    ddp = wrap(Shapes("tuple"), gradient_as_bucket_view=view)
    ddp.module.made = lambda a, b, c: (a, b + c.bias + c.weight.sum())

    def loss(step: int) -> torch.Tensor:
        first, second = ddp(torch.ones(1, 2) * (ctx.rank + 1 + step))
        first.sum().backward()
        for p in ddp.parameters():
            if p.grad is not None and not view:
                p.grad.zero_()
        return second.sum()

    return history_of(ddp, loss)


@on_ranks(2)
def test_a_copy_on_one_rank_does_not_disturb_reset(ctx):
    ddp = wrapped(ctx, Scalars(2))
    if ctx.rank == 0:
        copy.deepcopy(ddp)
    other = wrapped(ctx, Scalars(2))
    other(x_of(ctx), [0]).sum().backward()
    other.reset()
    other(x_of(ctx)).sum().backward()
