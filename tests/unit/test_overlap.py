"""Optimizer steps inside the backward: what is refused, what a step sees."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from minidp import DataParallel, MiniDPError
from minidp._overlap import Excuses, StepInBackward, step_on


def three():
    return [nn.Parameter(torch.ones(1)) for _ in range(3)]


class LooksLikeOne:
    param_groups = ()


@pytest.mark.parametrize("given", [None, "sgd", LooksLikeOne(), torch.optim.SGD])
def test_what_is_no_optimizer(given):
    with pytest.raises(TypeError, match=r"needs a torch.optim.Optimizer, but got "):
        StepInBackward(given, Excuses(0))


def test_what_needs_a_closure():
    for optimizer in (torch.optim.LBFGS(three()), with_scheduler()):
        with pytest.raises(TypeError) as caught:
            StepInBackward(optimizer, Excuses(0))
        assert str(caught.value) == (
            "LBFGS.step() needs a closure that runs the backward itself, so it cannot "
            "step inside one."
        )


def with_scheduler():
    optimizer = torch.optim.LBFGS(three())
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def test_what_communicates(lone_group):
    zero = ZeroRedundancyOptimizer(three(), optimizer_class=torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError) as caught:
        StepInBackward(zero, Excuses(0))
    assert str(caught.value) == (
        "ZeroRedundancyOptimizer communicates in its step, which must not happen "
        "bucket by bucket."
    )


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


def test_step_on_none_of_its_own_does_not_call_step():
    params = three()
    optimizer = torch.optim.SGD(params, 1.0)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("stepped"))
    step_on(optimizer, three())


def test_excuses_end_with_the_step():
    optimizer, excuses = torch.optim.SGD(three(), 1.0), Excuses(3)
    with excuses.excused(optimizer):
        assert optimizer in excuses
    assert optimizer not in excuses
    what = r"^\[rank 3\] SGD.step\(\) raised KeyError"
    with pytest.raises(MiniDPError, match=what), excuses.excused(optimizer):
        raise KeyError
    assert optimizer not in excuses


def test_clipping_waits_for_the_end():
    params = three()
    optimizer = torch.optim.SGD(params, 1.0)
    for param in params:
        param.grad = torch.full((1,), 10.0)
    step = StepInBackward(optimizer, Excuses(0), clip_grad_norm=3**0.5)
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
    assert optimizer._opt_called
    scheduler.step()
    assert [str(w.message) for w in recwarn if "lr_scheduler" in str(w.message)] == []
    assert optimizer.param_groups[0]["lr"] == 0.5
