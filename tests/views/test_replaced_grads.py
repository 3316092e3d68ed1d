"""What users do to `.grad` between two backwards, and gradients that fit no bucket."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minidp import DataParallel
from minidp.errors import GradientError
from tests.support.both import Chain, Scalars, values, wrapped, x_of
from tests.support.ranks import on_ranks

VIEWS = {"gradient_as_bucket_view": True}
as_views = pytest.mark.parametrize("options", [{}, VIEWS], ids=["", "views"])


@on_ranks(2)
def test_replaced_views_are_averaged_and_are_views_again(ctx):
    """By another tensor on the same memory, which counts as the view; by a copy."""
    ddp = wrapped(ctx, Scalars(3), **VIEWS)
    for _ in range(2):  # then buckets are final
        ddp(x_of(ctx)).sum().backward()
    _, same, copied = ddp.module.w
    views = [param.grad for param in ddp.module.w]
    same.grad = same.grad.view(1)
    copied.grad = copied.grad.clone()
    ddp(x_of(ctx)).sum().backward()
    assert values(ddp) == [4.5] * 3
    assert [v.item() for v in views] == [4.5] * 3
    assert copied.grad is views[2]


def test_new_buckets_take_the_gradients_that_exist(lone_group):
    """Except those with a history, and misfits."""
    ddp = DataParallel(Scalars(5), process_group=lone_group, **VIEWS)
    ddp(torch.ones(1)).sum().backward()
    kept, local, none, tracked, misfit = ddp.module.w
    old = kept.grad
    local.grad = fresh = torch.tensor([7.0])  # of a local backward after zero_grad
    none.grad = None
    tracked.grad = history = torch.ones(1, requires_grad=True) * 2
    misfit.grad = sparse = torch.ones(1).to_sparse()
    ddp(torch.ones(1))
    assert kept.grad is not old
    assert local.grad is not fresh
    assert (kept.grad, local.grad, none.grad) == (1.0, 7.0, None)
    assert tracked.grad is history
    assert misfit.grad is sparse


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@as_views
def test_alone_every_bit_is_kept(lone_group, dtype, options):
    special = torch.tensor([-0.0, torch.inf, torch.nan, 1e-45])
    if dtype.is_complex:
        special = torch.complex(special, special.flip(0))
    module = nn.Module()
    module.w = nn.Parameter(torch.ones(4, dtype=dtype))
    module.w.register_hook(lambda _: special.clone())
    module.forward = lambda: module.w.abs().sum()
    ddp = DataParallel(module, process_group=lone_group, **options)
    ddp().backward()
    assert torch.equal(module.w.grad.view(torch.int32), special.view(torch.int32))


# ------------------------------------------------------------------------- misfits


def make_sparse(param):
    param.grad = param.grad.to_sparse()


@as_views
def test_a_misfit_is_named(lone_group, options):
    ddp = DataParallel(Chain(), process_group=lone_group, **options)
    ddp.module.a.register_post_accumulate_grad_hook(make_sparse)
    with pytest.raises(GradientError, match="do not change dtype, shape") as caught:
        ddp(torch.ones(2)).sum().backward()
    assert str(caught.value).startswith(
        "[rank 0] A gradient does not fit its bucket. Expected: torch.float32, "
        "torch.strided, shape (2,), on cpu. Found: torch.float32, torch.sparse_coo, "
        "shape (2,), on cpu. Parameters: a. "
    )


@as_views
@pytest.mark.parametrize("shape", [(1,), (2, 1), (4, 1)])
def test_a_gradient_of_another_shape_is_not_broadcast(lone_group, shape, options):
    ddp = DataParallel(Chain(), process_group=lone_group, **options)

    def hook(param):
        param.grad.data = torch.ones(shape)

    ddp.module.a.register_post_accumulate_grad_hook(hook)
    with pytest.raises(GradientError, match=r"shape \(2,\), on cpu\. Found: .*: a\."):
        ddp(torch.ones(2)).sum().backward()
