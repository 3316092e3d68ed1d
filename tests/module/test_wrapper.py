"""The nn.Module face: state, copies, modes, schedules; side by side with torch's."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Generic, TypeVar

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minidp
from minidp import DataParallel
from tests.module.net import Net, batch, step
from tests.support.both import MODES, Scalars, Scale, history_of, modes, same, x_of
from tests.support.ranks import as_in_torch

BOTH = [DistributedDataParallel, DataParallel]


# -------------------------------------------------------------------- an nn.Module


@pytest.mark.parametrize("options", [*MODES, {"average_over": "items"}], ids=str)
@pytest.mark.parametrize("has_trained", [False, True])
def test_tools_may_look_at_every_attribute(lone_group, options, has_trained):
    """What has no value raises an AttributeError: debuggers and tracers expect it."""
    ddp, net = DataParallel(Net(), **options), Net()
    handle = minidp.attach(net, **options)
    recording = minidp.record(ddp)
    detached = minidp.attach(Net())
    detached.detach()
    if has_trained:
        for owner, model in ((ddp, ddp), (handle, net)):
            if "average_over" in options:
                owner.count_items(3)
            model(batch()).sum().backward()
    for thing in (ddp, handle, recording, detached):
        for name in dir(thing):
            getattr(thing, name, None)
    for owner in (ddp, handle):
        assert hasattr(owner, "item_totals") == (
            has_trained and "average_over" in options
        )
    assert not hasattr(detached, "data_parallel")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "averages over ranks. What to do: pass average_over='items'"),
        ({"average_over": "items"}, "[rank 0] item_totals has no value: no synchron"),
    ],
)
def test_an_attribute_without_a_value_says_why(lone_group, options, says):
    ddp = DataParallel(Net(), **options)
    with pytest.raises(minidp.UnavailableError, match=re.escape(says)):
        ddp.item_totals  # noqa: B018
    with pytest.raises(AttributeError, match="'DataParallel' object has no attribute"):
        ddp.item_total  # noqa: B018


deprecated_trace = pytest.mark.filterwarnings(
    r"ignore:.torch.jit.trace\w*. is deprecated"
)


@deprecated_trace
@pytest.mark.parametrize("mode", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_trace_is_torchs(lone_group, mode):
    module, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), batch()
    traces = []
    for wrap in BOTH:
        ddp = wrap(copy.deepcopy(module), **mode)
        with torch.no_grad():
            traces.append(torch.jit.trace(ddp, x))
        traces.append(step(ddp))  # as if nothing had been traced
    theirs, their_grads, ours, our_grads = traces
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours(2 * x), theirs(2 * x))
    assert same(our_grads, their_grads)


@deprecated_trace
@modes
def test_a_trace_of_what_torch_cannot_trace(lone_group, mode):
    """It has module buffers; and torch's trace of the last two modes cannot run."""
    ddp = DataParallel(Net(), **mode).eval()
    traced = torch.jit.trace(ddp, batch())
    assert torch.equal(traced(2 * batch()), ddp.module(2 * batch()))


# ------------------------------------------------------------- generic in its module


@pytest.mark.parametrize("wrap", [DataParallel, DataParallel[Scale]], ids=str)
def test_a_parameter_changes_nothing_at_run_time(wrap, lone_group):
    ddp = wrap(Scale())
    assert type(ddp) is DataParallel
    for twin in (ddp, copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert isinstance(twin, DistributedDataParallel)
        twin(torch.ones(1)).backward()
        assert twin.module.w.grad == 1


def test_classes_may_be_generic_in_any_order(lone_group):
    """Not torch's: `typing` keeps such a class, and `swap` would warn of it later."""
    T = TypeVar("T")

    class Before(Generic[T], DataParallel):
        pass

    class After(DataParallel, Generic[T]):
        pass

    class OfScale(DataParallel[Scale]):
        pass

    for derived in (Before, After, Before[int], After[int], OfScale):
        assert isinstance(derived(Scale()), DataParallel)
    assert OfScale.__mro__[1] is DataParallel


# ------------------------------------------------------------- names in a checkpoint


@as_in_torch(2)
def test_nested(ctx, wrap):
    ddp = wrap(nn.Sequential(wrap(Scalars(1)), Scalars(1)))
    return history_of(ddp, lambda _: ddp(x_of(ctx)).sum()), list(ddp.state_dict())
