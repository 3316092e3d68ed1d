"""Logical ranks on process groups that are written in Python: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import minidp
from tests.groups.test_python_groups import GROUPS, Delegating
from tests.logical_ranks.trainings import batch
from tests.support.both import same


class ExchangesToo(Delegating):
    """A group that has all-to-all, too."""

    def alltoall_base(self, *args: Any) -> Any:
        return self._run("alltoall_base", *args)


KINDS = GROUPS | {"with all-to-all": lambda group: ExchangesToo(group, None)}


class Net(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 12, sparse=sparse)
        self.net = nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x: torch.Tensor, leaf: int) -> torch.Tensor:
        words = (torch.arange(5) + leaf) % 9
        return self.net(x + self.words(words).sum(0)).square().mean()


def train(ctx: Any, kind: str, sparse: bool, divides: bool = False) -> list[Any]:
    net = Net(sparse=sparse)
    group = KINDS[kind](ctx.group) if kind else ctx.group
    options: dict[str, Any] = {"logical_ranks": 5, "bucket_cap_mb": 0.0002}
    model = minidp.DataParallel(net, process_group=group, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if divides:
        model.sharded_step(optimizer)
    for step in range(3):
        for leaf in model.each_logical_rank():
            model(batch(step, leaf), leaf).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(net.state_dict().values())


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_one_rank(pool: Any, kind: str, sparse: bool) -> None:
    (alone,) = pool.run(train, 1, "", sparse)
    for size in (2, 3):
        for found in pool.run(train, size, kind, sparse):
            assert same(alone, found)


@pytest.mark.parametrize("kind", KINDS)
def test_divided_steps(pool: Any, kind: str) -> None:
    (alone,) = pool.run(train, 1, "", False)
    for size in (2, 3):
        for found in pool.run(train, size, kind, False, True):
            assert same(alone, found)
