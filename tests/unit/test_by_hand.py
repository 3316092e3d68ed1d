"""Hand-written updates with gradients that were never averaged: the next forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minidp import DataParallel, UnsyncedGradientsError

X = torch.tensor([2.0])


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.a * x + self.b * x


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


def refused(ddp, what):
    with pytest.raises(UnsyncedGradientsError, match=what) as caught:
        ddp(X)
    text = str(caught.value)
    assert text.startswith("[rank 0] Parameters changed after a ")
    assert "Parameters: a, b. What to do: " in text
    assert "reset()" in text


LOCAL, BYPASSED = "after a local backward", "averaged nothing"


def test_synchronised(ddp):
    for _ in range(3):
        ddp(X).backward()
        update(ddp)


def test_method_of_the_module(ddp):
    ddp.module(X).backward()
    update(ddp)
    refused(ddp, LOCAL)
    refused(ddp, LOCAL)  # until reset()
    ddp.reset()
    ddp(X).backward()
    update(ddp)
    ddp(X)


def test_second_backward(ddp):
    first, second = ddp(X), ddp(X)
    first.backward()
    second.backward()
    update(ddp)
    refused(ddp, LOCAL)


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


def test_no_sync_ends_before_the_update(ddp):
    with ddp.no_sync():
        ddp(X).backward()
    update(ddp, drops=False)
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
    before = [p.detach().clone() for p in ddp.parameters()]
    with ddp.no_sync():
        ddp(X).backward()
    with torch.no_grad():
        for param in ddp.parameters():
            param += 0.05 * param.grad
    ddp.zero_grad(set_to_none=set_to_none)
    ddp(X).backward()
    with torch.no_grad():
        for param, old in zip(ddp.parameters(), before, strict=True):
            param.copy_(old)
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()
    ddp(X)


def test_grad_function(ddp):
    params = list(ddp.parameters())
    for param, grad in zip(params, torch.autograd.grad(ddp(X), params), strict=True):
        param.data = param.data  # counts as no change
        with torch.no_grad():
            param -= 0.1 * grad
    refused(ddp, BYPASSED)


def test_cast(ddp):
    ddp.double().float()
    ddp(X).backward()
    update(ddp)
    refused(ddp, BYPASSED)


def test_gradient_penalty(ddp):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        x = X.clone().requires_grad_()
        out = ddp(x)
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        optimizer.zero_grad()
        (out + slope).backward()
        optimizer.step()


def test_saliency_between_backward_and_step(ddp):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(X).backward()
        x = X.clone().requires_grad_()
        torch.autograd.grad(ddp(x), x)
        optimizer.step()


def test_saliency_alone(ddp):
    for _ in range(2):
        x = X.clone().requires_grad_()
        torch.autograd.grad(ddp(x), x)


def test_new_optimizer_after_a_grad_function(ddp):
    ddp(X).backward()
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()
    params = list(ddp.parameters())
    for param, grad in zip(params, torch.autograd.grad(ddp(X), params), strict=True):
        param.grad = grad
    with pytest.raises(UnsyncedGradientsError, match="never came"):
        torch.optim.SGD(ddp.parameters(), lr=0.1).step()


def test_an_optimizer_may_where_local_gradients_are_ignored(lone_group):
    ddp = DataParallel(Two(), process_group=lone_group, unsynced="ignore")
    ddp.module(X).backward()
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()
    ddp(X)
    ddp._guard.policy = "raise"
    ddp(X)


def test_local_gradient_of_a_probe_and_an_untouched_model(ddp):
    ddp.module(X).backward()
    ddp(X)
    ddp.zero_grad()
    ddp(X).backward()


def test_load_after_a_probe_belongs_inside_no_sync(ddp):
    state = {k: v.clone() + 1 for k, v in ddp.state_dict().items()}
    ddp.module(X).backward()
    ddp.zero_grad()
    with ddp.no_sync():
        ddp.load_state_dict(state)
    ddp(X)


def test_warn(lone_group):
    ddp = DataParallel(Two(), process_group=lone_group, unsynced="warn")
    ddp.module(X).backward()
    update(ddp)
    with pytest.warns(UserWarning, match=LOCAL):
        ddp(X)


# ----------------------------------------------------------------- changed and put back


def half_a_window(ddp):
    with ddp.no_sync():
        ddp(X).backward()


def test_weights_that_are_swapped_for_an_evaluation(ddp):
    """While the gradients of half an accumulation window are kept."""
    half_a_window(ddp)
    kept = [param.detach().clone() for param in ddp.parameters()]
    for _ in range(2):
        with torch.no_grad():
            for param in ddp.parameters():
                param.mul_(0.5)
            ddp(X)
            for param, old in zip(ddp.parameters(), kept, strict=True):
                param.copy_(old)
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
    kept = [param.detach().clone() for param in ddp.parameters()]
    ddp(X).backward()
    update(ddp)
    ddp.module(X).backward()
    with torch.no_grad():
        for param, old in zip(ddp.parameters(), kept, strict=True):
            param.copy_(old)
    refused(ddp, LOCAL)


def test_a_corner_without_gradient_proves_nothing(lone_group):
    """An update by hand does not show in the rows of words that did not occur."""
    ddp = DataParallel(nn.Embedding(1000, 300), process_group=lone_group)
    with ddp.no_sync():
        ddp(torch.tensor([999])).sum().backward()
    with torch.no_grad():
        ddp.module.weight -= 0.1 * ddp.module.weight.grad
    with pytest.raises(UnsyncedGradientsError, match=LOCAL):
        ddp(torch.tensor([1]))
