"""All ranks leave out a backward, or one alone does: who is told, and how."""

from __future__ import annotations

import threading

import pytest
import torch

from minidp import UnsyncedGradientsError
from tests.support.both import Two, wrapped
from tests.support.fresh import run_fresh
from tests.support.ranks import on_ranks

X = torch.tensor([2.0])


def setting(ctx, **options):
    ddp = wrapped(ctx, Two(), hang_timeout=20.0, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    ddp(X).backward()
    optimizer.step()
    return ddp, optimizer


def values(ddp):
    return [param.item() for param in ddp.parameters()]


@on_ranks(2)
@pytest.mark.parametrize(
    ("times", "slow_rank", "options"),
    [(1, None, {}), (3, 1, {}), (2, None, {"gradient_as_bucket_view": True})],
    ids=str,
)
def test_all_ranks_skip_a_backward(ctx, times, slow_rank, options):
    """A loss that is NaN on all ranks, say: no backward, but a step with zeros."""
    ddp, optimizer = setting(ctx, **options)
    before = values(ddp)
    for k in range(times):
        optimizer.zero_grad(set_to_none=False)
        ddp(X)
        if ctx.rank == slow_rank and not k:
            threading.Event().wait(0.7)
        optimizer.step()  # momentum moves parameters
        assert values(ddp) != before
    optimizer.zero_grad(set_to_none=False)
    ddp(X).backward()
    optimizer.step()
    return values(ddp)


def one_skips(ctx):
    ddp, optimizer = setting(ctx)
    optimizer.zero_grad(set_to_none=False)
    loss = ddp(X)
    before = values(ddp)
    try:
        if ctx.rank == 0:
            loss.backward()
        optimizer.step()
    except RuntimeError as error:
        assert values(ddp) == before
        return type(error).__name__, str(error)
    return "", ""


def test_one_rank_skips_a_backward():
    (_, theirs), (kind, text) = run_fresh(one_skips, 2, group_timeout=60.0)
    assert kind == UnsyncedGradientsError.__name__
    assert text.startswith(
        "[rank 1] A forward announced a synchronised backward that never came on this "
        "rank, so the gradients present are not those of this step. Expected: the same "
        "step on all ranks, without a backward. Found: rank 0 did not see this "
        "problem and went on. Parameters: a, b. What to do: call backward() on "
    )
    assert "Rank 1 gave up: UnsyncedGradientsError: [rank 1] A forward" in theirs


@on_ranks(2)
def test_who_has_nothing_to_skip_is_not_asked(ctx):
    """Rank 0 looks at a loss; then all make the optimizer's state, with zeros."""
    ddp = wrapped(ctx, Two(), hang_timeout=20.0)
    optimizer = torch.optim.Adam(ddp.parameters(), weight_decay=0.1)
    if ctx.rank == 0:
        ddp(X)
    for param in ddp.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    first = values(ddp)
    optimizer.zero_grad()
    ddp(X).backward()
    optimizer.step()
    return first, values(ddp)


@on_ranks(2)
def test_ranks_without_hang_reports_ask_each_other_all_the_same(ctx):
    ddp = wrapped(ctx, Two(), hang_timeout=None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(X).backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    ddp(X)
    optimizer.step()
    return values(ddp)
