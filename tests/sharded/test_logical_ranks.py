"""Divided steps by logical ranks: one training, whatever the number of ranks."""

from __future__ import annotations

import copy
import time
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.amp import GradScaler

import minidp
from minidp.core import Observer
from minidp.errors import GradientError, LogicalRankError, ShardedStepError
from minidp.sharded import pieces
from tests.logical_ranks.trainings import batch, wrapped
from tests.sharded.test_bits import OPTIMIZERS, Net
from tests.shared_memory.test_buckets import Weighted
from tests.support.both import same
from tests.support.combined import combined
from tests.support.ranks import on_ranks

STEPS = 4


def run(pool, size, act, *arguments, **options):
    return pool.run(act_on_rank, size, partial(act, **options), *arguments)


def act_on_rank(ctx, act, *arguments):
    return act(ctx, *arguments)


def made(ctx, number, name="adamw", *, divides=True, given=None, **options):
    torch.manual_seed(3)
    model = wrapped(ctx, Net(), number, hang_timeout=20.0, **options)
    optimizers = OPTIMIZERS[name](list(model.parameters()))
    if divides:
        given = {"per_parameter": name == "lamb", **(given or {})}
        model.sharded_step(*optimizers, **given)
    return model, optimizers


def loop(model, step, factor=1.0):
    for leaf in model.each_logical_rank():
        (factor * model(batch(step, leaf, 4, 3)).square().mean()).backward()


def train(ctx, number, name, *, clip=None, steps=range(STEPS), keep=None, **how):
    """Train, and return parameters, norms and statistics; ``keep`` is a checkpoint."""
    model, optimizers = made(ctx, number, name, **how)
    if keep is not None:
        model.module.load_state_dict(keep["model"])
        for each, state in zip(optimizers, keep["optimizers"], strict=True):
            each.load_state_dict(copy.deepcopy(state))
    norms = []
    for step in steps:
        loop(model, step)
        if clip is not None:
            norms.append(model.clip_grad_norm_(*clip).clone())
        for each in optimizers:
            each.step()
            each.zero_grad()
    state = {
        "model": model.module.state_dict(),
        "optimizers": [model.whole_optimizer_state(each) for each in optimizers],
        "logical": model.logical_state,
    }
    return [*(p.detach().clone() for p in model.parameters()), *norms], state


CASES = [
    *((name, {}) for name in OPTIMIZERS),
    ("adamw", {"clip": (0.1,)}),
    ("sgd", {"clip": (0.1, 1.0), "gradient_as_bucket_view": True}),
    ("adamw", {"clip": (0.1, torch.inf), "given": {"overlap_param_gather": True}}),
    ("muon", {"given": {"overlap_param_gather": True}, "lazy_bucket_allocation": True}),
]


@pytest.mark.parametrize(
    ("case", "number"), combined(CASES, [4, 5, 7], always=5, every=3)
)
def test_weights_are_those_of_the_plain_optimizer(pool, case, number):
    """Norms, too. Four ranks have unequally many logical ranks of five and seven."""
    name, how = case
    ((expected, _),) = run(pool, 1, train, number, name, divides=False, **how)
    for size in (1, 2, 3, 4):
        for found, _ in run(pool, size, train, number, name, **how):
            assert same(expected, found), f"{size} ranks"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_resume_on_another_number_of_ranks(pool, size):
    how = {"clip": (0.1,)}
    ((end, _),) = run(pool, 1, train, 6, "adamw", divides=False, **how)
    (_, keep), *_ = run(pool, 4, train, 6, "adamw", steps=range(2), **how)
    how |= {"steps": range(2, STEPS), "keep": keep}
    number = keep["logical"]
    for divides in (True, False):
        found = run(pool, size, train, number, "adamw", divides=divides, **how)
        for params, norms in ((each[0][:6], each[0][6:]) for each in found):
            assert same(end[:6], params)
            assert same(end[-len(norms) :], norms)


def saves(ctx, folder, *, loads, steps, **how):
    """Train with a checkpoint that each rank writes, or reads, its share of."""
    number = 6
    if loads:
        number = torch.load(f"{folder}/logical.pt")
    model, (optimizer,) = made(ctx, number, **how)
    state = {
        "model": model.module,
        "optimizer": model.sharded_optimizer_state(optimizer),
    }
    where = {"checkpoint_id": folder, "process_group": ctx.group}
    if loads:
        dcp.load(state, **where)
    for step in steps:
        loop(model, step)
        optimizer.step()
        optimizer.zero_grad()
    if not loads:
        dcp.save(state, **where)
        if ctx.rank == 0:
            torch.save(model.logical_state, f"{folder}/logical.pt")
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_resume_of_shares(pool, tmp_path, size):
    ((end, _),) = run(pool, 1, train, 6, "adamw", divides=False)
    run(pool, 4, saves, str(tmp_path), loads=False, steps=range(2))
    for divides in (True, False):
        how = {"loads": True, "steps": range(2, STEPS), "divides": divides}
        for found in run(pool, size, saves, str(tmp_path), **how):
            assert same(end, found)


@on_ranks(2, 3)
def test_only_the_owner_has_an_average(ctx):
    model, (optimizer,) = made(ctx, 5)
    loop(model, 0)
    owners = model._sharded.owners.of
    for owner, param in zip(owners, model._reducer.params, strict=True):
        assert (param.grad is None) == (owner != ctx.rank)
    optimizer.step()
    assert len(optimizer.state) == owners.count(ctx.rank)


def scaled(ctx, divides):
    """One logical rank finds an infinity, in one parameter, so of one owner."""
    scaler = GradScaler("cpu", init_scale=4.0)
    given = {"grad_scaler": scaler}
    model, (optimizer,) = made(ctx, 5, "sgd", divides=divides, given=given)
    now = [0, 0]

    def break_it(grad):
        return grad / 0 if now == [1, 3] else grad

    model.module.last.bias.register_hook(break_it)
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            now[:] = step, leaf
            loss = model(batch(step, leaf, 4, 3)).square().mean()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0
    return [p.detach().clone() for p in model.parameters()]


def test_a_grad_scaler_skips_on_all_ranks(pool):
    (expected,) = pool.run(scaled, 1, False)
    for size in (1, 2, 3):
        assert same([expected] * size, pool.run(scaled, size, True))


@pytest.mark.parametrize(("number", "overlaps"), [(4, True), (7, False)])
@on_ranks(2, 3)
def test_messages_in_pieces_have_the_same_bits(ctx, number, overlaps):
    how = {"given": {"overlap_param_gather": overlaps}}
    found = []
    for nbytes in (2**20, 400):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MINIDP_SHARED_MEMORY", "0")
            patch.setattr(pieces, "PIECE_BYTES", nbytes)
            found.append(train(ctx, number, "adamw", **how)[0])
    assert same(*found)
    return found[0]


LARGE = [{}, {"gradient_as_bucket_view": True}, {"average_over": "items"}]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("options", "dtype"), combined(LARGE, DTYPES))
@on_ranks(2, 3)
def test_large_shares(ctx, dtype, options):
    """Sums go straight to gradients, in several blocks of several rows."""
    found = []
    for divides in (False, True):
        module = Weighted(dtype)
        model = wrapped(ctx, module, 7, **{"bucket_cap_mb": 0.5, **options})
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        if divides:
            model.sharded_step(optimizer)
        for step in range(4):
            for leaf in model.each_logical_rank():
                loss = model(10 * step + leaf)
                if "average_over" in options:
                    loss = model.weigh_loss(loss, 1 + leaf)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 2)
        found.append([param.detach().clone() for param in module.parameters()])
    assert same(*found)
    return found[1]


def attached(ctx, divides):
    torch.manual_seed(3)
    net = Net()
    handle = minidp.attach(net, process_group=ctx.group, logical_ranks=5)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    if divides:
        handle.sharded_step(optimizer, overlap_param_gather=True)
    for step in range(STEPS):
        for leaf in handle.each_logical_rank():
            net(batch(step, leaf, 4, 3)).square().mean().backward()
        handle.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    handle.detach()
    return [p.detach().clone() for p in net.parameters()]


def test_an_attached_model(pool):
    (expected,) = pool.run(attached, 1, False)
    for size in (1, 2, 3):
        assert same([expected] * size, pool.run(attached, size, True))


def two_models(ctx, number, divides):
    (a, (first,)), (b, (second,)) = (
        made(ctx, number, name, divides=divides) for name in ("sgd", "adamw")
    )
    for step in range(STEPS):
        loops = a.each_logical_rank(), b.each_logical_rank()
        for leaf, _ in zip(*loops, strict=True):
            x = batch(step, leaf, 4, 3)
            a(x).square().mean().backward()
            b(x + 1).square().mean().backward()
        for each in (second, first):
            each.step()
            each.zero_grad()
    return [p.detach().clone() for model in (a, b) for p in model.parameters()]


@pytest.mark.parametrize("number", [5, 6])  # unequally many turns, or equally many
def test_two_models_take_turns(pool, number):
    (expected,) = pool.run(two_models, 1, number, False)
    for size in (2, 3):
        for divides in (False, True):
            found = pool.run(two_models, size, number, divides)
            assert same([expected] * size, found)


class Lags(Observer):
    """This rank comes late to the sums of a backward, in which it takes part."""

    def finishing(self, *, applies_grads):
        time.sleep(0.5)


@on_ranks(2, 3)
def test_a_loop_without_a_step_before_waits_for_sums_of_others(ctx):
    """A rank that writes sums of its next logical ranks must not change the last."""
    model, (optimizer,) = made(ctx, 7, "sgd")
    for step in range(2):  # buckets are rebuilt
        loop(model, step)
        optimizer.step()
        optimizer.zero_grad()
    found = []
    for lags in (False, True):
        late = Lags()
        if lags and ctx.rank == 1:
            model._reducer.queue.observers.append(late)
        loop(model, 7)
        model._reducer.queue.observers.remove(late)
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.zero_grad()
        loop(model, 8, factor=100.0)
        optimizer.zero_grad()
    assert same(*found)


@on_ranks(2, 3)
def test_a_recording(ctx):
    model, (optimizer,) = made(ctx, 5)
    with minidp.record(model) as recorder:
        for step in range(STEPS):
            loop(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert "values" in str(recorder.report())


# ---------------------------------------------------------------------------- mistakes


def step_in_loop(model, optimizer):
    for leaf in model.each_logical_rank():
        model(batch(0, leaf, 4, 3)).square().mean().backward()
        optimizer.step()


def clip_in_loop(model, _optimizer):
    for leaf in model.each_logical_rank():
        model(batch(0, leaf, 4, 3)).square().mean().backward()
        model.clip_grad_norm_(1.0)


def create_graph(model, _optimizer):
    for leaf in model.each_logical_rank():
        loss = model(batch(0, leaf, 4, 3)).square().mean()
        loss.backward(create_graph=leaf == model.logical_block[-1])


def keep_averages(model, optimizer):
    loop(model, 0)
    loop(model, 1)
    optimizer.step()


def clip_one_share(model, optimizer):
    loop(model, 0)
    nn.utils.clip_grad_norm_(model.parameters(), 0.001)
    optimizer.step()


def step_on_some_ranks(model, optimizer):
    loop(model, 0)
    if model.process_group.rank() == 0:
        optimizer.step()
    else:
        optimizer.zero_grad()
        loop(model, 1)


@on_ranks(2)
def test_steps_are_divided_before_a_loop(ctx):
    model, (optimizer,) = made(ctx, 4, divides=False)
    for _ in model.each_logical_rank():
        with pytest.raises(ValueError, match="a loop over logical ranks that has"):
            model.sharded_step(optimizer)
        break


@pytest.mark.parametrize(
    ("act", "kind", "text"),
    [
        (step_in_loop, LogicalRankError, "An optimizer steps in logical rank"),
        (clip_in_loop, LogicalRankError, "Gradients are clipped in logical rank"),
        (create_graph, GradientError, "create_graph=True"),
        (keep_averages, ShardedStepError, "added gradients to averages"),
        (clip_one_share, ShardedStepError, "model.clip_grad_norm_"),
        (step_on_some_ranks, ShardedStepError, "Some ranks step"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
@on_ranks(2, 3)
def test_mistakes_are_named_and_reset_leads_out(ctx, act, kind, text):
    model, (optimizer,) = made(ctx, 7, "sgd")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(kind, match=text):
        act(model, optimizer)
    assert same(before, [p.detach().clone() for p in model.parameters()])
    model.reset()
    optimizer.zero_grad()
    loop(model, 2)
    optimizer.step()
    found = [p.detach().clone() for p in model.parameters()]
    assert not any(map(torch.equal, before, found))
    return found
