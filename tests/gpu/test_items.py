"""``average_over="items"``: gradients of the whole batch; bad counts change nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from minidp import ItemCountError, ReducerFailedError
from tests.gpu.places import EVERYWHERE, at
from tests.gpu.scenarios import SMALL, values
from tests.items.test_special_cases import Net, inputs, loss_of, near, whole, wrap

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
RELATIVE = dict(zip(DTYPES, (1e-13, 1e-5, 5e-3, 5e-2), strict=True))


def trains_on_the_whole_batch(ctx: Any, dtype: torch.dtype, options: Any) -> None:
    ddp = wrap(ctx, Net(dtype).to(ctx.device), **SMALL, **options)
    alone = copy.deepcopy(ddp.module)
    for step in range(3):
        parts = [
            inputs(rank, step, 2 + 3 * rank + step).to(ctx.device, dtype)
            for rank in range(ctx.world_size)
        ]
        x = parts[ctx.rank]
        n = torch.tensor(len(x), device=ctx.device) if step > 0 else len(x)
        ddp.zero_grad()
        ddp.weigh_loss(loss_of(ddp, x) / len(x), n).backward()
        everything = torch.cat(parts)
        assert near(ddp, whole(alone, everything), RELATIVE[dtype])
        assert ddp.item_totals.count.item() == len(everything)


@at(EVERYWHERE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=str,
)
def test_gradients_are_those_of_the_whole_batch(ranks, dtype, options):
    ranks.run(trains_on_the_whole_batch, dtype, options)


def steps_with_bad_counts(ctx: Any, in_backward: bool) -> None:
    ddp = wrap(ctx, Net(torch.float32).to(ctx.device), **SMALL)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if in_backward:
        ddp.step_in_backward(optimizer)
    before, x = values(ddp), inputs(ctx.rank, size=2).to(ctx.device, torch.float32)
    nan = torch.full((), float("nan"), device=ctx.device)
    ddp.count_items(nan if ctx.rank == 0 else 1)
    loss = loss_of(ddp, x)

    def step() -> None:  # on a GPU the backward itself may not know yet
        loss.backward()
        optimizer.step()

    with pytest.raises(ItemCountError, match="negative, too large or NaN on rank 0"):
        step()
    assert all(map(torch.equal, before, ddp.parameters()))
    with pytest.raises(ReducerFailedError):
        ddp(x)
    ddp.reset()


@at(EVERYWHERE)
@pytest.mark.parametrize("in_backward", [False, True])
def test_nothing_is_applied(ranks, in_backward):
    ranks.run(steps_with_bad_counts, in_backward)
