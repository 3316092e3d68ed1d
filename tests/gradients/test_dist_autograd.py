"""Distributed autograd: gradients live in a context of RPC, not in ``.grad``."""

from __future__ import annotations

import threading
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
from tests.support.both import Scalars, on_both, same, wrapped, x_of
from tests.support.ranks import on_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


@contextmanager
def rpc_workers(ctx, folder):
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


# Always these ranks: RPC names its groups by how many there were.
on_three_ranks = on_ranks(3)


def over_rpc(ctx, folder, scenario, *args):
    """(torch's, minidp's) result."""
    with rpc_workers(ctx, folder):
        return on_both(ctx, scenario, *args)


class Net(nn.Module):
    """Large and small parameters, one of them shared by two layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.layers = nn.Sequential(nn.Linear(8, 3000), nn.Tanh(), nn.Linear(3000, 8))
        self.last = nn.Linear(8, 50)
        self.last.weight = self.embed.weight

    def forward(self, x):
        return self.last(self.layers(self.embed(x)))


def train(ctx, wrap, options, hook):
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


@on_three_ranks
@pytest.mark.parametrize("name", [*OPTIONS, "hook"])
def test_gradients_in_the_context_are_averages(ctx, name, tmp_path):
    hook = default_hooks.fp16_compress_hook if name == "hook" else None
    theirs, ours = over_rpc(ctx, tmp_path, train, OPTIONS.get(name, {}), hook)
    assert isinstance(ours, list), ours
    assert same(theirs, ours)
    return ours


@on_three_ranks
def test_torch_fails_with_batched_copies(ctx, tmp_path):
    with rpc_workers(ctx, tmp_path):
        theirs, ours = on_both(ctx, train, {"batched_grad_copy": True}, None)
        expected, _ = on_both(ctx, train, {}, None)
    assert "INTERNAL ASSERT" in theirs
    # Divided, not multiplied: a last bit, which later steps blow up.
    torch.testing.assert_close(expected[0], ours[0])


def gradient(ddp, context):
    found = dist_autograd.get_gradients(context)
    return [found[p].item() if p in found else None for p in ddp.parameters()]


def several_backwards(ctx, wrap, options):
    ddp, x = wrap(Scalars(2), **options), x_of(ctx)
    log = []
    ddp(x).sum().backward()  # static graph: the first one counts
    with dist_autograd.context() as context:
        for factor, is_synced in ((1, True), (10, True), (1, False), (1, True)):
            ddp.require_backward_grad_sync = is_synced
            dist_autograd.backward(context, [ddp(factor * x).sum()])
            log.append(gradient(ddp, context))
    log.append([p.grad.item() for p in ddp.parameters()])
    ddp.zero_grad()
    ddp(x).sum().backward()
    log.append([p.grad.item() for p in ddp.parameters()])
    return log


@on_three_ranks
@pytest.mark.parametrize("name", OPTIONS)
def test_several_backwards_in_a_context(ctx, name, tmp_path):
    theirs, ours = over_rpc(ctx, tmp_path, several_backwards, OPTIONS[name])
    if name != "views":  # torch writes averages over what .grad holds
        assert same(theirs, ours)
    assert ours[:4] == [[2.0] * 2, [22.0] * 2, ours[2], [26.0] * 2]
    assert ours[4:] == [[2.0] * 2, [2.0] * 2]


class Two(nn.Module):
    """Two outputs of disjoint parameters."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Scalars(), Scalars()

    def forward(self, x):
        return self.a(x).sum(), self.b(x).sum()


def disjoint(ctx, wrap):
    """Two backwards share a reduction, of a forward outside of the context."""
    ddp, other = wrap(Two()), wrap(Scalars())  # gc may end one that nobody holds
    a, b = ddp(x_of(ctx))
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [other(x_of(ctx)).sum()])
        dist_autograd.backward(context, [a])
        dist_autograd.backward(context, [b])
        return gradient(ddp, context)


@on_three_ranks
def test_two_backwards_may_share_a_reduction(ctx, tmp_path):
    assert over_rpc(ctx, tmp_path, disjoint) == ([2.0, 2.0], [2.0, 2.0])


@on_three_ranks
@pytest.mark.parametrize(
    ("steps", "says"),
    [(False, ["different places", "b.w.0"]), (True, ["steps in the backward"])],
)
def test_what_cannot_be_done_in_a_context(ctx, steps, says, tmp_path):
    """Half of a reduction in .grad, half in a context; an optimizer in the backward."""
    with rpc_workers(ctx, tmp_path):
        ddp = wrapped(ctx, Two())
        if steps:
            ddp.step_in_backward(torch.optim.SGD(ddp.parameters(), lr=1.0))
        a, b = ddp(x_of(ctx))
        if not steps:
            a.backward()
        with dist_autograd.context() as context, pytest.raises(RuntimeError):
            dist_autograd.backward(context, [b])
        assert all(text in ddp._reducer.failure for text in says)


@on_three_ranks
def test_used_on_some_ranks_only(ctx, tmp_path):
    with rpc_workers(ctx, tmp_path):
        ddp = wrapped(ctx, Scalars(2), find_unused_parameters=True)
        with dist_autograd.context() as context:
            loss = ddp(x_of(ctx), range(2 if ctx.rank == 0 else 1)).sum()
            with pytest.raises(RuntimeError):
                dist_autograd.backward(context, [loss])
        with pytest.raises(minidp.ReducerFailedError):
            ddp(x_of(ctx))
        assert "on some ranks only" in ddp._reducer.failure
        assert "w.1" in ddp._reducer.failure
        ddp.reset()
        with dist_autograd.context() as context:  # unused by all ranks: it stays away
            dist_autograd.backward(context, [ddp(x_of(ctx), [0]).sum()])
            assert gradient(ddp, context) == [2.0, None]


class Referring(nn.Module):
    """Brings its output as an RRef."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = Scalars(), Scalars()

    def forward(self, x):
        return rpc.RRef(self.used(x))


def through_an_rref(ctx, wrap):
    ddp = wrap(Referring(), find_unused_parameters=True)
    log = []
    for _ in range(2):
        ddp(x_of(ctx)).local_value().sum().backward()
        log.append([p.grad is not None and p.grad.item() for p in ddp.parameters()])
    return log


@on_three_ranks
def test_outputs_are_found_behind_an_rref(ctx, tmp_path):
    expected = [[2.0, False], [4.0, False]]
    assert over_rpc(ctx, tmp_path, through_an_rref) == (expected, expected)


# ------------------------------------------------- threads that share a forward, no RPC


def two_threads(ctx, wrap, options):
    """The second backward runs inside the first one, on a thread of its own."""
    ddp = wrap(nn.ModuleList([nn.Linear(40, 40) for _ in range(2)]), **options)
    layers = ddp.module
    layers.forward = lambda x: [layer(x).square().sum() for layer in layers]
    calls = []

    def meanwhile(_):
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


@on_three_ranks
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0}], ids=str)
def test_two_threads_run_backwards_of_one_forward(ctx, options):
    theirs, ours = on_both(ctx, two_threads, options)
    assert isinstance(ours, list), ours
    assert same(theirs, ours)
    return ours
