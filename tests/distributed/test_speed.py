"""`minidp.watch_speed` on ranks; how often it is right: benchmarks/slow_ranks.py."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import nn

import minidp


class Slow(nn.Module):
    """A layer whose forward takes as long as it is told."""

    seconds = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layer(x)


def train(ctx: Any, attached: bool, resets: bool) -> Any:
    """Train until rank 0 has logged that rank 1 is slow; return that, and numbers."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore
    logger = logging.getLogger("minidp")
    logger.addHandler(handler)
    model = Slow()
    if attached:
        wrapper: Any = minidp.attach(model, process_group=ctx.group)
    else:
        wrapper = minidp.DataParallel(model, process_group=ctx.group)
    speed = minidp.watch_speed(wrapper)
    call = model if attached else wrapper
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if resets:
        wrapper.reset()
    model.seconds = 0.03 * ctx.rank
    steps = 0
    done = torch.zeros(1)
    while not done and steps < 300:
        call(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        done.fill_(len(lines))
        torch.distributed.all_reduce(done, group=ctx.group)
    speed.stop()
    logger.removeHandler(handler)
    return lines, speed.numbers()


def check(results: Any) -> None:
    (lines, numbers), (nothing, others) = results
    assert len(lines) == 1
    assert "Rank 1 (" in lines[0]
    assert ": its forward takes " in lines[0]
    assert nothing == []
    assert numbers["slow_rank"] == 1
    assert "slow_rank" not in others
    assert others["forward_s"] > 0.03 > numbers["forward_s"]


def test_rank_0_names_the_slow_rank(pool: Any) -> None:
    check(pool.run(train, 2, False, False))


def test_it_works_for_attached_models_and_after_reset(pool: Any) -> None:
    check(pool.run(train, 2, True, True))
