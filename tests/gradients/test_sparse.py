"""Sparse gradients of embeddings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minidp import DataParallel, comm_hooks
from minidp.errors import GradientError
from tests.support.both import history_of, same, wrapped
from tests.support.ranks import on_ranks


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, row: torch.Tensor | None) -> torch.Tensor:
        return self.w.sum() if row is None else (self.table(row) * self.w).sum()


@on_ranks(2)
def test_sparse_gradient_missing_on_one_rank_is_averaged(ctx):
    """Torch raises on that rank and its peer dies of it."""
    ddp = wrapped(ctx, Embeds(), find_unused_parameters=True)
    row = torch.tensor([2])
    mine = row if ctx.rank == 0 else None
    history = history_of(ddp, lambda n: ddp([mine, mine, None][n]))
    expected = torch.zeros(4, 2)
    expected[2] = 0.5
    found = [None if step[1] is None else step[1].to_dense() for step in history]
    assert same(found, [expected, expected, None])


class TwoTables(nn.Module):
    """Two sparse embeddings whose sum is used: their gradients share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = (nn.Embedding(5, 3, sparse=True) for _ in range(2))

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return (self.tokens(i) + self.places(i)).sum()


@on_ranks(2)
@pytest.mark.parametrize("use_hook", [False, True])
def test_difference_sparse_gradients_that_share_memory(ctx, use_hook):
    """Torch divides the shared values twice, or reduces them twice."""
    ddp = wrapped(ctx, TwoTables())
    if use_hook:
        ddp.register_comm_hook(None, comm_hooks.all_reduce_hook)
    history = history_of(ddp, lambda _: ddp(torch.tensor([ctx.rank, ctx.rank + 1])))
    assert [grad.to_dense().sum() for step in history for grad in step] == [6.0] * 6


@on_ranks(2)
def test_a_sparse_gradient_that_no_rank_used_stays(ctx):
    ddp = wrapped(ctx, Embeds(), find_unused_parameters=True)
    weight = ddp.module.table.weight
    ddp(torch.tensor([ctx.rank])).backward()
    grad, before = weight.grad, weight.grad.to_dense()
    ddp(None).backward()
    assert weight.grad is grad
    assert torch.equal(grad.to_dense(), before)
    return before


def test_a_dense_gradient_of_a_sparse_embedding_is_a_misfit(lone_group):
    ddp = DataParallel(Embeds(), process_group=lone_group)
    weight = ddp.module.table.weight

    def densify(param: nn.Parameter) -> None:
        param.grad = param.grad.to_dense()

    weight.register_post_accumulate_grad_hook(densify)
    with pytest.raises(GradientError) as caught:
        ddp(torch.tensor([1])).backward()
    text = str(caught.value)
    for part in ("[rank 0]", "sparse=True", "torch.strided", "rs: table.weight."):
        assert part in text
