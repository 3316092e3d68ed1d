"""A generator and a discriminator, each with a wrapper and a divided optimizer."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel
from minidp.errors import ShardedStepError
from tests.support.both import same
from tests.support.ranks import on_ranks


def layers(*widths):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


class Game:
    """The usual loop: whatever the generator's loss leaves in D is zeroed before D."""

    def __init__(self, ctx, kind, options):
        torch.manual_seed(0)
        self.ctx = ctx
        self.d, self.g = (
            kind(net, process_group=ctx.group, **options)
            for net in (layers(3, 8, 8, 1), layers(2, 8, 3))
        )
        self.optimizers = [torch.optim.Adam(n.parameters(), 0.01) for n in self.nets]
        if kind is DataParallel:
            for net, optimizer in zip(self.nets, self.optimizers, strict=True):
                net.sharded_step(optimizer)

    @property
    def nets(self):
        return self.d, self.g

    def turn(self, number, how, *, to_none):
        random = torch.Generator().manual_seed(100 * number + self.ctx.rank)
        real = torch.randn(4, 3, generator=random)
        fake = self.g(torch.randn(4, 2, generator=random))
        self.d.zero_grad(set_to_none=to_none)
        if how == "adds losses":
            loss = self.d(real).mean() - self.d(fake.detach()).mean()
            loss.backward()
        elif how == "no_sync":
            with self.d.no_sync():
                self.d(real).mean().backward()
            (-self.d(fake.detach()).mean()).backward()
        else:
            self.d(real).mean().backward()
            (-self.d(fake.detach()).mean()).backward()
        self.optimizers[0].step()
        self.g.zero_grad(set_to_none=to_none)
        self.d(fake).mean().backward()  # gradients of D on top of averages: unused
        self.optimizers[1].step()

    def params(self):
        return [p.detach().clone() for net in self.nets for p in net.parameters()]


def train(ctx, kind, how, options, to_none):
    game = Game(ctx, kind, options)
    for number in range(6):
        game.turn(number, how, to_none=to_none)
    return game.params()


@pytest.mark.parametrize("how", ["adds losses", "no_sync"])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
@on_ranks(2)
def test_a_generator_and_a_discriminator(ctx, how, options, to_none):
    theirs = train(ctx, DistributedDataParallel, how, options, to_none)
    ours = train(ctx, DataParallel, how, options, to_none)
    assert same(theirs, ours)
    return ours


@pytest.mark.parametrize("number", [0, 2])
@on_ranks(2)
def test_two_reductions_for_one_step(ctx, number):
    """Torch's DDP adds them up; here it is an error, which says how to do it."""
    game = Game(ctx, DataParallel, {})
    for before in range(number):
        game.turn(before, "no_sync", to_none=True)
    found = game.params()
    with pytest.raises(ShardedStepError, match="or add up the losses"):
        game.turn(number, "two", to_none=True)
    assert same(found, game.params())
