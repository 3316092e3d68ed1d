"""Two or three ranks compare what one or all of them suspect; nobody hangs."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from minidp import UnsyncedGradientsError
from minidp.guard import comparison
from tests.support.both import Two, wrapped
from tests.support.ranks import on_ranks

X = torch.tensor([2.0])


def setting(ctx, **options):
    ddp = wrapped(ctx, Two(), **{"hang_timeout": 20.0, **options})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(X).backward()
    optimizer.step()
    optimizer.zero_grad()
    return ddp, optimizer


def values(ddp):
    return [param.item() for param in ddp.parameters()]


def local_backwards(ctx, ddp):
    with ddp.no_sync():
        for k in range(2):
            ddp(X + ctx.rank + k).backward()


@pytest.fixture(autouse=True)
def other_rank():
    """The real comparison, instead of the fake one of this folder's other tests."""


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"hang_timeout": None}], ids=str)
def test_gradients_averaged_by_hand_are_applied(ctx, options):
    ddp, optimizer = setting(ctx, **options)
    for k in range(4):
        local_backwards(ctx, ddp)
        for param in ddp.parameters():
            dist.all_reduce(param.grad, group=ctx.group)
            param.grad /= ctx.world_size
        if ctx.rank == 1 and not k:
            threading.Event().wait(0.7)  # the others wait for it
        optimizer.step()
        optimizer.zero_grad()
    return values(ddp)


@on_ranks(2)
def test_gradients_that_differ_by_rounding_are_applied(ctx):
    ddp, optimizer = setting(ctx)
    local_backwards(ctx, ddp)
    for param in ddp.parameters():
        param.grad.fill_(1.0 + 2e-7 * ctx.rank)
    optimizer.step()
    for param in ddp.parameters():
        param.grad.fill_(1.0 + 1e-3 * ctx.rank)
    local_backwards(ctx, ddp)
    with pytest.raises(UnsyncedGradientsError, match="other values on rank 1 than on"):
        optimizer.step()


@on_ranks(3)
def test_local_gradients_on_one_rank_are_refused_there(ctx):
    """The others are in the next backward; they learn what happened."""
    ddp, optimizer = setting(ctx)
    before = values(ddp)
    ddp(X).backward()
    if ctx.rank == 1:
        ddp.module.a.square().sum().backward()
    found = ""
    try:
        optimizer.step()
        assert ctx.rank != 1
        optimizer.zero_grad()
        ddp(X).backward()
    except RuntimeError as error:
        found = str(error)
    assert ("Parameters: a. What to do" in found) == (ctx.rank == 1)
    assert (values(ddp) == before) == (ctx.rank == 1)
    assert "Gradients were never averaged" in found


@on_ranks(3)
def test_waiting_ranks_answer_for_their_parameters(ctx):
    """One rank alone asks for gradients of weights; then all load a checkpoint."""
    ddp, optimizer = setting(ctx)
    for _ in range(2):
        loss = ddp(X)
        if ctx.rank == 1:
            torch.autograd.grad(loss, [*ddp.parameters()])
        ddp.load_state_dict({n: v * 0.5 for n, v in ddp.state_dict().items()})
        ddp(X).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(ddp)


@on_ranks(2)
def test_a_waiting_rank_answers_that_it_differs(ctx):
    ddp, optimizer = setting(ctx, check_replicas_every=0)
    loss, found = ddp(X), ""
    if ctx.rank == 1:
        grads = torch.autograd.grad(loss, [*ddp.parameters()])
        with torch.no_grad():
            for param, grad in zip(ddp.parameters(), grads, strict=True):
                param -= 0.1 * grad
    ddp(X).backward()
    try:
        optimizer.step()
        optimizer.zero_grad()
        ddp(X).backward()
    except RuntimeError as error:
        found = str(error)
    assert "averaged nothing: torch.autograd.grad" in found
    if ctx.rank == 1:
        assert "Found: other parameters on rank 1 than on rank 0" in found
        assert "Parameters: a, b" in found


@on_ranks(2)
def test_weights_that_are_back_after_the_step_are_legal(ctx):
    """Sharpness-aware training, with each rank's own local gradients."""
    ddp, optimizer = setting(ctx)
    for _ in range(5):
        kept = [param.detach().clone() for param in ddp.parameters()]
        params = [*ddp.parameters()]
        grads = torch.autograd.grad(ddp(X + ctx.rank), params)
        with torch.no_grad():
            for param, grad in zip(params, grads, strict=True):
                param += 0.05 * grad
        ddp(X + ctx.rank).backward()
        with torch.no_grad():
            for param, old in zip(params, kept, strict=True):
                param.copy_(old)
        optimizer.step()
        optimizer.zero_grad()
    return values(ddp)


@on_ranks(2)
def test_the_store_does_not_grow(ctx):
    ddp, optimizer = setting(ctx)
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for _ in range(5):
        with ddp.no_sync():
            ddp(X).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier(group=ctx.group)
        counts.append(store.num_keys())
        dist.barrier(group=ctx.group)
    assert counts[2] == counts[3] == counts[4], counts


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        ([0.0, 1.0], [-0.0, 1.0], True),
        ([float("nan"), 1.0], [-float("nan"), 1.0], True),
        ([1.0, 2.0], [2.0, 1.0], False),
        ([1.0], [1.0, 0.0], False),
        (None, [], False),
        ([1.0], [1.5], False),
        ([], [], True),
    ],
)
def test_digest(one, other, are_equal):
    def digest(found):
        return comparison._digest([None if found is None else torch.tensor(found)])

    assert (digest(one) == digest(other)) == are_equal


def test_digest_of_other_kinds():
    sparse = torch.eye(3).to_sparse()
    kinds = [
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3),
        sparse,
        sparse * 2,
    ]
    assert len({comparison._digest([each]) for each in kinds}) == len(kinds)
