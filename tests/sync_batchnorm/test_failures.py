"""A rank fails while another one waits in a `SyncBatchNorm`; reset() helps both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

from minidp import DataParallel, SyncBatchNorm
from tests.support.both import error_of, same
from tests.support.ranks import on_simulated_ranks

pytestmark = [pytest.mark.fault, pytest.mark.fresh]


def refuse(_grad: torch.Tensor) -> None:
    raise ValueError("this rank's own mistake")


# In the forward one rank has begun to make the layers' own group, the other has not.
@on_simulated_ranks(2, fresh={"group_timeout": 4.0})
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


class Net(nn.Module):
    """Two layers, in whose forward or backward a rank can raise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = [nn.Linear(2, 3), SyncBatchNorm(3), nn.Linear(3, 3), SyncBatchNorm(3)]
        self.layers = nn.ModuleList(layers)
        self.fails_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if self.fails_in == "forward" and number == 3:
                refuse(x)
            x = layer(x)
            if self.fails_in == "backward" and number == 2:
                x.register_hook(refuse)
        return x


def trained(ctx: Any, ddp: DataParallel, steps: range) -> list[torch.Tensor]:
    """Run some steps with inputs of this rank, and return the parameters."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + ctx.rank)
        optimizer.zero_grad()
        ddp(torch.randn(4, 2, generator=generator)).pow(3).sum().backward()
        optimizer.step()
    return [param.detach().clone() for param in ddp.parameters()]


@on_simulated_ranks(2, fresh={"group_timeout": 120.0})
@pytest.mark.parametrize(
    ("first", "which", "resets"),  # all pairs; `first` is steps before the failure
    [
        (0, "forward", True),
        (0, "backward", False),
        (2, "forward", False),
        (2, "backward", True),
    ],
)
def test_the_others_name_a_rank_that_raises(ctx, first, which, resets):
    """It calls reset(), or is elsewhere for longer than the limit; then both train on.

    Nobody may wait for the first limit, or for the timeout of the group.
    """
    store = distributed_c10d._get_default_store()
    limit = 100.0 if resets else 2.0
    ddp = DataParallel(Net(), hang_timeout=limit, forward_sync_buffers=False)
    trained(ctx, ddp, range(first))
    ddp.module.fails_in = which if ctx.rank else ""
    told = error_of(lambda: trained(ctx, ddp, range(first, first + 1)))
    ddp.module.fails_in = ""
    if ctx.rank:
        assert told == "ValueError: this rank's own mistake"
        if not resets:
            store.wait(["rank 0 has raised"])
    else:
        assert told.startswith("CollectiveError: [rank 0] Missing: rank 1. Rank 1 ")
        assert f"A collective failed while SyncBatchNorm ran its {which} (" in told
        assert ("it called reset()" in told) == resets
        assert ("it did not finish within 2 s" in told) != resets
        again = error_of(lambda: ddp(torch.ones(4, 2)))
        assert again.startswith("ReducerFailedError: [rank 0] ")
        store.set("rank 0 has raised", "")
    ddp.reset()
    found = trained(ctx, ddp, range(first, 4))
    undisturbed = DataParallel(Net(), forward_sync_buffers=False)
    assert same(found, trained(ctx, undisturbed, range(4)))
    return found
