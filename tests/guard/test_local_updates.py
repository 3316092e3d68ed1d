"""Updates with gradients that were never averaged: by hand, or inside no_sync()."""

from __future__ import annotations

import pytest
import torch

from minidp import DataParallel, UnsyncedGradientsError
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


def step_of(ddp):
    return torch.optim.SGD(ddp.parameters(), lr=0.1).step


def refused(call, what, *args):
    """The call raises, because the other rank's parameters are others."""
    with pytest.raises(UnsyncedGradientsError, match=what) as caught:
        call(*args)
    text = str(caught.value)
    assert text.startswith("[rank 0] Parameters changed after a ")
    assert (
        "Found: different parameters on rank 1 than on rank 0. Parameters: a, b" in text
    )
    assert "reset()" in text


def is_watched(ddp):
    """A local update is refused after all that was legal."""
    ddp.zero_grad()
    ddp.module(X).backward()
    update(ddp)
    ddp(X).backward()
    refused(step_of(ddp), LOCAL)


def half_a_window(ddp):
    with ddp.no_sync():
        ddp(X).backward()


LOCAL, BYPASSED = "after a local backward", "averaged nothing"


def test_found_after_the_next_step(ddp):
    ddp.module(X).backward()
    update(ddp)
    ddp(X).backward()
    refused(step_of(ddp), LOCAL)
    ddp.reset()
    ddp(X).backward()
    step_of(ddp)()


def test_no_sync_excuses_no_change_that_came_before_it(ddp):
    """The usual accumulation follows a local backward and an update by hand."""
    ddp.module(X).backward()
    update(ddp)
    half_a_window(ddp)
    ddp(X).backward()
    refused(step_of(ddp), "the module ran without its wrapper")
    ddp.reset()
    grads = torch.autograd.grad(ddp(X), [*ddp.parameters()])
    with torch.no_grad():
        for param, grad in zip(ddp.parameters(), grads, strict=True):
            param -= 0.1 * grad
    half_a_window(ddp)  # the forward before it lets this backward average
    refused(ddp, BYPASSED, X)


def test_found_without_any_optimizer(ddp):
    """In the forward after the next averaged backward, or the next local update."""
    ddp.module(X).backward()
    update(ddp)
    ddp(X).backward()
    update(ddp)
    refused(ddp, LOCAL, X)
    for _ in range(2):
        ddp.module(X).backward()
        update(ddp)
        if not _:
            ddp(X)
    refused(ddp, LOCAL, X)
    ddp.reset()
    for _ in range(2):
        ddp(X).backward()
        update(ddp)


def test_nothing_is_said_if_the_other_rank_has_changed_alike(ddp, other_rank):
    other_rank.is_equal = True
    for _ in range(3):
        ddp.module(X).backward()
        update(ddp)
        ddp(X).backward()
        step_of(ddp)()
    assert "after" in other_rank.asked


def test_what_is_always_equal_is_compared_more_and_more_rarely(ddp, other_rank):
    other_rank.is_equal = True
    for _ in range(40):
        half_a_window(ddp)
        update(ddp)
        ddp(X).backward()
        step_of(ddp)()
    # In rounds 1 to 8; then in 9, 10, 13, 20 and 35.
    assert other_rank.asked.count("after") == 13


def test_averaged_first(ddp, other_rank):
    ddp.module(X).backward()
    ddp.sync_gradients()
    update(ddp)
    ddp(X).backward()
    step_of(ddp)()
    assert set(other_rank.asked) <= {"backward"}  # why no optimizer has stepped
    is_watched(ddp)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("where", ["outside", "in no_sync"])
def test_an_update_is_not_excused_by_zeros(ddp, set_to_none, where):
    if where == "outside":
        ddp.module(X).backward()
    else:
        half_a_window(ddp)
    update(ddp, drops=False)
    ddp.zero_grad(set_to_none=set_to_none)
    ddp(X).backward()
    refused(step_of(ddp), LOCAL)


def test_local_sgd_by_hand_inside_no_sync(ddp, other_rank):
    with ddp.no_sync():
        for _ in range(2):
            ddp(X).backward()
            update(ddp)
    ddp(X).backward()
    step_of(ddp)()
    assert other_rank.asked == []
    is_watched(ddp)


def test_grad_function(ddp):
    for _ in range(2):
        params = list(ddp.parameters())
        grads = torch.autograd.grad(ddp(X), params)
        for param, grad in zip(params, grads, strict=True):
            param.data = param.data  # counts as no change
            with torch.no_grad():
                param -= 0.1 * grad
    refused(ddp, BYPASSED, X)


@pytest.mark.parametrize("way", ["penalty", "before the step", "alone", "inputs"])
def test_gradients_of_inputs(ddp, way, other_rank):
    """They leave the parameters alone, which may change afterwards as they like."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        if way == "before the step":
            ddp(X).backward()
        x = X.clone().requires_grad_()
        out = ddp(x)
        if way == "inputs":
            out.backward(inputs=[x])
        else:
            (slope,) = torch.autograd.grad(out, x, create_graph=way == "penalty")
        if way == "penalty":
            (out + slope).backward()
        put_back(ddp, [each.clamp(-0.1, 0.1) for each in copies(ddp)])
        if way != "before the step":
            ddp(X).backward()
        other_rank.is_equal = way == "before the step"  # a forward left it out
        optimizer.step()
    # A forward left out its backward; a backward was not followed by a step.
    expected = {"before the step": {"step"}, "penalty": {"backward"}}
    assert set(other_rank.asked) <= expected.get(way, set())
    if way != "before the step":  # equal ranks are compared more and more rarely
        is_watched(ddp)


def test_warn(lone_group):
    ddp = DataParallel(Two(), process_group=lone_group, unsynced="warn")
    ddp.module(X).backward()
    update(ddp)
    ddp(X).backward()
    with pytest.warns(UserWarning, match=LOCAL):
        step_of(ddp)()


def test_one_rank_alone_cannot_differ(lone_group, monkeypatch):
    monkeypatch.undo()
    ddp = DataParallel(Two(), process_group=lone_group)
    for _ in range(2):
        ddp.module(X).backward()
        step_of(ddp)()
        update(ddp)
        ddp(X)
