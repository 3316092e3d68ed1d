"""A training by logical ranks has the same bits on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

import minidp
from minidp import DataParallel
from tests.logical_ranks import trainings
from tests.logical_ranks.trainings import STEPS, batch, net
from tests.support.both import same
from tests.support.combined import combined

NUMBERS = [1, 2, 3, 4, 5, 7, 8, 12]
OPTIONS = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "one bucket": {"bucket_cap_mb": 25},
    "lazy": {"lazy_bucket_allocation": True},
    "batched": {"batched_grad_copy": True},
    "auto": {"bucket_cap_mb": "auto"},
    "finite": {"check_finite_grads": True, "check_replicas_every": 1},
}
FEATURES = {
    "buffers": trainings.depends_on_buffers,
    "zeroes": partial(trainings.zeroes_in_the_loop, set_to_none=True),
    "zeroes in place": partial(trainings.zeroes_in_the_loop, set_to_none=False),
    "unused": trainings.unused,
    "unused, views": partial(trainings.unused, gradient_as_bucket_view=True),
    "unused, skipped": partial(trainings.unused, skip_all_reduce_unused_params=True),
    "accumulates": trainings.accumulates,
    "keeps": trainings.keeps,
    "keeps views": partial(trainings.keeps, gradient_as_bucket_view=True),
    "items": trainings.items,
    "items, views": partial(trainings.items, gradient_as_bucket_view=True),
    "steps inside": trainings.steps_inside,
    "clips inside": partial(trainings.steps_inside, clip_grad_norm=0.1),
    "scaled": trainings.scaled,
    "float64": partial(trainings.of_dtype, dtype=torch.float64),
    "bfloat16": partial(trainings.of_dtype, dtype=torch.bfloat16),
    "complex": partial(trainings.of_dtype, dtype=torch.complex64),
}


def run(ctx, scenario, number):
    return scenario(ctx, number)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def check(pool, scenario, number, ranks=(2, 3, 4), alone=None):
    """Compare several ranks with one process, bit for bit: -0 is not 0.

    That runs the same scenario, if ``alone`` is no other one.
    """
    (expected,) = pool.run(run, 1, alone or scenario, number)
    for size in ranks:
        if size <= number:
            for found in pool.run(run, size, scenario, number):
                for one, other in zip(expected, found, strict=False):
                    assert torch.equal(bits(one), bits(other)), f"{size} ranks"


@pytest.mark.parametrize("number", NUMBERS)
def test_any_number_of_logical_ranks(pool, number):
    check(pool, trainings.plain, number)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(pool, options):
    check(pool, partial(trainings.plain, **options), 5)


@pytest.mark.parametrize(("name", "number"), combined(FEATURES, [4, 6]))
def test_features(pool, name, number):
    check(pool, FEATURES[name], number, ranks=(2, 3))


def of_own_buffers(ctx, number):
    """One buffer is on the ignore list, and one has two names."""
    module = net()
    module[0].register_buffer("ignored", torch.ones(2))
    module[0].register_buffer("other_name", module[1].running_mean)
    module._ddp_params_and_buffers_to_ignore = ["0.ignored"]
    model = trainings.wrapped(ctx, module, number)
    for step in range(2):
        for leaf in model.each_logical_rank():
            model(batch(step, leaf)).square().mean().backward()
        assert module[0].ignored.tolist() == [1.0, 1.0]
        assert module[0].other_name is module[1].running_mean
    return [param.grad.clone() for param in module.parameters()]


def test_buffers_that_are_ignored_or_shared_stay(pool):
    check(pool, of_own_buffers, 6)


def empty(ctx, number):
    """A parameter without elements has a bucket of its own."""
    module = torch.nn.Linear(12, 3)
    module.nothing = torch.nn.Parameter(torch.zeros(0, 4))
    model = trainings.wrapped(ctx, module, number, bucket_cap_mb=0)
    for leaf in model.each_logical_rank():
        (model(batch(0, leaf)).square().mean() + module.nothing.sum()).backward()
    return [param.grad.clone() for param in module.parameters()]


def test_a_parameter_without_elements(pool):
    check(pool, empty, 7)


def test_buckets_change_no_bits(pool):
    layouts = [{"bucket_cap_mb": cap} for cap in (0, 0.001, 0.01, 1)]
    (first, *others) = [
        pool.run(run, 3, partial(trainings.plain, **each), 7)[0] for each in layouts
    ]
    assert all(same(first, other) for other in others)


def by_attached(ctx, number):
    """Resumes, with a handle of its own, after half of the steps."""
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.manual_seed(3)
    state = number
    for half in range(2):
        attached = minidp.attach(module, process_group=ctx.group, logical_ranks=state)
        with attached:
            for step in range(STEPS // 2):
                seen = []
                for leaf in attached.each_logical_rank():
                    seen.append(leaf)
                    x = batch(STEPS // 2 * half + step, leaf)
                    module(x).square().mean().backward()
                assert seen == list(attached.logical_block)
                optimizer.step()
                optimizer.zero_grad()
            state = attached.logical_state
    return [param.detach().clone() for param in module.parameters()]


def by_wrapped(ctx, number):
    module = net()
    model = trainings.wrapped(ctx, module, number)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            model(batch(step, leaf)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return trainings.result(model, optimizer)


def test_a_model_without_a_wrapper(pool):
    (expected,) = pool.run(by_attached, 1, 6)
    assert same([expected], pool.run(run, 1, by_wrapped, 6))
    for size in (2, 3):
        assert same([expected] * size, pool.run(by_attached, size, 6))


def by_ddp(ctx, wrap, options):
    """A training with one logical rank on each of two ranks, or with plain ranks."""
    module = net()
    model = wrap(module, process_group=ctx.group, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module.eval()  # torch's DDP has no random numbers of logical ranks
    is_ours = "logical_ranks" in options
    for step in range(STEPS):
        for leaf in model.each_logical_rank() if is_ours else [ctx.rank]:
            model(batch(step, leaf)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return trainings.result(model, optimizer)


def test_two_on_two_ranks_have_the_bits_of_torchs_ddp(pool):
    theirs = pool.run(by_ddp, 2, TorchsDDP, {})
    assert same(theirs, pool.run(by_ddp, 2, DataParallel, {"logical_ranks": 2}))
    assert same(theirs[:1], pool.run(by_ddp, 1, DataParallel, {"logical_ranks": 2}))


SCENARIOS = {
    **{name: partial(trainings.plain, **options) for name, options in OPTIONS.items()},
    **FEATURES,
}
# What does not go with steps that are divided among the ranks.
UNDIVIDED = {"auto", "keeps", "keeps views", "steps inside", "clips inside"}


@pytest.mark.parametrize(
    ("name", "number"), combined(sorted({*SCENARIOS} - UNDIVIDED), [4, 5])
)
def test_divided_steps(pool, name, number):
    """Their bits are those of the plain optimizer on one rank."""
    made_of = trainings.World(divides=True)
    divided = partial(trainings.in_world, scenario=SCENARIOS[name], made_of=made_of)
    check(pool, divided, number, ranks=(1, 2, 3), alone=SCENARIOS[name])


@given(
    number=st.integers(1, 16),
    size=st.integers(1, 4),
    name=st.sampled_from(sorted(SCENARIOS)),
    divides=st.booleans(),
    # Without it there are 1600 cases, and whoever asks for more gets no more.
    made_of=st.builds(
        trainings.World,
        seed=st.integers(0, 2**20),
        rows=st.integers(2, 9),
        width=st.integers(2, 40),
        bucket_kib=st.sampled_from([0.1, 1, 2, 4, 1024]),
    ),
)
@pytest.mark.laws
def test_random_trainings(pool, number, size, name, divides, made_of):
    """With steps that are divided among the ranks, too."""
    alone, several = (
        partial(
            trainings.in_world,
            scenario=SCENARIOS[name],
            made_of=replace(made_of, divides=divides and name not in UNDIVIDED),
        )
        for divides in (False, divides)
    )
    check(pool, several, number, ranks=[min(size, number)], alone=alone)
