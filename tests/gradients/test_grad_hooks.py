"""Where the grad hooks sit, what they record, and how they go away."""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from minidp import (
    CommHookError,
    DataParallel,
    Recorder,
    ReducerFailedError,
    native,
)
from minidp.core.autograd import queue_final_callback
from tests.support.both import Scale

both = pytest.mark.parametrize("wrap", [DistributedDataParallel, DataParallel])


# --------------------------------------------------------- position among user hooks


def run_with_hooks(wrap, group):
    """What each user hook saw, each one scaling the gradient, and the final value."""
    module = Scale()
    param, seen = module.w, []
    node = get_gradient_edge(param).node

    def scaling(tag, factor):
        def hook(*_):
            seen.append((tag, param.grad.item()))
            param.grad.mul_(factor)

        return hook

    param.register_post_accumulate_grad_hook(scaling("accumulated, before", 2))
    node.register_hook(scaling("node, before", 3))
    ddp = wrap(module, process_group=group)
    param.register_post_accumulate_grad_hook(scaling("accumulated, after", 5))
    node.register_hook(scaling("node, after", 7))
    param.register_hook(lambda grad: seen.append(("tensor", grad.item())))
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.ones(1)).sum().backward()
        seen.append(("final", param.grad.item()))
    return seen


def test_difference_a_node_hook_behind_ours_is_too_late(lone_group):
    """Python hooks of a node share one slot; torch's hook is C++ and has its own."""
    theirs = run_with_hooks(DistributedDataParallel, lone_group)
    ours = run_with_hooks(DataParallel, lone_group)
    assert theirs[-1] == ("final", 210.0)
    if native.library() is not None:
        assert ours == theirs  # so has ours, natively
        return
    assert ours[-1] == ("final", 30.0)
    assert theirs[:-1] != ours[:-1]  # already in the first of two steps
    assert [tag for tag, _ in theirs] == [tag for tag, _ in ours]


def queued(wrap, group, position):
    """Gradients that an engine callback of the user sees."""
    seen = []
    module = Scale()

    class Early(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            queue_final_callback(lambda: seen.append(module.w.grad.item()))
            return grad

    ddp = wrap(module, process_group=group)

    def late(*_):
        module.w.grad.fill_(5.0)  # after the copy: the reduction overwrites it
        queue_final_callback(lambda: seen.append(module.w.grad.item()))

    handle = get_gradient_edge(module.w).node.register_hook(late)
    loss = ddp(torch.ones(1)).sum()
    (Early.apply(loss) if position == "early" else loss).backward()
    handle.remove()
    return seen


@both
def test_final_callback_is_queued_where_torch_queues_its_own(lone_group, wrap):
    assert queued(wrap, lone_group, "late") == [1.0]
    assert queued(wrap, lone_group, "early") == [5.0, 1.0]


# ----------------------------------------------------------------- coming and going


def test_wrapping_needs_no_grad_mode(lone_group):
    with torch.no_grad():
        ddp = DataParallel(Scale(), process_group=lone_group)
    recorder = Recorder()
    ddp.set_recorder(recorder)
    ddp(torch.ones(1)).sum().backward()
    assert len(recorder) > 0


@pytest.mark.usefixtures("no_gc")
def test_a_failed_object_is_not_kept_by_its_error(lone_group):
    module = nn.Linear(2, 2)
    ddp = DataParallel(module, process_group=lone_group)
    ddp.register_comm_hook(None, lambda state, bucket: None)
    with contextlib.suppress(CommHookError):
        ddp(torch.ones(1, 2)).sum().backward()
    with contextlib.suppress(ReducerFailedError):
        ddp(torch.ones(1, 2))
    assert "CommHookError" in ddp._reducer.failure
    parts = (ddp, ddp._reducer, module, module.weight)
    references = [weakref.ref(part) for part in parts]
    del ddp, module, parts
    assert [reference() for reference in references] == [None] * 4


@pytest.mark.usefixtures("no_gc")
def test_an_output_that_lives_on_does_not_keep_the_object(lone_group):
    ddp = DataParallel(Scale(), process_group=lone_group, find_unused_parameters=True)
    module = ddp.module
    loss = ddp(torch.ones(1)).sum()
    part = weakref.ref(ddp._reducer)
    del ddp
    assert part() is None
    loss.backward()
    assert module.w.grad.tolist() == [1.0]


@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "static_graph"])
def test_nothing_is_planted_on_parameters(lone_group, option):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    planted = [*module.parameters(), *module.buffers(), *module.modules()]
    before = [(dir(thing), sorted(vars(thing))) for thing in planted]
    ddp = DataParallel(module, process_group=lone_group, **{option: True})
    for _ in range(3):
        ddp(torch.randn(3, 2)).sum().backward()
    assert [(dir(thing), sorted(vars(thing))) for thing in planted] == before
    for param in module.parameters():
        assert param._backward_hooks is None
        assert param._post_accumulate_grad_hooks is None
    for child in module.modules():
        assert not child._forward_hooks
        assert not child._forward_pre_hooks


class Boxed(nn.Module):
    """Its second output is an object in which nobody looks for tensors."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = Scale(), Scale()
        self.outputs = iter((lambda y: y, lambda y: SimpleNamespace(y=y)))

    def forward(self, x):
        return next(self.outputs)(self.used(x))


def test_a_backward_that_raised_before_any_gradient_hides_no_end(lone_group):
    """The first hook of the next one queues the call that fills in the unused."""
    ddp = DataParallel(Boxed(), process_group=lone_group, find_unused_parameters=True)
    x = torch.ones(1, requires_grad=True)

    def fail(_):
        raise ValueError("user")

    handle = ddp.module.used.w.register_hook(fail)
    with pytest.raises(ValueError, match="user"):
        ddp(x).sum().backward()
    handle.remove()
    ddp(x).y.sum().backward()
    assert ddp._reducer.phase.is_idle
    assert ddp.module.used.w.grad is not None
