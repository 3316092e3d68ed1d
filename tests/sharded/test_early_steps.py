"""Divided steps inside the backward end where the plain loop on torch's DDP does."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import minidp
from minidp import DataParallel
from minidp.core import Observer
from minidp.sharded import pieces, returns
from minidp.trace import Moment
from tests.support.both import same
from tests.support.combined import combined
from tests.support.ranks import on_ranks

from .test_awaited import awaited, forget_compilations
from .test_bits import (
    CASES,
    OPTIMIZERS,
    STEPS,
    Net,
    averaged_over_items,
    batch,
    train,
)

EARLY = [each for each in CASES if "clip" not in each[2]]


@pytest.mark.parametrize(("case", "overlaps"), combined(EARLY, [False, True]))
@on_ranks(2)
def test_weights_are_those_of_the_plain_loop(ctx, case, overlaps):
    name, options, how = case
    forget_compilations()
    theirs, _ = train(ctx, False, name, options, how)
    early = {**how, "early": True}
    ours, _ = train(ctx, True, name, options, early, overlap_param_gather=overlaps)
    assert same(theirs, ours)
    return ours


@pytest.mark.parametrize("lazy", [False, True])
@on_ranks(1, 3, 4)
def test_weights_are_close_on_any_number_of_ranks(ctx, lazy):
    options = {"bucket_cap_mb": 0.001, "lazy_bucket_allocation": lazy}
    theirs, _ = train(ctx, False, "adamw", {}, {})
    ours, _ = train(ctx, True, "adamw", options, {"early": True})
    torch.testing.assert_close(ours, theirs)
    return ours


@pytest.mark.parametrize(
    ("options", "overlaps"), [({}, True), ({"gradient_as_bucket_view": True}, False)]
)
@on_ranks(2, 3)
def test_messages_have_the_bits_of_steps_after_the_backward(ctx, options, overlaps):
    options = {"bucket_cap_mb": 0.001, **options}
    found = []
    for early in (False, True):
        how = {"to_none": False, "early": early, "steps": 5}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MINIDP_SHARED_MEMORY", "0")
            patch.setattr(pieces, "PIECE_BYTES", 400)
            patch.setattr(returns, "CHUNK_BYTES", 160)
            more = {"overlap_param_gather": overlaps}
            found.append(train(ctx, True, "adamw", options, how, **more)[0])
    assert same(found[0], found[1])
    return found[1]


def clipping(ctx, ours, name, options, norms, **more):
    """Train with a norm for each optimizer, over its own parameters, or without."""
    torch.manual_seed(3)
    kind = DataParallel if ours else DistributedDataParallel
    ddp = kind(Net(), process_group=ctx.group, **options)
    optimizers = OPTIMIZERS[name](list(ddp.parameters()))
    if ours:
        ddp.sharded_step(*optimizers, per_parameter=name == "lamb", **more)
        for optimizer, norm in zip(optimizers, norms, strict=True):
            ddp.step_in_backward(optimizer, clip_grad_norm=norm)
    for step in range(STEPS):
        uses = (step + ctx.rank) % 3 == 0 and "find_unused_parameters" in options
        ddp(batch(ctx, step), with_extra=not uses).square().mean().backward()
        if not ours:
            for optimizer, norm in zip(optimizers, norms, strict=True):
                groups = [group["params"] for group in optimizer.param_groups]
                if norm is not None:
                    clip_grad_norm_([p for group in groups for p in group], norm)
                optimizer.step()
        ddp.zero_grad()
    return [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("name", "options", "norms"),
    [
        ("adamw", {}, [0.3]),
        ("sgd", {"bucket_cap_mb": 0.001}, [0.1]),
        ("groups", {"gradient_as_bucket_view": True}, [0.05]),
        ("lamb", {"find_unused_parameters": True}, [0.3]),
        ("adamw-fused", {}, [float("inf")]),
        ("muon", {"bucket_cap_mb": 0.001}, [0.1, 0.2]),
        ("muon", {"bucket_cap_mb": 0.001}, [None, 0.1]),
        ("muon", {}, [0.1, None]),
    ],
    ids=str,
)
@on_ranks(2)
def test_gradients_of_all_shares_are_clipped(ctx, name, options, norms, overlaps):
    forget_compilations()
    theirs = clipping(ctx, False, name, options, norms)
    ours = clipping(ctx, True, name, options, norms, overlap_param_gather=overlaps)
    assert same(theirs, ours)
    return ours


class Trace(Observer):
    """What happens to buckets, in order."""

    sees_times = True

    def __init__(self):
        self.events = []

    def on_bucket_event(self, moment, index):
        self.events.append((moment, index))


@pytest.mark.parametrize("overlaps", [False, True])
@on_ranks(2)
def test_a_bucket_steps_before_the_next_one_is_awaited(ctx, overlaps):
    forget_compilations()
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    ddp = DataParallel(net, process_group=ctx.group, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ddp.sharded_step(optimizer, overlap_param_gather=overlaps)
    ddp.step_in_backward(optimizer)
    for number in range(3):
        trace = Trace()
        if number == 2:
            ddp._reducer.queue.observers.append(trace)
            optimizer.register_step_post_hook(
                lambda *_, seen=trace: seen.events.append(("step", 0))
            )
        ddp(torch.ones(2, 8)).sum().backward()
        optimizer.zero_grad()
    events = [e for e in trace.events if e[0] in ("step", Moment.COPIED_OUT)]
    buckets = len(ddp._reducer.queue.buckets)
    assert buckets == 3
    assert [kind for kind, _ in events] == [Moment.COPIED_OUT, "step"] * buckets
    sent = [e for e in trace.events if e[0] is Moment.VALUES_STARTED]
    numbers = [*range(buckets)]
    assert [number for _, number in sent] == numbers[:: -1 if overlaps else 1]
    first, last = trace.events.index(sent[0]), (Moment.COPIED_OUT, buckets - 1)
    assert (first < trace.events.index(last)) is not overlaps
    assert bool(awaited(net)) is overlaps


@on_ranks(2)
def test_one_of_two_optimizers_steps_by_hand(ctx):
    def halves(net):
        return net.first.parameters(), [*net.extra.parameters(), *net.last.parameters()]

    found = []
    for ours in (False, True):
        torch.manual_seed(3)
        kind = DataParallel if ours else DistributedDataParallel
        ddp = kind(Net(), process_group=ctx.group)
        both = [torch.optim.AdamW(half, 0.01) for half in halves(ddp.module)]
        if ours:
            ddp.sharded_step(*both)
            ddp.step_in_backward(both[0])
        for step in range(6):
            ddp(batch(ctx, step)).square().mean().backward()
            for each in both[1 if ours else 0 :]:
                each.step()
            ddp.zero_grad()
        found.append([p.detach().clone() for p in ddp.parameters()])
    assert same(*found)
    return found[0]


@pytest.mark.parametrize("overlaps", [False, True])
@on_ranks(2)
def test_an_attached_model(ctx, overlaps):
    forget_compilations()
    found = []
    for attaches in (False, True):
        torch.manual_seed(3)
        net = Net()
        model = net
        if attaches:
            handle = minidp.attach(net, process_group=ctx.group)
        else:
            model = DistributedDataParallel(net, process_group=ctx.group)
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        if attaches:
            handle.sharded_step(optimizer, overlap_param_gather=overlaps)
            handle.step_in_backward(optimizer)
        for step in range(5):
            model(batch(ctx, step)).square().mean().backward()
            if not attaches:
                optimizer.step()
            optimizer.zero_grad()
        if attaches:
            handle.detach()
            assert {type(param) for param in net.parameters()} == {nn.Parameter}
        found.append([p.detach().clone() for p in net.parameters()])
    assert same(found[0], found[1])


@on_ranks(2)
def test_averages_over_items(ctx):
    found = averaged_over_items(ctx, "in_backward")
    assert same(found, averaged_over_items(ctx, "plain"))
    return found


@on_ranks(2)
def test_a_scheduler_on_a_rank_without_a_share_sees_the_steps(ctx):
    torch.manual_seed(0)
    net = nn.Linear(4, 4, bias=False)
    ddp = DataParallel(net, process_group=ctx.group)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ddp.sharded_step(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    ddp.step_in_backward(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            ddp(torch.ones(1, 4) + step).sum().backward()
            scheduler.step()
            optimizer.zero_grad()
    return net.weight.detach().clone()


@on_ranks(2)
def test_step_hooks_run_once_for_each_bucket_on_all_ranks(ctx):
    torch.manual_seed(0)
    ddp = DataParallel(Net(), process_group=ctx.group, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    ddp.sharded_step(optimizer)
    ddp.step_in_backward(optimizer)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for step in range(2):
        calls.clear()
        ddp(batch(ctx, step)).square().mean().backward()
        optimizer.zero_grad()
        assert calls == ["before", "after"] * len(ddp._reducer.queue.buckets)
    return len(calls)


@on_ranks(2)
def test_a_graph_from_before_the_step_is_refused(ctx):
    torch.manual_seed(0)
    ddp = DataParallel(Net(), process_group=ctx.group)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    ddp.sharded_step(optimizer)
    ddp.step_in_backward(optimizer)
    y = ddp(batch(ctx, 0))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@on_ranks(2)
def test_the_state_comes_and_goes(ctx):
    """A checkpoint of the whole state, with which a plain loop goes on."""
    torch.manual_seed(3)
    ddp = DataParallel(Net(), process_group=ctx.group)
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.01)
    ddp.sharded_step(optimizer)
    ddp.step_in_backward(optimizer)
    loop = partial(run, ctx, ddp, optimizer, steps=False)
    loop(range(3))
    weights = {n: v.clone() for n, v in ddp.module.state_dict().items()}
    states = [ddp.whole_optimizer_state(optimizer, to=rank) for rank in range(2)]
    state = copy.deepcopy(states[ctx.rank])  # which has the tensors of the own share
    loop(range(3, 6))
    plain = DistributedDataParallel(Net(), process_group=ctx.group)
    plain.module.load_state_dict(weights)
    other = torch.optim.AdamW(plain.parameters(), 0.01)
    other.load_state_dict(state)
    run(ctx, plain, other, range(3, 6))
    assert same(ddp.module.state_dict(), plain.module.state_dict())


def run(ctx, ddp, optimizer, numbers, *, steps=True):
    for number in numbers:
        ddp(batch(ctx, number)).square().mean().backward()
        if steps:
            optimizer.step()
        optimizer.zero_grad()
