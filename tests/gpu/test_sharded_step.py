"""Steps that are divided among the ranks: the bits of torch's plain loop, no waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from minidp import DataParallel
from minidp.errors import ShardedStepError
from tests.gpu.places import EVERYWHERE, NCCL, at
from tests.gpu.scenarios import SMALL, inputs, net, values
from tests.gpu.test_bits import UNUSED, VIEWS, check
from tests.support.combined import combined

STEPS = 5
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
    "adamw, fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
}
WAYS = ["plain", "clipped", "kept", "scaled"]


def divided(ctx: Any, wrap: Any, name: str, options: Any, how: str) -> Any:
    model = wrap(net(ctx), **SMALL, **options)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    is_ours = isinstance(model, DataParallel)
    scaler = None
    if how == "scaled":
        scaler = torch.amp.GradScaler(ctx.device.type, init_scale=256.0)
    if is_ours:
        model.sharded_step(optimizer, grad_scaler=scaler)
    norms = []
    for step in range(STEPS):
        loss = model(inputs(ctx, step)).square().mean()
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
        if how == "clipped":
            clip = model.clip_grad_norm_ if is_ours else None
            norm = clip(0.05) if clip else clip_grad_norm_(model.parameters(), 0.05)
            norms.append(norm.clone())
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=how != "kept")
    return values(model), norms


@at(EVERYWHERE)
@pytest.mark.parametrize("options", [{}, VIEWS, UNUSED], ids=str)
@pytest.mark.parametrize(("how", "name"), combined(WAYS, [*OPTIMIZERS], always="adamw"))
def test_bits(ranks: Any, options: Any, how: str, name: str) -> None:
    check(ranks, divided, name, options, how)


def clips_its_share(ctx: Any) -> None:
    """The norm is that of one share, and torch's kernel for lists scales by it."""
    model = DataParallel(net(ctx), process_group=ctx.group, **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.sharded_step(optimizer)
    model(inputs(ctx, 0)).square().mean().backward()
    before = values(model)
    clip_grad_norm_(model.parameters(), 1e-4)
    with pytest.raises(ShardedStepError, match=r"model\.clip_grad_norm_\(max_norm\)"):
        optimizer.step()
    assert all(map(torch.equal, before, values(model)))
    model.reset()


@at(EVERYWHERE)
def test_clipping_by_one_share_is_noticed(ranks: Any) -> None:
    ranks.run(clips_its_share)


def waits(ctx: Any, clips: bool) -> None:
    """Raise where the host waits for the device, once the buckets are rebuilt."""
    model = DataParallel(net(ctx), process_group=ctx.group, **SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model.sharded_step(optimizer)
    x = [inputs(ctx, step) for step in range(6)]
    for step in range(6):
        if step == 3:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            model(x[step]).square().mean().backward()
            if clips:
                model.clip_grad_norm_(0.05)
            optimizer.step()
            optimizer.zero_grad()
        finally:
            if step == 5:
                torch.cuda.set_sync_debug_mode("default")


@at(NCCL)
@pytest.mark.parametrize("clips", [False, True])
def test_no_host_waits(ranks: Any, clips: bool) -> None:
    ranks.run(waits, clips)


def runs_ahead(ctx: Any) -> bool:
    """Whether the host ends a step while the device still computes the one before."""
    model = DataParallel(net(ctx), process_group=ctx.group, **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.sharded_step(optimizer)
    x = inputs(ctx, 0)
    for step in range(4):
        if step == 3:
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000_000)  # cycles: a second or so
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    event = torch.cuda.Event()
    event.record()
    is_ahead = not event.query()
    torch.cuda.synchronize()
    return is_ahead


@at(NCCL)
def test_the_host_runs_ahead(ranks: Any) -> None:
    assert all(ranks.run(runs_ahead))


def whole_state(ctx: Any, wrap: Any) -> Any:
    model = wrap(net(ctx), **SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    if isinstance(model, DataParallel):
        model.sharded_step(optimizer)
    for step in range(3):
        model(inputs(ctx, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()
    if isinstance(model, DataParallel):
        state = model.whole_optimizer_state(optimizer)
    if state is None or ctx.rank:
        return []
    rows = state["state"].values()
    return [value.cpu() for row in rows for value in row.values()]


@at(EVERYWHERE)
def test_whole_states(ranks: Any) -> None:
    check(ranks, whole_state)
