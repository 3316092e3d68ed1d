"""``check_finite_grads``: who brought NaN or infinity, before it is averaged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minidp import DataParallel, NonFiniteGradientError
from minidp.comm.nonfinite import _is_surely_finite
from tests.fault.test_faults import make as make_two_layers
from tests.fault.test_faults import trains
from tests.support.both import done, error_of
from tests.support.ranks import on_ranks


class Two(nn.Module):
    def __init__(self, dtype=None):
        super().__init__()
        self.a = nn.Parameter(torch.ones(3, dtype=dtype))
        self.b = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, x, y):
        return (self.a * x).sum() + (self.b * y).sum()


def gradients_of(ddp, x, y):
    """Backward with these gradients for a and b; the error's text."""
    ddp.zero_grad()
    try:
        ddp(x, y).backward()
    except NonFiniteGradientError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("bad", "options"),
    [(float("nan"), {}), (float("inf"), {"bucket_cap_mb": 0}), (-float("inf"), {})],
)
def test_names_rank_step_and_parameter(lone_group, options, bad):
    ddp = DataParallel(Two(), check_finite_grads=True, **options)
    good = torch.ones(3)
    assert gradients_of(ddp, good, good[:2]) == ""
    text = gradients_of(ddp, torch.tensor([1.0, bad, 2.0]), good[:2])
    assert text.startswith(
        "[rank 0] A gradient of step 1 is not finite (before it was "
    )
    assert f"Found: {bad} in a, 1 of its 3 elements." in text
    assert "Parameters: a." in text
    ddp.reset()
    assert gradients_of(ddp, good, good[:2]) == ""


def test_sums_that_overflow_are_looked_at_again(lone_group):
    """The quick look sees infinity, the careful one does not."""
    big = torch.finfo(torch.float32).max
    assert not _is_surely_finite(torch.tensor([big, big]))
    ddp = DataParallel(Two(), check_finite_grads=True)
    assert gradients_of(ddp, torch.full((3,), big), torch.ones(2)) == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_other_dtypes(lone_group, dtype):
    ddp = DataParallel(Two(dtype), check_finite_grads=True)
    x, y = torch.full((3,), 60000.0).to(dtype), torch.ones(2, dtype=dtype)
    nan = y.clone()
    nan[1] = float("nan")

    def backward(*values):
        ddp.zero_grad()
        loss = ddp(*values)
        (loss.abs() if loss.is_complex() else loss).backward()

    backward(x / 3, y)  # the sum exceeds half precision
    with pytest.raises(NonFiniteGradientError, match="Parameters: b"):
        backward(x / 3, nan)


def test_sparse_gradients(lone_group):
    ddp = DataParallel(nn.Embedding(4, 2, sparse=True), check_finite_grads=True)
    ddp(torch.tensor([1])).sum().backward()
    with pytest.raises(NonFiniteGradientError, match="Parameters: weight"):
        (ddp(torch.tensor([2])) / 0).sum().backward()


def test_sync_gradients_is_checked_too(lone_group):
    ddp = DataParallel(Two(), check_finite_grads=True)
    ddp.module.a.grad = torch.full((3,), float("nan"))
    with pytest.raises(NonFiniteGradientError, match="Parameters: a"):
        ddp.sync_gradients()


def test_what_a_comm_hook_brings_is_checked_too(lone_group):
    ddp = DataParallel(Two(), check_finite_grads=True)

    ddp.register_comm_hook(None, lambda _, b: done(b.buffer() * float("inf")))
    text = gradients_of(ddp, torch.ones(3), torch.ones(2))
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
