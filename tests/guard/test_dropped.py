"""A wrapper that is gone while training goes on is missed, but only then."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minidp
from minidp.guard import dropped
from minidp.hang.rank_status import Channel
from tests.support.both import Two, all_die, wrapped
from tests.support.ranks import on_ranks

KEPT: list[Any] = []  # alive to the end of a test
GONE = "the DataParallel object around these parameters is gone"


def step(net: Any, optimizer: Any) -> list[str]:
    """Make a step; return the warnings that it gives."""
    optimizer.zero_grad()
    net(torch.ones(2, 3)).sum().backward()
    return told(optimizer)


def told(optimizer: Any) -> list[str]:
    """Step with the gradients that are there; return the warnings that it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(each.message) for each in caught if GONE in str(each.message)]


def sgd(net: nn.Module) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.1)


@on_ranks(2)
@pytest.mark.parametrize("when", ["at once", "evaluated", "in training", "in no_sync"])
def test_training_without_the_wrapper_is_named_once(ctx, when):
    dropped.orphans().clear()  # what other tests have left
    net = nn.Linear(3, 1)
    optimizer = sgd(net)
    ddp = wrapped(ctx, net)
    if when == "evaluated":
        with torch.no_grad():
            ddp(torch.ones(2, 3))
    if when == "in training":
        assert not step(ddp, optimizer)
    if when == "in no_sync":
        with ddp.no_sync():
            step(ddp, optimizer)
    del ddp
    gc.collect()
    (text,) = step(net, optimizer)
    assert text.startswith(
        f"[rank {ctx.rank}] SGD.step() applies gradients that nobody"
    )
    assert "Parameters: weight, bias. What to do: keep what DataParallel(net)" in text
    assert not step(net, optimizer)
    assert not dropped.orphans()


def add_a_local_gradient(net):
    net(torch.ones(2, 3)).sum().backward()


def write_to_the_averages(net):
    for param in net.parameters():
        param.grad.mul_(2)


def put_others_in_their_place(net):
    for param in net.parameters():
        other = torch.ones_like(param)
        while other._version < param.grad._version:
            other.mul_(2)
        param.grad = other


WRITES = [add_a_local_gradient, write_to_the_averages, put_others_in_their_place]


@on_ranks(2)
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("number", range(len(WRITES)), ids=[f.__name__ for f in WRITES])
def test_averages_outlive_the_wrapper_until_somebody_writes(ctx, number, view):
    dropped.orphans().clear()  # what other tests have left
    net = nn.Linear(3, 1)
    optimizer = sgd(net)
    ddp = wrapped(ctx, net, gradient_as_bucket_view=view)
    assert not step(ddp, optimizer)
    optimizer.zero_grad()
    ddp(torch.ones(2, 3)).sum().backward()
    references = [weakref.ref(param.grad) for param in net.parameters()]
    del ddp
    gc.collect()
    assert [told(optimizer), told(optimizer)] == [[], []]
    assert len(dropped.orphans()) == 2
    WRITES[number](net)
    (text,) = told(optimizer)
    assert "Parameters: weight, bias." in text
    assert not dropped.orphans()
    optimizer.zero_grad()
    assert all_die(*references)


def add_before(ctx, ddp):
    """Through the module: local gradients that nobody has announced."""
    ddp.module(torch.ones(2, 3)).sum().backward()


def add_inside_no_sync(ctx, ddp):
    with ddp.no_sync():
        ddp(torch.ones(2, 3)).sum().backward()


def put_what_autograd_returns(ctx, ddp):
    params = [*ddp.parameters()]
    grads = torch.autograd.grad(ddp(torch.ones(2, 3)).sum(), params)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def switch_off(ctx, ddp):
    """Not every local gradient is known then."""
    ddp.require_backward_grad_sync = False


LOCAL = [add_before, add_inside_no_sync, put_what_autograd_returns, switch_off]


@on_ranks(2)
@pytest.mark.parametrize("number", range(len(LOCAL)), ids=[f.__name__ for f in LOCAL])
def test_what_was_no_average_at_the_death_is_named(ctx, number):
    net = nn.Linear(3, 1)
    optimizer = sgd(net)
    ddp = wrapped(ctx, net)
    assert not step(ddp, optimizer)
    optimizer.zero_grad()
    ddp(torch.ones(2, 3)).sum().backward()
    LOCAL[number](ctx, ddp)
    del ddp
    gc.collect()
    (text,) = told(optimizer)
    assert "Parameters: weight, bias." in text


@on_ranks(2)
def test_gradients_put_in_before_any_backward_are_no_averages(ctx):
    net = nn.Linear(3, 1)
    ddp = wrapped(ctx, net)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    del ddp
    gc.collect()
    (text,) = told(sgd(net))
    assert "Parameters: weight, bias." in text


@on_ranks(2)
def test_gradients_of_an_unfinished_backward_are_no_averages(ctx):
    net, x = Two(), torch.ones(1)
    optimizer = sgd(net)
    ddp = wrapped(ctx, net)
    ddp(x, "ab").backward()
    assert not told(optimizer)
    optimizer.zero_grad()
    ddp(x, "a").backward()
    del ddp
    gc.collect()
    (text,) = told(optimizer)
    assert "Parameters: a. " in text


def fine_tune(ctx, held, net):
    step(held.pop(), sgd(net))
    return sgd(net)


def wrap_again(ctx, held, net):
    KEPT[:] = [wrapped(ctx, net)]
    return sgd(net)


def wrap_and_end_training(ctx, held, net):
    """The first wrapper was never used: only the second one counts."""
    again = wrapped(ctx, net)
    held.clear()
    gc.collect()
    step(again, sgd(net))
    return sgd(net)


def wrap_twice_and_drop_the_unused_last(ctx, held, net):
    again = wrapped(ctx, net)
    step(again, sgd(net))
    del again
    gc.collect()
    return sgd(net)


def attach_and_detach(ctx, held, net):
    held.clear()
    gc.collect()
    minidp.attach(net, process_group=ctx.group).detach()
    return sgd(net)


def ignore(ctx, held, net):
    held.clear()
    gc.collect()
    wrapped(ctx, net, unsynced="ignore")
    return sgd(net)


def wrap_in_torchs(ctx, held, net):
    KEPT[:] = [DistributedDataParallel(net, process_group=ctx.group)]
    return sgd(net)


def remove_hooks(ctx, held, net):
    held[0]._remove_autograd_hooks()
    return sgd(net)


def drop_a_copy(ctx, held, net):
    twin = copy.deepcopy(held[0]).module
    KEPT[:] = [held[0], twin]
    return sgd(twin)


def step_without_gradients(ctx, held, net):
    net.requires_grad_(requires_grad=False)
    net.forward = lambda x: torch.ones(1, requires_grad=True) * x
    return sgd(net)


RIGHT = [
    *(fine_tune, wrap_again, wrap_and_end_training, attach_and_detach, ignore),
    wrap_twice_and_drop_the_unused_last,
    *(wrap_in_torchs, remove_hooks, drop_a_copy, step_without_gradients),
]


@on_ranks(2)
@pytest.mark.parametrize("number", range(len(RIGHT)), ids=[f.__name__ for f in RIGHT])
def test_right_endings_of_a_wrapper(ctx, number):
    net = nn.Linear(3, 1)
    held = [wrapped(ctx, net)]  # alone: before 3.11 a caller keeps what it passes
    optimizer = RIGHT[number](ctx, held, net)
    held.clear()
    gc.collect()
    heard = [step(net, optimizer) for _ in range(2)]
    KEPT.clear()
    assert heard == [[], []]


def test_one_rank_trains_alone(lone_group):
    net = nn.Linear(3, 1)
    minidp.DataParallel(net)
    assert not step(net, sgd(net))


def after_the_group(ctx):
    net = nn.Linear(3, 1)
    ddp = minidp.DataParallel(net)
    del ddp
    dist.destroy_process_group()
    return step(net, sgd(net))


@on_ranks(2, fresh={"group_timeout": 20.0})
def test_training_is_over_with_the_process_group(ctx):
    assert after_the_group(ctx) == []


@contextmanager
def store_answers(*, at_once: bool) -> Iterator[None]:
    """If not ``at_once``, let the watchdog's thread wait for the store in the block."""
    released, plain = threading.Event(), Channel.send

    def send(self: Channel, status: Any) -> None:
        released.wait(20)
        plain(self, status)

    with pytest.MonkeyPatch.context() as patch:
        if not at_once:
            patch.setattr(Channel, "send", send)
        try:
            yield
        finally:
            released.set()


@on_ranks(2)
@pytest.mark.parametrize("at_once", [True, False], ids=["store", "store that blocks"])
def test_no_tensor_is_kept_alive(ctx, at_once):
    dropped.orphans().clear()  # what other tests have left
    with store_answers(at_once=at_once):
        net = nn.Linear(3, 1)
        assert all_die(weakref.ref(wrapped(ctx, net)))
        assert len(dropped.orphans()) == 2
        facts, _ = next(iter(dropped.orphans().values()))
        references = [weakref.ref(param) for param in net.parameters()]
        del net
        assert all_die(*references)
        assert all_die(weakref.ref(wrapped(ctx, nn.Linear(2, 1))))
        assert all(others is not facts for others, _ in dropped.orphans().values())
    dropped.orphans().clear()
