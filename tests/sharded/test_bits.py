"""A training with divided steps ends where the plain loop on torch's DDP does."""

from __future__ import annotations

import time
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
from tests.support.both import same
from tests.support.ranks import on_ranks

STEPS = 20
# Whether ranks share memory, which they do with the extension only.
SHARES = [False, pytest.param(True, marks=pytest.mark.native)]


class Lamb(torch.optim.Optimizer):
    """Trust ratios need whole parameters, and no other ones."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m = state.setdefault("m", torch.zeros_like(p))
                v = state.setdefault("v", torch.zeros_like(p))
                m.lerp_(p.grad, 0.1)
                v.lerp_(p.grad.square(), 0.01)
                update = m / (v.sqrt() + 1e-6)
                p.add_(update, alpha=-group["lr"] * float(p.norm() / update.norm()))


OPTIMIZERS = {
    "sgd": lambda ps: [torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01)],
    "sgd-foreach": lambda ps: [torch.optim.SGD(ps, 0.1, momentum=0.9, foreach=True)],
    "adam": lambda ps: [torch.optim.Adam(ps, 0.01, amsgrad=True)],
    "adamw": lambda ps: [torch.optim.AdamW(ps, 0.01)],
    "adamw-foreach": lambda ps: [torch.optim.AdamW(ps, 0.01, foreach=True)],
    "adamw-fused": lambda ps: [torch.optim.AdamW(ps, 0.01, fused=True)],
    "adafactor": lambda ps: [torch.optim.Adafactor(ps, 0.01)],
    "rmsprop": lambda ps: [torch.optim.RMSprop(ps, 0.01, momentum=0.5)],
    "lamb": lambda ps: [Lamb(ps, 0.01)],
    "groups": lambda ps: [
        torch.optim.Adam(
            [{"params": ps[::2], "lr": 0.1}, {"params": ps[1::2], "weight_decay": 0.1}]
        )
    ],
    "muon": lambda ps: [
        torch.optim.Muon([p for p in ps if p.ndim == 2], 0.01),
        torch.optim.AdamW([p for p in ps if p.ndim != 2], 0.01),
    ],
}


class Net(nn.Module):
    """Layers of several sizes; ``extra`` is used on demand."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 40)
        self.extra = nn.Linear(40, 40)
        self.last = nn.Linear(40, 2)

    def forward(self, x, *, with_extra=True):
        x = torch.tanh(self.first(x))
        if with_extra:
            x = torch.tanh(self.extra(x))
        return self.last(x)


def batch(ctx, step):
    generator = torch.Generator().manual_seed(100 * ctx.rank + step)
    return torch.randn(4, 3, generator=generator)


def train(ctx, ours, name, options, how, **more):  # noqa: C901 -- a loop with all options
    torch.manual_seed(3)
    net = Net()
    kind = DataParallel if ours else DistributedDataParallel
    ddp = kind(net, process_group=ctx.group, **options)
    optimizers = OPTIMIZERS[name](list(net.parameters()))
    if how.get("has_zeros"):
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
    if ours:
        ddp.sharded_step(*optimizers, per_parameter=name == "lamb", **more)
    is_early = ours and how.get("early", False)
    for each in optimizers if is_early else ():
        ddp.step_in_backward(each, clip_grad_norm=how.get("clip"))
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 5, 0.5) for each in optimizers]
    norms = []
    for step in range(how.get("steps", STEPS)):
        for micro in range(how.get("accumulate", 0)):
            with ddp.no_sync():
                ddp(batch(ctx, 50 + 10 * step + micro)).square().mean().backward()
        skips = how.get("skips") and (step + ctx.rank) % 3 == 0
        skips = skips or (how.get("skips_all") and step % 3 != 1)
        ddp(batch(ctx, step), with_extra=not skips).square().mean().backward()
        if how.get("looks_ahead"):  # in the first step this moves the gradients
            ddp(batch(ctx, 90 + step))
        if "clip" in how and not is_early:
            norm = (
                ddp.clip_grad_norm_(how["clip"])
                if ours
                else clip_grad_norm_(ddp.parameters(), how["clip"])
            )
            norms.append(norm)
        for each in () if is_early else optimizers:
            each.step()
        for each in schedulers:
            each.step()
        for each in optimizers:
            each.zero_grad(set_to_none=how.get("to_none", True))
    return [*(p.detach().clone() for p in net.parameters()), *norms], optimizers


CASES = [
    *((name, {}, {}) for name in OPTIMIZERS),
    *(("adamw", {}, {"clip": clip}) for clip in (0.3, 1e9)),
    ("sgd", {}, {"accumulate": 2}),
    ("sgd", {}, {"accumulate": 1, "to_none": False}),
    ("sgd", {"gradient_as_bucket_view": True}, {}),
    ("adamw", {"gradient_as_bucket_view": True}, {"to_none": False, "clip": 0.3}),
    ("sgd", {"find_unused_parameters": True}, {"skips": True}),
    ("sgd", {"find_unused_parameters": True}, {"skips": True, "to_none": False}),
    ("sgd", {"find_unused_parameters": True}, {"skips_all": True}),
    ("sgd", {"find_unused_parameters": True}, {"skips_all": True, "to_none": False}),
    ("sgd", {"find_unused_parameters": True}, {"skips_all": True, "has_zeros": True}),
    ("sgd", {"gradient_as_bucket_view": True}, {"looks_ahead": True, "clip": 0.3}),
    ("sgd", {"gradient_as_bucket_view": True}, {"looks_ahead": True}),
    ("sgd", {"static_graph": True}, {"looks_ahead": True}),
    ("adamw", {"bucket_cap_mb": 0.001}, {}),
    ("muon", {"bucket_cap_mb": 0.001}, {}),
    ("adamw", {"static_graph": True}, {}),
    ("adamw", {"batched_grad_copy": True}, {}),
]


@pytest.mark.parametrize(("name", "options", "how"), CASES, ids=str)
@on_ranks(2)
def test_weights_are_those_of_the_plain_loop(ctx, name, options, how):
    theirs, _ = train(ctx, False, name, options, how)
    ours, _ = train(ctx, True, name, options, how)
    assert same(theirs, ours)
    assert all(bool(each.isfinite().all()) for each in ours)
    return ours


@pytest.mark.parametrize("lazy", [False, True])
@on_ranks(1, 3, 4)
def test_weights_are_close_on_any_number_of_ranks(ctx, lazy):
    options = {"bucket_cap_mb": 0.001, "lazy_bucket_allocation": lazy}
    theirs, _ = train(ctx, False, "adamw", {}, {"clip": 0.3})
    ours, _ = train(ctx, True, "adamw", options, {"clip": 0.3})
    torch.testing.assert_close(ours, theirs)
    return ours


@on_ranks(2, 3)
def test_the_state_is_divided(ctx):
    """Twelve layers of one size: a share of each rank, and little more."""
    layers = [nn.Linear(32, 32) for _ in range(12)]
    net = nn.Sequential(*layers)
    ddp = DataParallel(net, process_group=ctx.group)
    optimizer = torch.optim.Adam(net.parameters())
    ddp.sharded_step(optimizer)
    ddp(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    whole = 2 * sum(p.nbytes for p in net.parameters()) + 4 * 24
    assert nbytes(optimizer) <= 1.05 * whole / ctx.world_size
    owned = [p for p in net.parameters() if p.grad is not None]
    assert owned == [p for p in net.parameters() if p in optimizer.state]


def nbytes(optimizer):
    states = optimizer.state.values()
    return sum(t.nbytes for s in states for t in s.values() if torch.is_tensor(t))


@on_ranks(2)
def test_a_model_without_a_wrapper(ctx):
    torch.manual_seed(3)
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    handle = minidp.attach(net, process_group=ctx.group)
    ddp = DistributedDataParallel(plain, process_group=ctx.group)
    kinds = [torch.optim.AdamW(each.parameters(), 0.01) for each in (net, plain)]
    handle.data_parallel.sharded_step(kinds[0])
    for step in range(4):
        for model, optimizer in zip((net, ddp), kinds, strict=True):
            model(batch(ctx, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [p.detach().clone() for p in net.parameters()]
    assert same(found, [p.detach() for p in plain.parameters()])
    return found


def averaged_over_items(ctx, way, **options):
    """Train on unequal counts; steps "plain", "divided" or "in_backward"."""
    torch.manual_seed(3)
    options = {"average_over": "items", "process_group": ctx.group, **options}
    ddp = DataParallel(Net(), **options)
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.01)
    if way != "plain":
        ddp.sharded_step(optimizer)
    if way == "in_backward":
        ddp.step_in_backward(optimizer)
    for step in range(4):
        loss = ddp(batch(ctx, step)).square().mean()
        ddp.weigh_loss(loss, 1 + 2 * ctx.rank).backward()
        if way != "in_backward":
            optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_averages_over_items(ctx, view):
    """The same bits as minidp's plain loop."""
    options = {"gradient_as_bucket_view": view}
    found = averaged_over_items(ctx, "divided", **options)
    assert same(found, averaged_over_items(ctx, "plain", **options))
    return found


@on_ranks(2)
def test_large_shares(ctx):
    """Larger than a cache; a bucket of one rank only, and one of both."""
    found = []
    for kind in (DistributedDataParallel, DataParallel):
        torch.manual_seed(3)
        layers = [nn.Linear(300, 300) for _ in range(5)]
        net = nn.Sequential(*layers, nn.Linear(300, 2000))
        ddp = kind(net, process_group=ctx.group, bucket_cap_mb=0.8)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
        if kind is DataParallel:
            ddp.sharded_step(optimizer)
        for step in range(5):
            x = torch.randn(4, 300, generator=torch.Generator().manual_seed(step))
            (ddp(x * (1 + ctx.rank))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        found.append([p.detach().clone() for p in net.parameters()])
    assert same(*found)
    return found[1]


class Lags(Observer):
    """This rank comes late to the sums of a backward, in which it takes part."""

    def __init__(self, seconds):
        self.seconds = seconds

    def finishing(self, *, applies_grads):
        time.sleep(self.seconds)


@on_ranks(2, 3)
def test_the_next_backward_waits_for_sums_of_others(ctx):
    """No step comes between the two: the second one must not change the first."""
    torch.manual_seed(3)
    net = Net()
    ddp = DataParallel(net, process_group=ctx.group)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ddp.sharded_step(optimizer)
    for step in range(2):  # buckets are rebuilt
        ddp(batch(ctx, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = []
    for lags in (0.0, 0.5):
        observer = Lags(lags if ctx.rank == 1 else 0.0)
        ddp._reducer.queue.observers.append(observer)
        ddp(batch(ctx, 7)).square().mean().backward()
        ddp._reducer.queue.observers.remove(observer)
        found.append(
            [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        )
        optimizer.zero_grad()
        ddp(100 * batch(ctx, 8)).square().mean().backward()
        optimizer.zero_grad()
    assert same(*found)


@pytest.mark.parametrize(
    ("options", "overlaps"), [({}, True), ({"gradient_as_bucket_view": True}, False)]
)
@on_ranks(2, 4)
def test_messages_in_pieces_have_the_same_bits(ctx, options, overlaps):
    how = {"to_none": False, "steps": 5}
    more = {"overlap_param_gather": overlaps}
    found = []
    for nbytes in (2**20, 400):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MINIDP_SHARED_MEMORY", "0")
            patch.setattr(pieces, "PIECE_BYTES", nbytes)
            patch.setattr(returns, "CHUNK_BYTES", 4 * nbytes)
            found.append(train(ctx, True, "adamw", options, how, **more)[0])
    assert same(found[0], found[1])
    return found[1]


@pytest.mark.parametrize("widths", [[0, 0], [5, 0, 3], [1000, 999, 0, 1], [7]])
def test_pieces_are_whole(monkeypatch, widths):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)
    ranges = pieces.cut(widths, torch.empty(0))
    for rank, width in enumerate(widths):
        elements = [k for each in ranges for k in range(*each[rank])]
        assert elements == list(range(width))
    assert all(len(each) == len(widths) for each in ranges)
    sizes = [4 * (part.stop - part.start) for each in ranges for part in each]
    assert max(sizes) <= 64


@pytest.mark.parametrize("overlaps", [False, True])
@on_ranks(2)
def test_an_attached_model(ctx, overlaps):
    found = []
    for attaches in (False, True):
        torch.manual_seed(3)
        net = Net()
        if attaches:
            handle = minidp.attach(net, process_group=ctx.group)
            clip = handle.clip_grad_norm_
        else:
            handle = DistributedDataParallel(net, process_group=ctx.group)
            clip = partial(clip_grad_norm_, list(net.parameters()))
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        if attaches:
            handle.sharded_step(optimizer, overlap_param_gather=overlaps)
        for step in range(5):
            (net if attaches else handle)(batch(ctx, step)).square().mean().backward()
            clip(0.5)
            optimizer.step()
            optimizer.zero_grad()
        if attaches:
            state = handle.whole_optimizer_state(optimizer)
            assert ctx.rank or len(state["state"]) == len(list(net.parameters()))
            handle.detach()
            assert {type(param) for param in net.parameters()} == {nn.Parameter}
        found.append([p.detach().clone() for p in net.parameters()])
    assert same(found[0], found[1])
