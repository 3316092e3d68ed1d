"""Cases that words of steps do not reach, on torch's DDP and on minidp side by side."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minidp import DataParallel, comm_hooks
from tests.support.both import Scalars, grads, on_both, same, x_of

MODES: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]
modes = pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m) or "default")


def both_equal(pool: Any, scenario: Any, world_size: int = 2, *args: Any) -> list[Any]:
    results = pool.run(run_both, world_size, scenario, *args)
    for rank, (theirs, ours) in enumerate(results):
        assert same(theirs, ours), f"rank {rank}: torch {theirs}, minidp {ours}"
    return [ours for _, ours in results]


def run_both(ctx: Any, scenario: Any, *args: Any) -> tuple[Any, Any]:
    return on_both(ctx, lambda c, wrap: scenario(c, wrap, *args))


# -- the no_sync table of two ranks with inputs 1 and 2 --------------------------------


def no_sync_rows(ctx: Any, wrap: Any, mode: dict[str, Any]) -> list[list[float]]:
    ddp = wrap(Scalars(), **mode)
    x = x_of(ctx)
    rows = []

    def note() -> None:
        rows.append([p.grad.item() for p in ddp.parameters()])

    ddp(x).sum().backward()
    note()
    ddp(x).sum().backward()
    note()
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(x).sum().backward()
    note()
    ddp(x).sum().backward()
    note()
    ddp.zero_grad()
    with ddp.no_sync():
        loss = ddp(x).sum()
    loss.backward()
    note()
    ddp.zero_grad()
    loss = ddp(x).sum()
    with ddp.no_sync():
        loss.backward()
    note()
    ddp.zero_grad()
    first, second = ddp(x).sum(), ddp(10 * x).sum()
    first.backward()
    second.backward()
    note()
    ddp.zero_grad()
    (ddp(x).sum() + ddp(10 * x).sum()).backward()
    note()
    ddp.zero_grad()
    loss = ddp(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    note()
    ddp.zero_grad()
    first = ddp(x).sum()
    with ddp.no_sync():
        second = ddp(10 * x).sum()
    second.backward()
    note()
    first.backward()
    note()
    return rows


@modes
def test_no_sync_table(pool: Any, mode: dict[str, Any]) -> None:
    ours = both_equal(pool, no_sync_rows, 2, mode)
    mean_then_local = [1.5, 3.0, 1.0, 3.0, 1.0, 1.5, 11.5, 16.5, 2.5, 15.0, 16.0]
    assert [row[0] for row in ours[0]] == mean_then_local
    assert [row[0] for row in ours[1]] == [
        *(1.5, 3.0, 2.0, 3.0, 2.0, 1.5, 21.5, 16.5, 3.5, 15.0, 17.0)
    ]


# -- checkpointing ---------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, times: int, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.times = times
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.again, x, use_reentrant=self.reentrant)
        return x


def checkpointed(ctx: Any, wrap: Any, mode: Any, times: int, reentrant: bool) -> Any:
    ddp = wrap(Checkpointed(times, reentrant=reentrant), **mode)
    history = []
    for step in range(3):
        ddp.zero_grad()
        x = torch.ones(2, 4) * (ctx.rank + step + 1)
        ddp(x).pow(2).sum().backward()
        history.append(grads(ddp))
    return history


@modes
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_matrix_is_at_least_as_good_as_torchs(
    pool: Any, mode: dict[str, Any], times: int, reentrant: bool
) -> None:
    """Torch raises 'marked twice' in three cells; minidp in two of them."""
    results = pool.run(run_both, 2, checkpointed, mode, times, reentrant)
    fails = reentrant and times == 2 and "static_graph" not in mode
    for theirs, ours in results:
        if fails:
            assert ours.startswith("MarkedTwiceError"), ours
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


def second_order(ctx: Any, view: bool) -> Any:
    """Per step: (averaged first order, its oracle), (second order, its oracle)."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    alone = copy.deepcopy(net)
    ddp = DataParallel(
        net, process_group=ctx.group, gradient_as_bucket_view=view, init_sync=False
    )
    history = []
    for step in range(3):
        inputs = [
            torch.linspace(-1, 1, 6).reshape(2, 3) * (rank + 1 + step)
            for rank in range(ctx.world_size)
        ]
        ddp(inputs[ctx.rank]).pow(2).sum().backward(create_graph=True)
        locals_ = [
            torch.autograd.grad(alone(x).pow(2).sum(), alone.parameters())
            for x in inputs
        ]
        mean = [sum(g) / ctx.world_size for g in zip(*locals_, strict=True)]
        averaged = [p.grad for p in ddp.parameters()]
        # The history of an averaged gradient is this rank's alone, scaled.
        own = torch.autograd.grad(
            alone(inputs[ctx.rank]).pow(2).sum(), alone.parameters(), create_graph=True
        )
        weights = [m.detach() for m in mean]
        second = torch.autograd.grad(
            sum((g * w).sum() for g, w in zip(averaged, weights, strict=True)),
            list(ddp.parameters()),
            allow_unused=True,
        )
        oracle = torch.autograd.grad(
            sum((g * w).sum() for g, w in zip(own, weights, strict=True))
            / ctx.world_size,
            list(alone.parameters()),
            allow_unused=True,
        )
        history.append(([g.detach().clone() for g in averaged], mean, second, oracle))
        for p in ddp.parameters():
            p.grad = None
    return history


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("view", [False, True])
def test_create_graph(pool: Any, world_size: int, view: bool) -> None:
    """Torch fails as soon as two such gradients share a bucket."""
    results = pool.run(second_order, world_size, view)
    for history in results:
        for first, mean, second, oracle in history:
            for pair in zip(first, mean, strict=True):
                torch.testing.assert_close(*pair)
            for found, expected in zip(second, oracle, strict=True):
                if expected is not None:
                    torch.testing.assert_close(found, expected)
    for history in results[1:]:
        assert all(same(a[0], b[0]) for a, b in zip(history, results[0], strict=True))


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=True)
        self.head = nn.Linear(2, 1)

    def forward(self, index: torch.Tensor, *, use_table: bool = True) -> torch.Tensor:
        x = self.table(index) if use_table else torch.ones(1, 2)
        return self.head(x).sum()


def sparse_training(ctx: Any, wrap: Any, view: bool) -> Any:
    ddp = wrap(Embeds(), gradient_as_bucket_view=view)
    history = []
    for step in range(4):
        if step % 2:
            ddp.zero_grad()
        ddp(torch.tensor([ctx.rank, 3, (ctx.rank + step) % 6])).backward()
        table = ddp.module.table.weight.grad
        history.append(
            (table.is_coalesced(), table.to_dense(), ddp.module.head.weight.grad + 0)
        )
    return history


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("view", [False, True])
def test_sparse_embedding(pool: Any, world_size: int, view: bool) -> None:
    both_equal(pool, sparse_training, world_size, view)


def sparse_unused_on_rank_1(ctx: Any) -> Any:
    ddp = DataParallel(Embeds(), process_group=ctx.group, find_unused_parameters=True)
    with torch.no_grad():
        ddp.module.head.weight.fill_(1.0)
    history = []
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.tensor([2]), use_table=ctx.rank == 0).backward()
        grad = ddp.module.table.weight.grad
        history.append(None if grad is None else grad.to_dense())
    ddp.zero_grad()
    ddp(torch.tensor([2]), use_table=False).backward()
    history.append(ddp.module.table.weight.grad)
    return history


def test_sparse_gradient_missing_on_one_rank_is_averaged(pool: Any) -> None:
    """Torch raises on that rank and its peer dies of it."""
    expected = torch.zeros(6, 2)
    expected[2] = 0.5
    for history in pool.run(sparse_unused_on_rank_1, 2):
        assert torch.equal(history[0], expected)
        assert torch.equal(history[1], expected)
        assert history[2] is None


# -- user hooks ------------------------------------------------------------------------


def hooked(ctx: Any, wrap: Any, before: str, after: str, mode: dict[str, Any]) -> Any:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))

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

    keep: list[Any] = []
    install(before, 3.0)
    ddp = wrap(module, **mode)
    install(after, 5.0)
    history = []
    for step in range(3):
        ddp.zero_grad()
        ddp(torch.ones(2, 3) * (ctx.rank + 1 + step)).sum().backward()
        history.append(grads(ddp))
    return history


@modes
@pytest.mark.parametrize(
    ("before", "after"),
    [("", "n"), ("n", ""), ("tp", "tp"), ("p", "pn"), ("tn", "tp"), ("", "nn")],
)
def test_user_hooks_see_and_change_what_they_do_in_torch(
    pool: Any, before: str, after: str, mode: dict[str, Any]
) -> None:
    if "n" in after and "gradient_as_bucket_view" in mode:
        return  # the hook would write to a buffer that is on its way, in torch too
    both_equal(pool, hooked, 3, before, after, mode)


def nulled(ctx: Any, wrap: Any, mode: dict[str, Any]) -> Any:
    ddp = wrap(Scalars(3), **mode)
    victim = ddp.module.w[1]
    if ctx.rank == 1:
        victim.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    history = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(x_of(ctx)).sum().backward()
        history.append(grads(ddp))
    return history


@modes
def test_a_hook_that_drops_the_gradient_contributes_zero(
    pool: Any, mode: dict[str, Any]
) -> None:
    both_equal(pool, nulled, 2, mode)


def callbacks(ctx: Any, wrap: Any) -> Any:
    ddp = wrap(Scalars(2))
    engine = torch.autograd.Variable._execution_engine
    seen = []

    def note(tag: str) -> None:
        seen.append((tag, [p.grad.item() for p in ddp.parameters()]))

    class Early(torch.autograd.Function):
        @staticmethod
        def forward(fn: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(fn: Any, grad: torch.Tensor) -> torch.Tensor:
            engine.queue_callback(lambda: note("early"))
            return grad

    for p in ddp.parameters():
        p.register_post_accumulate_grad_hook(
            lambda _: engine.queue_callback(lambda: note("post"))
        )
    Early.apply(ddp(x_of(ctx)).sum()).backward()
    return seen


def test_final_callbacks_of_users_run_before_or_after_ours_as_in_torch(
    pool: Any,
) -> None:
    both_equal(pool, callbacks)


# -- outputs ---------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    value: torch.Tensor


class Shapes(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2) for _ in range(3))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        a, b = self.a(x), self.b(x)
        if self.kind == "tuple":
            return a, b
        if self.kind == "dict":
            return {"a": a, "nested": [b, 3]}
        if self.kind == "dataclass":
            return Output(a + b)
        if self.kind == "leaf":
            return a + b, self.c.bias
        if self.kind == "object":
            self.hidden = a + b
            return object()
        return a


def loss_of(module: nn.Module, out: Any, kind: str) -> torch.Tensor:
    if kind == "tuple":
        return out[0].sum()
    if kind == "dict":
        return out["a"].sum() + out["nested"][0].pow(2).sum()
    if kind == "dataclass":
        return out.value.pow(2).sum()
    if kind == "leaf":
        return out[0].pow(2).sum() + out[1].sum()
    if kind == "object":
        return module.hidden.pow(2).sum()
    return out.sum()


def outputs(ctx: Any, wrap: Any, kind: str, mode: dict[str, Any]) -> Any:
    ddp = wrap(Shapes(kind), **mode)
    history = []
    for step in range(4):
        ddp.zero_grad()
        out = ddp(torch.ones(1, 2) * (ctx.rank + 1 + step))
        loss_of(ddp.module, out, kind).backward()
        history.append(grads(ddp))
    return history


KINDS = ["tensor", "tuple", "dict", "dataclass", "leaf", "object"]


@pytest.mark.parametrize("kind", KINDS)
def test_find_unused_parameters_with_any_output(pool: Any, kind: str) -> None:
    """Torch fails with a leaf parameter or an opaque object among the outputs."""
    results = pool.run(run_both, 2, outputs, kind, {"find_unused_parameters": True})
    for theirs, ours in results:
        assert not isinstance(ours, str), ours
        if kind not in ("leaf", "object"):
            assert same(theirs, ours), f"{theirs} != {ours}"
    assert same(results[0][1], results[1][1])
    (_, first), _ = results
    unused = [i for i, g in enumerate(first[-1]) if g is None]
    assert unused == {
        "tensor": [2, 3, 4, 5], "tuple": [2, 3, 4, 5], "leaf": [4]
    }.get(kind, [4, 5])  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_static_graph_with_any_output(pool: Any, kind: str) -> None:
    """Torch never synchronises a dataclass or object, and fails with a spare output."""
    results = pool.run(run_both, 2, outputs, kind, {"static_graph": True})
    for theirs, ours in results:
        assert not isinstance(ours, str), ours
        if kind not in ("dataclass", "object", "leaf", "tuple"):
            assert same(theirs, ours), f"{theirs} != {ours}"
    assert same(results[0][1], results[1][1])


def first_backward_local(ctx: Any) -> Any:
    ddp = DataParallel(Scalars(2), process_group=ctx.group, static_graph=True)
    with ddp.no_sync():
        ddp(x_of(ctx)).sum().backward()
    history = [grads(ddp)]
    for _ in range(3):
        ddp(x_of(ctx)).sum().backward()
        history.append(grads(ddp))
        ddp.zero_grad()
    return history


def test_static_graph_whose_first_backward_is_local(pool: Any) -> None:
    """Torch dies of an internal assert."""
    first, second = pool.run(first_backward_local, 2)
    assert [h[0].item() for h in first] == [1.0, 3.0, 1.5, 1.5]
    assert [h[1].item() for h in second] == [2.0, 3.0, 1.5, 1.5]


def containers(ctx: Any) -> list[bool]:
    results = []
    for mode in MODES:
        ddp = DataParallel(Shapes("tuple"), process_group=ctx.group, **mode)
        kept = []
        ddp.module.register_forward_hook(lambda _m, _i, out, k=kept: k.append(out))
        out = ddp(torch.ones(1, 2))
        results.append(out is kept[0])
    return results


def test_outputs_are_the_very_objects_of_the_module(pool: Any) -> None:
    assert pool.run(containers, 1) == [[True] * 4]


# -- groups ----------------------------------------------------------------------------


def train_on(ctx: Any, group: Any, ranks: int) -> Any:
    torch.manual_seed(ctx.rank)
    ddp = DataParallel(
        nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)),
        process_group=group,
        bucket_cap_mb=0,
    )
    for step in range(4):
        ddp.zero_grad()
        ddp(torch.randn(4, 3) + step).pow(2).sum().backward()
    return grads(ddp), [p.detach().clone() for p in ddp.parameters()]


def train_on_own(ctx: Any) -> Any:
    return train_on(ctx, ctx.group, ctx.world_size)


def test_subgroup_that_lacks_rank_0(pool: Any) -> None:
    first, second = pool.run(train_on_own, (1, 2))
    assert same(first, second)


def train_on_pair(ctx: Any) -> Any:
    pair = (0, 1) if ctx.rank < 2 else (2, 3)
    return train_on(ctx, ctx.subgroups[pair], 2)


def test_two_disjoint_groups_train_at_once(pool: Any) -> None:
    results = pool.run(train_on_pair, 4)
    assert same(results[0], results[1])
    assert same(results[2], results[3])
    assert not same(results[0], results[2])


# -- layout ----------------------------------------------------------------------------


def rank_dependent_order(ctx: Any, wrap: Any) -> Any:
    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.ParameterList([nn.Parameter(torch.rand(40)) for _ in range(5)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = [0, 1, 2, 3, 4] if ctx.rank == 0 else [2, 0, 4, 3, 1]
            for i in order:
                x = torch.tanh(x * self.w[i])
            return x.sum()

    ddp = wrap(Ordered(), bucket_cap_mb=200 / 2**20)
    history = []
    for step in range(4):
        ddp.zero_grad()
        ddp(torch.linspace(0.1, 1, 40) * (ctx.rank + step + 1)).backward()
        history.append(grads(ddp))
    return history


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_with_different_ready_order_follow_rank_0(
    pool: Any, world_size: int
) -> None:
    both_equal(pool, rank_dependent_order, world_size)


def view_addresses(ctx: Any) -> Any:
    ddp = DataParallel(
        nn.Sequential(
            nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.Flatten()
        ),
        process_group=ctx.group,
        gradient_as_bucket_view=True,
    )
    seen = []
    for step in range(4):
        ddp.zero_grad(set_to_none=step % 2 == 0)
        ddp(torch.randn(1, 2, 3, 3)).sum().backward()
        bucket = ddp._reducer.pipeline.buckets[0]
        aliases = [
            p.grad is view for p, view in zip(bucket.params, bucket.views, strict=True)
        ]
        weight = ddp.module[0].weight
        seen.append((all(aliases), weight.grad.stride() == weight.stride()))
        address = weight.grad.data_ptr()
        seen.append(address if step == 1 else step > 1 and address == seen[3])
    return seen[0], seen[2], seen[4], seen[5], seen[6], seen[7]


def test_gradients_are_views_with_stable_addresses(pool: Any) -> None:
    (seen,) = pool.run(view_addresses, 1)
    assert seen == ((True, True), (True, True), (True, True), True, (True, True), True)


# -- other uses ------------------------------------------------------------------------


def wrapped_twice(ctx: Any, wrap: Any) -> Any:
    module = Scalars(2)
    first, second = wrap(module), wrap(module)
    history = []
    for _ in range(3):
        module.zero_grad()
        second(first(x_of(ctx))).sum().backward()
        history.append(grads(module))
    return history


def test_wrapping_twice(pool: Any) -> None:
    both_equal(pool, wrapped_twice)


def wrapped_twice_with_views(ctx: Any, wrap: Any) -> Any:
    module = Scalars(2)
    first = wrap(module, gradient_as_bucket_view=True)
    second = wrap(first, gradient_as_bucket_view=True)
    second(x_of(ctx)).sum().backward()
    return grads(module)


def test_two_wrappers_with_views_on_one_parameter_are_refused(pool: Any) -> None:
    for theirs, ours in pool.run(run_both, 2, wrapped_twice_with_views):
        assert "not the expected DDP bucket view" in theirs
        assert ours.startswith("GradientError: [rank ")
        assert "not the expected DDP bucket view" in ours


def nested(ctx: Any, wrap: Any) -> Any:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wrap(Scalars(1))
            self.own = Scalars(1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.own(self.inner(x))

    ddp = wrap(Outer())
    history = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(x_of(ctx)).sum().backward()
        history.append(grads(ddp))
    return history, list(ddp.state_dict())


def test_nested_wrappers(pool: Any) -> None:
    both_equal(pool, nested)


def called_directly(ctx: Any, wrap: Any) -> Any:
    ddp = wrap(Scalars(2))
    x = x_of(ctx)
    history = []
    ddp.module(x).sum().backward()  # nothing announced: local
    history.append(grads(ddp))
    ddp.zero_grad()
    ddp(x)
    ddp.module(x).sum().backward()  # still announced: reduced
    history.append(grads(ddp))
    with torch.inference_mode():
        history.append(ddp(x).clone())
    ddp.eval()
    ddp.zero_grad()
    ddp(x).sum().backward()
    history.append(grads(ddp))
    return history


def test_module_called_directly_and_inference_mode(pool: Any) -> None:
    both_equal(pool, called_directly)


def accumulation_with_unused(ctx: Any, wrap: Any, mode: dict[str, Any]) -> Any:
    ddp = wrap(Scalars(3), find_unused_parameters=True, **mode)
    x = x_of(ctx)
    history = []
    for local_use in ([0, 1, 2], [0, 2] if ctx.rank == 0 else [0], [0]):
        for _ in range(2):
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(x, local_use).sum().backward()
            ddp(x, [0]).sum().backward()
            history.append(grads(ddp))
    return history


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("view", [False, True])
def test_parameter_used_only_in_the_no_sync_part(
    pool: Any, world_size: int, view: bool
) -> None:
    both_equal(
        pool, accumulation_with_unused, world_size, {"gradient_as_bucket_view": view}
    )


def stale_and_unused(ctx: Any) -> Any:
    ddp = DataParallel(
        nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50)),
        process_group=ctx.group,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
    )
    x = torch.randn(2, 50, generator=torch.Generator().manual_seed(ctx.rank))
    ddp(x).pow(2).sum().backward()
    before = [g for g in grads(ddp.module[1]) if g is not None]
    ddp.module[1].forward = lambda y: y  # type: ignore[method-assign]
    for _ in range(3):
        ddp(x).pow(2).sum().backward()
    return before, grads(ddp.module[1])


def test_globally_unused_gradient_views_do_not_drift(pool: Any) -> None:
    """Torch re-averages them in place, which changes bits at three ranks."""
    for before, after in pool.run(stale_and_unused, 3):
        assert same(before, after)


# -- found by readers and attackers ----------------------------------------------------


class Sized(nn.Module):
    """One large layer and small ones with as many elements together."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(128, 128))
        self.small = nn.ParameterList([nn.Parameter(torch.ones(64, 64))] * 0)
        for _ in range(4):
            self.small.append(nn.Parameter(torch.ones(64, 64)))

    def forward(self, x: torch.Tensor, *, use_large: bool = True) -> torch.Tensor:
        if use_large:
            return (self.large * x).sum()
        return sum((p * x).sum() for p in self.small)


def large_beside_missing_small(ctx: Any, wrap: Any, mode: dict[str, Any]) -> Any:
    ddp = wrap(Sized(), **mode)
    history = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(x_of(ctx)).backward()
        history.append(grads(ddp))
    if "static_graph" not in mode:
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(x_of(ctx)).backward()
        ddp(x_of(ctx), use_large=False).backward()
        history.append(grads(ddp))
    return history


@pytest.mark.parametrize("mode", ["static_graph", "find_unused_parameters"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_large_gradient_beside_missing_small_ones_of_the_same_size(
    pool: Any, world_size: int, mode: str
) -> None:
    both_equal(pool, large_beside_missing_small, world_size, {mode: True})


def penalised(ctx: Any, wrap: Any, mode: dict[str, Any], ranks: list[int]) -> Any:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    ddp = wrap(net, **mode)
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


def penalised_alone(ctx: Any, mode: dict[str, Any], ranks: list[int]) -> Any:
    def wrap(module: nn.Module, **options: Any) -> DataParallel:
        return DataParallel(module, process_group=ctx.group, **options)

    return penalised(ctx, wrap, mode, ranks)


@modes
@pytest.mark.parametrize("ranks", [[0, 1], [0]])
def test_gradient_penalty(pool: Any, mode: dict[str, Any], ranks: list[int]) -> None:
    """``torch.autograd.grad`` through the outputs is no backward of ours."""
    if "static_graph" in mode:  # torch drifts, and desynchronises its collectives
        results = [(None, o) for o in pool.run(penalised_alone, 2, mode, ranks)]
    else:
        results = pool.run(run_both, 2, penalised, mode, ranks)
    for theirs, ours in results:
        assert not isinstance(ours, str), ours
        assert theirs is None or same(theirs, ours)
    assert same(results[0][1], results[1][1])


def two_heads_with_zeroing(ctx: Any, wrap: Any, mode: dict[str, Any]) -> Any:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.a(x), self.b(x)

    ddp = wrap(Heads(), **mode)
    history = []
    for step in range(3):
        first, second = ddp(torch.ones(1, 2) * (ctx.rank + 1 + step))
        first.sum().backward()
        for p in ddp.parameters():
            if p.grad is not None and not mode:
                p.grad.zero_()
        second.sum().backward()
        history.append(grads(ddp))
        ddp.zero_grad()
    return history


@pytest.mark.parametrize("view", [False, True])
def test_gradients_are_read_before_the_user_may_zero_them(
    pool: Any, view: bool
) -> None:
    mode = {"gradient_as_bucket_view": True} if view else {}
    both_equal(pool, two_heads_with_zeroing, 2, mode)


def shared_checkpoints(ctx: Any, wrap: Any) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.a = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            x = x.requires_grad_()
            for layer in (self.q, self.q, self.q, self.a):
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    ddp = wrap(Net(), static_graph=True)
    history = []
    for step in range(4):
        ddp.zero_grad()
        ddp(torch.ones(1, 3) * (ctx.rank + step + 1)).pow(2).sum().backward()
        history.append(grads(ddp))
    return history


def test_static_graph_counts_survive_inner_graph_tasks(pool: Any) -> None:
    both_equal(pool, shared_checkpoints)


def cast_and_back(ctx: Any) -> str:
    ddp = DataParallel(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        process_group=ctx.group,
        find_unused_parameters=True,
    )
    ddp.module[1].double()
    ddp.module[1].float()
    try:
        ddp(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_parameters_that_lost_their_hooks_are_named(pool: Any) -> None:
    """Torch takes them for unused: replicas drift silently."""
    for rank, text in enumerate(pool.run(cast_and_back, 2)):
        assert text.startswith(
            f"GradientError: [rank {rank}] Parameters lost their grad hooks, so their "
            "gradients cannot be averaged. Parameters: 1.weight, 1.bias."
        )


def opaque_after_missing(ctx: Any) -> Any:
    class Box:
        def __init__(self, t: torch.Tensor) -> None:
            self.t = t

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, *, both: bool) -> Any:
            return Box(self.a(x) + self.b(x) if both else self.a(x))

    ddp = DataParallel(
        Branches(),
        process_group=ctx.group,
        find_unused_parameters=True,
        bucket_cap_mb=0,
    )
    for both in (True, False, True):
        ddp.zero_grad()
        ddp(torch.ones(1, 2) * (ctx.rank + 1), both=both).t.sum().backward()
    return grads(ddp)


def test_nothing_is_predicted_from_an_output_that_cannot_be_seen(pool: Any) -> None:
    first, second = pool.run(opaque_after_missing, 2)
    assert same(first, second)
    assert all(g is not None for g in first)


def copies_on_one_rank(ctx: Any) -> bool:
    ddp = DataParallel(Scalars(2), process_group=ctx.group)
    if ctx.rank == 0:
        copy.deepcopy(ddp)
    other = DataParallel(Scalars(2), process_group=ctx.group)
    other(x_of(ctx), [0]).sum().backward()
    other.reset()
    other(x_of(ctx)).sum().backward()
    return True


def test_a_copy_on_one_rank_does_not_disturb_reset(pool: Any) -> None:
    assert pool.run(copies_on_one_rank, 2) == [True, True]


class TwoTables(nn.Module):
    """Two sparse embeddings whose sum is used: their gradients share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 3, sparse=True)
        self.places = nn.Embedding(5, 3, sparse=True)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.tokens(i) + self.places(i)


def two_tables(ctx: Any, use_hook: bool) -> list[float]:
    ddp = DataParallel(TwoTables(), process_group=ctx.group)
    if use_hook:
        ddp.register_comm_hook(None, comm_hooks.all_reduce_hook)
    seen = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.tensor([ctx.rank, ctx.rank + 1])).sum().backward()
        seen += [p.grad.to_dense().sum().item() for p in ddp.parameters()]
    return seen


@pytest.mark.parametrize("use_hook", [False, True])
def test_difference_sparse_gradients_that_share_memory(pool: Any, use_hook: bool):
    """Torch divides the shared values twice, or reduces them twice."""
    assert pool.run(two_tables, 2, use_hook) == [[6.0] * 6] * 2
