"""``average_over="items"`` on any device: right, no waits, errors before a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from minidp import DataParallel, ItemCountError
from tests.gpu.places import EVERYWHERE, ON_GPUS, at

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
RELATIVE = dict(zip(DTYPES, (1e-13, 1e-5, 5e-3, 5e-2), strict=True))


def wrap(ctx: Any, dtype: torch.dtype, **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    net.to(ctx.device, dtype)
    options = {"bucket_cap_mb": 64 / 2**20, "average_over": "items"} | options
    return DataParallel(net, process_group=ctx.group, **options)


def batch(ctx: Any, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(10 * rank + step)
    x = torch.randn(2 + 3 * rank + step, 4, generator=random, dtype=torch.float64)
    return x.to(ctx.device, dtype)


def loss_of(net: Any, x: torch.Tensor) -> torch.Tensor:
    return (net(x) - 1).square().sum()


def is_whole_batch(ctx: Any, dtype: torch.dtype, options: Any) -> list[bool]:
    ddp, found = wrap(ctx, dtype, **options), []
    alone = copy.deepcopy(ddp.module)
    for step in range(3):
        ddp.zero_grad()
        x = batch(ctx, ctx.rank, step, dtype)
        n = torch.ones(len(x), device=ctx.device).sum()
        ddp.weigh_loss(loss_of(ddp, x) / len(x), n if step else len(x)).backward()
        parts = [batch(ctx, rank, step, dtype) for rank in range(ctx.world_size)]
        whole = torch.cat(parts)
        alone.zero_grad()
        (loss_of(alone, whole) / len(whole)).backward()
        found += [
            bool((a.grad - b.grad).abs().max() <= RELATIVE[dtype] * b.grad.abs().max())
            for a, b in zip(ddp.parameters(), alone.parameters(), strict=True)
        ]
        found.append(ddp.item_totals.count.item() == len(whole))
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


def steps_with_bad_counts(ctx: Any, in_backward: bool) -> list[Any]:
    """(error's text, whether a parameter changed, error of the next forward)."""
    ddp = wrap(ctx, torch.float32)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if in_backward:
        ddp.step_in_backward(optimizer)
    before = [param.detach().clone() for param in ddp.parameters()]
    nan = torch.full((), float("nan"), device=ctx.device)
    ddp.count_items(nan if ctx.rank == 0 else 1)
    text = follow = ""
    try:
        loss_of(ddp, batch(ctx, ctx.rank, 0, torch.float32)).backward()
        if not in_backward:
            optimizer.step()
    except ItemCountError as error:
        text = str(error)
    same = all(map(torch.equal, before, ddp.parameters()))
    try:
        ddp(batch(ctx, ctx.rank, 0, torch.float32))
    except RuntimeError as error:
        follow = type(error).__name__
    ddp.reset()
    return [text, same, follow]


@at(EVERYWHERE)
@pytest.mark.parametrize("in_backward", [False, True])
def test_nothing_is_applied(ranks, in_backward):
    for text, same, follow in ranks.run(steps_with_bad_counts, in_backward):
        assert "negative, too large or NaN on rank 0" in text
        assert same
        assert follow == "ReducerFailedError"


def never_waits(ctx: Any) -> str:
    """The host waits for the device in no forward and no backward."""
    ddp = wrap(ctx, torch.float32, check_replicas_every=0)
    for step in range(4):
        ddp.zero_grad()
        x = batch(ctx, ctx.rank, step, torch.float32)
        n = torch.ones(len(x), device=ctx.device).sum()
        torch.cuda.set_sync_debug_mode("error" if step == 3 else "default")
        try:
            ddp.weigh_loss(loss_of(ddp, x) / len(x), n).backward()
        except RuntimeError as error:
            return str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return ""


@at(ON_GPUS)
def test_host_does_not_wait(ranks):
    if ranks.place.backend == "gloo":
        pytest.skip("Gloo copies through the host")
    assert set(ranks.run(never_waits)) == {""}
