"""Updates with gradients that were never averaged: by hand, or inside no_sync()."""

from __future__ import annotations

import gc
import logging
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidp import DataParallel, UnsyncedGradientsError
from minidp.guard import local_updates
from tests.support.both import Two

X = torch.tensor([2.0])


@pytest.fixture(
    params=[{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}],
    ids=str,
)
def ddp(lone_group, request):
    return DataParallel(Two(), process_group=lone_group, **request.param)


def update(ddp, *, drops=True):
    with torch.no_grad():
        for param in ddp.parameters():
            if param.grad is not None:
                param -= 0.1 * param.grad
                param.grad = None if drops else param.grad


def copies(ddp):
    return [param.detach().clone() for param in ddp.parameters()]


@torch.no_grad()
def put_back(ddp, kept):
    for param, old in zip(ddp.parameters(), kept, strict=True):
        param.copy_(old)


def refused(ddp, what):
    with pytest.raises(UnsyncedGradientsError, match=what) as caught:
        ddp(X)
    text = str(caught.value)
    assert text.startswith("[rank 0] Parameters changed after a ")
    assert "Parameters: a, b. What to do: " in text
    assert "reset()" in text


def half_a_window(ddp):
    with ddp.no_sync():
        ddp(X).backward()


LOCAL, BYPASSED = "after a local backward", "averaged nothing"


def test_method_of_the_module(ddp):
    ddp.module(X).backward()
    update(ddp)
    refused(ddp, LOCAL)
    refused(ddp, LOCAL)  # until reset()
    ddp.reset()
    for _ in range(2):
        ddp(X).backward()
        update(ddp)


def test_averaged_first(ddp):
    ddp.module(X).backward()
    ddp.sync_gradients()
    update(ddp)
    ddp(X)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_stray_backward_is_not_excused_by_zeros(ddp, set_to_none):
    """Nobody said that it was to stay local."""
    ddp.module(X).backward()
    update(ddp, drops=False)
    ddp.zero_grad(set_to_none=set_to_none)
    refused(ddp, LOCAL)


def test_local_sgd_by_hand_inside_no_sync(ddp):
    with ddp.no_sync():
        for _ in range(2):
            ddp(X).backward()
            update(ddp)
    ddp(X)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_climbing_to_the_worst_case_with_local_gradients(ddp, set_to_none):
    """Sharpness-aware minimisation: up with local gradients, and down again."""
    kept = copies(ddp)
    half_a_window(ddp)
    update(ddp, drops=False)
    ddp.zero_grad(set_to_none=set_to_none)
    ddp(X).backward()
    put_back(ddp, kept)
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()
    ddp(X)


def test_grad_function(ddp):
    params = list(ddp.parameters())
    for param, grad in zip(params, torch.autograd.grad(ddp(X), params), strict=True):
        param.data = param.data  # counts as no change
        with torch.no_grad():
            param -= 0.1 * grad
    refused(ddp, BYPASSED)


@pytest.mark.parametrize("way", ["penalty", "before the step", "alone"])
def test_gradients_of_inputs(ddp, way):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        if way == "before the step":
            ddp(X).backward()
        x = X.clone().requires_grad_()
        out = ddp(x)
        (slope,) = torch.autograd.grad(out, x, create_graph=way == "penalty")
        if way == "penalty":
            (out + slope).backward()
        optimizer.step()


def test_local_gradient_of_a_probe_and_an_untouched_model(ddp):
    state = {k: v.clone() + 1 for k, v in ddp.state_dict().items()}
    ddp.module(X).backward()
    ddp(X)
    ddp.zero_grad()
    with ddp.no_sync():
        ddp.load_state_dict(state)
    ddp(X).backward()


def test_warn(lone_group):
    ddp = DataParallel(Two(), process_group=lone_group, unsynced="warn")
    ddp.module(X).backward()
    update(ddp)
    with pytest.warns(UserWarning, match=LOCAL):
        ddp(X)


# ----------------------------------------------------------------- changed and put back


def test_weights_that_are_swapped_for_an_evaluation(ddp):
    """While the gradients of half an accumulation window are kept."""
    half_a_window(ddp)
    kept = copies(ddp)
    for _ in range(2):
        put_back(ddp, [each / 2 for each in kept])
        with torch.no_grad():
            ddp(X)
        put_back(ddp, kept)
    ddp(X).backward()
    assert ddp.module.a.grad == 2 * X
    update(ddp)
    ddp(X)


@pytest.mark.parametrize("name", ["a", "b"])
def test_only_one_is_put_back(ddp, name):
    half_a_window(ddp)
    kept = getattr(ddp.module, name).detach().clone()
    update(ddp, drops=False)
    with torch.no_grad():
        getattr(ddp.module, name).copy_(kept)
    refused(ddp, LOCAL)


def test_put_back_to_what_it_was_before_an_update(ddp):
    """The corner is of another forward than the local backward."""
    half_a_window(ddp)
    kept = copies(ddp)
    ddp(X).backward()
    update(ddp)
    ddp.module(X).backward()
    put_back(ddp, kept)
    refused(ddp, LOCAL)


def test_a_corner_without_gradient_proves_nothing(lone_group):
    """An update by hand does not show in the rows of words that did not occur."""
    ddp = DataParallel(nn.Embedding(1000, 300), process_group=lone_group)
    with ddp.no_sync():
        ddp(torch.tensor([999])).sum().backward()
    update(ddp, drops=False)
    with pytest.raises(UnsyncedGradientsError, match=LOCAL):
        ddp(torch.tensor([1]))


# -------------------------------------- steps inside no_sync() that nobody makes up for


def steps_of(ctx, kinds, average_every=0, policy="raise"):
    """Train; return a weak reference to the reducer: its end logs.

    Of ``kinds``: l, a local backward and step; s, a synchronised one, w, one window of
    accumulation; p, a step inside no_sync() with averaged gradients.
    """
    torch.manual_seed(0)
    ddp = DataParallel(nn.Linear(2, 2), process_group=ctx.group, unsynced=policy)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(ctx.rank)
    for k, kind in enumerate(kinds):
        with ddp.no_sync():
            if kind in "lw":
                optimizer.zero_grad()
                ddp(torch.randn(3, 2)).sum().backward()
            if kind in "lp":
                optimizer.step()
        if kind in "sw":
            ddp(torch.randn(3, 2)).sum().backward()
            optimizer.step()
        if average_every and (k + 1) % average_every == 0:
            for param in ddp.parameters():
                dist.all_reduce(param.data, group=ctx.group)
                param.data = param.data / 2  # as Accelerate's LocalSGD does
    return weakref.ref(ddp._reducer)


class Caught(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def told(ctx, *args):
    log, before = Caught(), local_updates.PATIENCE
    logging.getLogger("minidp").addHandler(log)
    local_updates.PATIENCE = 6
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reducer = steps_of(ctx, *args)
        deadline = time.monotonic() + 10
        while reducer() is not None and time.monotonic() < deadline:
            gc.collect()  # the watchdog's thread may hold it for a moment
            time.sleep(0.01)
    finally:
        local_updates.PATIENCE = before
        logging.getLogger("minidp").removeHandler(log)
    return [(str(w.message), w.filename) for w in caught], log.texts


TEXT = (
    "[rank {}] An optimizer stepped inside no_sync(), with gradients that stayed local "
    "(steps: {}), and nobody averaged "
)


def test_everything_indented(pool):
    for rank, (((text, file),), logged) in enumerate(pool.run(told, 2, "lllllllll")):
        assert text.startswith(TEXT.format(rank, 6))
        assert file == __file__
        assert logged == []  # it was said


def test_the_end_of_a_short_run(pool):
    for rank, (warned, (logged,)) in enumerate(pool.run(told, 2, "lll")):
        assert warned == []
        assert logged.startswith(TEXT.format(rank, 3))


@pytest.mark.parametrize(
    ("kinds", "every", "policy"),
    [
        ("lllllllll", 3, "raise"),
        ("lllllllll", 5, "raise"),
        ("llll", 3, "raise"),
        ("llllllll", 1, "raise"),
        ("lllllllll", 0, "ignore"),
        ("wpwpwp", 0, "raise"),
    ],
)
def test_nothing_is_told(pool, kinds, every, policy):
    assert pool.run(told, 2, kinds, every, policy) == [([], [])] * 2


def test_one_rank_alone(lone_group):
    class Alone:
        group, rank = lone_group, 0

    assert told(Alone, "lllllllll") == ([], [])


def test_it_is_not_said_twice(pool):
    """The synchronised backward has compared the replicas, and warned."""
    for ((text, _),), logged in pool.run(told, 2, "lslsl"):
        assert "Parameters were updated inside no_sync()" in text
        assert logged == []
