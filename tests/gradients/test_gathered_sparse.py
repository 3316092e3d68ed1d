"""Sparse gradients where the backend adds dense tensors only, as NCCL."""

from __future__ import annotations

import pytest
import torch

from minidp import DataParallel
from minidp.comm import collectives
from tests.support.ranks import on_ranks


def sparse_of(rank, dtype=torch.float32, rows=7):
    """Return a sparse tensor whose rows overlap with those of other ranks."""
    indices = torch.tensor([[rank, rank + 1, rank, 5][: 4 - rank]])
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(indices.size(1), 3, 2, generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (rows, 3, 2), check_invariants=True)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_what_is_gathered_is_the_sum(ctx, dtype):
    mine = sparse_of(ctx.rank, dtype)
    collectives.GatheredSum(mine, ctx.group).wait()
    expected = sum(sparse_of(r, dtype).to_dense() for r in range(ctx.world_size))
    assert torch.allclose(mine.to_dense(), expected)
    return mine.to_dense()


@on_ranks(2)
def test_ranks_without_a_value(ctx):
    empty = torch.sparse_coo_tensor(torch.empty(1, 0), [], (4,), check_invariants=True)
    collectives.GatheredSum(empty, ctx.group).wait()
    assert empty.to_dense().tolist() == [0] * 4
    some = torch.sparse_coo_tensor([[2]], [3.0], (4,), check_invariants=True)
    mine = some if ctx.rank else empty
    collectives.GatheredSum(mine, ctx.group).wait()
    assert mine.to_dense().tolist() == [0, 0, 3, 0]


@on_ranks(2)
def test_an_embedding_trains_on_such_a_backend(ctx):
    def train():
        torch.manual_seed(0)
        layer = torch.nn.Embedding(9, 4, sparse=True)
        ddp = DataParallel(layer, process_group=ctx.group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            ddp(torch.tensor([step, ctx.rank, 4])).square().sum().backward()
            optimizer.step()
        return layer.weight.detach()

    expected = train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_must_gather", lambda t, _: t.is_sparse)
        patch.setattr(collectives.GatheredSum, "is_done_within", done, raising=False)
        assert torch.allclose(train(), expected)


def done(self, _seconds):
    """Gloo's waits have a limit; those of a backend that must gather have none."""
    return True
