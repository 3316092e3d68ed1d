"""A run that resumes on other numbers of ranks has the bits of one without a break."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import minidp
from tests.logical_ranks.trainings import batch, net, wrapped
from tests.support.both import same

NUMBER = 6


def train(ctx, steps, saved, changes=None, number=NUMBER, **options):
    """Train some steps, from the beginning or from a checkpoint, and return one."""
    module = net()
    first = 0
    if saved is not None:
        module.load_state_dict(saved["model"])
        first = saved["logical"]["first_step"]
    logical = number if saved is None else saved["logical"] | (changes or {})
    model = wrapped(ctx, module, logical, **options)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, first + steps):
        for leaf in model.each_logical_rank():
            loss = model(batch(step, leaf)).square().mean()
            (loss * random.random()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "logical": model.logical_state,
    }


def state_of(saved):
    moments = saved["optimizer"]["state"].values()
    return [*saved["model"].values(), *(each["exp_avg"] for each in moments)]


def test_a_resume_on_other_numbers_of_ranks(pool):
    (whole, *_) = pool.run(train, 1, 6, None)
    (half, *_) = pool.run(train, 4, 3, None)
    assert half["logical"]["first_step"] == 3
    for size in (1, 2, 3, 4):
        (found, *_) = pool.run(train, size, 3, half)
        assert same(state_of(whole), state_of(found)), f"{size} ranks"


def train_with(ctx, options, steps, saved):
    return train(ctx, steps, saved, **options)


# Each run: its steps, its ranks, and whether it has other buckets.
RUNS = st.lists(
    st.tuples(st.integers(1, 2), st.integers(1, 4), st.booleans()),
    min_size=2,
    max_size=4,
)


@given(number=st.integers(1, 16), runs=RUNS)
@pytest.mark.laws
def test_random_breaks(pool, number, runs):
    """A training that is stopped, and goes on elsewhere, again and again."""
    total = sum(steps for steps, _, _ in runs)
    (whole, *_) = pool.run(train_with, 1, {"number": number}, total, None)
    saved = None
    for steps, size, has_views in runs:
        options = {"gradient_as_bucket_view": has_views, "number": number}
        options["bucket_cap_mb"] = 25 if has_views else 0.001
        where = min(size, number)
        (saved, *others) = pool.run(train_with, where, options, steps, saved)
        assert all(same(state_of(saved)[:2], state_of(o)[:2]) for o in others)
    assert same(state_of(whole), state_of(saved))


def test_the_state_is_plain_data(pool):
    (half, *_) = pool.run(train, 1, 1, None)
    state = dict(half["logical"])
    values = [*state.pop("conditions").values(), *state.values()]
    assert {type(value) for value in values} == {int, str}


def warned(ctx, saved):
    changes = {"conditions": saved["logical"]["conditions"] | {"threads": "99"}}
    with pytest.warns(UserWarning, match="threads .was 99, is ") as caught:
        train(ctx, 1, saved, changes)
    return [str(each.message) for each in caught]


def test_what_else_changes_bits_is_named(pool):
    (half, *_) = pool.run(train, 2, 1, None)
    for texts in pool.run(warned, 2, half):
        assert sum("will not have the bits" in text for text in texts) == 1


IMAGES = [torch.full((12,), float(i)) for i in range(80)]


class Batches:
    """The recipe of the room's README: samples by step and logical rank."""

    def __getitem__(self, where):
        step, leaf = where
        epoch, k = divmod(step, len(IMAGES) // (NUMBER * 3))
        order = torch.randperm(80, generator=torch.Generator().manual_seed(epoch))
        mine = order[(NUMBER * k + leaf) * 3 :][:3].tolist()
        with minidp.seeded(step, leaf):
            noise = torch.rand(12) + random.random() + np.random.rand()
            return torch.stack([IMAGES[i] / 80 + noise for i in mine])


def train_by_loader(ctx, end, saved):
    module = net()
    if saved is not None:
        module.load_state_dict(saved["model"])
    logical = NUMBER if saved is None else saved["logical"]
    model = wrapped(ctx, module, logical, audit_every=2)
    first = model.logical_state["first_step"]
    mine = [(step, leaf) for step in range(first, end) for leaf in model.logical_block]
    batches = Batches()
    loader = iter(DataLoader(batches, sampler=mine, batch_size=None))
    foreign = 0
    for step in range(first, end):
        ready = {leaf: next(loader) for leaf in model.logical_block}
        for leaf in model.each_logical_rank():
            foreign += leaf not in ready
            x = ready[leaf] if leaf in ready else batches[step, leaf]
            (model(x).square().mean() * random.random()).backward()
        with torch.no_grad():
            for param in module.parameters():
                param -= 0.1 * param.grad
                param.grad = None
    assert foreign == (0 if ctx.world_size == 1 else len(range(first, end)) // 2)
    return {"model": module.state_dict(), "logical": model.logical_state}


@pytest.mark.filterwarnings("ignore")  # with one rank there is nobody to audit
def test_in_the_middle_of_an_epoch_with_audits(pool):
    (whole, *_) = pool.run(train_by_loader, 1, 8, None)
    (half, *_) = pool.run(train_by_loader, 2, 2, None)  # an epoch has four steps
    for size in (1, 3, 4):
        (found, *_) = pool.run(train_by_loader, size, 8, half)
        values = [list(each["model"].values()) for each in (whole, found)]
        assert same(*values), f"{size} ranks"
