"""reset(): whatever broke, the same object trains correctly afterwards.

What raises in a backward: `tests/reset/test_failed_ranks.py`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed import distributed_c10d

from minidp import CollectiveError, DataParallel
from minidp.comm import stores
from tests.support.both import Scalars, Two, error_of, values, wrapped, x_of
from tests.support.fresh import run_fresh
from tests.support.ranks import on_ranks

TWO_BUCKETS = {"bucket_cap_mb_list": [0]}


def train(ctx, ddp, steps=3):
    """Some whole steps: the mean over two ranks is 1.5."""
    for _ in range(steps):
        ddp.zero_grad()
        ddp(x_of(ctx)).backward()
        assert values(ddp) == [1.5, 1.5]


# --------------------------------------------------------- all ranks fail alike


# A wrapper of an earlier test may still live on a group that tests share.
@on_ranks(2, fresh={})
@pytest.mark.parametrize("options", [{}, TWO_BUCKETS], ids=str)
def test_unfinished_reduction(ctx, options):
    ddp, x = wrapped(ctx, Two(), **options), x_of(ctx)
    ddp(x, "a").backward()
    errors = [error_of(lambda: ddp(x)) for _ in range(2)]
    with torch.no_grad():
        assert ddp(x).item() == 2 * (ctx.rank + 1)  # it still evaluates
    with ddp.no_sync():
        errors.append(error_of(lambda: ddp(x)))
    errors.append(error_of(ddp.sync_gradients))
    (text,) = set(errors)
    for words in (
        f"UnfinishedReductionError: [rank {ctx.rank}] Expected to have finished reduct",
        f"which did not receive grad for rank {ctx.rank}: 1\n",
        f"which did not receive grad for rank {ctx.rank}: b.\n",
        "`find_unused_parameters=True`",
        "call reset() on all ranks",
    ):
        assert words in text
    ddp.reset()
    assert ddp.process_group is ctx.group  # nothing was in flight
    assert values(ddp) == [ctx.rank + 1, None]  # as it was
    train(ctx, ddp)


@on_ranks(2, fresh={})
def test_reset_without_a_failure(ctx):
    ddp = wrapped(ctx, Two())
    ddp.reset()
    train(ctx, ddp)
    ddp(torch.ones(1))  # armed
    ddp.reset()
    ddp.reset()
    train(ctx, ddp)
    assert ddp.process_group is ctx.group


@on_ranks(2, fresh={"group_timeout": 4.0})
def test_all_ranks_average_after_an_error_between_switching_off_and_on(ctx):
    """By hand, as trainers do: one rank raises before it sets the attribute back."""
    ddp = wrapped(ctx, Two())
    ddp.require_backward_grad_sync = False
    ddp(x_of(ctx)).backward()
    ddp.require_backward_grad_sync = ctx.rank == 0
    ddp.reset()
    assert ddp.require_backward_grad_sync
    train(ctx, ddp)


@on_ranks(2, fresh={"group_timeout": 4.0})
@pytest.mark.parametrize("before", [True, False])
def test_reset_inside_no_sync_leaves_gradients_local_until_its_end(ctx, before):
    ddp = wrapped(ctx, Two())
    ddp.require_backward_grad_sync = before
    with ddp.no_sync():
        with ddp.no_sync():
            pass
        ddp.reset()
        ddp.zero_grad()
        ddp(x_of(ctx)).backward()
        assert values(ddp) == [ctx.rank + 1, ctx.rank + 1]
    assert ddp.require_backward_grad_sync is before
    ddp.reset()
    train(ctx, ddp)


@on_ranks(2)
def test_gradients_that_are_views_survive(ctx):
    ddp = wrapped(ctx, Two(), gradient_as_bucket_view=True)
    train(ctx, ddp)
    ddp.reset()
    assert values(ddp) == [1.5, 1.5]
    buffers = [bucket.payload for bucket in ddp._reducer.queue.buckets]
    for param in ddp.parameters():
        address = param.grad.data_ptr()
        assert any(0 <= address - b.data_ptr() < b.nbytes for b in buffers)


@on_ranks((1, 2))
def test_objects_on_one_group_are_reset_apart(ctx):
    pair = [wrapped(ctx, Two()) for _ in range(2)]
    for ddp, use in zip(pair, "ab", strict=True):
        ddp(torch.ones(1), use).backward()
    for ddp in pair:
        ddp.reset()
    for ddp in pair:
        train(ctx, ddp)


def without_a_store(monkeypatch):
    """As with a store that serves one thread only."""

    def refuse(*_):
        raise RuntimeError("clone() is not supported")

    monkeypatch.setattr(stores, "own_store", refuse)


@on_ranks(2, fresh={"group_timeout": 120.0})
def test_ranks_without_a_store_do_not_wait_in_reset(ctx):
    """Rank 1 begins when rank 0 is done; that would hang if either waited."""
    store = distributed_c10d._get_default_store()
    with pytest.MonkeyPatch.context() as patch:
        without_a_store(patch)
        ddp = wrapped(ctx, Two())
        train(ctx, ddp)
        if ctx.rank == 1:
            store.wait(["rank 0 is done"])
        ddp.reset()
        store.set("rank 0 is done", "")
        train(ctx, ddp)


@on_ranks(2, fresh={"group_timeout": 8.0})
@pytest.mark.parametrize("hangs", [False, True])
def test_groups_of_earlier_resets_are_freed(ctx, hangs):
    """But not one that somebody uses; it has threads, connections, and a name."""
    ddp = wrapped(ctx, Two(), hang_timeout=20.0)
    ddp._reducer.communicator.limit = 1.5
    known = distributed_c10d._world.pg_map
    mine, kept = None, []
    for number in range(5):
        if hangs and ctx.rank == 0:
            assert "Missing: rank 1" in error_of(lambda: ddp(x_of(ctx)).backward())
        ddp._reducer.communicator.has_failed = True
        ddp.reset()
        train(ctx, ddp, 1)
        kept.append(len(known))
        if number == 1:
            mine = ddp.process_group
    # The first, that of the pool; mine; the last two; on rank 0, one that has hung.
    assert max(kept) <= 4 + hangs
    assert kept[-1] == kept[-2]
    assert mine in known
    if not hangs:  # a collective that hung has broken it, as always
        total = torch.ones(1)
        torch.distributed.all_reduce(total, group=mine)
        assert total == 2


@on_ranks(2, fresh={"group_timeout": 8.0})
def test_names_of_groups_do_not_grow_with_each_reset(ctx):
    """They are a part of all keys in the store."""
    ddp, names = wrapped(ctx, Two(), hang_timeout=20.0), []

    def replaced(model):
        model._reducer.communicator.has_failed = True
        model.reset()
        names.append(str(model.process_group.group_name))

    for _ in range(4):
        replaced(ddp)
    # Made on a replacement, it calls its own resets as the first one called its.
    other = DataParallel(Two(), process_group=ddp.process_group, hang_timeout=20.0)
    replaced(other)
    train(ctx, ddp, 1)
    train(ctx, other, 1)
    assert len(set(names)) == 5
    assert len({len(name) for name in names[1:]}) == 1, names
    return names


# ---------------------------------------------------------- ranks fail differently


@on_ranks(2, fresh={"group_timeout": 3.0})
def test_a_forward_that_waits_in_vain(ctx):
    """No bucket is lost, all counts are equal: but the group is broken."""
    module = Two()
    module.register_buffer("mark", torch.zeros(1))
    ddp = wrapped(ctx, module)
    train(ctx, ddp, 2)
    if ctx.rank == 1:  # waits for rank 0's module buffers
        told = error_of(lambda: ddp(torch.ones(1)))
        assert told.startswith("CollectiveError: [rank 1] ")
        assert "A collective failed while broadcasting module buffers (" in told
    ddp.reset()
    assert ddp.process_group is not ctx.group
    train(ctx, ddp)


def one_rank_stays_away(ctx):
    ddp = wrapped(ctx, Two())
    ddp._reducer.communicator.limit = 1.0  # not for wrapping, which may take longer
    if ctx.rank != 1:
        ddp.reset()


def test_a_rank_that_never_comes_is_named():
    results = run_fresh(one_rank_stays_away, 3, errors="return")
    assert results[1] is None
    for rank in (0, 2):
        assert results[rank].kind == CollectiveError.__name__
        text = results[rank].message
        assert text.startswith(f"[rank {rank}] reset() waited 7 s in vain.")
        assert "no call on rank(s) 1. What to do: a dead rank cannot be reset" in text


@on_ranks(2)
def test_a_copy_on_one_rank_does_not_disturb_reset(ctx):
    ddp = wrapped(ctx, Scalars(2))
    if ctx.rank == 0:
        copy.deepcopy(ddp)
    other = wrapped(ctx, Scalars(2))
    other(x_of(ctx), [0]).sum().backward()
    other.reset()
    other(x_of(ctx)).sum().backward()
