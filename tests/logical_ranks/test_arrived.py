"""What a logical rank has brought is noted; the extension notes the same as Python."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minidp import DataParallel, LogicalRankError
from minidp.logical.arrived import Arrived
from tests.support.ranks import on_ranks

NUM_PARAMS = 3
BUFFER = torch.zeros(2)


def dense(param):
    param.grad = torch.ones(2)


def view(param):
    param.grad = BUFFER[:2]


def sparse(param):
    param.grad = torch.ones(2).to_sparse()


def with_graph(param):
    param.grad = torch.ones(2, requires_grad=True) * 2


def nothing(param):
    param.grad = None


def in_place(param):
    if param.grad is not None and not param.grad.is_sparse:
        with torch.no_grad():
            param.grad.mul_(2)


def equal_one(param):
    param.grad = None if param.grad is None else param.grad.detach().clone()


CHANGES = [dense, view, sparse, with_graph, nothing, in_place, equal_one]
INDEX = st.integers(0, NUM_PARAMS - 1)
ACTS = st.one_of(
    st.tuples(st.sampled_from(["note"]), INDEX),
    st.tuples(st.sampled_from(["note_all", "clear", "take"])),
    st.tuples(st.sampled_from(CHANGES), INDEX),
)


@given(acts=st.lists(ACTS, max_size=12))
def test_the_extension_notes_the_same(library, acts):
    params = [nn.Parameter(torch.ones(2)) for _ in range(NUM_PARAMS)]
    both = Arrived(params), library.Arrived(params)
    for act, *arguments in acts:
        if act == "take":
            before = [param.grad for param in params]
            grads, are_plain = both[0].take()
            assert all(param.grad is None for param in params)
            for param, grad in zip(params, before, strict=True):
                param.grad = grad
            found, are_plain_too = both[1].take()
            assert all(param.grad is None for param in params)
            assert all(a is b for a, b in zip(grads, found, strict=True))
            assert are_plain == are_plain_too
        elif isinstance(act, str):
            for each in both:
                getattr(each, act)(*arguments)
        else:
            act(params[arguments[0]])
        changed = [sorted(each.changed()) for each in both]
        assert changed[0] == changed[1]
        assert len(both[0]) == len(both[1])
        assert both[0].is_any_there() == both[1].is_any_there()


@pytest.mark.parametrize(
    "change", [in_place, equal_one, nothing], ids=lambda f: f.__name__
)
def test_each_kind_of_change_is_seen(either_kernels, change, library):
    params = [nn.Parameter(torch.ones(2)) for _ in range(NUM_PARAMS)]
    dense(params[1])
    noted = Arrived(params) if either_kernels == "python" else library.Arrived(params)
    noted.note_all()
    assert noted.changed() == []
    change(params[1])
    assert noted.changed() == [1]


def test_it_keeps_no_gradient_alive(either_kernels, library):
    (param,) = params = [nn.Parameter(torch.ones(2))]
    noted = Arrived(params) if either_kernels == "python" else library.Arrived(params)
    weak = torch.multiprocessing.reductions.StorageWeakRef
    for _ in range(3):
        dense(param)
        storage = weak(param.grad.untyped_storage())
        noted.note(0)
        param.grad = None
        assert storage.expired()
        assert noted.changed() == [0]


class ChangesLater(nn.Module):
    """A hook of the first parameter changes the gradient of the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.is_on = False

        def double(_param):
            if self.is_on:
                self.last.weight.grad.mul_(2)

        # When this one is called, the last layer's gradients have come.
        self.first.weight.register_post_accumulate_grad_hook(double)

    def forward(self, x):
        return self.last(self.first(x)).square().mean()


@on_ranks(1, 2)
def test_a_change_between_a_hook_and_the_end_of_its_backward(ctx):
    """Of a large bucket the last logical rank would not have it: bits would differ."""
    module = ChangesLater()
    model = DataParallel(module, process_group=ctx.group, logical_ranks=4)

    def step():
        for _ in model.each_logical_rank():
            model(torch.ones(2, 4)).backward()

    step()
    module.is_on = True
    with pytest.raises(LogicalRankError, match="Gradients were changed") as caught:
        step()
    assert "last.weight" in str(caught.value)


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.ones(3) for _ in range(count))

    def forward(self, factor):
        return torch.stack([param.sum() for param in self.all]).sum() * factor


def calls_between_turns(count: int) -> int:
    """How many Python functions run between two turns, with so many parameters."""
    model = DataParallel(Many(count), logical_ranks=4)
    calls = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    for _ in range(2):
        turns = model.each_logical_rank()
        next(turns)
        for leaf in range(4):
            model(1.0).backward()
            sys.setprofile(note if leaf == 1 else None)
            next(turns, None)
            sys.setprofile(None)
        model.zero_grad()
        found, calls = calls, 0
    return found


def test_between_turns_no_python_runs_for_each_parameter(lone_group, either_kernels):
    few, many = calls_between_turns(5), calls_between_turns(50)
    assert many == few if either_kernels == "native" else many < few + 2 * 45
