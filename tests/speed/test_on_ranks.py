"""`minidp.watch_speed` on ranks: one injection per phase, named with its rank.

What is slow takes many times as long as everything else, so that a busy machine does
not hide it. How often it is right when little is slow: benchmarks/slow_ranks.py.
"""

from __future__ import annotations

import logging
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minidp
from tests.support.ranks import on_ranks
from tests.support.waiting import until

pytestmark = pytest.mark.fresh

SECONDS = 0.1
PHASES = {
    "data": "time between steps (data loading, logging) takes ",
    "forward": "forward takes ",
    "backward": "backward (most of it before bucket 1: first.weight to first.weight) ",
    "optimizer": "optimizer step takes ",
}


class SlowBackward(torch.autograd.Function):
    """Sleep in the backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class Net(nn.Module):
    """Two layers; ``naps`` has seconds to sleep, by phase."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 4, bias=False)
        self.naps = dict.fromkeys(PHASES, 0.0)

    def forward(self, x):
        time.sleep(self.naps["forward"])
        return self.last(SlowBackward.apply(self.first(x), self.naps["backward"]))


def logged(lines):
    """Make a handler that adds messages to ``lines``."""
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("minidp").addHandler(handler)
    return handler


@on_ranks(2)
@pytest.mark.parametrize(
    ("phase", "attached"), [*((phase, False) for phase in PHASES), ("forward", True)]
)
def test_rank_0_names_the_slow_rank_and_its_phase(ctx, phase, attached):
    """Train until rank 0 has logged that rank 1 is slow."""
    lines = []
    handler = logged(lines)
    model = Net()
    options = {"process_group": ctx.group, "bucket_cap_mb": 1e-5}
    if attached:
        wrapper = minidp.attach(model, **options)
        wrapper.reset()
    else:
        wrapper = minidp.DataParallel(model, **options)
    speed = minidp.watch_speed(wrapper)
    call = model if attached else wrapper
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.naps[phase] = SECONDS * ctx.rank
    done = torch.zeros(1)
    for _ in range(300):
        time.sleep(model.naps["data"])
        call(torch.ones(2, 4)).sum().backward()
        done.fill_(len(lines))
        dist.all_reduce(done, group=ctx.group)  # no wait: all end the backward at once
        if done:
            break
        time.sleep(model.naps["optimizer"])
        optimizer.step()
        optimizer.zero_grad()
    speed.stop()
    logging.getLogger("minidp").removeHandler(handler)
    numbers = speed.numbers()
    assert (numbers[f"{phase}_s"] > SECONDS / 2) == (ctx.rank == 1)
    if ctx.rank == 1:
        assert lines == []
        assert "slow_rank" not in numbers
    else:
        assert len(lines) == 1
        assert "Rank 1 (" in lines[0]
        assert f": its {PHASES[phase]}" in lines[0]
        assert numbers["slow_rank"] == 1


@on_ranks(2)
def test_a_rank_that_waits_for_buffers_of_logical_ranks_does_not_work(ctx):
    """Rank 0 comes late to the loop, which begins with its module buffers."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    options = {"process_group": ctx.group, "logical_ranks": 4}
    model = minidp.DataParallel(module, **options)
    speed = minidp.watch_speed(model)
    for _ in range(6):
        time.sleep(SECONDS * (ctx.rank == 0))
        for _ in model.each_logical_rank():
            model(torch.randn(2, 4)).square().sum().backward()
        model.zero_grad()
    speed.stop()
    numbers = speed.numbers()
    assert numbers["step"] == 5
    assert (numbers["data_s"] > SECONDS / 2) == (ctx.rank == 0)
    assert (numbers["waiting_s"] > SECONDS / 2) == (ctx.rank == 1)


@on_ranks(2)
def test_two_watches_of_one_model_do_not_know_each_other(ctx):
    model = minidp.DataParallel(Net(), process_group=ctx.group)
    peers = model._reducer.communicator.peers
    first, second = minidp.watch_speed(model), minidp.watch_speed(model)
    for _ in range(8):
        model(torch.ones(2, 4)).sum().backward()
    posts = []
    for watch in (first, second):
        plain = watch._exchange

        def counted(posted, watch=watch, plain=plain):
            posts.append(watch)
            return plain(posted)

        topic = next(t for t, rider in peers._riders.items() if rider == plain)
        peers._riders[topic] = counted
    until(lambda: {*posts} == {first, second})
    assert peers.interval <= 0.25
    second.stop()
    second.stop()  # nothing more happens
    posts.clear()
    until(lambda: posts.count(first) > 2)
    assert second not in posts
    first.stop()
    assert not peers._riders
    assert peers.interval == 1.0  # no more posts than any model has
    dist.barrier(group=ctx.group)


@on_ranks(2)
def test_an_exchange_that_raises_says_nothing_about_the_store(ctx):
    lines = []
    handler = logged(lines)
    model = minidp.DataParallel(Net(), process_group=ctx.group)
    peers = model._reducer.communicator.peers

    def broken(_posted):
        raise RuntimeError("a mistake in the rider")

    peers.exchange_often("broken", broken)
    watch = minidp.watch_speed(model)
    until(lambda: lines)
    logging.getLogger("minidp").removeHandler(handler)
    assert len(lines) == 1
    assert "The exchange of broken/0 ends" in lines[0]
    assert peers._channel.problem == ""
    assert len(peers._riders) == 1  # the other one goes on
    watch.stop()
    dist.barrier(group=ctx.group)
