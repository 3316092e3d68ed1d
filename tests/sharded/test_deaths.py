"""A rank that dies when all have agreed on a step is named by the others."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import nn

from minidp import DataParallel
from minidp.errors import CollectiveError
from tests.support.fresh import MEMORIES, run_fresh
from tests.support.optimized import Breaks

pytestmark = [pytest.mark.fresh, pytest.mark.fault]


class Dies(Breaks):
    def step(self, closure=None):
        if self.is_broken:
            os._exit(3)
        return super().step(closure)


def train(ctx):
    net = nn.Linear(8, 8)
    ddp = DataParallel(net, hang_timeout=8.0)
    optimizer = Dies(net.parameters(), 0.1)
    ddp.sharded_step(optimizer, per_parameter=True)
    for step in range(3):
        ddp(torch.ones(1, 8)).sum().backward()
        optimizer.is_broken = ctx.rank == 1 and step == 2
        start = time.monotonic()
        try:
            optimizer.step()
        except CollectiveError as error:
            return str(error), time.monotonic() - start
        optimizer.zero_grad()
    return None


@pytest.mark.parametrize("memory", MEMORIES)
def test_who_is_named(memory):
    results = run_fresh(train, 2, group_timeout=10.0, errors="return", **memory)
    text, seconds = results[0]
    assert "ank 1" in text
    assert "new values of parameters" in text or "agreement on a step" in text, text
    assert seconds < 8.0
