"""A run that resumes on other numbers of ranks has the bits of one without a break."""

from __future__ import annotations

import random

import pytest
import torch

from tests.logical_ranks.trainings import batch, net, wrapped
from tests.support.both import same

NUMBER = 6


def train(ctx, steps, saved, changes=None):
    """Train some steps, from the beginning or from a checkpoint, and return one."""
    module = net()
    first = 0
    if saved is not None:
        module.load_state_dict(saved["model"])
        first = saved["logical"]["first_step"]
    logical = NUMBER if saved is None else saved["logical"] | (changes or {})
    model = wrapped(ctx, module, logical)
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
