"""Ranks that ran out of inputs in ``join()`` hold old parameters, and prove nothing."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.both import wrapped
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_a_penalty_goes_on_after_other_ranks_have_run_out(ctx):
    """Its backward comes after the main one; torch trains to the same end."""
    ddp = wrapped(ctx, nn.Linear(4, 3), hang_timeout=20.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for k in range(2 + 3 * ctx.rank):
            optimizer.zero_grad()
            ddp(torch.ones(3, 4) * (k + ctx.rank)).square().mean().backward()
            penalty = sum(param.square().sum() for param in ddp.parameters())
            (0.1 * penalty).backward()
            optimizer.step()
    return [param.detach() for param in ddp.parameters()]
