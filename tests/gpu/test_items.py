"""``average_over="items"``: gradients of the whole batch, errors, and no wait."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.distributed.test_items import Net, inputs, loss_of, near, whole, wrap
from tests.gpu.measure import waiting_is_an_error
from tests.gpu.places import EVERYWHERE, ON_GPUS, at
from tests.support.both import error_of

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
RELATIVE = dict(zip(DTYPES, (1e-13, 1e-5, 5e-3, 5e-2), strict=True))


def made(ctx: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return wrap(ctx, Net(dtype).to(ctx.device), bucket_cap_mb=64 / 2**20, **options)


def batch(ctx: Any, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return inputs(rank, step, 2 + 3 * rank + step).to(ctx.device, dtype)


def backward(ctx: Any, ddp: Any, step: int, dtype: torch.dtype, **how: Any) -> None:
    x = batch(ctx, ctx.rank, step, dtype)
    n = torch.ones(len(x), device=ctx.device).sum() if how.get("on_device") else len(x)
    ddp.zero_grad()
    ddp.weigh_loss(loss_of(ddp, x) / len(x), n).backward()


def is_whole_batch(ctx: Any, dtype: torch.dtype, options: Any) -> list[bool]:
    ddp, found = made(ctx, dtype, **options), []
    alone = copy.deepcopy(ddp.module)
    for step in range(3):
        backward(ctx, ddp, step, dtype, on_device=step > 0)
        ranks = range(ctx.world_size)
        everything = torch.cat([batch(ctx, rank, step, dtype) for rank in ranks])
        found.append(near(ddp, whole(alone, everything), RELATIVE[dtype]))
        found.append(ddp.item_totals.count.item() == len(everything))
    return found


@at(EVERYWHERE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=str,
)
def test_gradients_are_those_of_the_whole_batch(ranks, dtype, options):
    for found in ranks.run(is_whole_batch, dtype, options):
        assert all(found)


def step_with_bad_counts(ctx: Any, in_backward: bool) -> list[Any]:
    """(error, whether all parameters stayed, error of the next forward)."""
    ddp = made(ctx)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if in_backward:
        ddp.step_in_backward(optimizer)
    before = [param.detach().clone() for param in ddp.parameters()]
    nan = torch.full((), float("nan"), device=ctx.device)
    ddp.count_items(nan if ctx.rank == 0 else 1)
    x = batch(ctx, ctx.rank, 0, torch.float32)

    def step() -> None:
        loss_of(ddp, x).backward()
        if not in_backward:
            optimizer.step()

    error = error_of(step)
    same = all(map(torch.equal, before, ddp.parameters()))
    follow = error_of(lambda: ddp(x))
    ddp.reset()
    return [error, same, follow]


@at(EVERYWHERE)
@pytest.mark.parametrize("in_backward", [False, True])
def test_nothing_is_applied(ranks, in_backward):
    for error, same, follow in ranks.run(step_with_bad_counts, in_backward):
        assert error.startswith("ItemCountError")
        assert "negative, too large or NaN on rank 0" in error
        assert same
        assert follow.startswith("ReducerFailedError")


def never_waits(ctx: Any) -> str:
    """The host waits for the device in no forward and no backward."""
    ddp = made(ctx, check_replicas_every=0)
    for step in range(3):
        backward(ctx, ddp, step, torch.float32, on_device=True)
    with waiting_is_an_error(torch.cuda):
        work = (ctx, ddp, 3, torch.float32)
        return error_of(lambda: backward(*work, on_device=True))


@at(ON_GPUS)
def test_host_does_not_wait(ranks):
    if ranks.place.backend == "gloo":
        pytest.skip("Gloo copies through the host")
    assert set(ranks.run(never_waits)) == {""}
