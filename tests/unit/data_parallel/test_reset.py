"""reset(): whatever broke, the same object trains correctly afterwards."""

from __future__ import annotations

import pytest
import torch

from minidp import (
    CollectiveError,
    DataParallel,
    UnfinishedReductionError,
)
from tests.support.both import Two
from tests.support.fresh import run_fresh

TWO_BUCKETS = {"bucket_cap_mb_list": [0]}


def grads(ddp):
    return [None if p.grad is None else p.grad.item() for p in ddp.parameters()]


def train(ctx, ddp, steps=3):
    """Gradients of some whole steps; their mean over two ranks is 1.5."""
    seen = []
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.tensor([ctx.rank + 1.0])).backward()
        seen.append(grads(ddp))
    return seen


HEALTHY = [[1.5, 1.5]] * 3


def error_of(call, *args):
    try:
        call(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


# --------------------------------------------------------- all ranks fail alike


def after_unfinished(ctx, options):
    ddp = DataParallel(Two(), process_group=ctx.group, **options)
    x = torch.tensor([ctx.rank + 1.0])
    ddp(x, "a").backward()
    errors = [error_of(ddp, x) for _ in range(2)]
    with torch.no_grad():
        still_evaluates = ddp(x).item()
    with ddp.no_sync():
        errors.append(error_of(ddp, x))
    errors.append(error_of(ddp.sync_gradients))
    ddp.reset()
    kept = ddp.process_group is ctx.group  # nothing was in flight
    return errors, still_evaluates, grads(ddp), train(ctx, ddp), kept


@pytest.mark.parametrize("options", [{}, TWO_BUCKETS], ids=str)
def test_unfinished_reduction(pool, options):
    for rank, result in enumerate(pool.run(after_unfinished, 2, options)):
        errors, still_evaluates, left, trained, kept = result
        assert len(set(errors)) == 1
        kind, text = errors[0]
        assert kind == UnfinishedReductionError.__name__
        assert text.startswith(f"[rank {rank}] Expected to have finished reduction")
        assert f"which did not receive grad for rank {rank}: 1\n" in text
        assert f"which did not receive grad for rank {rank}: b.\n" in text
        assert "`find_unused_parameters=True`" in text
        assert "call reset() on all ranks" in text
        assert still_evaluates == 2 * (rank + 1)
        assert left == [rank + 1, None]  # as it was
        assert trained == HEALTHY
        assert kept


def after_nothing(ctx):
    ddp = DataParallel(Two(), process_group=ctx.group)
    ddp.reset()
    seen = train(ctx, ddp)
    ddp(torch.ones(1))  # armed
    ddp.reset()
    ddp.reset()
    return seen + train(ctx, ddp), ddp.process_group is ctx.group


def test_reset_without_a_failure(pool):
    assert pool.run(after_nothing, 2) == [(HEALTHY * 2, True)] * 2


def views_after_reset(ctx):
    options = {"gradient_as_bucket_view": True}
    ddp = DataParallel(Two(), process_group=ctx.group, **options)
    train(ctx, ddp)
    ddp.reset()
    buffers = [bucket.payload for bucket in ddp._reducer.queue.buckets]
    starts = [b.data_ptr() for b in buffers], [b.data_ptr() + b.nbytes for b in buffers]
    pointers = [p.grad.data_ptr() for p in ddp.parameters()]
    inside = [any(map(lambda a, b: a <= p < b, *starts)) for p in pointers]
    return grads(ddp), inside


def test_gradients_that_are_views_survive(pool):
    assert pool.run(views_after_reset, 2) == [([1.5, 1.5], [True, True])] * 2


def two_objects(ctx):
    one, other = (DataParallel(Two(), process_group=ctx.group) for _ in range(2))
    x = torch.ones(1)
    one(x, "a").backward()
    other(x, "b").backward()
    one.reset()
    other.reset()
    return train(ctx, one), train(ctx, other)


def test_objects_on_one_group_are_reset_apart(pool):
    assert pool.run(two_objects, (1, 2)) == [(HEALTHY, HEALTHY)] * 2


# ---------------------------------------------------------- ranks fail differently


def one_rank_never_calls_forward(ctx):
    module = Two()
    module.register_buffer("mark", torch.zeros(1))
    ddp = DataParallel(module, process_group=ctx.group)
    train(ctx, ddp, 2)
    error, text = "", ""
    if ctx.rank == 1:  # waits for rank 0's module buffers
        error, text = error_of(ddp, torch.ones(1))
    ddp.reset()
    return error, text, ddp.process_group is not ctx.group, train(ctx, ddp)


def test_a_forward_that_waits_in_vain():
    """No bucket is lost, all counts are equal: but the group is broken."""
    first, second = run_fresh(one_rank_never_calls_forward, 2, group_timeout=3.0)
    assert first == ("", "", True, HEALTHY)
    assert second[0] == CollectiveError.__name__
    assert second[1].startswith(
        "[rank 1] A collective failed while broadcasting module buffers. "
    )
    assert second[2:] == (True, HEALTHY)


def one_rank_stays_away(ctx):
    ddp = DataParallel(Two(), process_group=ctx.group)
    if ctx.rank != 1:
        ddp.reset()


def test_a_rank_that_never_comes_is_named():
    results = run_fresh(one_rank_stays_away, 3, group_timeout=1.0, errors="return")
    assert results[1] is None
    for rank in (0, 2):
        assert results[rank].kind == CollectiveError.__name__
        text = results[rank].message
        assert text.startswith(f"[rank {rank}] reset() waited 7 s in vain.")
        assert "no call on rank(s) 1. What to do: a dead rank cannot be reset" in text
