"""A rank fails while another one waits in a `SyncBatchNorm`; reset() helps both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minidp import DataParallel, SyncBatchNorm
from tests.support.fresh import run_fresh


def refuse(_grad: torch.Tensor) -> None:
    raise ValueError("this rank's own mistake")


def one_rank_raises(ctx: Any, where: str) -> Any:
    layers = [nn.Linear(2, 2, bias=False), SyncBatchNorm(2)]
    # Without their broadcast, which would be where the other rank waits.
    ddp = DataParallel(nn.Sequential(*layers), forward_sync_buffers=False)
    x = torch.arange(8.0).view(4, 2).square() + ctx.rank
    text = ""
    try:
        if where == "forward" and ctx.rank == 1:
            refuse(x)
        y = ddp(x)
        if ctx.rank == 1:
            y.register_hook(refuse)
        y.pow(3).sum().backward()
    except (RuntimeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    ddp.reset()
    ddp.zero_grad()
    y = ddp(x)
    y.pow(3).sum().backward()
    return text, y.detach(), layers[1].weight.grad


# In the forward one rank has begun to make the layers' own group, the other has not.
@pytest.mark.parametrize("where", ["backward", "forward"])
def test_one_rank_raises(where: str) -> None:
    (waited, *first), (raised, *second) = run_fresh(
        one_rank_raises, 2, where, group_timeout=2.0
    )
    assert raised == "ValueError: this rank's own mistake"
    assert waited.startswith(
        f"CollectiveError: [rank 0] A collective failed while SyncBatchNorm ran its "
        f"{where}. "
    )
    y = torch.cat([first[0], second[0]])  # as one batch: these are its moments
    assert torch.allclose(y.mean(0), torch.zeros(2), atol=1e-5)
    assert torch.allclose(y.var(0, correction=0), torch.ones(2), atol=1e-3)
    assert torch.equal(first[1], second[1])
