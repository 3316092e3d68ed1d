"""``check_finite_grads``: who brought NaN or infinity, before it is averaged."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from torch import nn

from minidp import DataParallel, NonFiniteGradientError
from minidp.core.nonfinite import _is_surely_finite
from tests.support.both import done, error_of
from tests.support.ranks import on_ranks
from tests.support.two_layers import make as make_two_layers
from tests.support.two_layers import trains

BIG = torch.finfo(torch.float32).max


class Two(nn.Module):
    """Gradients are what is given."""

    def __init__(self, dtype=None):
        super().__init__()
        self.a = nn.Parameter(torch.ones(3, dtype=dtype))
        self.b = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, x, y):
        loss = (self.a * x).sum() + (self.b * y).sum()
        return loss.abs() if loss.is_complex() else loss


def error_with(ddp, a, b):
    """The error of a backward with these gradients."""
    ddp.zero_grad()
    given = [torch.tensor(each, dtype=ddp.module.a.dtype) for each in (a, b)]
    return error_of(lambda: ddp(*given).backward())


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0}], ids=str)
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_names_rank_step_and_parameter(lone_group, options, bad):
    ddp = DataParallel(Two(), check_finite_grads=True, **options)
    assert error_with(ddp, [1.0, 2.0, 3.0], [1.0, 1.0]) == ""
    text = error_with(ddp, [1.0, bad, 2.0], [1.0, 1.0])
    assert text.startswith(
        "NonFiniteGradientError: [rank 0] A gradient of step 1 is not finite (before "
    )
    assert f"Found: {bad} in a, 1 of its 3 elements. Parameters: a." in text
    ddp.reset()
    assert error_with(ddp, [1.0, 2.0, 3.0], [1.0, 1.0]) == ""


@pytest.mark.parametrize(
    ("dtype", "large"),
    [
        (torch.float32, BIG),  # the quick look at sums sees infinity
        *((dtype, 20000.0) for dtype in (torch.float16, torch.bfloat16)),
        (torch.complex64, 20000.0),
    ],
)
def test_sums_that_overflow_are_looked_at_again(lone_group, dtype, large):
    assert not _is_surely_finite(torch.tensor([BIG, BIG]))
    ddp = DataParallel(Two(dtype), check_finite_grads=True)
    assert error_with(ddp, [large] * 3, [1.0, 1.0]) == ""
    assert "Parameters: b" in error_with(ddp, [1.0] * 3, [1.0, nan])


def test_sparse_gradients(lone_group):
    ddp = DataParallel(nn.Embedding(4, 2, sparse=True), check_finite_grads=True)
    ddp(torch.tensor([1])).sum().backward()
    with pytest.raises(NonFiniteGradientError, match="Parameters: weight"):
        (ddp(torch.tensor([2])) / 0).sum().backward()


def test_sync_gradients_and_comm_hooks_are_checked_too(lone_group):
    ddp = DataParallel(Two(), check_finite_grads=True)
    ddp.module.a.grad = torch.full((3,), nan)
    with pytest.raises(NonFiniteGradientError, match="Parameters: a"):
        ddp.sync_gradients()
    ddp.reset()
    ddp.register_comm_hook(None, lambda _, b: done(b.buffer() * inf))
    text = error_with(ddp, [1.0] * 3, [1.0] * 2)
    assert "is not finite after the comm hook" in text


@on_ranks(2)
def test_the_others_hear_of_it_and_keep_their_gradients_finite(ctx):
    ddp = make_two_layers(ctx, check_finite_grads=True, hang_timeout=20.0)
    x = torch.ones(1, 4)
    ddp(x).sum().backward()
    ddp.zero_grad()
    error = error_of(lambda: ddp(x / 0 if ctx.rank else x).sum().backward())
    mine = "NonFiniteGradientError: [rank 1] "
    if ctx.rank == 0:
        assert error.startswith("CollectiveError: [rank 0] ")
        assert f"Rank 1 gave up: {mine}" in error
        grads = [param.grad for param in ddp.parameters()]
        assert all(grad is None or grad.isfinite().all() for grad in grads)
    else:
        assert error.startswith(mine)
    ddp.reset()
    assert trains(ctx, ddp)
