"""What ranks have after ``join()``: equal optimizers, or a warning."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.support.both import wrapped
from tests.support.optimized import (
    OPTIMIZERS,
    Own,
    loss_of,
    made,
    state_of,
    step,
    told,
)
from tests.support.ranks import as_in_torch, on_ranks


@on_ranks(2, 3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_equal_after_uneven_inputs(ctx, name):
    """Momentum of the rank that trained longest, as its parameters."""
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS[name](ddp.parameters())
    for epoch in range(2):

        def train(epoch=epoch):
            with ddp.join():
                for number in range(2 * ctx.rank):  # rank 0 has none
                    step(ctx, ddp, optimizer, number + epoch)

        assert not told(train)
    return state_of(ddp, optimizer)


@as_in_torch(2)
def test_even_inputs_keep_torch_s_bits(ctx, wrap):
    ddp = wrap(made())
    optimizer = OPTIMIZERS["momentum"](ddp.parameters())
    for _ in range(2):
        with ddp.join():
            for number in range(2):
                step(ctx, ddp, optimizer, number)
    return state_of(ddp, optimizer)


@on_ranks(2)
def test_what_join_cannot_copy_is_named(ctx):
    ddp = wrapped(ctx, made())
    optimizer = Own(ddp.parameters())

    def train():
        with ddp.join():
            for number in range(1 + ctx.rank):
                step(ctx, ddp, optimizer, number)

    (text,) = told(train)
    assert "The end of join() " in text
    assert "cannot copy the state of Own." in text
    assert "rank 1's state of these" in text
    if ctx.rank == 0:
        assert "gave all ranks rank 1's parameters" in text
        assert "Optimizer steps: Own: 1 on rank 0, 2 on rank 1." in text


@on_ranks(2)
def test_later_doubts_of_all_ranks_meet(ctx):
    """A rank with fewer inputs has made fewer forwards, and fewer steps."""
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    with ddp.join():
        for number in range(2 + 2 * ctx.rank):
            step(ctx, ddp, optimizer, number)

    def averaged_by_hand():
        for number in range(3):
            optimizer.zero_grad()
            loss_of(ddp.module, 10 * number + ctx.rank).backward()
            for param in ddp.parameters():
                dist.all_reduce(param.grad, group=ctx.group)
            optimizer.step()

    assert told(averaged_by_hand) == []
    return [*ddp.parameters()]
