"""Optimizer steps inside the backward end where the plain loop on torch's DDP does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from minidp import DataParallel, comm_hooks
from minidp.errors import MiniDPError, ReducerFailedError
from tests.support.both import error_of, grads, same, wrapped
from tests.support.optimized import Breaks
from tests.support.ranks import as_in_torch, on_ranks

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
STEPS = 5

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01),
    "sgd-foreach": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, foreach=True),
    "adam": lambda ps: torch.optim.Adam(ps, 0.1),
    "adam-foreach": lambda ps: torch.optim.Adam(ps, 0.1, foreach=True, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01, momentum=0.5, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1, lr_decay=0.1),
    "adagrad-foreach": lambda ps: torch.optim.Adagrad(ps, 0.1, foreach=True),
    "groups": lambda ps: torch.optim.Adam(
        [
            {"params": ps[::2], "lr": 0.1},
            {"params": ps[1::2], "lr": 0.02, "weight_decay": 0.1},
        ]
    ),
}


class Branches(nn.Module):
    """Three layers; ``extra`` is used on demand, ``never`` not at all."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.extra = nn.Linear(5, 5)
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(5, 2)

    def forward(self, x, *, with_extra=True):
        x = torch.tanh(self.first(x))
        if with_extra:
            x = torch.tanh(self.extra(x))
        return self.last(x)


def batch(ctx, step):
    generator = torch.Generator().manual_seed(100 * ctx.rank + step)
    return torch.randn(4, 3, generator=generator).to(ctx.device)


def make_net(*, has_unused=False):
    torch.manual_seed(3)
    net = Branches()
    if not has_unused:
        del net.never
    return net


def train(ctx, name, options, how):
    """(torch's plain loop, minidp's overlapped one): parameters and optimizer state.

    Also called on GPUs, by tests/gpu.
    """
    results = []
    for overlapped in (False, True):
        net = make_net(has_unused="find_unused_parameters" in options)
        net.to(ctx.device)
        ddp = wrap(ctx, net, overlapped, ignores=how.get("ignores", False), **options)
        if how.get("hook"):
            register_hook(ddp, overlapped=overlapped)
        kinds = [OPTIMIZERS[name](list(net.parameters()))]
        if how.get("two"):
            halves = net.first.parameters(), net.extra.parameters()
            kinds = [OPTIMIZERS[name](list(half)) for half in halves]
        results.append(loop(ctx, ddp, kinds, how, overlapped=overlapped))
    return results[0], results[1]


def wrap(ctx, net, ours, *, ignores, **options):
    wrapper = DataParallel if ours else DistributedDataParallel
    if ignores:
        names = ["extra.weight", "extra.bias"]
        wrapper._set_params_and_buffers_to_ignore_for_model(net, names)
    return wrapper(net, process_group=ctx.group, **options)


def register_hook(ddp, *, overlapped):
    if overlapped:
        ddp.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    else:
        kind = torch.distributed.BuiltinCommHookType.FP16_COMPRESS
        ddp._register_builtin_comm_hook(kind)


def loop(ctx, ddp, optimizers, how, *, overlapped):
    clip, last = how.get("clip"), optimizers[-1]
    for optimizer in optimizers if overlapped else ():
        ddp.step_in_backward(optimizer, clip_grad_norm=clip)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    for step in range(STEPS):
        if step == 2 and how.get("two"):  # a group that is added later
            last.add_param_group({"params": list(ddp.module.last.parameters())})
        for micro in range(how.get("accumulate", 0)):
            with ddp.no_sync():
                ddp(batch(ctx, 50 + 10 * step + micro)).square().sum().backward()
        uses = {"with_extra": (step + ctx.rank) % 3 != 0} if how.get("skips") else {}
        ddp(batch(ctx, step), **uses).square().sum().backward()
        if clip is not None and not overlapped:
            clip_grad_norm_(ddp.module.parameters(), clip)
        for optimizer in () if overlapped else optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        ddp.module.zero_grad(set_to_none=how.get("to_none", True))
        if step == 2 and how.get("reload"):
            last.load_state_dict(copy.deepcopy(last.state_dict()))
    return (
        params_of(ddp.module),
        [optimizer.state_dict()["state"] for optimizer in optimizers],
        [group["lr"] for each in optimizers for group in each.param_groups],
    )


def params_of(net):
    return [p.detach().clone() for p in net.parameters()]


CASES = [
    *((name, {}, {}) for name in OPTIMIZERS),
    ("adam", {}, {"clip": 0.3}),
    ("groups", {}, {"reload": True}),
    ("sgd", {}, {"accumulate": 2}),
    ("sgd", {}, {"to_none": False}),
    ("adam", {}, {"hook": True}),
    ("adam", {"bucket_cap_mb_list": [0.00005]}, {}),
    ("sgd", {"bucket_cap_mb_list": [0.00005]}, {"hook": True}),
    ("sgd", {"gradient_as_bucket_view": True}, {}),
    ("adam", {"gradient_as_bucket_view": True}, {"to_none": False, "accumulate": 1}),
    ("adam", {"static_graph": True}, {}),
    ("sgd", {"find_unused_parameters": True}, {"skips": True}),
    ("sgd", {"find_unused_parameters": True}, {"skips": True, "to_none": False}),
    ("adam", {}, {"two": True}),
    ("adam", {}, {"ignores": True}),
]


@pytest.mark.parametrize(("name", "options", "how"), CASES, ids=str)
def test_parameters_are_those_of_the_plain_loop(pool, name, options, how):
    world_size = 3 if name in ("sgd", "groups") else 2
    results = pool.run(train, world_size, name, options, how)
    for rank, (theirs, ours) in enumerate(results):
        assert same(theirs, ours), f"rank {rank}"
    # Parameters in no bucket take their own steps on each rank.
    is_ignored = how.get("ignores", False)
    assert same(results[0][1][0], results[1][1][0]) is not is_ignored


@on_ranks(2)
@pytest.mark.parametrize("skip", [False, True])
def test_globally_unused_parameters(ctx, skip):
    """Without gradient no step; with one (here zeros) the usual one."""
    net = make_net(has_unused=True)
    before = net.never.weight.detach().clone()
    options = {"find_unused_parameters": True, "bucket_cap_mb_list": [0.00001]}
    ddp = wrapped(ctx, net, skip_all_reduce_unused_params=skip, **options)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.5)
    ddp.step_in_backward(optimizer)
    ddp(batch(ctx, 0)).sum().backward()
    assert torch.equal(before, net.never.weight)
    optimizer.zero_grad(set_to_none=False)
    net.never.weight.grad = torch.zeros(2, 2)  # decays from now on, as in a plain loop
    ddp(batch(ctx, 0)).sum().backward()
    assert torch.equal(net.never.weight, before - 0.1 * 0.5 * before)


@on_ranks(2)
def test_the_first_bucket_steps_before_the_last_one_is_awaited(ctx):
    """What happens to three buckets, with a hook whose futures tell who waits."""
    events = []

    class Reports(torch.futures.Future):
        def wait(self):
            events.append(f"wait {self.index}")
            return super().wait()

    def hook(state, bucket):
        events.append(f"launch {bucket.index()}")
        future = Reports()
        future.index = bucket.index()
        future.set_result(bucket.buffer())
        return future

    net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    ddp = wrapped(ctx, net, bucket_cap_mb_list=[0])
    ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def note(optimizer, args, kwargs):
        held = [id(p) for g in optimizer.param_groups for p in g["params"]]
        names = [n for n, p in net.named_parameters() if id(p) in held]
        events.append(f"step {' '.join(names)}")

    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(lambda *_: events.append("stepped"))
    ddp.step_in_backward(optimizer)
    ddp(torch.ones(1, 2)).sum().backward()
    assert events == [
        *("launch 0", "launch 1", "launch 2"),
        *("wait 0", "step 2.weight", "stepped"),
        *("wait 1", "step 1.weight", "stepped"),
        *("wait 2", "step 0.weight", "stepped"),
    ]


@on_ranks(2)
def test_a_step_outside_is_refused(ctx):
    """Nobody complains about the steps inside; and everybody about one outside."""
    nets = [make_net(), make_net()]
    ddps = [wrapped(ctx, net) for net in nets]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    for ddp, optimizer in zip(ddps, optimizers, strict=True):
        ddp.step_in_backward(optimizer)
    losses = [ddp(batch(ctx, 0)).sum() for ddp in ddps]
    sum(losses).backward()
    before = params_of(nets[0])
    problem = error_of(optimizers[0].step)
    kind = f"DoubleStepError: [rank {ctx.rank}] "
    assert problem.startswith(f"{kind}This optimizer steps in the backward")
    assert "What to do: remove the call of optimizer.step(); if a Grad" in problem
    assert same(before, params_of(nets[0]))
    assert same(before, params_of(nets[1]))


@on_ranks(2)
def test_sync_gradients_steps_and_no_sync_does_not(ctx):
    net = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        net.weight.zero_()
    ddp = wrapped(ctx, net)
    ddp.step_in_backward(torch.optim.SGD(net.parameters(), 1.0))
    with ddp.no_sync():
        ddp(torch.ones(1, 2) * (ctx.rank + 1)).sum().backward()
    assert net.weight.tolist() == [[0.0, 0.0]]
    ddp.sync_gradients()
    assert net.weight.tolist() == [[-1.5, -1.5]]


@on_ranks(2)
def test_a_step_that_raises_is_named_and_reset_leads_out(ctx):
    net = make_net()
    ddp = wrapped(ctx, net, bucket_cap_mb_list=[0.00005])
    optimizer = Breaks(net.parameters(), 0.1)
    ddp.step_in_backward(optimizer)
    optimizer.is_broken = True
    with pytest.raises(MiniDPError) as caught:
        ddp(batch(ctx, 0)).sum().backward()
    assert str(caught.value).startswith(
        f"[rank {ctx.rank}] Breaks.step() raised ValueError inside the backward: out "
        "of luck What to do: call reset() on all ranks, and load parameters and "
        "optimizer from a checkpoint"
    )
    for _ in range(2):
        with pytest.raises(ReducerFailedError):
            ddp(batch(ctx, 0))
    assert len(optimizer.param_groups[0]["params"]) == len(list(net.parameters()))
    optimizer.is_broken = False
    ddp.reset()
    ddp.zero_grad()
    ddp(batch(ctx, 0)).sum().backward()
    return params_of(net)


@as_in_torch(4)
@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1}),
    ],
)
@pytest.mark.parametrize("only_some", [False, True])
def test_fused_optimizers_are_torchs(ctx, wrap, kind, kwargs, only_some):
    """On all ranks: torch's takes the default group, whatever the module's is."""
    net = make_net()
    ddp = wrap(net)
    some = list(net.first.parameters()) if only_some else None
    ddp._register_fused_optim(kind, optim_params=some, **kwargs)
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(batch(ctx, step)).square().sum().backward()
    return params_of(net), grads(net)


@on_ranks(2)
@pytest.mark.parametrize(
    ("when", "view", "hook", "ignores"),
    [
        ("before", False, False, False),
        ("after", False, False, False),
        ("before", True, False, False),
        ("before", False, True, False),
        ("before", False, False, True),
        ("after", True, True, True),
    ],
)
def test_parameters_with_optimizers_of_their_own(ctx, when, view, hook, ignores):
    """Torch's needs an accelerator for these, so it runs the plain loop."""
    results, kwargs = [], {"lr": 0.1, "momentum": 0.9}
    for overlapped in (False, True):
        net = make_net()
        if overlapped and when == "before":
            _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), kwargs)
        more = {"ignores": ignores, "gradient_as_bucket_view": view}
        ddp = wrap(ctx, net, overlapped, **more)
        if hook:
            register_hook(ddp, overlapped=overlapped)
        if overlapped and when == "after":
            _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), kwargs)
        optimizer = torch.optim.SGD(net.parameters(), **kwargs)
        for step in range(STEPS):
            ddp(batch(ctx, step)).square().sum().backward()
            if not overlapped:
                optimizer.step()
                optimizer.zero_grad()
        results.append(params_of(net))
    assert same(*results)
    assert all(p.grad is None for p in net.parameters())
