"""Optimizer steps inside the backward: what is refused, what a step sees."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from minidp import DataParallel


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
        DataParallel(nn.Linear(1, 1)).step_in_backward(make())
    assert says in str(caught.value)


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
