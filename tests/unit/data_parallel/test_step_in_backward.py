"""Optimizer steps inside the backward: what is refused, what a step sees."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from minidp import DataParallel, DoubleStepError, MiniDPError
from minidp.data_parallel.step_in_backward import StepInBackward, step_on


class AnyGuard:
    def allow(self, _optimizer):
        return contextlib.nullcontext()


GUARD = AnyGuard()


def three():
    return [nn.Parameter(torch.ones(1)) for _ in range(3)]


class LooksLikeOne:
    param_groups = ()


def with_scheduler():
    optimizer = torch.optim.LBFGS(three())
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def zero():
    return ZeroRedundancyOptimizer(three(), optimizer_class=torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: None, "needs a torch.optim.Optimizer, but got NoneType."),
        (LooksLikeOne, "needs a torch.optim.Optimizer, but got LooksLikeOne."),
        (lambda: torch.optim.SGD, "needs a torch.optim.Optimizer, but got type."),
        (lambda: torch.optim.LBFGS(three()), "LBFGS.step() needs a closure"),
        (with_scheduler, "LBFGS.step() needs a closure"),
        (zero, "ZeroRedundancyOptimizer communicates in its step"),
    ],
)
def test_what_cannot_step_on_a_part(lone_group, make, says):
    with pytest.raises(TypeError) as caught:
        StepInBackward(make(), GUARD)
    assert says in str(caught.value)


def test_step_on_some_leaves_the_optimizer_as_it_was():
    params = three()
    optimizer = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], 1.0)
    groups = optimizer.param_groups
    for param in params:
        param.grad = torch.ones(1)
    step_on(optimizer, params[1:2])
    assert [param.item() for param in params] == [1.0, 0.0, 1.0]
    assert optimizer.param_groups is groups
    assert [len(group["params"]) for group in groups] == [2, 1]
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("stepped"))
    step_on(optimizer, three())  # none of its own


def test_allowed_end_with_the_step(lone_group):
    ddp, optimizer = DataParallel(nn.Linear(1, 1)), torch.optim.SGD(three(), 1.0)
    guard = ddp._guard
    guard._in_backward.add(optimizer)
    with guard.allow(optimizer):
        guard.check(optimizer)
    with pytest.raises(DoubleStepError):
        guard.check(optimizer)
    what = r"^\[rank 0\] SGD.step\(\) raised KeyError"
    with pytest.raises(MiniDPError, match=what), guard.allow(optimizer):
        raise KeyError
    with pytest.raises(DoubleStepError):
        guard.check(optimizer)


def test_clipping_waits_for_the_end():
    params = three()
    optimizer = torch.optim.SGD(params, 1.0)
    for param in params:
        param.grad = torch.full((1,), 10.0)
    step = StepInBackward(optimizer, GUARD, clip_grad_norm=3**0.5)
    step.reduced(params)
    assert [param.item() for param in params] == [1.0] * 3
    step.finished()
    assert [param.item() for param in params] == pytest.approx([0.0] * 3, abs=1e-4)


def test_an_optimizer_steps_in_one_backward_only(lone_group):
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    ddp = DataParallel(net)
    ddp.step_in_backward(optimizer)
    for again in (ddp, DataParallel(nn.Linear(1, 1))):
        with pytest.raises(ValueError, match="SGD steps in the backward already"):
            again.step_in_backward(optimizer)
    del ddp, again
    DataParallel(net).step_in_backward(optimizer)  # wrapped again


def test_scheduler_sees_the_steps(lone_group, recwarn):
    net = nn.Linear(1, 1)
    ddp = DataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    ddp.step_in_backward(optimizer)
    ddp(torch.ones(1, 1)).backward()
    scheduler.step()
    assert [w for w in recwarn if "lr_scheduler" in str(w.message)] == []
    assert optimizer.param_groups[0]["lr"] == 0.5
