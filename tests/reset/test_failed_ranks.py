"""Ranks that fail, die or stay away: a named error in seconds, and recovery."""

from __future__ import annotations

import copy
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import minidp
from minidp import DataParallel
from minidp.hang.rank_status import status_of
from tests.support.both import MODES, error_of
from tests.support.ranks import on_ranks, on_simulated_ranks
from tests.support.two_layers import TwoLayers, backward, make, trains

pytestmark = pytest.mark.fault

SECONDS = 3.0  # timeout of the process group


on_two_ranks = on_simulated_ranks(2, fresh={"group_timeout": SECONDS})


@on_two_ranks
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb_list": [0]}],
    ids=str,
)
def test_parameter_unused_on_one_rank(ctx, options):
    ddp = make(ctx, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    first = error_of(lambda: backward(ddp, skip=ctx.rank == 1))
    second, third = error_of(optimizer.step), error_of(lambda: ddp(torch.ones(1, 4)))
    assert second.startswith(f"UnsyncedGradientsError: [rank {ctx.rank}] ")
    if ctx.rank == 0:
        assert first.startswith("CollectiveError: [rank 0] ")
        assert "bucket 0" in first
        assert first.endswith("then call reset() on all live ranks.")
        assert third.startswith("ReducerFailedError: [rank 0] ")
    else:
        assert first == ""  # another backward might still bring them
        assert third.startswith("UnfinishedReductionError: [rank 1] ")
        assert "rank 1: b.weight, b.bias." in second
        assert "rank 1: b.weight, b.bias." in third
    old = ddp.process_group
    ddp.reset()  # a group with a collective left half done cannot be kept
    assert ctx.rank == 1 or ddp.process_group is not old
    assert trains(ctx, ddp)


@on_two_ranks
@pytest.mark.parametrize(
    ("ranks", "warm_up", "mode"),
    [([1], 2, {}), *(([0, 1], w, mode) for mode in MODES for w in (0, 2))],
    ids=str,
)
def test_backward_raises(ctx, ranks, warm_up, mode):
    ddp, rank = make(ctx, bucket_cap_mb=0, **mode), ctx.rank
    for _ in range(warm_up):  # past the rebuild: several buckets
        backward(ddp)
    ddp.zero_grad()

    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("boo")

    handle = ddp.module.a.weight.register_hook(fail) if rank in ranks else None
    first = error_of(lambda: backward(ddp))
    if handle is not None:
        handle.remove()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    second, third = error_of(optimizer.step), error_of(lambda: ddp(torch.ones(1, 4)))
    if rank in ranks:
        assert first == "ValueError: boo"
        assert third.startswith(f"UnfinishedReductionError: [rank {rank}] ")
        assert "a.weight" in third
    else:
        assert first.startswith(f"CollectiveError: [rank {rank}] ")
        assert third.startswith(f"ReducerFailedError: [rank {rank}] ")
    assert second.startswith(f"UnsyncedGradientsError: [rank {rank}] ")
    old, buckets = ddp.process_group, ddp._reducer.queue.buckets
    ddp.reset()  # equal launches complete, and are awaited; unequal do not
    assert (ddp.process_group is old) == (len(ranks) == 2)
    assert len(ranks) < 2 or {b.work for b in buckets} == {None}  # drained
    assert trains(ctx, ddp)
    backward(ddp, skip=True)
    ddp.reset()  # a second time, perhaps on a fresh group
    assert trains(ctx, ddp)


@on_simulated_ranks(3, fresh={"group_timeout": SECONDS})
def test_reset_in_a_subgroup_needs_only_its_members(ctx):
    timeout = timedelta(seconds=3)
    dist.new_group([0, 1], timeout=timeout)  # rank 1 is in one group more than rank 2
    pair = dist.new_group([1, 2], timeout=timeout)
    if ctx.rank == 0:
        return
    ddp = DataParallel(TwoLayers(), process_group=pair)
    error = error_of(lambda: backward(ddp, skip=ctx.rank == 2))
    assert error.startswith("CollectiveError: [rank 0] " if ctx.rank == 1 else "")
    assert bool(error) == (ctx.rank == 1)
    ddp.reset()
    ddp.zero_grad()
    ddp(torch.ones(1, 4) * ctx.rank).sum().backward()
    alone = copy.deepcopy(ddp.module)
    alone.zero_grad()
    alone(torch.ones(1, 4) * 1.5).sum().backward()  # the loss is linear: their mean
    for mine, theirs in zip(ddp.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad)


@on_simulated_ranks(2, fresh={"group_timeout": 60.0})
def test_a_rank_that_resets_one_of_two_wrappers_is_named_in_the_other(ctx):
    """Rank 0 waits for the second one, whose bucket comes first in the backward.

    After the first recovery the two have groups of their own, over the same ranks.
    """
    first, second = make(ctx), make(ctx)
    params = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        second(first(torch.ones(1, 4))).sum().backward()
        optimizer.step()

    step()
    for _ in range(2):
        if ctx.rank == 0:
            error = error_of(step)
            assert error.startswith("CollectiveError: [rank 0] Missing: rank 1. ")
            assert "Rank 1 gave up: it called reset()" in error
        first.reset(copy_from=0)
        second.reset(copy_from=0)
        step()
        assert trains(ctx, first)
        assert trains(ctx, second)
    return [param.detach().clone() for param in params]


@on_simulated_ranks(2, fresh={"group_timeout": 20.0})
def test_a_wrapper_beside_one_that_is_reset_goes_on(ctx):
    """Nobody takes the other ranks to be gone there, once all have called reset()."""
    first, second = make(ctx), make(ctx)
    backward(second)
    first.reset()
    communicator = second._reducer.communicator
    report = communicator.peers.report(communicator.started + 1)
    assert "gave up" not in report.text
    assert trains(ctx, second)


class RaisesBehind(torch.autograd.Function):
    """Stands before a module, so that its backward raises after that of the module."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, _grad):
        raise ValueError("boo")


@on_ranks(2, fresh={"group_timeout": 60.0})
def test_ranks_number_their_steps_alike_after_only_one_has_finished(ctx):
    """Rank 1 raises when all its buckets are launched, so rank 0 gets the averages.

    Later both count from the same number, in recordings and in errors.
    """
    ddp = make(ctx, check_finite_grads=True, check_replicas_every=0)
    x = torch.ones(1, 4, requires_grad=True)
    behind = RaisesBehind.apply(x) if ctx.rank else x
    error = error_of(lambda: ddp(behind).sum().backward())
    assert error == ("ValueError: boo" if ctx.rank else "")
    ddp.reset()
    with minidp.record(ddp) as rec:
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.ones(1, 4)).sum().backward()
    rec.gather()
    zero, one = (timeline.steps for timeline in rec.timelines)
    assert [step.number for step in zero] == [step.number for step in one] == [1, 2, 3]
    for ours, theirs in zip(zero, one, strict=True):
        for a, b in zip(ours.buckets, theirs.buckets, strict=True):
            assert max(a.launched_ns, b.launched_ns) <= min(a.done_ns, b.done_ns)
    ddp.zero_grad()
    error = error_of(lambda: ddp(torch.ones(1, 4) / (1 - ctx.rank)).sum().backward())
    assert "[rank 1] A gradient of step 4 is not finite (before" in error
    # So does a hang report, which shows what each rank publishes.
    assert status_of(ddp._reducer, threading.get_ident()).step == 4
