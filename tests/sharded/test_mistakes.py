"""What cannot be right with divided steps is a named error, on all ranks at once."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.utils import clip_grad_norm_

from minidp import DataParallel, comm_hooks
from minidp.errors import MiniDPError, ReplicaMismatchError, ShardedStepError
from tests.support.optimized import Breaks
from tests.support.ranks import on_ranks


def made(ctx, make=lambda ps: torch.optim.Adam(ps, 0.01), calls=None, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    ddp = DataParallel(net, process_group=ctx.group, hang_timeout=10.0, **options)
    optimizer = make(list(net.parameters()))
    ddp.sharded_step(optimizer, **(calls or {}))
    return ddp, optimizer


def backward(ctx, ddp, seed=0):
    generator = torch.Generator().manual_seed(10 * seed + ctx.rank)
    ddp(torch.randn(3, 4, generator=generator)).square().mean().backward()


def params_of(ddp):
    return [p.detach().clone() for p in ddp.parameters()]


def says(error, *texts):
    for text in texts:
        assert text in str(error.value), str(error.value)


def goes_on(ctx, ddp, optimizer, seed=7):
    """A step after `reset()`; all ranks have the same parameters then."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddp.reset()
    optimizer.zero_grad()
    before = params_of(ddp)
    backward(ctx, ddp, seed)
    optimizer.step()
    assert not all(map(torch.equal, before, params_of(ddp)))
    return params_of(ddp)


def clip(ddp, _optimizer):
    clip_grad_norm_(ddp.parameters(), 0.01)


def replace(ddp, _optimizer):
    for p in ddp.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5


def closure(_ddp, optimizer):
    optimizer.step(lambda: torch.zeros(()))


def step(_ddp, optimizer):
    optimizer.step()


def give_foreign(ddp, _optimizer):
    for p in ddp.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (clip, "call model.clip_grad_norm_(max_norm)"),
        (replace, "gradients were changed between backward() and step()"),
        (give_foreign, "parameters that another rank steps have a gradient"),
        (closure, "step() has a closure"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
@on_ranks(2)
def test_what_a_share_cannot_do(ctx, act, text):
    ddp, optimizer = made(ctx)
    before = params_of(ddp)
    backward(ctx, ddp)
    if act is not closure:
        act(ddp, optimizer)
        act = step
    with pytest.raises(ShardedStepError) as error:
        act(ddp, optimizer)
    says(error, text, "on rank 0, 1", f"[rank {ctx.rank}]", "reset()")
    assert all(map(torch.equal, before, params_of(ddp)))
    return goes_on(ctx, ddp, optimizer)


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_a_change_beside_a_forward_that_moves_gradients(ctx, when):
    """The second forward makes new buckets, of which gradients are views."""
    ddp, optimizer = made(ctx, gradient_as_bucket_view=True)
    backward(ctx, ddp)
    if when == "before":
        clip(ddp, optimizer)
    ddp(torch.ones(1, 4))
    if when == "after":
        clip(ddp, optimizer)
    with pytest.raises(ShardedStepError, match="gradients were changed"):
        optimizer.step()


@on_ranks(2)
def test_a_mistake_of_one_rank_is_an_error_of_all(ctx):
    ddp, optimizer = made(ctx)
    backward(ctx, ddp)
    if ctx.rank:
        clip(ddp, optimizer)
    with pytest.raises(ShardedStepError, match="because on rank 1 gradients"):
        optimizer.step()
    return goes_on(ctx, ddp, optimizer)


@pytest.mark.parametrize("steps", [0, 1, 2])
@on_ranks(2)
def test_a_rank_that_leaves_out_a_step(ctx, steps):
    """It says so in its next backward, or forward, for which the other one waits."""
    ddp, optimizer = made(ctx)
    for number in range(steps):
        backward(ctx, ddp, number)
        optimizer.step()
        optimizer.zero_grad()
    before = params_of(ddp)
    backward(ctx, ddp)
    if ctx.rank:
        optimizer.zero_grad()
    with pytest.raises(ShardedStepError) as error:
        backward(ctx, ddp, 1) if ctx.rank else optimizer.step()
    says(error, "rank 0 steps, rank 1 does not", "No rank has stepped")
    assert all(map(torch.equal, before, params_of(ddp)))
    return goes_on(ctx, ddp, optimizer)


@on_ranks(2)
def test_all_ranks_may_leave_out_a_step(ctx):
    ddp, optimizer = made(ctx)
    for step in range(4):
        backward(ctx, ddp, step)
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()
    return params_of(ddp)


@pytest.mark.parametrize("way", ["sync", "no_sync", "no_sync, sync"])
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_averages_that_are_not_zeroed(ctx, way, steps, clips, view):
    ddp, optimizer = made(ctx, gradient_as_bucket_view=view)
    backward(ctx, ddp)
    if steps:
        optimizer.step()
    for how in way.split(", "):
        with ddp.no_sync() if how == "no_sync" else nullcontext():
            backward(ctx, ddp)
    before = params_of(ddp)
    act = ddp.clip_grad_norm_ if clips else lambda _: optimizer.step()
    with pytest.raises(ShardedStepError, match=r"that were still in|another rank"):
        act(1.0)
    assert all(map(torch.equal, before, params_of(ddp)))
    return goes_on(ctx, ddp, optimizer)


@pytest.mark.parametrize("way", ["sync", "no_sync", "no_sync, no_sync", "sync, sync"])
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_sums_with_averages_that_are_zeroed_in_time(ctx, way, to_none, view):
    """They do no harm, and the next step is right, whatever comes before it."""
    found = []
    for spoils in (False, True):
        ddp, optimizer = made(ctx, gradient_as_bucket_view=view)
        for number in range(6):
            optimizer.zero_grad(set_to_none=to_none)
            if number % 2:
                with ddp.no_sync():
                    backward(ctx, ddp, 10 + number)
            backward(ctx, ddp, number)
            optimizer.step()
            for how in way.split(", ") if spoils else ():
                with ddp.no_sync() if how == "no_sync" else nullcontext():
                    backward(ctx, ddp, 20 + number)
        found.append(params_of(ddp))
    assert all(map(torch.equal, *found))
    return found[0]


@on_ranks(2)
def test_a_step_inside_no_sync(ctx):
    ddp, optimizer = made(ctx)
    backward(ctx, ddp)
    with ddp.no_sync(), pytest.raises(ShardedStepError, match="inside no_sync"):
        optimizer.step()
    return goes_on(ctx, ddp, optimizer)


@on_ranks(2)
def test_a_step_that_raises_on_one_rank(ctx):
    """The other rank has stepped its share: a warning says that shares differ."""
    ddp, optimizer = made(ctx, lambda ps: Breaks(ps, 0.1), {"per_parameter": True})
    backward(ctx, ddp)
    optimizer.is_broken = ctx.rank == 1
    with pytest.raises(ValueError if ctx.rank else MiniDPError):
        optimizer.step()
    optimizer.is_broken = False
    with pytest.warns(match="1 on rank 0, 0 on rank 1"):
        ddp.reset()
    found = params_of(ddp)
    optimizer.zero_grad()
    backward(ctx, ddp, 1)
    optimizer.step()
    return found, params_of(ddp)


@on_ranks(2)
def test_a_step_that_raised_and_is_forgotten(ctx):
    ddp, optimizer = made(ctx, lambda ps: Breaks(ps, 0.1), {"per_parameter": True})
    backward(ctx, ddp)
    optimizer.is_broken = True
    with pytest.raises(ValueError, match="out of luck"):
        optimizer.step()
    optimizer.is_broken = False
    with pytest.raises(ShardedStepError, match="its last step raised"):
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 2])
@on_ranks(2)
def test_a_step_that_raised_on_one_rank_and_is_forgotten(ctx, steps):
    """Its next forward says so, and the others wait no longer."""
    ddp, optimizer = made(ctx, lambda ps: Breaks(ps, 0.1), {"per_parameter": True})
    for number in range(steps):
        backward(ctx, ddp, number)
        optimizer.step()
        optimizer.zero_grad()
    backward(ctx, ddp, 5)
    optimizer.is_broken = ctx.rank == 1
    began = time.monotonic()

    def goes_on_without_a_word():
        with suppress(ValueError):
            optimizer.step()
        backward(ctx, ddp, 6)

    with pytest.raises(MiniDPError) as error:
        goes_on_without_a_word()
    says(error, "its last step raised")  # on rank 0, too, which tells what rank 1 said
    assert time.monotonic() - began < 5
    optimizer.is_broken = False
    with pytest.warns(match=f"{steps + 1} on rank 0, {steps} on rank 1"):
        ddp.reset()
    return params_of(ddp)


@on_ranks(2)
def test_changes_that_the_script_allows(ctx):
    ddp, optimizer = made(ctx, calls={"allow_changes": True})
    backward(ctx, ddp)
    torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.001)
    optimizer.step()
    return params_of(ddp)


@on_ranks(2)
def test_comparisons_of_replicas_find_nothing(ctx):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddp, optimizer = made(ctx, check_replicas_every=1)
        for step in range(4):
            backward(ctx, ddp, step)
            optimizer.step()
            optimizer.zero_grad()
        ddp.reset()
        ddp.reset(copy_from=0)
        backward(ctx, ddp)
        optimizer.step()


@on_ranks(2)
def test_a_change_of_one_replica_by_hand_is_found(ctx):
    ddp, optimizer = made(ctx, check_replicas_every=1)
    backward(ctx, ddp)
    optimizer.step()
    optimizer.zero_grad()
    if ctx.rank:
        with torch.no_grad():
            next(ddp.parameters()).add_(1.0)
    with pytest.raises(ReplicaMismatchError, match=r"0\.weight"):
        backward(ctx, ddp)


class Own(torch.optim.SGD):
    """A subclass may do anything in its step."""


def lbfgs(ps):
    return torch.optim.LBFGS(ps)


def subclass(ps):
    return Own(ps, 0.1)


def none(_ps):
    return None


def missing(ps):
    return torch.optim.SGD(ps[1:], 0.1)


def several_dtypes(ps):
    ps[0].data = ps[0].data.double()
    return torch.optim.Adafactor(ps)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (several_dtypes, TypeError, "takes that of the first gradient's dtype"),
        (lbfgs, TypeError, "needs a closure"),
        (subclass, TypeError, "sharded_step does not know Own"),
        (missing, ValueError, "no optimizer has 0.weight"),
        (none, TypeError, "but got NoneType"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
@on_ranks(2)
def test_what_cannot_be_divided(ctx, make, kind, text):
    with pytest.raises(kind, match=text):
        made(ctx, make)


@on_ranks(2)
def test_zero_redundancy_optimizer_is_refused(ctx):
    net = nn.Linear(4, 4)
    ddp = DataParallel(net, process_group=ctx.group)
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, process_group=ctx.group, lr=0.1
    )
    with pytest.raises(TypeError, match="divides its work among the ranks itself"):
        ddp.sharded_step(zero)


@on_ranks(2)
def test_ranks_with_different_optimizers(ctx):
    kinds = torch.optim.Adam, torch.optim.SGD
    with pytest.raises(ReplicaMismatchError, match="Adam"):
        made(ctx, lambda ps: kinds[ctx.rank](ps, 0.1))


@on_ranks(2)
def test_a_rank_that_is_refused_tells_the_others(ctx):
    kind = TypeError if ctx.rank else ReplicaMismatchError
    with pytest.raises(kind, match="Own"):
        made(ctx, lambda ps: (Own if ctx.rank else torch.optim.SGD)(ps, 0.1))


@on_ranks(2)
def test_what_does_not_go_with_it(ctx):
    ddp, optimizer = made(ctx)
    for call in (ddp.sync_gradients, lambda: ddp.join()):
        with pytest.raises(ShardedStepError, match="does not go with sharded_step"):
            call()
    with pytest.raises(RuntimeError, match="each rank gets its share"):
        ddp.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    with pytest.raises(ValueError, match="second call"):
        ddp.sharded_step(optimizer)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"logical_ranks": 4, "audit_every": 5}, "audit_every"),
        ({"bucket_cap_mb": "auto"}, "bucket_cap_mb"),
    ],
)
@on_ranks(2)
def test_options_that_do_not_go_with_it(ctx, options, text):
    with pytest.raises(ValueError, match=text):
        made(ctx, **options)


@on_ranks(2)
def test_sparse_gradients_are_refused(ctx):
    net = nn.Embedding(4, 2, sparse=True)
    ddp = DataParallel(net, process_group=ctx.group)
    with pytest.raises(ValueError, match="sparse gradients"):
        ddp.sharded_step(torch.optim.SGD(net.parameters(), 0.1))


@on_ranks(2)
def test_second_order_backwards_are_refused(ctx):
    ddp, optimizer = made(ctx)
    loss = ddp(torch.ones(1, 4)).sum()
    with pytest.raises(MiniDPError, match="create_graph=True"):
        loss.backward(create_graph=True)
    return goes_on(ctx, ddp, optimizer)


def by_hand(p):
    p -= 0.1 * p.grad


def through_data(p):
    p.data.sub_(0.1 * p.grad)


@pytest.mark.parametrize("how", [by_hand, through_data])
@pytest.mark.parametrize("every", [0, "auto"])
@on_ranks(2)
def test_an_update_by_hand_of_what_has_a_gradient(ctx, how, every):
    """Each rank changes its own share: the next backward finds that."""
    ddp, optimizer = made(ctx, check_replicas_every=every)
    backward(ctx, ddp)
    optimizer.step()
    optimizer.zero_grad()
    backward(ctx, ddp, 1)
    with torch.no_grad():
        for p in ddp.parameters():
            if p.grad is not None:
                how(p)
    ddp.zero_grad()
    with pytest.raises(ShardedStepError, match="Perhaps they were changed by hand"):
        backward(ctx, ddp, 2)
    return goes_on(ctx, ddp, optimizer)


@on_ranks(2)
def test_updates_by_hand_that_are_right(ctx):
    """All ranks decay all weights; and one rank looks at an average of them."""
    ddp, optimizer = made(ctx)
    average = [p.detach().clone() for p in ddp.parameters()]
    for number in range(6):
        backward(ctx, ddp, number)
        if number % 3:
            optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in ddp.parameters():
                p.mul_(0.99)
            if ctx.rank == 0:
                kept = params_of(ddp)
                for p, mean in zip(ddp.parameters(), average, strict=True):
                    mean.lerp_(p, 0.1)
                    p.copy_(mean)
                for p, value in zip(ddp.parameters(), kept, strict=True):
                    p.copy_(value)
    return params_of(ddp)


class Around(torch.optim.Optimizer):
    """An optimizer of the same parameters that calls another one, as Lookahead does."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self):
        self.inner.step()


class Unknown(torch.optim.Optimizer):
    def __init__(self, ps):
        super().__init__(ps, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p -= p.grad


@pytest.mark.parametrize("kind", [torch.optim.SGD, Unknown])
@on_ranks(2)
def test_an_optimizer_that_was_not_passed(ctx, kind):
    ddp, optimizer = made(ctx)
    backward(ctx, ddp)
    with pytest.raises(ShardedStepError) as error:
        kind(ddp.parameters()).step()
    says(error, f"{kind.__name__} steps parameters", "was not passed to sharded_step")
    return goes_on(ctx, ddp, optimizer)


@on_ranks(2)
def test_an_optimizer_around_one_that_was_passed(ctx):
    ddp, optimizer = made(ctx)
    for step in range(3):
        backward(ctx, ddp, step)
        Around(optimizer).step()
        optimizer.zero_grad()
    return params_of(ddp)


@on_ranks(2)
def test_a_passed_optimizer_around_another_one(ctx):
    def around(ps):
        return Around(torch.optim.SGD(ps, 0.1))

    ddp, optimizer = made(ctx, around, {"per_parameter": True})
    for step in range(3):
        backward(ctx, ddp, step)
        optimizer.step()
        optimizer.zero_grad()
    return params_of(ddp)


@on_ranks(2)
def test_averages_that_are_changed_and_not_zeroed(ctx):
    ddp, optimizer = made(ctx, calls={"allow_changes": True})
    backward(ctx, ddp)
    torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.001)
    optimizer.step()
    backward(ctx, ddp)
    with pytest.raises(ShardedStepError, match="that were still in"):
        optimizer.step()
    return goes_on(ctx, ddp, optimizer)


@on_ranks(2)
def test_a_layer_that_is_unfrozen_later(ctx):
    """Nobody averages its gradients, and the optimizer holds it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    net[0].requires_grad_(False)
    ddp = DataParallel(net, process_group=ctx.group, hang_timeout=10.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ddp.sharded_step(optimizer)
    backward(ctx, ddp)
    optimizer.step()
    optimizer.zero_grad()
    net[0].requires_grad_(True)
    backward(ctx, ddp, 1)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(MiniDPError, match=r"0\.weight"):
        backward(ctx, ddp, 2)


def two_optimizers(ctx):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    ddp = DataParallel(net, process_group=ctx.group, hang_timeout=10.0)
    ps = list(net.parameters())
    both = torch.optim.SGD(ps[:2], 0.1), torch.optim.SGD(ps[2:], 0.1)
    ddp.sharded_step(*both)
    return ddp, both


@pytest.mark.parametrize("steps", [0, 1])
@on_ranks(2)
def test_a_parameter_that_a_second_optimizer_gets(ctx, steps):
    ddp, both = two_optimizers(ctx)
    for number in range(steps):
        backward(ctx, ddp, number)
        for each in both:
            each.step()
            each.zero_grad()
    both[1].add_param_group({"params": [ddp.module[0].bias]})
    backward(ctx, ddp, 5)
    both[0].step()
    with pytest.raises(ShardedStepError, match="add_param_group") as error:
        both[1].step()
    says(error, "Parameters: 0.bias", "on rank 0, 1")


@on_ranks(2)
def test_parameters_that_an_optimizer_may_get(ctx):
    """Those of no wrapper, and its own in another group."""
    ddp, both = two_optimizers(ctx)
    both[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    bias = both[1].param_groups[0]["params"].pop()
    both[1].add_param_group({"params": [bias], "lr": 0.01})
    for number in range(3):
        backward(ctx, ddp, number)
        for each in both:
            each.step()
            each.zero_grad()
    return params_of(ddp)
