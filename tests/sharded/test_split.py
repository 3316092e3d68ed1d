"""Large parameters are divided by rows: what each rank has, and what a script sees."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import minidp
from minidp import DataParallel
from minidp.errors import ReplicaMismatchError, ShardedStepError
from minidp.sharded import awaited
from tests.sharded.test_awaited import forget_compilations
from tests.sharded.test_bits import SHARES, Lags
from tests.support.both import same
from tests.support.combined import combined
from tests.support.ranks import on_ranks

TINY = 64 / 2**20  # MiB: from 16 floats on

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.01),
    "foreach": lambda ps: torch.optim.AdamW(ps, 0.01, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),  # see the next test
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1, initial_accumulator_value=0.1),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, 0.5),
    "adamax": lambda ps: torch.optim.Adamax(ps, 0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, 0.01),
    "radam": lambda ps: torch.optim.RAdam(ps, 0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01, momentum=0.5, centered=True),
    "rprop": lambda ps: torch.optim.Rprop(ps, 0.01),
    "asgd": lambda ps: torch.optim.ASGD(ps, 0.01, t0=1),
    "groups": lambda ps: torch.optim.Adam(
        [{"params": ps[::2], "lr": 0.1}, {"params": ps[1::2], "weight_decay": 0.1}]
    ),
}


class Net(nn.Module):
    """Layers whose rows do not divide evenly; ``extra`` is used on demand."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(37, 4)
        self.first = nn.Linear(4, 41)
        self.extra = nn.Linear(41, 41)
        self.last = nn.Linear(41, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, *, with_extra=True):
        x = torch.tanh(self.first(self.words(x))) * self.scale
        if with_extra:
            x = torch.tanh(self.extra(x))
        return self.last(x)


def words(ctx, step):
    generator = torch.Generator().manual_seed(100 * ctx.rank + step)
    return torch.randint(37, (6,), generator=generator)


def made(ctx, *, name="adamw", split=TINY, kind=DataParallel, options=(), **more):
    torch.manual_seed(3)
    net = Net()
    ddp = kind(net, process_group=ctx.group, **dict(options))
    optimizer = OPTIMIZERS[name](list(net.parameters()))
    if kind is DataParallel:
        ddp.sharded_step(optimizer, split_from_mb=split, **more)
    return ddp, optimizer


def params_of(ddp):
    return [p.detach().clone() for p in ddp.parameters()]


def backward(ctx, ddp, step, **how):
    ddp(words(ctx, step), **how).square().mean().backward()


def train(ctx, ddp, optimizer, steps=range(8), *, zeroes=None):
    may_skip = getattr(ddp, "find_unused_parameters", False)
    for step in steps:
        backward(ctx, ddp, step, with_extra=step % 3 != 1 or not may_skip)
        optimizer.step()
        (zeroes or optimizer.zero_grad)()
    return params_of(ddp)


UNUSED = {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True}
MODES = [
    {},
    VIEWS,
    {"lazy_bucket_allocation": True},
    {"bucket_cap_mb": 0.0002},
]
modes = pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m) or "default")


# ---------------------------------------------------------------------------- the bits


@pytest.mark.parametrize(("name", "options"), combined(OPTIMIZERS, [{}, UNUSED]))
@on_ranks(2)
def test_bits_of_the_plain_loop(ctx, name, options):
    theirs = made(ctx, name=name, kind=DistributedDataParallel, options=options)
    ours = made(ctx, name=name, options=options)
    found = train(ctx, *ours)
    assert same(found, train(ctx, *theirs))
    divided = sum(map(ours[0]._sharded.owners.is_split, range(8)))
    assert divided == (0 if name == "fused" else 6)
    return found


@pytest.mark.parametrize(("mode", "overlaps"), combined(MODES, [False, True]))
@pytest.mark.parametrize("shares", SHARES)
@on_ranks(2, 4)
def test_bits_of_whole_owners(ctx, mode, overlaps, shares):
    """On any number of ranks: who owns what does not change a sum."""
    with pytest.MonkeyPatch.context() as patch:
        if not shares:
            patch.setenv("MINIDP_SHARED_MEMORY", "0")
        options = mode if overlaps else {**mode, **UNUSED}
        more = {"overlap_param_gather": overlaps, "options": options}
        whole = train(ctx, *made(ctx, split=None, **more))
        for to_none in (True, False):
            ddp, optimizer = made(ctx, **more)

            def zeroes(optimizer=optimizer, to_none=to_none):
                optimizer.zero_grad(set_to_none=to_none)

            found = train(ctx, ddp, optimizer, zeroes=zeroes)
            if to_none:
                assert same(found, whole)
    return found


@modes
@on_ranks(2)
def test_bits_of_fused_steps(ctx, mode):
    """Of the last elements of a tensor these have other bits than of the others."""
    found = []
    for kind in (DistributedDataParallel, DataParallel):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 27))
        options = {} if kind is DistributedDataParallel else mode
        ddp = kind(net, process_group=ctx.group, **options)
        optimizer = OPTIMIZERS["fused"](list(net.parameters()))
        if kind is DataParallel:
            ddp.sharded_step(optimizer, split_from_mb=0)
            split = [ddp._sharded.owners.is_split(i) for i in range(4)]
            assert split == [True, False, False, False]
        for step in range(12):
            generator = torch.Generator().manual_seed(10 * step + ctx.rank)
            ddp(torch.randn(3, 64, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(params_of(ddp))
    assert same(*found)


def train_early(ctx, ddp, optimizer, norm=None):
    ddp.step_in_backward(optimizer, clip_grad_norm=norm)
    for step in range(8):
        backward(ctx, ddp, step)
        optimizer.zero_grad()
    return params_of(ddp)


@pytest.mark.parametrize(("mode", "overlaps"), combined(MODES, [False, True]))
@pytest.mark.parametrize("shares", SHARES)
@on_ranks(2, 3)
def test_steps_in_the_backward_have_the_bits_of_steps_after_it(
    ctx, mode, overlaps, shares
):
    forget_compilations()
    with pytest.MonkeyPatch.context() as patch:
        if not shares:
            patch.setenv("MINIDP_SHARED_MEMORY", "0")
        after = train(ctx, *made(ctx, split=None, options=mode))
        more = {"overlap_param_gather": overlaps, "options": mode}
        ddp, optimizer = made(ctx, **more)
        early = train_early(ctx, ddp, optimizer)
    assert same(after, early)
    rows = ddp._sharded.owners.rows_of(ctx.rank, 1)  # the state is that of own rows
    words = ddp.module.words.weight
    assert optimizer.state[words]["exp_avg"].shape == words[rows].shape
    return early


@on_ranks(2)
def test_steps_in_the_backward_are_clipped(ctx):
    ddp, optimizer = made(ctx, kind=DistributedDataParallel, name="sgd")
    for step in range(8):
        backward(ctx, ddp, step)
        clip_grad_norm_(ddp.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    early = train_early(ctx, *made(ctx, name="sgd"), norm=0.05)
    torch.testing.assert_close(early, params_of(ddp))
    return early


class Used(nn.Module):
    """Uses all of its parameters alike."""

    def __init__(self, params):
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self, x):
        return sum((p * x).abs().square().mean() for p in self.params)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("name", ["sgd", "rmsprop", "adamax"])
@on_ranks(2)
def test_bits_of_other_dtypes(ctx, name, dtype):
    """Torch rounds the last elements of a tensor of 16 bits otherwise."""
    if name == "adamax" and dtype.is_complex:
        return
    found = []
    for kind in (DistributedDataParallel, DataParallel):
        torch.manual_seed(0)
        used = Used(torch.randn(26, n).to(dtype) for n in (8, 64, 128))
        ddp = kind(used, process_group=ctx.group)
        optimizer = OPTIMIZERS[name](list(used.parameters()))
        if kind is DataParallel:
            ddp.sharded_step(optimizer, split_from_mb=0)
            split = [ddp._sharded.owners.is_split(i) for i in range(3)]
            assert split == [dtype.is_complex, True, True]
        for step in range(6):
            ddp(0.1 + ctx.rank + step / 9).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(params_of(ddp))
    for a, b in zip(*found, strict=True):  # RMSprop has NaN in float16, on both
        assert torch.equal(a, b) or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


# ------------------------------------------------------------------------ what is split


@on_ranks(2, 3)
def test_one_layer_larger_than_a_share(ctx):
    net = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 3))
    ddp = DataParallel(net, process_group=ctx.group)
    optimizer = torch.optim.Adam(net.parameters())
    ddp.sharded_step(optimizer, split_from_mb=0.01)
    ddp(torch.arange(1000)).sum().backward()
    optimizer.step()
    states = optimizer.state.values()
    mine = sum(t.nbytes for s in states for t in s.values() if torch.is_tensor(t))
    whole = 2 * sum(p.nbytes for p in net.parameters())
    assert mine <= 1.05 * whole / ctx.world_size
    assert optimizer.state[net[0].weight]["exp_avg"].shape[1:] == (8,)
    assert optimizer.param_groups[0]["params"] == [*net.parameters()]


def shapes_split(ctx, params, make, **more):
    net = Used([p.clone() for p in params])
    ddp = DataParallel(net, process_group=ctx.group)
    optimizer = make([*net.parameters()])
    ddp.sharded_step(optimizer, **{"split_from_mb": TINY, **more})
    owners = ddp._sharded.owners
    return [tuple(p.shape) for i, p in enumerate(net.params) if owners.is_split(i)]


def adafactor(params):
    return torch.optim.Adafactor(params, eps=(1e-7, 1e-3))


class Own(torch.optim.SGD):
    """A class that nobody knows."""


@on_ranks(3)
def test_which_parameters_stay_whole(ctx):
    params = [
        torch.randn(8, 8),
        torch.randn(50),
        torch.randn(()),
        torch.randn(2, 40),  # fewer rows than ranks
        torch.randn(4, 40),  # the third rank would have no row
        torch.randn(15),  # small
        torch.randn(8, 4, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(8, 9).t(),
        torch.randn(10, 9, dtype=torch.bfloat16),
        torch.randn(6, 32, dtype=torch.bfloat16),
        torch.randn(0, 9),
    ]
    large = [(8, 8), (50,), (6, 32)]
    assert shapes_split(ctx, params, torch.optim.SGD) == large
    assert shapes_split(ctx, params, torch.optim.SGD, split_from_mb=None) == []
    assert shapes_split(ctx, params, torch.optim.SGD, split_from_mb=1) == []
    assert shapes_split(ctx, params, adafactor) == []
    assert shapes_split(ctx, params, adafactor, elementwise=True) == []
    assert shapes_split(ctx, params, Own, per_parameter=True) == []
    assert shapes_split(ctx, params, Own, elementwise=True) == large


@on_ranks(1)
def test_one_rank_has_everything(ctx):
    assert shapes_split(ctx, [torch.randn(8, 8)], torch.optim.SGD) == []


@on_ranks(2)
def test_ranks_that_want_different_sizes(ctx):
    with pytest.raises(ReplicaMismatchError, match="split_from_mb"):
        made(ctx, split=TINY if ctx.rank else None)


@on_ranks(2)
def test_each_message_goes_in_both_directions(ctx):
    ddp, optimizer = made(ctx, name="sgd")
    train(ctx, ddp, optimizer, range(0, 6, 3))
    owners = ddp._sharded.owners
    plans = ddp._reducer.queue.layout.buckets
    for plan in plans:
        if owners.is_split(plan.indices[0]):
            widths = [each.numel for each in owners.stretches(plan)]
            rows = owners.rows[plan.indices[0]]
            assert len(plan.slots) == 1
            assert widths[0] - widths[1] in (0, plan.numel // rows)
    assert len(plans) == 7
    assert owners.arranged(ddp._reducer.queue.layout) == ddp._reducer.queue.layout


# -------------------------------------------------------------- what a script may do


@modes
@on_ranks(2, 3)
def test_gradients_are_averages_of_own_rows(ctx, mode):
    theirs, _ = made(ctx, kind=DistributedDataParallel)
    ours, _ = made(ctx, options=mode)
    for ddp in (theirs, ours):
        backward(ctx, ddp, 0)
    for i, (p, q) in enumerate(
        zip(ours.parameters(), theirs.parameters(), strict=True)
    ):
        if ours._sharded.owners.is_split(i):
            rows = ours._sharded.owners.rows_of(ctx.rank, i)
            expected = torch.zeros_like(p)
            expected[rows] = q.grad[rows]
            torch.testing.assert_close(p.grad, expected)
            p.grad.add_(1.0)  # nobody else reads it


@modes
@on_ranks(2)
def test_gradients_that_are_changed_while_others_add_up(ctx, mode):
    """Rank 1 comes late to its sums, of which rank 0 has brought a part."""
    found = []
    for lags in (0.0, 0.3):
        ddp, _ = made(ctx, options=mode)
        observer = Lags(lags if ctx.rank == 1 else 0.0)
        ddp._reducer.queue.observers.append(observer)
        backward(ctx, ddp, 0)
        grads = [p.grad for p in ddp.parameters() if p.grad is not None]
        found.append([grad.clone() for grad in grads])
        for grad in grads:
            grad.fill_(7.0)
    assert same(*found)


@pytest.mark.parametrize("way", ["module", "wrapper", "by hand", "zeros", "in place"])
@modes
@on_ranks(2)
def test_every_way_to_zero(ctx, way, mode):
    def zero(ddp, optimizer):
        if way in ("by hand", "in place"):
            for p in ddp.parameters():
                if p.grad is not None and way == "in place":
                    p.grad.zero_()
                elif way == "by hand":
                    p.grad = None
        elif way == "zeros":
            optimizer.zero_grad(set_to_none=False)
        else:
            (ddp.module if way == "module" else ddp).zero_grad()

    found = []
    for kind in (DistributedDataParallel, DataParallel):
        options = {} if kind is DistributedDataParallel else mode
        ddp, optimizer = made(ctx, kind=kind, options=options)
        for step in range(4):
            for _ in range(2):  # the first one is dropped
                zero(ddp, optimizer)
                backward(ctx, ddp, step)
            optimizer.step()
        found.append(params_of(ddp))
    assert same(*found)
    return found[1]


@modes
@on_ranks(2)
def test_accumulated_gradients(ctx, mode):
    found = []
    for kind in (DistributedDataParallel, DataParallel):
        options = {} if kind is DistributedDataParallel else mode
        ddp, optimizer = made(ctx, kind=kind, options=options)
        for step in range(5):
            with ddp.no_sync():
                backward(ctx, ddp, 10 + step)
                backward(ctx, ddp, 20 + step)
            backward(ctx, ddp, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        found.append(params_of(ddp))
    assert same(*found)


@on_ranks(2)
def test_averages_that_were_not_zeroed(ctx):
    ddp, optimizer = made(ctx)
    backward(ctx, ddp, 0)
    optimizer.step()
    for i, p in enumerate(ddp.parameters()):
        if not ddp._sharded.owners.is_split(i):
            p.grad = None
    before = params_of(ddp)
    backward(ctx, ddp, 1)
    with pytest.raises(ShardedStepError, match="averages that were still"):
        optimizer.step()
    assert same(before, params_of(ddp))
    ddp.reset()
    optimizer.zero_grad()
    return train(ctx, ddp, optimizer, [0, 2])


@on_ranks(2)
def test_clipping_by_torch_is_noticed(ctx):
    ddp, optimizer = made(ctx)
    backward(ctx, ddp, 0)
    clip_grad_norm_(ddp.parameters(), 0.1)
    with pytest.raises(ShardedStepError, match="to clip, call"):
        optimizer.step()


class Twice(nn.Module):
    """Two large parameters, whose gradients lie in one memory: other rows of it."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(6, 10))
        self.b = nn.Parameter(torch.ones(3, 20))
        self.c = nn.Parameter(torch.ones(3))

    def forward(self, x):
        flat = self.a.view(-1) + self.b.view(-1)
        return (flat * x.view(-1)).sum().square() + self.c.sum()


@pytest.mark.parametrize("b_is_whole", [False, True])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0}], ids=["one", "many"])
@on_ranks(2)
def test_gradients_in_one_memory(ctx, options, b_is_whole):
    found = []
    for kind in (DistributedDataParallel, DataParallel):
        net = Twice()
        ddp = kind(net, process_group=ctx.group, **options)
        of_b = torch.optim.Adafactor if b_is_whole else torch.optim.SGD
        optimizers = [torch.optim.SGD([net.a, net.c], 0.001), of_b([net.b], 0.001)]
        if kind is DataParallel:
            ddp.sharded_step(*optimizers, split_from_mb=TINY)
            split = [ddp._sharded.owners.is_split(i) for i in range(3)]
            assert split == [True, not b_is_whole, False]
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + ctx.rank)
            ddp(torch.randn(6, 10, generator=generator)).backward()
            for each in optimizers:
                each.step()
            net.zero_grad()
        found.append(params_of(ddp))
    assert same(*found)
    return found[1]


# ---------------------------------------------------------------------------- clipping


def clipped(ctx, kind, order, **more):
    ddp, optimizer = made(ctx, name="sgd", kind=kind, **more)
    norms = []
    for step in range(5):
        backward(ctx, ddp, step)
        if kind is DataParallel:
            norms.append(ddp.clip_grad_norm_(0.05, order))
        else:
            norms.append(clip_grad_norm_(ddp.parameters(), 0.05, order))
        optimizer.step()
        optimizer.zero_grad()
    return [*params_of(ddp), *norms]


@modes
@pytest.mark.parametrize("order", [2.0, 1.0, 0.5, 0.0, math.inf])
@on_ranks(2)
def test_norms_are_those_of_torch(ctx, mode, order):
    """Up to the last bits, because torch adds up all elements in another order."""
    theirs = clipped(ctx, DistributedDataParallel, order)
    ours = clipped(ctx, DataParallel, order, options=mode)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    if order == math.inf:
        assert same(ours, theirs)
    return ours


@on_ranks(2, 3)
def test_norms_of_several_dtypes_and_absent_gradients(ctx):
    found = []
    for kind in (DistributedDataParallel, DataParallel):
        torch.manual_seed(0)
        net = nn.Module()
        net.a = nn.Parameter(torch.randn(12, 16))
        net.b = nn.Parameter(torch.randn(12, 16, dtype=torch.float64))
        net.never = nn.Parameter(torch.randn(12, 16))
        net.c = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        net.d = nn.Parameter(torch.randn(2))
        used = (net.a, net.b, net.c, net.d)
        net.forward = lambda x, used=used: sum((p * x).abs().sum() for p in used)
        ddp = kind(net, process_group=ctx.group, find_unused_parameters=True)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        if kind is DataParallel:
            ddp.sharded_step(optimizer, split_from_mb=TINY / 2)
        ddp(1.0 + ctx.rank).square().backward()
        if kind is DataParallel:
            norm = ddp.clip_grad_norm_(1.0)
        else:
            norm = clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        found.append([norm, *params_of(ddp)])
    torch.testing.assert_close(*found)
    return found[1]


# ------------------------------------------------------- optimizers that are in the way


class Rebinds(torch.optim.Optimizer):
    """Gives parameters new memory, looks them up in groups and state, drops .grad."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["sum"] = state.get("sum", 0.0) + p.grad
                p.data = p.data - group["lr"] * state["sum"]
                p.grad = None


@on_ranks(2)
def test_an_optimizer_that_gives_parameters_new_memory(ctx):
    found = []
    for kind in (DistributedDataParallel, DataParallel):
        torch.manual_seed(3)
        ddp = kind(Net(), process_group=ctx.group)
        optimizer = Rebinds(ddp.parameters())
        if kind is DataParallel:
            ddp.sharded_step(optimizer, elementwise=True, split_from_mb=TINY)
        for step in range(4):
            backward(ctx, ddp, step)
            optimizer.step()
            assert all(p.grad is None for p in ddp.parameters())
        found.append(params_of(ddp))
    assert same(*found)


@on_ranks(2)
def test_parameters_are_in_the_groups_but_for_the_step(ctx):
    ddp, optimizer = made(ctx, name="groups")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    params = [*ddp.parameters()]
    lists = [group["params"] for group in optimizer.param_groups]
    seen = []

    def look(which, *_):
        seen.append([p for group in which.param_groups for p in group["params"]])

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    for _ in range(3):
        train(ctx, ddp, optimizer, [0])
        scheduler.step()
    assert all(each == [*params[::2], *params[1::2]] for each in seen)
    for group, before in zip(optimizer.param_groups, lists, strict=True):
        assert group["params"] is before
    assert set(optimizer.state) <= set(params)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [params[0]]})


@on_ranks(2)
def test_hooks_of_steps_in_the_backward_find_parameters(ctx):
    ddp, optimizer = made(ctx, name="groups")
    params, seen = [*ddp.parameters()], []
    lists = [group["params"] for group in optimizer.param_groups]

    def look(which, *_):
        seen.extend(p for group in which.param_groups for p in group["params"])

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    train_early(ctx, ddp, optimizer)
    assert {*map(id, seen)} == {*map(id, params)}
    assert len(seen) == 8 * 2 * len(params)
    backward(ctx, ddp, 8)
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = "no number"
    with pytest.raises(
        minidp.MiniDPError, match="raised TypeError inside the backward"
    ):
        backward(ctx, ddp, 9)
    for group, before in zip(optimizer.param_groups, lists, strict=True):
        assert group["params"] is before
    assert {*map(id, optimizer.state)} <= {*map(id, params)}


@on_ranks(2)
def test_a_step_that_raises(ctx):
    ddp, optimizer = made(ctx)
    params = [*ddp.parameters()]
    train(ctx, ddp, optimizer, range(2))
    backward(ctx, ddp, 2)
    group = optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], "no number"
    with pytest.raises(TypeError):
        optimizer.step()
    group["lr"] = rate
    # What an emergency checkpoint would have: whole parameters, and the share.
    assert {p.shape for p in params} == {p.shape for p in Net().parameters()}
    assert optimizer.state_dict()["state"][1]["exp_avg"].shape == (19 - ctx.rank, 4)
    with pytest.raises(ShardedStepError, match="its last step raised"):
        backward(ctx, ddp, 3)
    assert group["params"] == params
    ddp.reset()
    optimizer.zero_grad()
    assert set(optimizer.state) <= set(params)
    return train(ctx, ddp, optimizer, range(3))


@on_ranks(2)
def test_a_wrapper_that_goes_after_a_step_that_raised(ctx):
    ddp, optimizer = made(ctx, name="sgd")
    params = [*ddp.parameters()]
    backward(ctx, ddp, 2)
    optimizer.param_groups[0]["lr"] = "no number"
    with pytest.raises(TypeError):
        optimizer.step()
    del ddp
    assert optimizer.param_groups[0]["params"] == params


@on_ranks(2, 3)
def test_reset_gives_the_rows_of_the_owners(ctx):
    ddp, optimizer = made(ctx)
    train(ctx, ddp, optimizer, [0])
    with torch.no_grad():
        for p in ddp.parameters():
            p.fill_(ctx.rank)
    ddp.reset()
    owners = ddp._sharded.owners
    for i, p in enumerate(ddp.parameters()):
        if owners.is_split(i):
            for rank in range(ctx.world_size):
                assert bool((p[owners.rows_of(rank, i)] == rank).all())
    return params_of(ddp)


@on_ranks(2)
def test_parameters_changed_by_hand_are_found(ctx):
    """Each rank applies its rows in place of a step."""
    ddp, _ = made(ctx)
    backward(ctx, ddp, 0)
    with torch.no_grad():
        for p in ddp.parameters():
            if p.grad is not None:
                p -= p.grad
                p.grad = None
    with pytest.raises(ShardedStepError, match="Parameters differ"):
        backward(ctx, ddp, 1)


# ----------------------------------------------------------- values that come later


@pytest.mark.parametrize("shares", SHARES)
@on_ranks(2, 3)
def test_a_divided_parameter_waits_for_its_rows(ctx, shares):
    with pytest.MonkeyPatch.context() as patch:
        if not shares:
            patch.setenv("MINIDP_SHARED_MEMORY", "0")
        ddp, optimizer = made(ctx, overlap_param_gather=True)
        other, its = made(ctx)
        for step in range(3):
            for one, each in ((ddp, optimizer), (other, its)):
                backward(ctx, one, step)
                each.step()
                each.zero_grad()
            weight = ddp.module.first.weight
            assert type(weight) is awaited.AwaitedParameter
            version = weight._version
            values = weight.detach().clone()
            assert type(weight) is nn.Parameter
            assert weight._version == version
            assert torch.equal(values, other.module.first.weight)
        assert same(params_of(ddp), params_of(other))
    return params_of(ddp)


@on_ranks(2)
def test_a_graph_from_before_the_step(ctx):
    for overlaps in (False, True):
        ddp, optimizer = made(ctx, overlap_param_gather=overlaps)
        weight = ddp.module.last.weight
        old = (weight * weight).sum()
        train(ctx, ddp, optimizer, [0])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()


# --------------------------------------------------------------------------- a scaler


@pytest.mark.parametrize("foreach", [False, True])
@modes
@on_ranks(2)
def test_a_scaler_skips_on_all_ranks(ctx, mode, foreach):
    found = []
    for kind in (DistributedDataParallel, DataParallel):
        options = {} if kind is DistributedDataParallel else mode
        torch.manual_seed(3)
        ddp = kind(Net(), process_group=ctx.group, **options)
        optimizer = torch.optim.AdamW(ddp.parameters(), 0.01, foreach=foreach)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        if kind is DataParallel:
            ddp.sharded_step(optimizer, split_from_mb=TINY, grad_scaler=scaler)
        scales = []
        for step in range(7):
            weight, row = ddp.module.first.weight, -1 if step == 1 else 0
            overflows = step in (1, 4) and ctx.rank == step % 2

            def spoil(grad, row=row, overflows=overflows):
                grad = grad.clone()
                grad[row] *= torch.inf if overflows else 1.0  # in one rank's rows
                return grad

            handle = weight.register_hook(spoil)
            scaler.scale(ddp(words(ctx, step)).square().mean()).backward()
            handle.remove()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(torch.tensor(scaler.get_scale()))
            optimizer.zero_grad()
        found.append([*params_of(ddp), *scales])
    assert same(*found)
    return found[1]


# ---------------------------------------------------------------------- other wrappers


@on_ranks(2)
def test_a_copy_that_is_divided_goes_on(ctx):
    ddp, optimizer = made(ctx)
    train(ctx, ddp, optimizer, range(2))
    twin, copied = copy.deepcopy((ddp, optimizer))
    twin.sharded_step(copied, split_from_mb=TINY)
    again, its = copy.deepcopy((ddp, optimizer))
    with pytest.raises(ShardedStepError, match="A copy of a divided AdamW steps"):
        train(ctx, again, its, [0])
    again, its = copy.deepcopy((ddp, optimizer))
    with pytest.raises(ShardedStepError, match="copy of a share"):
        again.sharded_step(its)
    found = train(ctx, twin, copied, range(2, 4))
    assert same(found, train(ctx, ddp, optimizer, range(2, 4)))
    return found


@on_ranks(2)
def test_an_attached_model(ctx):
    torch.manual_seed(3)
    net = Net()
    handle = minidp.attach(net, process_group=ctx.group)
    optimizer = OPTIMIZERS["adamw"](list(net.parameters()))
    handle.sharded_step(optimizer, split_from_mb=TINY)
    found = train(ctx, net, optimizer)
    handle.detach()
    assert same(found, train(ctx, *made(ctx, split=None)))
    with pytest.raises(ShardedStepError, match="wrapper is gone"):
        train(ctx, net, optimizer, [0])


@on_ranks(2)
def test_averages_over_items(ctx):
    found = []
    for split in (None, TINY):
        options = {"average_over": "items"}
        ddp, optimizer = made(ctx, split=split, options=options)
        for step in range(4):
            loss = ddp(words(ctx, step)).square().mean()
            ddp.weigh_loss(loss, 1 + 2 * ctx.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(params_of(ddp))
    assert same(*found)
