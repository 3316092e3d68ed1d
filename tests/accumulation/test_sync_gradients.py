"""``sync_gradients()``: averages what local backwards have left."""

from __future__ import annotations

from torch import nn

from tests.support.both import Scale, history_of, modes, values, wrapped, x_of
from tests.support.ranks import on_ranks


@on_ranks(2)
@modes
def test_sync_gradients(ctx, mode):
    module = nn.ModuleDict({"a": Scale(), "b": Scale(), "c": Scale()})
    module.forward = lambda x: sum(part(x) for part in module.values())
    ddp = wrapped(ctx, module, **mode)
    with ddp.no_sync():
        ddp(x_of(ctx)).backward()
    module["b"].w.grad = None if ctx.rank == 0 else module["b"].w.grad
    module["c"].w.grad = None
    ddp.sync_gradients()
    assert values(module) == [1.5, 1.0, None]  # b: zeros from rank 0; c: None on both
    assert history_of(ddp, lambda _: ddp(x_of(ctx)), 2) == [[1.5] * 3] * 2


@on_ranks(2)
def test_sync_gradients_leaves_a_waiting_forward_armed(ctx):
    ddp = wrapped(ctx, Scale())
    ddp.module(x_of(ctx)).backward()
    loss = ddp(x_of(ctx))
    ddp.sync_gradients()
    assert values(ddp) == [1.5]
    loss.backward()
    assert values(ddp) == [3.0]
