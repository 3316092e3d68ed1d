"""``skip_all_reduce_unused_params``: buckets that no rank uses do not travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minidp import DataParallel
from tests.support.both import (
    Scalars,
    done,
    on_both,
    values,
    wrapped,
    x_of,
)
from tests.support.ranks import on_ranks
from tests.support.tracing import collective_trace

ALONE = {
    "find_unused_parameters": True,
    "skip_all_reduce_unused_params": True,
    "bucket_cap_mb": 0,  # one bucket for each parameter
}


def wrap(ctx: Any, module: nn.Module, **options: Any) -> DataParallel:
    return wrapped(ctx, module, **{**ALONE, **options})


INT, FLOAT = (4, "torch.int32"), (1, "torch.float32")


@on_ranks(2)
@pytest.mark.parametrize(
    ("uses", "num_buckets", "averages"),
    [
        ([[0, 1, 2, 3], [0, 1, 2, 3]], 4, [1.5, 1.5, 1.5, 1.5]),
        ([[0, 1], [0, 1]], 2, [1.5, 1.5, None, None]),
        ([[0, 3], [3]], 2, [0.5, None, None, 1.5]),
        ([[0], [3]], 2, [0.5, None, None, 1.0]),  # torch hangs
        ([[1, 2], [2]], 2, [None, 0.5, 1.5, None]),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_only_buckets_that_some_rank_uses(ctx, options, uses, num_buckets, averages):
    """One all-reduce more tells which; the used-map comes at the end, as ever."""
    ddp = wrap(ctx, Scalars(4), **options)
    for _ in range(2):
        ddp.zero_grad()
        with collective_trace() as trace:
            ddp(x_of(ctx), uses[ctx.rank]).sum().backward()
        assert [t[1:] for t in trace] == [INT, *[FLOAT] * num_buckets, INT]
        assert values(ddp) == averages


@on_ranks(2)
@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (slice(2), [None, 1.5, 1.5]),
        (slice(1), [None, 1.5, None]),
        (slice(1, 2), [None, None, 1.5]),
    ],
)
def test_backward_of_another_forward(ctx, ends, expected):
    """What any forward since the last reduction reaches may still come."""
    module = Scalars(3)
    ddp = wrap(ctx, module)
    ddp(x_of(ctx), [0]).sum().backward()
    ddp.zero_grad()
    losses = [ddp(x_of(ctx), [i]).sum() for i in (1, 2)]
    sum(losses[ends]).backward()
    assert values(module) == expected


@on_ranks(2)
def test_comm_hooks_hear_which_bucket_is_the_last_to_travel(ctx):
    turns = []

    def hook(state: Any, bucket: Any) -> Any:
        turns.append((bucket.index(), bucket.is_last()))
        return done(bucket.buffer())

    ddp = wrap(ctx, Scalars(4))
    ddp.register_comm_hook(None, hook)
    ddp(x_of(ctx), [1, 3]).sum().backward()  # buckets 2 and 0: the last comes first
    assert turns == [(0, False), (2, True)]


@on_ranks(2)
@pytest.mark.parametrize("mode", [{}, {"static_graph": True}], ids=str)
def test_alone_it_has_no_effect(ctx, mode):
    module, seen = Scalars(2), []
    ddp = wrap(ctx, module, find_unused_parameters=False, **mode)
    for _ in range(3):
        ddp.zero_grad()
        ddp(x_of(ctx)).sum().backward()
        seen.append(values(module))
    assert seen == [[1.5, 1.5]] * 3


# ------------------------------------------------------------------ batched_grad_copy


def batched_create_graph(_ctx: Any, make: Any) -> Any:
    ddp = make(Scalars(), batched_grad_copy=True)
    ddp(torch.full((1,), 5.0)).square().sum().backward(create_graph=True)
    first = ddp.module.w[0].grad
    second = torch.autograd.grad(first.sum(), ddp.module.w[0])[0]
    return first.item(), second.item()


def test_difference_batched_create_graph(pool: Any) -> None:
    """Torch divides twice."""
    for theirs, ours in pool.run(on_both, 2, batched_create_graph):
        assert ours == (50.0, 25.0)  # the second order is local, and scaled
        assert theirs == (25.0, 12.5)
