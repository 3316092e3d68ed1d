"""Cases that words of steps do not reach, on torch's DDP and on minidp side by side."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
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
    both_equal,
    grads,
    modes,
    on_both,
    same,
    x_of,
)

VIEWS = [(False,), (True,)]


def run_ours(ctx: Any, scenario: Any, *args: Any) -> Any:
    torch.manual_seed(0)
    return scenario(ctx, partial(DataParallel, process_group=ctx.group), *args)


AS_IN_TORCH: list[Any] = []


def as_in_torch(*world_sizes: int, args: Sequence[tuple[Any, ...]] = ((),)) -> Any:
    """Mark a scenario: its gradients must be torch's, with all of these arguments."""

    def note(scenario: Any) -> Any:
        for size, each in itertools.product(world_sizes, args):
            words = (scenario.__name__, size, *each)
            AS_IN_TORCH.append(
                pytest.param(scenario, size, each, id="-".join(map(str, words)))
            )
        return scenario

    return note


def history_of(ddp: nn.Module, loss: Callable[[int], torch.Tensor], n: int = 3) -> Any:
    """The gradients of some steps, each after `zero_grad`."""
    history = []
    for step in range(n):
        ddp.zero_grad()
        loss(step).backward()
        history.append(grads(ddp))
    return history


# -- the no_sync table of two ranks with inputs 1 and 2 --------------------------------


def no_sync_rows(ctx: Any, wrap: Any, mode: dict[str, Any]) -> list[float]:
    ddp = wrap(Scalars(), **mode)
    x, (param,) = x_of(ctx), ddp.parameters()
    rows = []

    def note(*, zero: bool = True) -> None:
        rows.append(param.grad.item())
        if zero:
            ddp.zero_grad()

    ddp(x).sum().backward()
    note(zero=False)
    ddp(x).sum().backward()
    note()
    with ddp.no_sync():
        ddp(x).sum().backward()
    note(zero=False)
    ddp(x).sum().backward()
    note()
    with ddp.no_sync():
        loss = ddp(x).sum()
    loss.backward()
    note()
    loss = ddp(x).sum()
    with ddp.no_sync():
        loss.backward()
    note()
    first, second = ddp(x).sum(), ddp(10 * x).sum()
    first.backward()
    second.backward()
    note()
    (ddp(x).sum() + ddp(10 * x).sum()).backward()
    note()
    loss = ddp(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    note()
    first = ddp(x).sum()
    with ddp.no_sync():
        second = ddp(10 * x).sum()
    second.backward()
    note(zero=False)
    first.backward()
    note()
    return rows


@modes
def test_no_sync_table(pool: Any, mode: dict[str, Any]) -> None:
    assert both_equal(pool, no_sync_rows, mode) == [
        [1.5, 3.0, 1.0, 3.0, 1.0, 1.5, 11.5, 16.5, 2.5, 15.0, 16.0],
        [1.5, 3.0, 2.0, 3.0, 2.0, 1.5, 21.5, 16.5, 3.5, 15.0, 17.0],
    ]


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


@as_in_torch(2, args=[({"static_graph": True}, "aaab", True)])
def checkpointed(ctx: Any, wrap: Any, mode: Any, order: str, reentrant: bool) -> Any:
    ddp = wrap(Checkpointed(order, reentrant=reentrant), **mode)
    return history_of(ddp, lambda n: ddp(torch.ones(2, 4) * (ctx.rank + n + 1)), 4)


@modes
@pytest.mark.parametrize("order", ["a", "aa"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_matrix_is_at_least_as_good_as_torchs(
    pool: Any, mode: dict[str, Any], order: str, reentrant: bool
) -> None:
    """Torch raises 'marked twice' in three cells; minidp in two of them."""
    results = pool.run(on_both, 2, checkpointed, mode, order, reentrant)
    fails = reentrant and order == "aa" and "static_graph" not in mode
    for theirs, ours in results:
        if fails:
            assert ours.startswith("MarkedTwiceError")
            assert "again." in ours
            assert isinstance(theirs, str)
        elif isinstance(theirs, str):
            assert mode == {"find_unused_parameters": True}
            assert not isinstance(ours, str), ours
        else:
            assert same(theirs, ours), ours
    if not fails:
        assert same(results[0][1], results[1][1])


# -- gradients of unusual kinds --------------------------------------------------------


def second_order(ctx: Any, wrap: Any, view: bool) -> Any:
    """Per step: (averaged first order, its oracle), (second order, its oracle)."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    alone = copy.deepcopy(net)
    ddp = wrap(net, gradient_as_bucket_view=view, init_sync=False)
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
        history.append(([g.detach().clone() for g in averaged], mean, second, oracle))
        for p in ddp.parameters():
            p.grad = None
    return history


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("view", [False, True])
def test_create_graph(pool: Any, world_size: int, view: bool) -> None:
    """Torch fails as soon as two such gradients share a bucket."""
    results = pool.run(run_ours, world_size, second_order, view)
    for history in results:
        for first, mean, second, oracle in history:
            for found, expected in zip(
                (*first, *second), (*mean, *oracle), strict=True
            ):
                if expected is not None:
                    torch.testing.assert_close(found, expected)
    for history in results[1:]:
        assert all(same(a[0], b[0]) for a, b in zip(history, results[0], strict=True))


def penalised(ctx: Any, wrap: Any, mode: dict[str, Any], ranks: list[int]) -> Any:
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


@modes
@pytest.mark.parametrize("ranks", [[0, 1], [0]])
def test_gradient_penalty(pool: Any, mode: dict[str, Any], ranks: list[int]) -> None:
    """``torch.autograd.grad`` through the outputs is no backward of ours."""
    if "static_graph" in mode:  # torch drifts, and desynchronises its collectives
        ours = pool.run(run_ours, 2, penalised, mode, ranks)
    else:
        ours = both_equal(pool, penalised, mode, ranks)
    assert isinstance(ours[0], list)
    assert same(*ours)


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=True)
        self.head = nn.Linear(2, 1)

    def forward(self, index: torch.Tensor, *, use_table: bool = True) -> torch.Tensor:
        x = self.table(index) if use_table else torch.ones(1, 2)
        return self.head(x).sum()


@as_in_torch(1, 2, 3, args=VIEWS)
def sparse_training(ctx: Any, wrap: Any, view: bool) -> Any:
    ddp = wrap(Embeds(), gradient_as_bucket_view=view)
    table, head = ddp.module.table.weight, ddp.module.head.weight
    history = []
    for step in range(4):
        if step % 2:
            ddp.zero_grad()
        ddp(torch.tensor([ctx.rank, 3, (ctx.rank + step) % 6])).backward()
        history.append(
            (table.grad.is_coalesced(), table.grad.to_dense(), head.grad + 0)
        )
    return history


def sparse_unused_on_rank_1(ctx: Any, wrap: Any) -> Any:
    ddp = wrap(Embeds(), find_unused_parameters=True)
    nn.init.ones_(ddp.module.head.weight)
    uses = [ctx.rank == 0, ctx.rank == 0, False]
    history = history_of(
        ddp, lambda n: ddp(torch.tensor([2]), use_table=uses[n]), len(uses)
    )
    return [None if step[0] is None else step[0].to_dense() for step in history]


def test_sparse_gradient_missing_on_one_rank_is_averaged(pool: Any) -> None:
    """Torch raises on that rank and its peer dies of it."""
    expected = torch.zeros(6, 2)
    expected[2] = 0.5
    for history in pool.run(run_ours, 2, sparse_unused_on_rank_1):
        assert same(history, [expected, expected, None])


class TwoTables(nn.Module):
    """Two sparse embeddings whose sum is used: their gradients share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = (nn.Embedding(5, 3, sparse=True) for _ in range(2))

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return (self.tokens(i) + self.places(i)).sum()


def two_tables(ctx: Any, wrap: Any, use_hook: bool) -> list[float]:
    ddp = wrap(TwoTables())
    if use_hook:
        ddp.register_comm_hook(None, comm_hooks.all_reduce_hook)
    history = history_of(ddp, lambda _: ddp(torch.tensor([ctx.rank, ctx.rank + 1])))
    return [grad.to_dense().sum().item() for step in history for grad in step]


@pytest.mark.parametrize("use_hook", [False, True])
def test_difference_sparse_gradients_that_share_memory(pool: Any, use_hook: bool):
    """Torch divides the shared values twice, or reduces them twice."""
    assert pool.run(run_ours, 2, two_tables, use_hook) == [[6.0] * 6] * 2


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


@as_in_torch(2, 3, args=[("static_graph",), ("find_unused_parameters",)])
def large_beside_missing_small(ctx: Any, wrap: Any, mode: str) -> Any:
    ddp = wrap(Sized(), **{mode: True})
    history = history_of(ddp, lambda _: ddp(x_of(ctx)))
    if mode != "static_graph":
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(x_of(ctx)).backward()
        ddp(x_of(ctx), use_large=False).backward()
        history.append(grads(ddp))
    return history


# -- user hooks ------------------------------------------------------------------------


HOOKS = [("", "n"), ("n", ""), ("tp", "tp"), ("p", "pn"), ("tn", "tp"), ("", "nn")]
# With views a late node hook would write to a buffer that is on its way, in torch too.
HOOKS_AND_MODES = [
    (before, after, mode)
    for (before, after), mode in itertools.product(HOOKS, MODES)
    if "n" not in after or "gradient_as_bucket_view" not in mode
]


@as_in_torch(3, args=HOOKS_AND_MODES)
def hooked(ctx: Any, wrap: Any, before: str, after: str, mode: dict[str, Any]) -> Any:
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


@as_in_torch(2, args=[(mode,) for mode in MODES])
def nulled(ctx: Any, wrap: Any, mode: dict[str, Any]) -> Any:
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


def outputs(ctx: Any, wrap: Any, kind: str, mode: str) -> Any:
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
def test_any_output(pool: Any, kind: str, mode: str, torch_is_wrong: Any) -> None:
    results = pool.run(on_both, 2, outputs, kind, mode)
    for theirs, ours in results:
        assert not isinstance(ours, str), ours
        assert kind in torch_is_wrong or same(theirs, ours), f"{theirs} != {ours}"
    (_, first), (_, second) = results
    assert same(first, second)
    if mode == "find_unused_parameters":
        unused = [i for i, grad in enumerate(first[-1]) if grad is None]
        assert unused == UNUSED.get(kind, [4, 5])


def containers(ctx: Any, wrap: Any) -> list[bool]:
    results = []
    for mode in MODES:
        ddp = wrap(Shapes("tuple"), **mode)
        kept: list[Any] = []
        ddp.module.register_forward_hook(lambda _m, _i, out, k=kept: k.append(out))
        results.append(ddp(torch.ones(1, 2)) is kept[0])
    return results


def test_outputs_are_the_very_objects_of_the_module(pool: Any) -> None:
    assert pool.run(run_ours, 1, containers) == [[True] * 4]


def opaque_after_missing(ctx: Any, wrap: Any) -> Any:
    ddp = wrap(Shapes("object"), find_unused_parameters=True, bucket_cap_mb=0)
    for made in (lambda a, b, c: Box(a + b), lambda a, b, c: Box(a)) * 2:
        ddp.zero_grad()
        ddp.module.made = made
        ddp(torch.ones(1, 2) * (ctx.rank + 1)).value.sum().backward()
        found = grads(ddp)
    ddp.zero_grad()
    ddp.module.made = lambda a, b, c: Box(a + b)
    ddp(torch.ones(1, 2) * (ctx.rank + 1)).value.sum().backward()
    return [g is None for g in found], grads(ddp)[:4]


def test_nothing_is_predicted_from_an_output_that_cannot_be_seen(pool: Any) -> None:
    (missing, first), (_, second) = pool.run(run_ours, 2, opaque_after_missing)
    assert missing == [False, False, True, True, True, True]
    assert all(g is not None for g in first)
    assert same(first, second)


def first_backward_local(ctx: Any, wrap: Any) -> Any:
    ddp = wrap(Scalars(2), static_graph=True)
    with ddp.no_sync():
        ddp(x_of(ctx)).sum().backward()
    history = [grads(ddp)]
    for _ in range(3):
        ddp(x_of(ctx)).sum().backward()
        history.append(grads(ddp))
        ddp.zero_grad()
    return [[g.item() for g in step] for step in history]


def test_static_graph_whose_first_backward_is_local(pool: Any) -> None:
    """Torch dies of an internal assert."""
    first, second = pool.run(run_ours, 2, first_backward_local)
    assert first == [[1.0] * 2, [3.0] * 2, [1.5] * 2, [1.5] * 2]
    assert second == [[2.0] * 2, [3.0] * 2, [1.5] * 2, [1.5] * 2]


# -- groups and layout -----------------------------------------------------------------


def train_on(ctx: Any, ranks: tuple[int, ...] | None) -> Any:
    torch.manual_seed(ctx.rank)
    ddp = DataParallel(
        nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)),
        process_group=ctx.group if ranks is None else ctx.subgroups[ranks],
        bucket_cap_mb=0,
    )
    history = history_of(ddp, lambda n: ddp(torch.randn(4, 3) + n).pow(2).sum(), 4)
    return history[-1], [p.detach().clone() for p in ddp.parameters()]


def test_subgroup_that_lacks_rank_0(pool: Any) -> None:
    assert same(*pool.run(train_on, (1, 2), None))


def train_on_pair(ctx: Any) -> Any:
    return train_on(ctx, (0, 1) if ctx.rank < 2 else (2, 3))


def test_two_disjoint_groups_train_at_once(pool: Any) -> None:
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
def rank_dependent_order(ctx: Any, wrap: Any) -> Any:
    order = [0, 1, 2, 3, 4] if ctx.rank == 0 else [2, 0, 4, 3, 1]
    ddp = wrap(Ordered(order), bucket_cap_mb=200 / 2**20)
    x = torch.linspace(0.1, 1, 40)
    return history_of(ddp, lambda n: ddp(x * (ctx.rank + n + 1)), 4)


def view_addresses(ctx: Any, wrap: Any) -> Any:
    conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    ddp = wrap(nn.Sequential(conv, nn.Flatten()), gradient_as_bucket_view=True)
    seen, addresses = [], []
    for step in range(4):
        ddp.zero_grad(set_to_none=step % 2 == 0)
        ddp(torch.randn(1, 2, 3, 3)).sum().backward()
        bucket, weight = ddp._reducer.queue.buckets[0], conv.weight
        pairs = zip(bucket.params, bucket.views, strict=True)
        seen += [p.grad is view for p, view in pairs]
        seen.append(weight.grad.stride() == weight.stride())
        addresses.append(weight.grad.data_ptr())
    return all(seen), len(set(addresses[1:]))  # buckets are rebuilt after the first


def test_gradients_are_views_with_stable_addresses(pool: Any) -> None:
    assert pool.run(run_ours, 1, view_addresses) == [(True, 1)]


# -- other uses ------------------------------------------------------------------------


@as_in_torch(2)
def wrapped_twice(ctx: Any, wrap: Any) -> Any:
    module = Scalars(2)
    first, second = wrap(module), wrap(module)
    return history_of(module, lambda _: second(first(x_of(ctx))).sum())


@as_in_torch(2)
def nested(ctx: Any, wrap: Any) -> Any:
    ddp = wrap(nn.Sequential(wrap(Scalars(1)), Scalars(1)))
    return history_of(ddp, lambda _: ddp(x_of(ctx)).sum()), list(ddp.state_dict())


@as_in_torch(2)
def called_directly(ctx: Any, wrap: Any) -> Any:
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


def wrapped_twice_with_views(ctx: Any, wrap: Any) -> Any:
    first = wrap(Scalars(2), gradient_as_bucket_view=True)
    second = wrap(first, gradient_as_bucket_view=True)
    second(x_of(ctx)).sum().backward()


def test_two_wrappers_with_views_on_one_parameter_are_refused(pool: Any) -> None:
    for theirs, ours in pool.run(on_both, 2, wrapped_twice_with_views):
        assert "not the expected DDP bucket view" in theirs
        assert ours.startswith("GradientError: [rank ")
        assert "not the expected DDP bucket view" in ours


@as_in_torch(2, 3, args=VIEWS)
def accumulation_with_unused(ctx: Any, wrap: Any, view: bool) -> Any:
    ddp = wrap(Scalars(3), find_unused_parameters=True, gradient_as_bucket_view=view)
    x, plan = x_of(ctx), ([0, 1, 2], [0, 2] if ctx.rank == 0 else [0], [0])

    def loss(step: int) -> torch.Tensor:
        with ddp.no_sync():
            ddp(x, plan[step // 2]).sum().backward()
        return ddp(x, [0]).sum()

    return history_of(ddp, loss, 2 * len(plan))


def stale_and_unused(ctx: Any, wrap: Any) -> Any:
    net = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    ddp = wrap(net, find_unused_parameters=True, gradient_as_bucket_view=True)
    x = torch.randn(2, 50, generator=torch.Generator().manual_seed(ctx.rank))
    ddp(x).pow(2).sum().backward()
    before = grads(net[1])
    net[1].forward = lambda y: y
    for _ in range(3):
        ddp(x).pow(2).sum().backward()
    return before, grads(net[1])


def test_globally_unused_gradient_views_do_not_drift(pool: Any) -> None:
    """Torch re-averages them in place, which changes bits at three ranks."""
    for before, after in pool.run(run_ours, 3, stale_and_unused):
        assert same(before, after)


@as_in_torch(2, args=VIEWS)
def two_heads_with_zeroing(ctx: Any, wrap: Any, view: bool) -> Any:
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


def cast_and_back(ctx: Any, wrap: Any) -> Any:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ddp = wrap(net, find_unused_parameters=True)
    net[1].double()
    net[1].float()
    ddp(torch.ones(1, 2)).sum().backward()


def test_parameters_that_lost_their_hooks_are_named(pool: Any) -> None:
    """Torch takes them for unused: replicas drift silently."""
    for error in pool.run(run_ours, 2, cast_and_back, errors="return"):
        assert error.is_a("GradientError")
        assert "Parameters lost their grad hooks" in error.message
        assert "Parameters: 1.weight, 1.bias." in error.message


def copies_on_one_rank(ctx: Any, wrap: Any) -> bool:
    ddp = wrap(Scalars(2))
    if ctx.rank == 0:
        copy.deepcopy(ddp)
    other = wrap(Scalars(2))
    other(x_of(ctx), [0]).sum().backward()
    other.reset()
    other(x_of(ctx)).sum().backward()
    return True


def test_a_copy_on_one_rank_does_not_disturb_reset(pool: Any) -> None:
    assert pool.run(run_ours, 2, copies_on_one_rank) == [True, True]


@pytest.mark.parametrize(("scenario", "world_size", "args"), AS_IN_TORCH)
def test_as_in_torch(pool: Any, scenario: Any, world_size: int, args: Any) -> None:
    both_equal(pool, scenario, *args, world_size=world_size)
