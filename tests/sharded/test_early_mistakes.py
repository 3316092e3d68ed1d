"""What cannot be right with divided steps inside the backward is a named error."""

from __future__ import annotations

import copy
import os
import time
import warnings
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from minidp import DataParallel
from minidp.errors import (
    CollectiveError,
    DoubleStepError,
    MiniDPError,
    ReplicaMismatchError,
    ShardedStepError,
)
from tests.support.fresh import MEMORIES, run_fresh
from tests.support.optimized import Breaks
from tests.support.ranks import on_ranks

from .test_mistakes import (
    Around,
    Unknown,
    backward,
    by_hand,
    params_of,
    says,
    two_optimizers,
)


def made(ctx, make=lambda ps: torch.optim.Adam(ps, 0.01), clip=None, **options):
    calls = options.pop("calls", {})
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    ddp = DataParallel(net, process_group=ctx.group, hang_timeout=10.0, **options)
    optimizer = make(list(net.parameters()))
    ddp.sharded_step(optimizer, **calls)
    ddp.step_in_backward(optimizer, clip_grad_norm=clip)
    return ddp, optimizer


def goes_on(ctx, ddp, optimizer, seed=7):
    """A step after `reset()`; all ranks have the same parameters then."""
    ddp.reset()
    optimizer.zero_grad()
    before = params_of(ddp)
    backward(ctx, ddp, seed)
    assert not all(map(torch.equal, before, params_of(ddp)))
    return params_of(ddp)


SMALL = {"bucket_cap_mb": 0.00001}  # a bucket for each parameter


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("options", [{}, SMALL, {"gradient_as_bucket_view": True}])
@on_ranks(2)
def test_averages_that_are_not_zeroed(ctx, options, clip):
    ddp, optimizer = made(ctx, clip=clip, **options)
    for number in range(2):
        optimizer.zero_grad()
        backward(ctx, ddp, number)
    before = params_of(ddp)
    with pytest.raises(ShardedStepError, match="that were still in"):
        backward(ctx, ddp, 2)
    assert all(map(torch.equal, before, params_of(ddp)))
    return goes_on(ctx, ddp, optimizer)


@on_ranks(2)
def test_averages_that_one_rank_has_not_zeroed(ctx):
    ddp, optimizer = made(ctx)
    backward(ctx, ddp, 0)
    if ctx.rank == 0:
        optimizer.zero_grad()
    before = params_of(ddp)
    with pytest.raises(ShardedStepError, match="No rank steps, because on rank 1 a"):
        backward(ctx, ddp, 1)
    assert all(map(torch.equal, before, params_of(ddp)))
    return goes_on(ctx, ddp, optimizer)


@on_ranks(2)
def test_a_gradient_of_an_unused_parameter_of_another_rank(ctx):
    torch.manual_seed(0)
    net = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    net.forward = lambda x: net[0](x)
    ddp = DataParallel(net, process_group=ctx.group, find_unused_parameters=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ddp.sharded_step(optimizer)
    ddp.step_in_backward(optimizer)
    backward(ctx, ddp)
    optimizer.zero_grad()
    for param in net[1].parameters():
        param.grad = torch.ones_like(param)
    before = params_of(ddp)
    with pytest.raises(ShardedStepError, match="that another rank steps have a grad"):
        backward(ctx, ddp, 1)
    assert all(map(torch.equal, before, params_of(ddp)))


def raises_late(param):
    def hook(_):
        raise RuntimeError("out of luck")

    return param.register_hook(hook)


@on_ranks(2)
def test_a_backward_that_raises_on_one_rank(ctx):
    """After its first bucket was launched: no rank has stepped."""
    ddp, optimizer = made(ctx, **SMALL)
    for number in range(2):
        backward(ctx, ddp, number)
        optimizer.zero_grad()
    before = params_of(ddp)
    if ctx.rank:
        handle = raises_late(ddp.module[0].weight)

    def goes_on_without_a_word():
        with suppress(RuntimeError) if ctx.rank else nullcontext():
            backward(ctx, ddp, 2)
        ddp(torch.ones(1, 4))  # refuses, and tells the others

    with pytest.raises(MiniDPError) as error:
        goes_on_without_a_word()
    if ctx.rank:
        handle.remove()
    else:
        says(error, "ank 1")
    assert all(map(torch.equal, before, params_of(ddp)))
    return goes_on(ctx, ddp, optimizer)


class BreaksInThird(torch.optim.SGD):
    """SGD that raises in the third step from now on."""

    left = 10**9

    def step(self, closure=None):
        self.left -= 1
        if not self.left:
            raise ValueError("out of luck")
        return super().step(closure)


@pytest.mark.parametrize("overlaps", [False, True])
@on_ranks(2)
def test_a_step_that_raises_between_two_buckets(ctx, overlaps):
    calls = {"per_parameter": True, "overlap_param_gather": overlaps}
    ddp, optimizer = made(ctx, lambda ps: BreaksInThird(ps, 0.1), calls=calls, **SMALL)
    for number in range(2):
        backward(ctx, ddp, number)
        optimizer.zero_grad()
    optimizer.left = 3 if ctx.rank else 10**9

    def needs_all_values():
        backward(ctx, ddp, 2)
        ddp.module.state_dict()

    with pytest.raises(MiniDPError) as error:
        needs_all_values()
    says(error, "BreaksInThird.step() raised ValueError inside the backward: out of")
    optimizer.left = 10**9
    with pytest.warns(match="3 on rank 0, 2 and a part of the next one on rank 1"):
        ddp.reset()
    found = params_of(ddp)
    optimizer.zero_grad()
    backward(ctx, ddp, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddp.reset()
    return found, params_of(ddp)


@on_ranks(2)
def test_a_step_that_raises_on_all_ranks(ctx):
    """All shares are halves of the same step."""
    calls = {"per_parameter": True}
    ddp, optimizer = made(ctx, lambda ps: Breaks(ps, 0.1), calls=calls)
    optimizer.is_broken = True
    with pytest.raises(MiniDPError, match="out of luck"):
        backward(ctx, ddp)
    with pytest.raises(MiniDPError):
        ddp(torch.ones(1, 4))
    optimizer.is_broken = False
    with pytest.warns(match="0 and a part of the next one on rank 1"):
        ddp.reset()
    optimizer.zero_grad()
    backward(ctx, ddp, 1)
    return params_of(ddp)


@on_ranks(2)
def test_a_step_by_hand(ctx):
    ddp, optimizer = made(ctx)
    backward(ctx, ddp)
    before = params_of(ddp)
    for step in (optimizer.step, lambda: optimizer.step(lambda: torch.zeros(()))):
        with pytest.raises(DoubleStepError, match="steps in the backward"):
            step()
    assert all(map(torch.equal, before, params_of(ddp)))
    optimizer.zero_grad()
    backward(ctx, ddp, 1)
    return params_of(ddp)


@on_ranks(2)
def test_clipping_after_the_steps(ctx):
    ddp, _ = made(ctx)
    backward(ctx, ddp)
    with pytest.raises(ShardedStepError, match="pass the norm there"):
        ddp.clip_grad_norm_(1.0)


def halves(optimizer, _args, _kwargs):
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(0.5)


@pytest.mark.parametrize("clip", [None, 0.1])
@on_ranks(2)
def test_a_hook_that_changes_gradients(ctx, clip):
    ddp, optimizer = made(ctx, clip=clip)
    optimizer.register_step_pre_hook(halves)
    before = params_of(ddp)
    with pytest.raises(ShardedStepError, match="A hook of an optimizer has changed"):
        backward(ctx, ddp)
    assert all(map(torch.equal, before, params_of(ddp)))


@on_ranks(2)
def test_a_hook_that_may_change_gradients(ctx):
    found = []
    for factor in (1.0, 0.5):
        calls = {"allow_changes": True}
        ddp, optimizer = made(ctx, lambda ps: torch.optim.SGD(ps, 0.1), calls=calls)
        before = params_of(ddp)
        if factor != 1.0:
            optimizer.register_step_pre_hook(halves)
        backward(ctx, ddp)
        pairs = zip(params_of(ddp), before, strict=True)
        found.append([(new - old) / factor for new, old in pairs])
    torch.testing.assert_close(*found)
    return found[1]


@pytest.mark.parametrize("inner", [torch.optim.SGD, Unknown])
@on_ranks(2)
def test_an_optimizer_around_another_one(ctx, inner):
    """The inner one would step all parameters with each bucket."""

    def around(ps):
        return Around(inner(ps) if inner is Unknown else inner(ps, 0.1))

    ddp, _ = made(ctx, around, calls={"per_parameter": True})
    text = "was not passed to sharded_step|An optimizer steps inside the backward"
    with pytest.raises(MiniDPError, match=text):
        backward(ctx, ddp)


@on_ranks(2)
def test_a_parameter_that_nobody_averages(ctx):
    """Each rank steps it; but a norm would be another one on each rank."""
    extra = nn.Parameter(torch.ones(3))
    for clip in (None, 0.1):
        ddp, optimizer = made(ctx, lambda ps: torch.optim.SGD(ps, 0.1), clip=clip)
        optimizer.add_param_group({"params": [extra]})
        extra.grad = torch.ones(3)
        if clip is None:
            backward(ctx, ddp)
            assert extra.tolist() == pytest.approx([0.9] * 3)
        else:
            with pytest.raises(ShardedStepError, match="whose norm each rank would"):
                backward(ctx, ddp)


@on_ranks(2)
def test_a_parameter_that_a_second_optimizer_gets(ctx):
    ddp, both = two_optimizers(ctx)
    for each in both:
        ddp.step_in_backward(each)
    both[1].add_param_group({"params": [ddp.module[0].bias]})
    before = params_of(ddp)
    with pytest.raises(ShardedStepError, match="add_param_group") as error:
        backward(ctx, ddp)
    says(error, "Parameters: 0.bias", "on rank 0, 1")
    assert all(map(torch.equal, before, params_of(ddp)))


@on_ranks(2)
def test_what_is_refused_before_it_begins(ctx):
    ddp, optimizer = made(ctx)
    with pytest.raises(ValueError, match="steps in the backward already"):
        ddp.step_in_backward(optimizer)
    other = torch.optim.SGD(ddp.parameters(), 0.1)
    with pytest.raises(ValueError, match="was not passed to sharded_step"):
        ddp.step_in_backward(other)
    with pytest.raises(ValueError, match="must be positive"):
        ddp.step_in_backward(optimizer, clip_grad_norm=-1.0)
    ddp, both = two_optimizers(ctx)
    ddp(torch.ones(1, 4))
    with pytest.raises(ValueError, match="while a backward is to come"):
        ddp.step_in_backward(both[0])
    net = nn.Linear(2, 2)
    ddp = DataParallel(net, process_group=ctx.group)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    ddp.sharded_step(optimizer, grad_scaler=scaler)
    with pytest.raises(ValueError, match="does not go with a GradScaler"):
        ddp.step_in_backward(optimizer)
    net = nn.Linear(2, 2)
    ddp = DataParallel(net, process_group=ctx.group, logical_ranks=2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"split_from_mb.* not go with logical_ranks"):
        ddp.sharded_step(optimizer, split_from_mb=0)
    ddp.sharded_step(optimizer)
    with pytest.raises(ValueError, match="does not go with logical_ranks"):
        ddp.step_in_backward(optimizer)
    net = nn.Linear(2, 2)
    ddp = DataParallel(net, process_group=ctx.group)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ddp.step_in_backward(optimizer)
    with pytest.raises(ValueError, match="call it after it"):
        ddp.sharded_step(optimizer)


@on_ranks(2)
def test_optimizers_that_torch_has_planted(ctx):
    net = nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    ddp = DataParallel(net, process_group=ctx.group)
    ddp.sharded_step(torch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(ShardedStepError, match="_apply_optimizer_in_backward"):
        ddp(torch.ones(1, 2))


@pytest.mark.parametrize("what", ["optimizer", "norm", "error"])
@on_ranks(2)
def test_ranks_that_call_it_differently(ctx, what):
    ddp, both = two_optimizers(ctx)
    mine = both[ctx.rank if what == "optimizer" else 0]
    norm = {"norm": 1.0 + ctx.rank, "error": -1.0 * ctx.rank or None}.get(what)
    kind = ValueError if what == "error" and ctx.rank else ReplicaMismatchError
    with pytest.raises(kind):
        ddp.step_in_backward(mine, clip_grad_norm=norm)


@on_ranks(2)
def test_a_copy_does_not_step(ctx):
    ddp, optimizer = made(ctx, lambda ps: torch.optim.SGD(ps, 0.1))
    backward(ctx, ddp)
    twin, copied = copy.deepcopy((ddp, optimizer))
    twin.zero_grad()
    before = params_of(twin)
    backward(ctx, twin, 1)
    assert all(map(torch.equal, before, params_of(twin)))
    copied.step()
    return params_of(twin)


@on_ranks(2)
def test_a_change_by_hand_of_one_replica_is_found(ctx):
    ddp, optimizer = made(ctx, check_replicas_every=1)
    backward(ctx, ddp)
    with torch.no_grad():
        for p in ddp.parameters():
            if p.grad is not None:
                by_hand(p)
    optimizer.zero_grad()
    with pytest.raises(ReplicaMismatchError, match=r"0\.weight"):
        backward(ctx, ddp, 1)


class Dies(BreaksInThird):
    def step(self, closure=None):
        if self.left == 1:
            os._exit(3)
        return super().step(closure)


def dies_between_buckets(ctx):
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    ddp = DataParallel(net, hang_timeout=8.0, bucket_cap_mb=0.0001)
    optimizer = Dies(net.parameters(), 0.1)
    ddp.sharded_step(optimizer, per_parameter=True)
    ddp.step_in_backward(optimizer)
    for step in range(3):
        optimizer.left = 3 if ctx.rank == 1 and step == 2 else 10**9
        start = time.monotonic()
        try:
            ddp(torch.ones(1, 8)).sum().backward()
        except CollectiveError as error:
            return str(error), time.monotonic() - start
        optimizer.zero_grad()
    return None


@pytest.mark.fresh
@pytest.mark.fault
@pytest.mark.parametrize("memory", MEMORIES)
def test_who_has_died_between_two_buckets_is_named(memory):
    results = run_fresh(
        dies_between_buckets, 2, group_timeout=10.0, errors="return", **memory
    )
    text, seconds = results[0]
    assert "ank 1" in text
    assert "new values of parameters" in text or "this rank's share" in text, text
    assert seconds < 8.0
