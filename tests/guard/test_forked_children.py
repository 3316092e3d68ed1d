"""A forked child of a rank is no rank: nothing of minidp waits for others in it."""

from __future__ import annotations

import copy
import json
import os
import select
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

import minidp
from minidp.guard import dropped
from tests.support.both import wrapped
from tests.support.ranks import as_in_torch, on_ranks

PATIENCE = 8.0  # seconds; a child needs a tenth of one
X = torch.ones(2, 3)


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Return what ``function(*args)``, which JSON can hold, returns in a forked child.

    Ranks of the pool are daemons, so multiprocessing lets them have no children.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python: there are threads
        pid = os.fork()
    if pid == 0:
        try:
            answer = function(*args), ""
        except BaseException:  # the rest of the test is not the child's
            answer = None, traceback.format_exc()
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    try:
        is_done, _, _ = select.select([reading], [], [], PATIENCE)
        assert is_done, "the child hangs"
        result, error = json.loads(os.read(reading, 2**16))
        assert not error, error
        return result
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def sgd(net: nn.Module) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def train(net: Any, optimizer: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        net(X).square().sum().backward()
        optimizer.step()


# What a child does, with the module, its wrapper, and an optimizer of the parent's.
def train_the_module(net, ddp, optimizer):
    train(net, sgd(net))


def step_the_parents_optimizer(net, ddp, optimizer):
    train(net, optimizer)


def step_with_a_closure(net, ddp, optimizer):
    lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=2)

    def closure() -> Any:
        lbfgs.zero_grad()
        loss = net(X).square().sum()
        loss.backward()
        return loss

    lbfgs.step(closure)


def update_by_hand_and_evaluate(net, ddp, optimizer):
    ddp.eval()
    for _ in range(2):
        net.zero_grad()
        net(X).square().sum().backward()
        with torch.no_grad():
            for param in net.parameters():
                param -= 0.1 * param.grad
        with ddp.no_sync():
            ddp(X)
        with torch.no_grad():
            ddp(X)
    ddp(X)


def cast_and_evaluate(net, ddp, optimizer):
    net.double()
    ddp.eval()
    ddp(X.double())


def evaluate_with_graph(net, ddp, optimizer):
    ddp.eval()
    ddp(X)


def forward_without_graph(net, ddp, optimizer):
    with torch.no_grad():
        ddp(X)


def train_in_no_sync(net, ddp, optimizer):
    with ddp.no_sync():
        train(ddp, sgd(net))


def step_after_no_sync(net, ddp, optimizer):
    optimizer.zero_grad()
    with ddp.no_sync():
        ddp(X).square().sum().backward()
    optimizer.step()


ACTS = [
    *(train_the_module, step_the_parents_optimizer, step_with_a_closure),
    *(update_by_hand_and_evaluate, cast_and_evaluate, evaluate_with_graph),
    *(forward_without_graph, train_in_no_sync, step_after_no_sync),
]


def after(act: Callable[..., None], net: nn.Module, *args: Any) -> list[Any]:
    """Return the parameters, as lists, after a child's act, which may not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        act(net, *args)
    return [param.tolist() for param in net.parameters()]


@as_in_torch(2)
@pytest.mark.parametrize("number", range(len(ACTS)), ids=[f.__name__ for f in ACTS])
def test_a_child_may_do_what_torch_lets_it(ctx, wrap, number):
    net = nn.Linear(3, 2)
    ddp, optimizer = wrap(net), sgd(net)
    train(ddp, optimizer)  # two steps: later forwards rebuild no buckets
    optimizer.zero_grad()
    ddp((ctx.rank + 1) * X).square().sum().backward()
    found = None
    if ctx.rank == 0:  # a child of the other rank would answer this one
        found = in_child(after, ACTS[number], net, ddp, optimizer)
    dist.barrier(ctx.group)
    optimizer.step()  # the parent is guarded, and trains on
    train(ddp, optimizer)
    return found, [param.tolist() for param in net.parameters()]


def train_copies(net, ddp, optimizer):
    train(copy.deepcopy(net), sgd(net))
    twin = copy.deepcopy(ddp)
    train(twin.module, sgd(twin))
    with twin.no_sync():
        train(twin, sgd(twin))


@on_ranks(2)
def test_a_child_may_train_copies(ctx):
    """Torch copies wrappers of the default group only."""
    net = nn.Linear(3, 2)
    ddp, optimizer = wrapped(ctx, net), sgd(net)
    train(ddp, optimizer)
    if ctx.rank == 0:
        in_child(after, train_copies, net, ddp, optimizer)
    dist.barrier(ctx.group)


@on_ranks(2)
def test_the_parent_is_guarded_after_the_fork(ctx):
    net = nn.Linear(3, 2)
    ddp, optimizer = wrapped(ctx, net), sgd(net)
    train(ddp, optimizer)
    in_child(after, train_the_module, net, ddp, optimizer)
    net((ctx.rank + 1) * X).square().sum().backward()
    with pytest.raises(minidp.UnsyncedGradientsError, match="without its wrapper"):
        optimizer.step()


def drop(net: nn.Module, held: list[Any]) -> list[Any]:
    """Train after the wrapper's death in this process."""
    held.clear()
    return after(train_the_module, net, None, None)


@on_ranks(2)
def test_a_child_is_not_told_of_wrappers_that_die(ctx):
    net, gone = nn.Linear(3, 2), nn.Linear(3, 2)
    held = [wrapped(ctx, net)]
    wrapped(ctx, gone)  # is gone at once
    assert dropped.orphans()
    in_child(drop, net, held)
    in_child(after, train_the_module, gone, None, None)


class OneOfTwo(ProcessGroup):
    """A group of two ranks, of which this process knows no other."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def getBackendName(self) -> str:
        return "one-of-two"


def refused() -> str:
    """Step local gradients of a new wrapper on a new group; return the error."""
    net = nn.Linear(3, 2)
    options: dict[str, Any] = {"init_sync": False, "process_group": OneOfTwo()}
    ddp = minidp.DataParallel(net, **options)
    with ddp.no_sync():
        ddp(X).sum().backward()
    try:
        sgd(net).step()
    except minidp.UnsyncedGradientsError as error:
        return f"{os.getpid()} {error}"
    return ""


@on_ranks(2)
def test_a_wrapper_of_the_childs_own_is_guarded(ctx):
    wrapped(ctx, nn.Linear(3, 2))  # the process has the hooks of the guard
    pid, _, text = in_child(refused).partition(" ")
    assert pid.isdecimal()
    assert int(pid) != os.getpid()
    assert "belongs to a forward inside no_sync()" in text
