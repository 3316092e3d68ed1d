"""Distributed autograd: gradients live in a context of RPC, not in ``.grad``."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import DistributedOptimizer

import minidp
from minidp import DataParallel
from tests.support.both import Scalars, on_both, same, x_of

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


@contextmanager
def rpc_workers(ctx: Any, folder: str) -> Iterator[None]:
    """Each rank of the job is a worker of RPC while this lasts."""
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/rpc", rpc_timeout=20
    )
    rpc.init_rpc(
        f"worker{ctx.rank}",
        rank=ctx.rank,
        world_size=ctx.world_size,
        rpc_backend_options=options,
    )
    try:
        yield
    finally:
        rpc.shutdown()


def over_rpc(ctx: Any, folder: str, scenario: Callable[..., Any], *args: Any) -> Any:
    with rpc_workers(ctx, folder):
        return on_both(ctx, lambda c, wrap: scenario(c, wrap, *args))


def run(pool: Any, scenario: Callable[..., Any], *args: Any) -> Any:
    """Per rank (torch's, minidp's) result.

    On three ranks, always the same ones: RPC names its groups by how many there were.
    """
    with tempfile.TemporaryDirectory() as folder:
        return pool.run(over_rpc, 3, folder, scenario, *args)


class Net(nn.Module):
    """Large and small parameters, one of them shared by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.layers = nn.Sequential(nn.Linear(8, 3000), nn.Tanh(), nn.Linear(3000, 8))
        self.last = nn.Linear(8, 50)
        self.last.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(self.embed(x)))


def train(ctx: Any, wrap: Any, options: dict[str, Any], hook: Any) -> Any:
    """Gradients of each step, and the weights that DistributedOptimizer leaves."""
    ddp = wrap(Net(), **options)
    if hook is not None:
        ddp.register_comm_hook(ctx.group, hook)
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [rpc.RRef(p) for p in ddp.parameters()], lr=0.1
    )
    log: list[Any] = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + ctx.rank)
        x = torch.randint(0, 50, (4,), generator=generator)
        with dist_autograd.context() as context:
            loss = ddp(x).square().mean()
            dist_autograd.backward(context, [loss])
            found = dist_autograd.get_gradients(context)
            log.append([found[p].clone() for p in ddp.parameters()])
            optimizer.step(context)
        assert all(p.grad is None for p in ddp.parameters())
    return [*log, [p.detach().clone() for p in ddp.parameters()]]


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_in_the_context_are_averages(pool: Any, name: str) -> None:
    results = run(pool, train, OPTIONS[name], None)
    for theirs, ours in results:
        assert isinstance(ours, list), ours
        assert same(theirs, ours)
        assert same(ours, results[0][1]), "ranks differ"


def test_torch_fails_with_batched_copies(pool: Any) -> None:
    batched = run(pool, train, {"batched_grad_copy": True}, None)
    plain = run(pool, train, {}, None)
    for (theirs, ours), (expected, _) in zip(batched, plain, strict=True):
        assert "INTERNAL ASSERT" in theirs
        # Divided, not multiplied: a last bit, which later steps blow up.
        torch.testing.assert_close(expected[0], ours[0])


def test_with_a_comm_hook(pool: Any) -> None:
    for theirs, ours in run(pool, train, {}, default_hooks.fp16_compress_hook):
        assert isinstance(ours, list), ours
        assert same(theirs, ours)


def gradient(ddp: Any, context: int) -> list[float | None]:
    found = dist_autograd.get_gradients(context)
    return [found[p].item() if p in found else None for p in ddp.parameters()]


def several_backwards(ctx: Any, wrap: Any, options: dict[str, Any]) -> Any:
    ddp, x = wrap(Scalars(2), **options), x_of(ctx)
    log = []
    ddp(x).sum().backward()  # static graph: the first one counts
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [ddp(x).sum()])
        log.append(gradient(ddp, context))
        dist_autograd.backward(context, [ddp(10 * x).sum()])
        log.append(gradient(ddp, context))
        with ddp.no_sync():
            dist_autograd.backward(context, [ddp(x).sum()])
        log.append(gradient(ddp, context))
        dist_autograd.backward(context, [ddp(x).sum()])
        log.append(gradient(ddp, context))
    log.append([p.grad.item() for p in ddp.parameters()])
    ddp.zero_grad()
    ddp(x).sum().backward()
    log.append([p.grad.item() for p in ddp.parameters()])
    return log


@pytest.mark.parametrize("name", OPTIONS)
def test_several_backwards_in_a_context(pool: Any, name: str) -> None:
    for theirs, ours in run(pool, several_backwards, OPTIONS[name]):
        if name != "views":  # torch writes averages over what .grad holds
            assert same(theirs, ours)
        assert ours[:4] == [[2.0] * 2, [22.0] * 2, ours[2], [26.0] * 2]
        assert ours[4:] == [[2.0] * 2, [2.0] * 2]


def forward_outside(ctx: Any, wrap: Any) -> Any:
    ddp, other = wrap(Scalars(2)), wrap(Scalars(2))
    loss = ddp(x_of(ctx)).sum()
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [other(x_of(ctx)).sum()])
        dist_autograd.backward(context, [loss])
        return gradient(ddp, context)


def test_the_forward_may_run_outside_the_context(pool: Any) -> None:
    for theirs, ours in run(pool, forward_outside):
        assert theirs == ours == [2.0, 2.0]


class Two(nn.Module):
    """Two outputs of disjoint parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scalars(), Scalars()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x).sum(), self.b(x).sum()


def disjoint(ctx: Any, wrap: Any) -> Any:
    ddp = wrap(Two())
    with dist_autograd.context() as context:
        a, b = ddp(x_of(ctx))
        dist_autograd.backward(context, [a])
        dist_autograd.backward(context, [b])
        return gradient(ddp, context)


def test_two_backwards_may_share_a_reduction(pool: Any) -> None:
    for theirs, ours in run(pool, disjoint):
        assert theirs == ours == [2.0, 2.0]


def in_two_places(ctx: Any, wrap: Any) -> str:
    ddp = wrap(Two())
    a, b = ddp(x_of(ctx))
    a.backward()
    with dist_autograd.context() as context:
        try:
            dist_autograd.backward(context, [b])
        except RuntimeError:
            if not isinstance(ddp, DataParallel):
                raise
            return ddp._reducer.failure
    return str(gradient(ddp, context))


def test_gradients_of_one_reduction_in_two_places(pool: Any) -> None:
    for _, ours in run(pool, in_two_places):
        assert "different places" in ours
        assert "b.w.0" in ours


def used_on_rank_0(ctx: Any, wrap: Any) -> Any:
    ddp = wrap(Scalars(2), find_unused_parameters=True)
    if not isinstance(ddp, DataParallel):
        return ""
    with dist_autograd.context() as context:
        loss = ddp(x_of(ctx), range(2 if ctx.rank == 0 else 1)).sum()
        with pytest.raises(RuntimeError):
            dist_autograd.backward(context, [loss])
    with pytest.raises(minidp.ReducerFailedError):
        ddp(x_of(ctx))
    failure = ddp._reducer.failure
    ddp.reset()
    with dist_autograd.context() as context:  # unused by all ranks: it stays away
        dist_autograd.backward(context, [ddp(x_of(ctx), [0]).sum()])
        return failure, gradient(ddp, context)


def test_used_on_some_ranks_only(pool: Any) -> None:
    for _, (failure, after) in run(pool, used_on_rank_0):
        assert "on some ranks only" in failure
        assert "w.1" in failure
        assert after == [2.0, None]


def with_an_optimizer_inside(ctx: Any, wrap: Any) -> Any:
    ddp = wrap(Scalars())
    if not isinstance(ddp, DataParallel):
        return ""
    ddp.step_in_backward(torch.optim.SGD(ddp.parameters(), lr=1.0))
    with dist_autograd.context() as context, pytest.raises(RuntimeError):
        dist_autograd.backward(context, [ddp(x_of(ctx)).sum()])
    return ddp._reducer.failure


def test_step_in_backward_is_refused(pool: Any) -> None:
    for _, ours in run(pool, with_an_optimizer_inside):
        assert "steps in the backward" in ours


class Referring(nn.Module):
    """Brings its output as an RRef."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = Scalars(), Scalars()

    def forward(self, x: torch.Tensor) -> Any:
        return rpc.RRef(self.used(x))


def through_an_rref(ctx: Any, wrap: Any) -> Any:
    ddp = wrap(Referring(), find_unused_parameters=True)
    log = []
    for _ in range(2):
        ddp(x_of(ctx)).local_value().sum().backward()
        log.append([p.grad is not None and p.grad.item() for p in ddp.parameters()])
    return log


def test_outputs_are_found_behind_an_rref(pool: Any) -> None:
    for theirs, ours in run(pool, through_an_rref):
        assert theirs == ours == [[2.0, False], [4.0, False]]


# ------------------------------------------------- threads that share a forward, no RPC


def two_threads(ctx: Any, wrap: Any, options: dict[str, Any]) -> Any:
    """The second backward runs inside the first one, on a thread of its own."""
    torch.manual_seed(0)
    ddp = wrap(nn.ModuleList([nn.Linear(40, 40) for _ in range(2)]), **options)
    layers = ddp.module
    layers.forward = lambda x: [layer(x).square().sum() for layer in layers]
    calls = []

    def meanwhile(_: Any) -> None:
        calls.append(1)
        if len(calls) % 2 == 0:  # a grad hook of the first backward has fired
            thread = threading.Thread(target=second.backward)
            thread.start()
            thread.join()

    for param in layers[0].parameters():
        param.register_post_accumulate_grad_hook(meanwhile)
    log = []
    for _ in range(3):
        ddp.zero_grad()
        first, second = ddp(torch.full((1, 40), float(ctx.rank + 1)))
        first.backward()
        log.append([p.grad.clone() for p in ddp.parameters()])
    return log


def both_threads(ctx: Any, options: dict[str, Any]) -> Any:
    return on_both(ctx, lambda c, wrap: two_threads(c, wrap, options))


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0}], ids=str)
def test_two_threads_run_backwards_of_one_forward(
    pool: Any, options: dict[str, Any]
) -> None:
    results = pool.run(both_threads, 3, options)
    for theirs, ours in results:
        assert isinstance(ours, list), ours
        assert same(theirs, ours)
        assert same(ours, results[0][1])
