"""When a forward announces a reduction: ``no_sync()``, its attribute, ``.module``."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _find_tensors

from tests.support.both import Scalars, Scale, grads, history_of, same, values, x_of
from tests.support.ranks import as_in_torch


@as_in_torch(2)
def test_called_directly(ctx, wrap):
    ddp, x = wrap(Scalars(2)), x_of(ctx)
    history: list[Any] = []
    ddp.module(x).sum().backward()  # nothing announced: local
    history.append(grads(ddp))
    ddp.zero_grad()
    ddp(x)
    ddp.module(x).sum().backward()  # still announced: reduced
    history.append(grads(ddp))
    with torch.inference_mode():
        history.append(ddp(x).clone())
    ddp.eval()
    return history + history_of(ddp, lambda _: ddp(x).sum(), 1)


@as_in_torch(2)
def test_the_forward_decides(ctx, wrap):
    """The attribute decides as no_sync() does, at the forward; no_sync restores it."""
    ddp, x, local = wrap(Scale()), x_of(ctx), [float(ctx.rank + 1)]
    for at_forward, at_backward in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        ddp.zero_grad()
        ddp.require_backward_grad_sync = bool(at_forward)
        loss = ddp(x)
        ddp.require_backward_grad_sync = bool(at_backward)
        loss.backward()
        assert values(ddp) == ([1.5] if at_forward else local)
    with contextlib.suppress(KeyError), ddp.no_sync():
        with ddp.no_sync():
            pass
        assert not ddp.require_backward_grad_sync
        raise KeyError
    assert ddp.require_backward_grad_sync


@as_in_torch(2)
def test_forwards_without_a_backward_announce_nothing(ctx, wrap):
    """The next backward of ``.module`` is a local one, and nobody waits for it."""
    ddp, x = wrap(nn.Linear(2, 1)), torch.full((1, 2), ctx.rank + 1.0)

    def fail(_: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            ddp(torch.ones(3, 5))

    for forward in (torch.no_grad()(ddp), torch.inference_mode()(ddp), fail):
        ddp.zero_grad()
        forward(x)
        ddp.module(x).sum().backward()
        assert same(ddp.module.weight.grad, x)
    return history_of(ddp, lambda _: ddp(x).sum(), 1)


@as_in_torch(2)
def test_prepare_for_backward(ctx, wrap):
    """What torch.distributed.pipelining does with a DDP inside a stage."""
    ddp = wrap(Scalars(2))
    history = []
    for _ in range(3):
        ddp.zero_grad()
        outputs = []
        for chunk in range(3):
            with ddp.no_sync():
                outputs.append(ddp(x_of(ctx) * (chunk + 1)))
        for output in outputs[:-1]:
            with ddp.no_sync():
                output.backward()
        ddp.reducer.prepare_for_backward(list(_find_tensors(outputs[-1])))
        outputs[-1].backward()
        assert values(ddp) == [9.0, 9.0]
        history.append(ddp.require_forward_param_sync)
    return history
