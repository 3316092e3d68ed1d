"""Steps that are divided among the ranks, on a device: bits, order, waits, faults."""

from __future__ import annotations

import copy
import gc
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

import minidp
from minidp import DataParallel
from minidp.comm import side_groups
from minidp.errors import ShardedStepError
from minidp.sharded import step
from minidp.sharded.averaging import Brought, StreamedShare, by_rank
from tests.accelerator.scenarios import Branches, Fails, TwoDevices
from tests.accelerator.test_lifetimes import Sums, all_memory_reused, nodes_on, take
from tests.accelerator.training import (
    SMALL,
    WAYS,
    Run,
    in_ways,
    net,
    no_races,
    result_of,
)
from tests.support import sim
from tests.support.pool import Pool
from tests.support.ranks import on_ranks

VIEWS = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
SPLIT = {"split_from_mb": 0}

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
    "foreach": lambda params: torch.optim.AdamW(params, 0.01, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
}


def of_two(flat):
    """Return what two ranks bring to a sum: a row each."""
    return Brought([flat], [1, 1], by_rank)


def here():
    return torch.accelerator.current_stream()


def divided(run, module, name="sgd", *, divides=True, given=None, **options):
    """Wrap a module, and divide the steps of an optimizer; return both."""
    model = run.wrap(module, **SMALL | options)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    if divides:
        model.sharded_step(optimizer, **given or {})
    return model, optimizer


def plain(run, *, name="sgd", set_to_none=True, given=None, **options):
    model, optimizer = divided(
        run, net().to(run.device()), name, given=given, **options
    )
    return run.train(model, optimizer=optimizer, set_to_none=set_to_none)


def branches(run, *, set_to_none=True, **options):
    """Parameters without gradients, others on each rank."""
    module = Branches().to(run.device())
    model, optimizer = divided(run, module, **UNUSED, **options)

    def step(n):
        branch = 0 if n == 2 else n + run.ctx.rank
        model(run.batch(n), branch).square().mean().backward()

    return run.train(model, step=step, optimizer=optimizer, set_to_none=set_to_none)


def clipped(run, *, norm_type=2.0, unused=False, set_to_none=True, **options):
    module = (Branches() if unused else net()).to(run.device())
    options |= UNUSED if unused else {}
    model, optimizer = divided(run, module, "adamw", **options)
    norms = []

    def step(n):
        more = (n % 2,) if unused else ()
        model(run.batch(n), *more).square().mean().backward()
        norms.append(model.clip_grad_norm_(0.05, norm_type))

    found = run.train(model, step=step, optimizer=optimizer, set_to_none=set_to_none)
    return [*found, *norms]


def accumulated(run, **options):
    model, optimizer = divided(run, net().to(run.device()), **options)

    def step(n):
        with model.no_sync():
            model(run.batch(10 * n)).square().mean().backward()
        model(run.batch(10 * n + 1)).square().mean().backward()

    return run.train(model, step=step, optimizer=optimizer)


def two_devices(run, *, clips=False, set_to_none=True, **options):
    model, optimizer = divided(run, TwoDevices(run), **options)

    def step(n):
        model(run.batch(n)).square().mean().backward()
        if clips:
            model.clip_grad_norm_(0.05)

    return run.train(model, step=step, optimizer=optimizer, set_to_none=set_to_none)


def in_backward(run, *, clip=None, unused=False, **options):
    """Each bucket steps in the backward, or all of them at its end."""
    module = (Branches() if unused else net()).to(run.device())
    options |= UNUSED if unused else {}
    model, optimizer = divided(run, module, "adamw", **options)
    model.step_in_backward(optimizer, clip_grad_norm=clip)
    found = []
    with run.training():
        for n in range(5):
            with run.count(run.costs):
                optimizer.zero_grad()
                more = (n % 2,) if unused else ()
                model(run.batch(n), *more).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found += [param.detach().clone() for param in model.parameters()]
    return found


def recorded(run):
    model, optimizer = divided(run, net().to(run.device()))
    with minidp.record(model):
        return run.train(model, optimizer=optimizer)


def two_optimizers(run, **options):
    module = net().to(run.device())
    model = run.wrap(module, **SMALL, **options)
    matrices = [p for p in module.parameters() if p.ndim == 2]
    others = [p for p in module.parameters() if p.ndim != 2]
    first, second = torch.optim.SGD(matrices, 0.1), torch.optim.AdamW(others, 0.01)
    model.sharded_step(first, second)

    def step(n):
        second.zero_grad()
        model(run.batch(n)).square().mean().backward()
        second.step()

    return run.train(model, step=step, optimizer=first)


def logical(run, number, *, set_to_none=True, clips=False, **options):
    """Each rank brings one sum of four logical ranks, and two of five."""
    options |= {"logical_ranks": number}
    model, optimizer = divided(run, net().to(run.device()), "adamw", **options)

    def step(n):
        for leaf in model.each_logical_rank():
            model(run.batch(10 * n + leaf)).square().mean().backward()
        if clips:
            model.clip_grad_norm_(0.05)

    return run.train(model, step=step, optimizer=optimizer, set_to_none=set_to_none)


def reset(run, **options):
    """A training that goes on after `reset`."""
    model, optimizer = divided(run, net().to(run.device()), **options)
    found = run.train(model, 2, optimizer=optimizer)
    model.reset()
    return found + run.train(model, 2, optimizer=optimizer)


SCENARIOS = {
    **{name: partial(plain, name=name) for name in OPTIMIZERS},
    "kept": partial(plain, set_to_none=False),
    "kept by foreach": partial(plain, name="foreach", set_to_none=False),
    "views": partial(plain, **VIEWS),
    "kept views": partial(plain, set_to_none=False, **VIEWS),
    "lazy": partial(plain, lazy_bucket_allocation=True),
    "lazy views": partial(plain, lazy_bucket_allocation=True, **VIEWS),
    "static": partial(plain, static_graph=True),
    "batched": partial(plain, batched_grad_copy=True),
    "overlap": partial(plain, given={"overlap_param_gather": True}),
    "split": partial(plain, given=SPLIT),
    "split kept": partial(plain, set_to_none=False, given=SPLIT),
    "split views": partial(plain, given=SPLIT, **VIEWS),
    "split kept views": partial(plain, set_to_none=False, given=SPLIT, **VIEWS),
    "split lazy": partial(plain, given=SPLIT, lazy_bucket_allocation=True),
    "split unused": partial(branches, given=SPLIT),
    "split clipped": partial(clipped, norm_type=float("inf"), given=SPLIT),
    "split reset": partial(reset, given=SPLIT),
    "split foreach": partial(plain, name="foreach", given=SPLIT),
    "unused": branches,
    "unused kept": partial(branches, set_to_none=False),
    "unused views": partial(branches, **VIEWS),
    "clipped": clipped,
    "clipped by the largest": partial(clipped, norm_type=float("inf")),
    "clipped unused": partial(clipped, unused=True),
    "clipped kept": partial(clipped, unused=True, set_to_none=False),
    "accumulated": accumulated,
    "two devices": two_devices,
    "two devices kept": partial(two_devices, set_to_none=False),
    "two optimizers": two_optimizers,
    "logical ranks": partial(logical, number=4),
    "logical ranks with several sums": partial(logical, number=5, clips=True),
    "logical ranks, kept views": partial(logical, number=5, set_to_none=False, **VIEWS),
    "in backward": in_backward,
    "in backward, clipped": partial(in_backward, clip=0.05),
    "in backward, unused": partial(in_backward, unused=True),
    "in backward, views": partial(in_backward, **VIEWS),
    "recorded": recorded,
    "reset": reset,
}


def bits_of_the_cpu(ctx, scenario, way):
    """Run a scenario on the device, check its bits, and return them."""
    expected = result_of(Run(ctx, DataParallel, "cpu"), scenario)
    found = result_of(Run(ctx, DataParallel, "sim", way), scenario)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))
    return found


@on_ranks(2)
@in_ways("name", SCENARIOS, every=6)
def test_bits_are_those_of_the_cpu(ctx, name, way):
    bits_of_the_cpu(ctx, SCENARIOS[name], way)


def capturable(run, *, divides=True):
    model = run.wrap(net().to(run.device()), **SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, capturable=True)
    if divides:
        model.sharded_step(optimizer)
    return run.train(model, optimizer=optimizer)


# What differs from the CPU: norms are added by device, for example.
OF_DEVICES = {
    "two devices clipped": partial(two_devices, clips=True),
    "capturable": capturable,
}


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OF_DEVICES)
def test_bits_are_those_of_a_plain_loop(ctx, name, way):
    scenario = OF_DEVICES[name]
    whole = partial(scenario, divides=False)
    expected = result_of(Run(ctx, DataParallel, "sim"), whole)
    found = result_of(Run(ctx, DataParallel, "sim", way), scenario)
    count = len(list(net().parameters()))
    assert all(map(torch.equal, expected[-count:], found[-count:]))


# ------------------------------------------------------------------- a scaler of losses


class Overflow(torch.autograd.Function):
    """The identity. Its gradient is infinite for what comes before it, on demand."""

    @staticmethod
    def forward(ctx, x, overflows):
        ctx.overflows = overflows
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (torch.inf if ctx.overflows else 1.0), None


class Overflows(nn.Module):
    """The gradients of its first layer, which one rank owns, may be infinite."""

    def __init__(self):
        super().__init__()
        layers = net()
        self.first, self.rest = layers[0], layers[1:]

    def forward(self, x, overflows):
        return self.rest(Overflow.apply(self.first(x), overflows))


def scaled(run, *, clips=False, fused=False, divides=True, **options):
    """Infinities come on one rank, in the second and in the fifth step."""
    model = run.wrap(Overflows().to(run.device()), **SMALL | options)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=fused or None)
    scaler = GradScaler(run.kind, init_scale=256.0, growth_interval=3)
    if divides:
        model.sharded_step(optimizer, grad_scaler=scaler)
    found = []
    with run.training():
        for n in range(6):
            overflows = n in (1, 4) and run.ctx.rank == n % 2
            with run.count(run.costs):
                scaler.scale(model(run.batch(n), overflows).square().mean()).backward()
                if clips:
                    scaler.unscale_(optimizer)
                    model.clip_grad_norm_(0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            found.append(torch.tensor(scaler.get_scale()))
        found += [param.detach().clone() for param in model.parameters()]
    return found


def one_branch_scaled(run):
    """In a step no gradient is in the share of some rank, which gets a stand-in."""
    model = run.wrap(Branches().to(run.device()), **UNUSED, **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = GradScaler(run.kind, init_scale=256.0, growth_interval=3)
    model.sharded_step(optimizer, grad_scaler=scaler)
    found = []
    with run.training():
        for n in range(6):
            factor = torch.inf if n in (1, 4) and run.ctx.rank == n % 2 else 1.0
            scaler.scale(model(run.batch(n), n).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(torch.tensor(scaler.get_scale()))
        found += [param.detach().clone() for param in model.parameters()]
    return found


SCALED = {
    "plain": scaled,
    "clips": partial(scaled, clips=True),
    "fused": partial(scaled, fused=True),
    "views": partial(scaled, gradient_as_bucket_view=True),
    "one branch": one_branch_scaled,
}


@on_ranks(2)
@in_ways("name", SCALED)
def test_a_scaler_skips_on_all_ranks(ctx, name, way):
    found = bits_of_the_cpu(ctx, SCALED[name], way)
    assert [int(scale) for scale in found[:6]] == [256, 128, 128, 128, 64, 64]


# ------------------------------------------------------------------------ what it costs


@on_ranks(2)
@pytest.mark.parametrize(
    "name", ["sgd", "views", "clipped", "unused", "two optimizers"]
)
@pytest.mark.parametrize("way", ["default", "mixed_nodes"])
def test_no_host_waits_but_where_buckets_are_rebuilt(ctx, name, way):
    """The hosts agree on a step without the device, and read no norm."""
    ours = Run(ctx, DataParallel, "sim", way)
    result_of(ours, SCENARIOS[name])
    whole = {"unused": UNUSED, "views": VIEWS}.get(name, {})
    theirs = Run(ctx, DataParallel, "sim", way)
    result_of(theirs, partial(waits_of_plain_loop, name=name, **whole))
    assert ours.costs.host_waits == theirs.costs.host_waits


def waits_of_plain_loop(run, name, **options):
    if name == "unused":
        return branches(run, divides=False)
    return plain(run, divides=False, **options)


@on_ranks(2)
def test_a_scaler_costs_no_more_waits_of_the_host(ctx):
    waits = []
    for divides in (True, False):
        run = Run(ctx, DataParallel, "sim")
        result_of(run, partial(scaled, divides=divides))
        waits.append(run.costs.host_waits)
    divided, plain = waits
    # The plain loop looks whether skipped steps are skipped on all ranks.
    assert len(divided) <= len(plain)
    assert {*divided} <= {*plain}


@on_ranks(2)
def test_zeroed_gradients_are_read_once_in_a_backward(ctx):
    """Whether they are zeros, or averages to which gradients would be added."""
    run = Run(ctx, DataParallel, "sim")
    result_of(run, partial(plain, set_to_none=False))
    before = Run(ctx, DataParallel, "sim")
    result_of(before, plain)
    assert len(run.costs.host_waits) == len(before.costs.host_waits) + 4


@on_ranks(2)
def test_memory_is_that_of_one_share(ctx):
    """Of the state; and what arrives of buckets does not pile up."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(128, 128, bias=False) for _ in range(16)]
    peaks = []
    for divides in (False, True):
        module = copy.deepcopy(torch.nn.Sequential(*layers)).to(ctx.device)
        model = DataParallel(module, process_group=ctx.group, bucket_cap_mb=0.13)
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        if divides:
            model.sharded_step(optimizer)
        x = torch.ones(2, 128, device=ctx.device)
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sim.load().drain()
        before = sim.allocated()
        with sim.costs() as costs:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append((before, costs.peak))
        del model, optimizer, module
        gc.collect()
    size = 16 * 128 * 128 * 4
    assert peaks[1][0] <= peaks[0][0] - 0.49 * size  # momenta
    assert peaks[1][1] <= peaks[0][1] + 0.2 * size, peaks


# -------------------------------------------------------- a group that has no other way


@on_ranks(2)
@pytest.mark.parametrize("name", ["sgd", "clipped", "clipped unused", "reset"])
def test_a_group_of_the_device_alone(ctx, name):
    """As NCCL's is. The hosts have a side group."""
    group = dist.new_group(backend=sim.BACKEND)
    expected = result_of(Run(ctx, DataParallel, "cpu"), SCENARIOS[name])
    run = Run(ctx, DataParallel, "sim")
    on_group = partial(SCENARIOS[name], process_group=group)
    assert all(map(torch.equal, expected, result_of(run, on_group)))
    if name in ("sgd", "clipped"):  # which wait for new buckets only
        theirs = Run(ctx, DataParallel, "sim")
        plain(theirs, divides=False, process_group=group)
        assert run.costs.host_waits == theirs.costs.host_waits


@on_ranks(2)
def test_a_group_without_a_store(ctx, monkeypatch):
    """The host reads what the ranks say through the device."""
    group = dist.new_group(backend=sim.BACKEND)
    monkeypatch.setattr(side_groups, "has_store", lambda _: False)
    expected = result_of(Run(ctx, DataParallel, "cpu"), clipped)
    run = Run(ctx, DataParallel, "sim")
    found = result_of(run, partial(clipped, process_group=group))
    assert all(map(torch.equal, expected, found))


@on_ranks(2)
@pytest.mark.parametrize("alone", [False, True])
def test_whole_states(ctx, alone):
    """They are those of a plain loop, and an optimizer on the device loads them."""
    group = dist.new_group(backend=sim.BACKEND) if alone else ctx.group
    run = Run(ctx, DataParallel, "sim")
    model, optimizer = divided(
        run, net().to(run.device()), "adamw", process_group=group
    )
    run.train(model, 3, optimizer=optimizer)
    state = model.whole_optimizer_state(optimizer)
    other, expected = divided(
        Run(ctx, DataParallel, "sim"), net().to(run.device()), "adamw", divides=False
    )
    run.train(other, 3, optimizer=expected)
    states = [dict(expected.state_dict()), state]
    if ctx.rank:
        assert state is None
        return
    rows = [
        [value.cpu() for row in each["state"].values() for value in row.values()]
        for each in states
    ]
    assert len(rows[0]) == len(rows[1])
    assert all(map(torch.equal, *rows))
    expected.load_state_dict(state)


# ---------------------------------------------------------------------- what is refused


@on_ranks(2)
def test_mistakes_are_named_as_on_the_cpu(ctx):
    run = Run(ctx, DataParallel, "sim")
    model, optimizer = divided(run, net().to(run.device()))
    model(run.batch(0)).square().mean().backward()
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None and ctx.rank == 1:
                param.grad.mul_(2)
    with pytest.raises(ShardedStepError, match=r"on rank 1 gradients were changed"):
        optimizer.step()
    model.reset()
    optimizer.zero_grad()
    model(run.batch(0)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    with pytest.raises(ShardedStepError, match=r"model\.clip_grad_norm_\(max_norm\)"):
        optimizer.step()
    model.reset()
    optimizer.zero_grad()
    model(run.batch(0)).square().mean().backward()
    model(run.batch(0)).square().mean().backward()
    with pytest.raises(ShardedStepError, match="averages that were still in"):
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("what", ["A backward", "A step", "A norm"])
def test_a_capture_is_refused(ctx, monkeypatch, what):
    run = Run(ctx, DataParallel, "sim")
    model, optimizer = divided(run, net().to(run.device()))
    loss = model(run.batch(0)).square().mean()
    if what != "A backward":
        loss.backward()
    monkeypatch.setattr(step, "is_capturing", lambda _: True)
    act = {
        "A backward": loss.backward,
        "A step": optimizer.step,
        "A norm": partial(model.clip_grad_norm_, 1.0),
    }
    with pytest.raises(ShardedStepError, match=f"{what} with sharded_step is captured"):
        act[what]()
    monkeypatch.undo()
    model.reset()


# --------------------------------------------------------------------- order and memory


@on_ranks(2)
def test_a_recording_has_the_time_of_a_sum(ctx):
    """It is over when the sum is, and not when it is queued."""
    ones = torch.ones(500, device=ctx.device)
    with no_races():
        total = StreamedShare(of_two(ones), [200, 300], ctx.group, 0)
        total.get_future().wait()
        ones.mul(2)
    total.wait()


@on_ranks(2)
def test_gradients_of_another_stream_are_dropped(ctx):
    """The user has made that of another rank's parameter there."""
    module, side = Sums().to(ctx.device), sim.new_stream()
    model = DataParallel(module, process_group=ctx.group)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    model.sharded_step(optimizer)
    x = torch.ones((), device=ctx.device)
    for _ in range(2):  # so that buckets are rebuilt
        module.zero_grad()
        model(x).backward()
        optimizer.step()
    (foreign,) = (param for param in module.parameters() if param.grad is None)
    with all_memory_reused():
        for _ in range(3):
            module.zero_grad()
            with sim.held(here()):  # or the host may have seen that it has read all
                with side:
                    foreign.grad = torch.zeros_like(foreign)
                here().wait_stream(side)
                model(x).backward()
                take(side, foreign.numel())
            optimizer.step()


@on_ranks(2)
def test_divided_gradients_of_another_stream_are_replaced(ctx):
    """The user has made them there, and has another tensor of their memory."""
    module, side = Sums().to(ctx.device), sim.new_stream()
    model = DataParallel(module, process_group=ctx.group)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    model.sharded_step(optimizer, split_from_mb=0)
    x = torch.ones((), device=ctx.device)
    for _ in range(2):  # so that buckets are rebuilt
        module.zero_grad()
        model(x).backward()
        optimizer.step()
    with all_memory_reused():
        for _ in range(3):
            module.zero_grad()
            with sim.held(here()):
                with side:
                    grads = [torch.zeros_like(p) for p in module.parameters()]
                    for param, grad in zip(module.parameters(), grads, strict=True):
                        param.grad = grad.view(-1)
                here().wait_stream(side)
                model(x).backward()
                del grads, grad
                take(side, *(param.numel() for param in module.parameters()))
            optimizer.step()
    # Each step takes the average, which is that of one rank: 500 and 300 ones.
    weights = [torch.full_like(p, 0.5) for p in module.parameters()]
    assert all(map(torch.allclose, module.parameters(), weights))


@on_ranks(2)
def test_a_wrapper_that_dies_after_a_step_on_another_stream(ctx):
    """Values were in its buffer there, which the constructor's stream takes at once."""
    module, made, third = Sums().to(ctx.device), sim.new_stream(), sim.new_stream()
    nodes = nodes_on(here(), *module.parameters())
    x = torch.ones((), device=ctx.device)
    with all_memory_reused():
        for _ in range(2):
            made.wait_stream(here())
            with made:
                model = DataParallel(module, process_group=ctx.group)
                optimizer = torch.optim.SGD(module.parameters(), 0.1)
                model.sharded_step(optimizer)
            here().wait_stream(made)
            model(x).backward()
            third.wait_stream(here())
            with sim.held(third):  # or it may be over
                with third:
                    optimizer.step()
                del model, optimizer
                gc.collect()
                take(made, 800)
            here().wait_stream(third)
            module.zero_grad()
    del nodes


@on_ranks(2)
def test_a_wrapper_that_dies_before_its_sums_have_ended(ctx):
    """The backward raises when the bucket of the last layer is on its way."""
    first, last = nn.Linear(20, 30).to(ctx.device), nn.Linear(30, 20).to(ctx.device)
    module = nn.Sequential(first, nn.Identity(), last)
    x = torch.ones(6, 20, device=ctx.device)
    with all_memory_reused():
        model = DataParallel(module, process_group=ctx.group, bucket_cap_mb=0.002)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        model.sharded_step(optimizer)
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        module[1].forward = Fails.apply
        with sim.held(here()):  # or they may have ended
            loss = model(x).sum()
            with pytest.raises(ValueError, match="out of luck"):
                loss.backward()
            del model, optimizer, loss
            gc.collect()
            module.zero_grad()
            take(here(), *range(50, 1000, 10))


@on_ranks(2)
def test_the_stream_of_a_backward_does_not_wait_for_other_ranks(ctx):
    ones = torch.ones(500, device=ctx.device)
    dist.all_reduce(ones.clone(), group=ctx.group)  # the first one connects the ranks
    cpu = torch.zeros(1)
    if ctx.rank == 1:  # comes when the other one has seen that it need not wait
        dist.all_reduce(cpu, group=ctx.group)
    total = StreamedShare(of_two(ones), [200, 300], ctx.group, 0)
    if ctx.rank == 0:
        passed = torch.Event("sim")
        passed.record()
        end = time.monotonic() + 5
        while not passed.query() and time.monotonic() < end:
            time.sleep(0.01)
        has_passed = passed.query()
        dist.all_reduce(cpu, group=ctx.group)
        assert has_passed
    total.wait()
    own = [slice(0, 200), slice(200, 500)][ctx.rank]
    assert ones[own].eq(2).all()


# ------------------------------------------------------------------------- three ranks


def as_on_the_cpu(ctx):
    several_sums = "logical ranks with several sums"
    for name in ("adamw", "views", "clipped unused", "two optimizers", several_sums):
        expected = result_of(Run(ctx, DataParallel, "cpu"), SCENARIOS[name])
        run = Run(ctx, DataParallel, "sim", "mixed_nodes")
        found = result_of(run, SCENARIOS[name])
        assert len(expected) == len(found)
        assert all(map(torch.equal, expected, found)), name


@pytest.mark.fresh
def test_three_ranks():
    """Sums are in the order of ranks, and some ranks own nothing of a bucket."""
    try:
        sim.build()
    except sim.NotBuilt as error:
        pytest.skip(str(error))
    backend, devices = f"cpu:gloo,sim:{sim.BACKEND}", ["sim:0"] * 3
    ranks = Pool(3, backend=backend, devices=devices, subgroups=())
    try:
        ranks.run(as_on_the_cpu, 3)
    finally:
        ranks.close()
