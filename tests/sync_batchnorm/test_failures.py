"""A rank fails while another one waits in a `SyncBatchNorm`; reset() helps both."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minidp import DataParallel, SyncBatchNorm
from tests.support.both import error_of
from tests.support.ranks import on_ranks

pytestmark = [pytest.mark.fault, pytest.mark.fresh]


def refuse(_grad: torch.Tensor) -> None:
    raise ValueError("this rank's own mistake")


# In the forward one rank has begun to make the layers' own group, the other has not.
@on_ranks(2, fresh={"group_timeout": 2.0})
@pytest.mark.parametrize("which", ["backward", "forward"])
def test_one_rank_raises(ctx, which):
    layers = [nn.Linear(2, 2, bias=False), SyncBatchNorm(2)]
    # Without their broadcast, which would be where the other rank waits.
    ddp = DataParallel(nn.Sequential(*layers), forward_sync_buffers=False)
    x = torch.arange(8.0).view(4, 2).square() + ctx.rank

    def run() -> None:
        if which == "forward" and ctx.rank == 1:
            refuse(x)
        y = ddp(x)
        if ctx.rank == 1:
            y.register_hook(refuse)
        y.pow(3).sum().backward()

    told = error_of(run)
    if ctx.rank:
        assert told.startswith("ValueError: this rank's own mistake")
    else:
        assert told.startswith("CollectiveError: [rank 0] ")
        assert f"A collective failed while SyncBatchNorm ran its {which} (" in told
    ddp.reset()
    ddp.zero_grad()
    y = ddp(x)
    y.pow(3).sum().backward()
    whole = [torch.empty_like(y) for _ in range(2)]
    torch.distributed.all_gather(whole, y.detach(), group=ddp.process_group)
    both = torch.cat(whole)  # as one batch: these are its moments
    assert torch.allclose(both.mean(0), torch.zeros(2), atol=1e-5)
    assert torch.allclose(both.var(0, correction=0), torch.ones(2), atol=1e-3)
    return layers[1].weight.grad
