"""Ranks that audit each other find what is wrong, and nothing else."""

from __future__ import annotations

import socket
import warnings
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from minidp import LogicalRankError, ReplicaMismatchError
from minidp.logical import audit
from tests.logical_ranks import faults, trainings
from tests.logical_ranks.faults import Flip
from tests.logical_ranks.test_bits import FEATURES, NUMBERS, OPTIONS, bits
from tests.logical_ranks.trainings import batch, net, wrapped
from tests.support.both import same
from tests.support.combined import combined, in_turns
from tests.support.ranks import on_ranks

# ------------------------------------------------------------- trainings that are right


def plain(ctx, scenario, number):
    return scenario(ctx, number)


def audited(ctx, scenario, number, every=1):
    """Run a training of `trainings` with audits, in which nothing may be told."""
    with warnings.catch_warnings(), mock.patch.dict(trainings.SMALL):
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="Complex modules")
        trainings.SMALL["audit_every"] = every
        return scenario(ctx, number)


def check(pool, scenario, number, ranks=(2, 3, 4), every=1):
    """Compare audited trainings with one on one rank that is not, bit for bit."""
    (expected,) = pool.run(plain, 1, scenario, number)
    for size in ranks:
        if size <= number:
            for found in pool.run(audited, size, scenario, number, every):
                for one, other in zip(expected, found, strict=False):
                    assert torch.equal(bits(one), bits(other)), f"{size} ranks"


@pytest.mark.parametrize("number", in_turns(NUMBERS))
def test_any_number_of_logical_ranks(pool, number):
    check(pool, trainings.plain, number)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(pool, options):
    check(pool, partial(trainings.plain, **options), 5)


@pytest.mark.parametrize(("name", "number"), combined(FEATURES, [4, 6]))
def test_features(pool, name, number):
    check(pool, FEATURES[name], number, ranks=(2, 3))


def test_some_steps_only(pool):
    check(pool, trainings.plain, 5, every=3)


def test_no_audit_without_the_option(pool):
    with_audit, without = (pool.run(messages, 2, {"audit_every": n}) for n in (1, 0))
    assert with_audit > without == pool.run(messages, 2, {})


def messages(ctx, options):
    """Return how many times ranks meet in some steps."""
    model = wrapped(ctx, net(), 4, **options)
    before = model._reducer.communicator.tally.started
    for step in range(2):
        turns(ctx, model, step)
        model.zero_grad()
    return model._reducer.communicator.tally.started - before


class Numbers(Dataset):
    """Samples that depend on their index alone."""

    def __len__(self):
        return 96

    def __getitem__(self, i):
        return batch(0, i, 12)


def with_loaders(ctx, audit_every):
    """The recipe of minidp/logical/README.md."""
    dataset, module, number = Numbers(), net(), 6
    model = wrapped(ctx, module, number, audit_every=audit_every)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def sampler_of(leaf):
        sampler = DistributedSampler(dataset, num_replicas=number, rank=leaf, seed=0)
        sampler.set_epoch(1)
        return sampler

    def batch_of(leaf, step):
        indices = list(sampler_of(leaf))[4 * step : 4 * (step + 1)]
        return default_collate([dataset[i] for i in indices])

    loaders = {
        leaf: iter(DataLoader(dataset, 4, sampler=sampler_of(leaf)))
        for leaf in model.logical_block
    }
    for step in range(4):
        ready = {leaf: next(loaders[leaf]) for leaf in model.logical_block}
        for leaf in model.each_logical_rank():
            x = ready[leaf] if leaf in ready else batch_of(leaf, step)
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()]


def test_loaders_of_a_ranks_own_numbers(pool):
    (expected,) = pool.run(with_loaders, 1, 0)
    for size in (2, 3):
        assert same([expected] * size, pool.run(with_loaders, size, 1))


def two_models(ctx, at):
    """Two models take turns; an audit cannot ask for further ones."""
    models = [wrapped(ctx, net(), 6, audit_every=1, hang_timeout=30) for _ in "ab"]

    def step():
        loops = (model.each_logical_rank() for model in models)
        struck = ctx.rank == at
        for leaf, _ in zip(*loops, strict=True):
            for model in models:
                flips = IN_GRADIENT(model.module) if struck else nullcontext()
                with flips:
                    model(batch(0, leaf)).square().mean().backward()
                struck = False

    if at is None:
        step()
        return ""
    with pytest.raises(LogicalRankError) as caught:
        step()
    return str(caught.value)


@pytest.mark.parametrize("at", [None, 1])
def test_two_models_in_one_loop(pool, at):
    for text in pool.run(two_models, 3, at):
        assert at is None or "cannot say which rank is wrong" in text
        assert at is None or "which was not repeated" in text


# --------------------------------------------------- after an alarm training may go on


def warned(ctx, scenario, number):
    """Run a training in which one rank errs whenever it computes for another one.

    This leaves the training as it is. In each step logical ranks are computed once more
    after the reduction, which must leave no trace either.
    """
    before, digests_of = audit.Audit.before, audit.digests_of

    def wrong_before(self, start, turn):
        if ctx.rank == 1:
            with mock.patch.object(audit, "digests_of", return_value={0: 5}):
                yield from before(self, start, turn)
            self._now.other_buffers = digests_of(start.buffers())
        else:
            yield from before(self, start, turn)

    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(audit.Audit, "before", wrong_before),
        mock.patch.dict(trainings.SMALL, audit_every=1, audit_action="warn"),
    ):
        warnings.simplefilter("always")
        found = scenario(ctx, number)
    texts = [str(each.message) for each in caught]
    alarms = [text for text in texts if "The audit of step" in text]
    assert len(alarms) == trainings.STEPS
    assert all(names(1)[:-1] in text for text in alarms)
    return found


def names(rank):
    return f"names rank {rank} on host {socket.gethostname()}."


@pytest.mark.parametrize("scenario", FEATURES.values(), ids=FEATURES)
def test_an_alarm_leaves_no_trace(pool, scenario):
    (expected,) = pool.run(plain, 1, scenario, 4)
    for size in (2, 3):
        for found in pool.run(warned, size, scenario, 4):
            for one, other in zip(expected, found, strict=False):
                assert torch.equal(bits(one), bits(other)), f"{size} ranks"


@pytest.mark.nightly
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_alarm_leaves_no_trace_with_options(pool, options):
    test_an_alarm_leaves_no_trace(pool, partial(trainings.plain, **options))


@on_ranks(2, 4)
def test_the_guard_knows_nothing_of_what_ranks_do_for_others(ctx):
    """Also those that have computed once more know what all ranks know."""
    model = wrapped(ctx, net(), 8, audit_every=1, audit_action="warn")
    fault = partial(IN_GRADIENT, model.module) if ctx.rank == 1 else nullcontext
    with pytest.warns(UserWarning, match="names rank 1"):
        turns(ctx, model, 0, fault)
    ledger, acts = model._reducer.ledger, model._guard.acts
    found = [ledger.forwards, ledger.armed, len(ledger.used_locally)]
    assert found == [0, 1, 0]
    assert not acts.unsynced
    assert model.require_backward_grad_sync
    assert model.require_forward_param_sync


@on_ranks(2, 3)
def test_the_same_warning_is_short_from_the_second_time_on(ctx):
    """Another kind of difference has the whole text again."""
    model = wrapped(ctx, net(), 6, audit_every=1, audit_action="warn")
    told = []
    for step in range(4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if step == 3:
                with torch.no_grad():
                    model.module[0].weight[0, 0] += ctx.rank == 1
            is_faulty = ctx.rank == 1 and step < 3
            fault = partial(IN_GRADIENT, model.module) if is_faulty else nullcontext
            turns(ctx, model, step, fault)
            model.zero_grad()
        told += [str(each.message) for each in caught]
    first, *again, other = told
    assert "names rank 1 on host" in first
    assert "What to do" in first
    assert len(again) == 2
    for number, text in enumerate(again, 1):
        assert text.startswith(f"[rank {ctx.rank}] The audit of step {number} names")
        assert f"{names(1)[:-1]} again: the same as in step 0" in text
        assert f"({number + 1} such audits by now)" in text
        assert len(text) < 200
    assert "What to do" in other
    assert "parameters" in other


@on_ranks(2, 3)
def test_a_step_that_is_tried_again_after_an_alarm(ctx):
    module = net()
    model = wrapped(ctx, module, 6, audit_every=1, hang_timeout=30)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fault = partial(IN_GRADIENT, module) if ctx.rank == 1 else nullcontext
    with pytest.raises(LogicalRankError, match="names rank 1"):
        turns(ctx, model, 0, fault)
    optimizer.zero_grad()
    for leaf in model.each_logical_rank(0):
        model(batch(0, leaf)).square().mean().backward()
    optimizer.step()
    return [param.detach().clone() for param in module.parameters()]


# ------------------------------------------------------------------------------- faults


def turns(ctx, model, step, fault=nullcontext, where="own", lasts=False):
    """Do a step. A fault strikes once, or each time if it lasts.

    Args:
        ctx: The context of a rank.
        model: The wrapped model.
        step: The number of the step.
        fault: Returns a context that makes it.
        where: Whether it strikes in the logical rank of this rank that is compared
            ("own"), in the one that this rank audits ("other"), or in "all".
        lasts: Whether it strikes each time.
    """
    own = faults.audited_leaf(model, ctx.rank, ctx.world_size, step)
    may_strike = True
    for leaf in model.each_logical_rank():
        is_own = leaf in model.logical_block
        strikes = may_strike and {"own": leaf == own, "other": not is_own, "all": True}
        with fault() if strikes and strikes[where] else nullcontext():
            model(batch(step, leaf)).square().mean().backward()
        if strikes and strikes[where]:
            may_strike = lasts


def alarm(ctx, number, at, fault, where="own", lasts=False, options=()):
    """Train until step 2, in which a rank has a fault; return what the audit says."""
    module = net()
    options = {"audit_every": 1, "hang_timeout": 30, **dict(options)}
    sends = where == "slice"  # in shared memory nobody calls what the fault is in
    with faults.sums_as_messages() if sends else nullcontext():
        model = wrapped(ctx, module, number, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        with faults.sums_as_messages() if sends else nullcontext():
            turns(ctx, model, step)  # buckets are rebuilt
        optimizer.step()
        optimizer.zero_grad()
    strikes, around = nullcontext, nullcontext()
    if ctx.rank == at and where == "weight":
        fault(module)
    elif ctx.rank == at and where in ("sum", "slice"):
        around = fault(lasts=lasts)
    elif ctx.rank == at:
        strikes = partial(fault, module, lasts=lasts)
    turn = where if where in ("own", "other") else "all"
    before = [param.detach().clone() for param in module.parameters()]
    with around, pytest.raises(LogicalRankError) as caught:
        turns(ctx, model, 2, strikes, turn, lasts)
    assert all(map(torch.equal, before, module.parameters()))
    return str(caught.value)


def weight_flips(module, flip):
    params = list(module.parameters())
    flip.hit(params[flip.tensor % len(params)])


def alarms(pool, size, *arguments):
    """Return what all ranks say."""
    found = pool.run(alarm, size, *arguments)
    spoken = [text.replace(f"[rank {r}] ", "", 1) for r, text in enumerate(found)]
    assert spoken == spoken[:1] * size
    assert "\n" not in spoken[0]
    return spoken[0]


IN_GRADIENT = partial(faults.in_gradient, flip=Flip(4, 5, 30))


@pytest.mark.parametrize("where", ["own", "other"])
@pytest.mark.parametrize(("size", "number"), [(2, 8), (3, 4), (4, 4)])
def test_a_flip_in_a_gradient(pool, size, number, where):
    for at in range(size):
        text = alarms(pool, size, number, at, IN_GRADIENT, where)
        assert names(at) in text
        assert "gradients" in text
        assert "4.weight" in text
        assert "0.weight" not in text
        assert "first_step 1 or less" in text


@pytest.mark.parametrize("lasts", [False, True])
def test_a_fault_that_lasts(pool, lasts):
    text = alarms(pool, 3, 6, 1, IN_GRADIENT, "all", lasts)
    assert names(1) in text


def test_a_fault_that_lasts_on_one_of_two_ranks(pool):
    text = alarms(pool, 2, 2, 1, IN_GRADIENT, "all", True)
    assert "cannot say which rank is wrong: rank 0 on host" in text
    assert "with the same result, but they differ" in text


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("where", ["own", "other"])
def test_a_flip_in_a_buffer(pool, size, where):
    fault = partial(faults.in_buffer, flip=Flip(0, 5))
    text = alarms(pool, size, 6, 1, fault, where)
    assert names(1) in text
    assert "module buffers" in text
    assert "1.running_mean" in text


@pytest.mark.parametrize("size", [3, 4])
def test_a_flip_in_a_weight(pool, size):
    fault = partial(weight_flips, flip=Flip(4, 7, 3))
    text = alarms(pool, size, 6, 2, fault, "weight")
    assert names(2) in text
    assert (
        "other parameters than most ranks at the beginning of step 2: 4.weight" in text
    )


def test_a_flip_in_a_weight_of_one_of_two_ranks(pool):
    fault = partial(weight_flips, flip=Flip(4, 7, 3))
    text = alarms(pool, 2, 6, 1, fault, "weight")
    assert "cannot say which rank is wrong" in text
    assert "Ranks 0, 1: Their parameters differ at the beginning of step 2" in text


@pytest.mark.parametrize(("size", "number"), [(2, 5), (3, 6), (3, 8), (4, 6), (4, 8)])
def test_a_flip_in_a_reduced_slice(pool, size, number):
    text = alarms(pool, size, number, 1, partial(faults.in_sum, Flip(0, 3)), "slice")
    assert names(1) in text
    assert "a wrong sum of slice 1 of bucket" in text


@pytest.mark.parametrize(("size", "number"), [(2, 5), (3, 6)])
def test_a_flip_when_a_slice_is_added_up_again(pool, size, number):
    # Each of two buckets is added up once before.
    fault = partial(faults.in_sum, Flip(0, 3), after=2)
    text = alarms(pool, size, number, 1, fault, "slice")
    assert names(1) in text
    assert f"it has added up slice {2 % size} of bucket 0 in step 2 to" in text


def both_wrong(ctx):
    """Both ranks receive the same wrong sum."""
    with faults.on_arrival(Flip(0, 3)), pytest.raises(LogicalRankError) as caught:
        turns(ctx, wrapped(ctx, net(), 4, audit_every=1), 0)
    return str(caught.value)


def test_a_wrong_all_reduce(pool):
    for text in pool.run(both_wrong, 2):
        assert "cannot say which rank is wrong" in text
        assert "that nobody gets when adding up again" in text


class Many(nn.Module):
    """A slice of 64 KiB, and one with an element less."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3 * 32768 - 1, dtype=torch.bfloat16))

    def forward(self, x):
        return (x * self.weight).sum()


@on_ranks(3)
def test_slices_of_unequal_length(ctx):
    model = wrapped(ctx, Many(), 4, audit_every=1)
    each_turn(model, lambda leaf: model(batch(0, leaf, 98303).bfloat16()))


@pytest.mark.parametrize("number", [4, 5])
@pytest.mark.parametrize("size", [2, 3])
def test_a_flip_in_what_a_rank_receives(pool, size, number):
    fault = partial(faults.on_arrival, Flip(0, 3))
    text = alarms(pool, size, number, 1, fault, "sum")
    assert names(1) in text
    assert "has not got the sum of slice" in text


class Sums(nn.Module):
    """Adds up so many numbers that the number of threads changes bits."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (x * self.weight).sum()


def each_turn(model, loss_of):
    for leaf in model.each_logical_rank():
        loss_of(leaf).backward()


def with_threads(ctx, at):
    threads = torch.get_num_threads()
    model = wrapped(ctx, Sums(), 3, audit_every=1, hang_timeout=30)
    try:
        torch.set_num_threads(2 if ctx.rank == at else 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(LogicalRankError) as error:
                each_turn(model, lambda leaf: model(batch(0, leaf, 300_001)))
    finally:
        torch.set_num_threads(threads)
    return str(error.value), [str(each.message) for each in caught]


@pytest.mark.parametrize("at", [0, 2])
def test_a_rank_with_other_threads(pool, at):
    for text, told in pool.run(with_threads, 3, at):
        assert names(at) in text
        assert f"Rank {at} has other settings: threads (2, elsewhere 1)." in text
        (warning,) = told
        assert f"Rank {at} has other settings: threads (2, elsewhere 1)." in warning


def by_chance(ctx, size):
    """Samples depend on what the rank has done before."""
    model = wrapped(ctx, net(), size, audit_every=1, hang_timeout=30)
    drawn = torch.Generator().manual_seed(ctx.rank)
    with pytest.raises(LogicalRankError) as error:
        each_turn(model, lambda _: model(torch.randn(5, 12, generator=drawn)).mean())
    return str(error.value)


@pytest.mark.parametrize("size", [2, 3])
def test_a_script_that_computes_something_else_each_time(pool, size):
    for text in pool.run(by_chance, size, 6):
        assert "cannot say which rank is wrong" in text
        assert "the script is the likely cause" in text
        assert "let samples depend on step and logical rank" in text


@on_ranks(2)
def test_gradients_that_are_zeroed_too_late(ctx):
    """The script zeroes them in its own first logical rank, not in the first turn."""
    module = net()
    model = wrapped(ctx, module, 4, audit_every=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            for leaf in model.each_logical_rank():
                if leaf == model.logical_block[0]:
                    optimizer.zero_grad()
                model(batch(step, leaf)).square().mean().backward()
            optimizer.step()
    texts = [str(each.message) for each in caught]
    assert len(texts) == 2
    assert all("audited in part only" in text for text in texts)
    return [param.detach().clone() for param in module.parameters()]


# -------------------------------------------------------------------------- the options


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"audit_every": -1}, ValueError, "audit_every must not be negative"),
        ({"audit_every": 1.5}, TypeError, "audit_every must be a number of steps"),
        ({"audit_action": "log"}, ValueError, "'raise', 'warn', but got 'log'"),
        (
            {"audit_every": 3, "number": None},
            ValueError,
            "audit_every needs logical_ranks",
        ),
    ],
)
@on_ranks(2)
def test_an_option_that_is_none(ctx, options, kind, text):
    with pytest.raises(kind) as caught:
        wrapped(ctx, net(), **{"number": 4, **options})
    assert text in str(caught.value)


@on_ranks(2)
def test_ranks_with_other_options(ctx):
    with pytest.raises(ReplicaMismatchError, match="audit_every"):
        wrapped(ctx, net(), 4, audit_every=1 + ctx.rank)


def alone(ctx):
    with mock.patch.object(audit.logger, "warning") as told:
        model = wrapped(ctx, net(), 4, audit_every=1)
    turns = []
    for leaf in model.each_logical_rank():
        turns.append(leaf)
        model(batch(0, leaf)).square().mean().backward()
    return turns, told.call_args.args


def test_one_rank(pool):
    ((turns, (text, every)),) = pool.run(alone, 1)
    assert turns == [0, 1, 2, 3]
    assert "audits nothing: there is one rank" in text
    assert every == 1
