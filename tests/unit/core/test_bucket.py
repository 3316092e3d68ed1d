"""One bucket: memory, copy in, copy out, and the alias rules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from minidp.comm import Communicator
from minidp.config import BucketCaps, ReducerConfig
from minidp.core import kernels
from minidp.core.averaging import Averaging, DivideFactors
from minidp.core.dense_bucket import DenseBucket
from minidp.core.grad_hooks import COPY_AT_ONCE_BYTES
from minidp.core.sparse_bucket import SparseBucket
from minidp.errors import GradientError
from minidp.layout.plan import ParamSpec, build_layout
from minidp.trace import Tracer
from tests.support.fake_cuda import FakeCuda, install

LARGE = COPY_AT_ONCE_BYTES // 4  # elements of fp32
as_views = pytest.mark.parametrize("as_view", [False, True])


def bucket_of(params, *, as_view=False, sparse=False):
    specs = [
        ParamSpec(f"p{i}", tuple(p.shape), p.stride(), p.dtype, p.device, sparse)
        for i, p in enumerate(params)
    ]
    (plan,) = build_layout(specs, [range(len(params))]).buckets
    config = ReducerConfig(BucketCaps(1, 1), gradient_as_bucket_view=as_view)
    kind = SparseBucket if sparse else DenseBucket
    named = {spec.name: param for spec, param in zip(specs, params, strict=True)}
    return kind(plan, named, SimpleNamespace(rank=0), config, Tracer())


def make_params(*shapes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def give_grads(params):
    """Distinct values everywhere: a gradient in a wrong place shows."""
    start = 1
    for param in params:
        values = torch.arange(start, start + param.numel(), dtype=torch.float32)
        param.grad = values.to(param.dtype).reshape(param.shape)
        start += param.numel()
    return [param.grad for param in params]


def finish(bucket, group, *, kept=()):
    bucket.communicator = communicator = Communicator(group)
    averaging = Averaging(communicator, over_items=False, batched=False)
    bucket.launch(averaging, is_last=True)
    bucket.is_alone = False  # as on several ranks
    bucket.wait("waiting")
    bucket.copy_out(kept)


# -------------------------------------------------------------------- dense, copied


@pytest.mark.parametrize("numel", [3, LARGE])
def test_alone_what_was_written_after_the_copy_is_undone(lone_group, numel):
    """As in torch: also where the copy out is left out because nobody wrote."""
    params = make_params((numel,), (numel,), (numel,))
    bucket = bucket_of(params)
    grads = give_grads(params)
    expected = [grad.clone() for grad in grads]
    entries = [bucket.copy_now(k, grad, 1) for k, grad in enumerate(grads)]
    bucket.flatten(entries, DivideFactors(1))
    params[0].grad.mul_(7)
    params[1].grad = grads[1] * 7
    finish(bucket, lone_group)
    for param, value in zip(params, expected, strict=True):
        assert torch.equal(param.grad, value)


# ------------------------------------------------------- gradients that are views


def synced(params, group):
    """A bucket after one synchronised backward with views."""
    bucket = bucket_of(params, as_view=True)
    bucket.flatten(give_grads(params), DivideFactors(1))
    finish(bucket, group)
    return bucket


def test_replaced_gradients_are_tolerated(lone_group):
    """By another tensor on the same memory, which counts as the view; by a copy."""
    params = make_params((2,), (2,), (2,))
    bucket = synced(params, lone_group)
    params[1].grad = bucket.payload[2:4]
    params[2].grad = params[2].grad.clone()
    bucket.flatten([p.grad for p in params], DivideFactors(2))
    assert bucket.payload.tolist() == [0.5, 1, 1.5, 2, 2.5, 3]
    finish(bucket, lone_group)
    assert params[2].grad is bucket.views[2]
    assert params[2].grad.tolist() == [2.5, 3]


@pytest.mark.parametrize("is_kept", [True, False])
def test_undecided_views_get_their_bytes_back_when_kept(lone_group, is_kept):
    params = make_params((3,), (2,))
    bucket = synced(params, lone_group)
    before = torch.tensor([0.1, 0.2, 0.3])
    params[0].grad.copy_(before)
    bucket.flatten([p.grad for p in params], DivideFactors(3), filled={0})
    finish(bucket, lone_group, kept=[0] * is_kept)
    assert params[0].grad is bucket.views[0]
    expected = before if is_kept else before / 3  # no ulp of drift
    assert torch.equal(params[0].grad, expected)
    assert bucket._saved == {}


def test_gradients_that_exist_become_views_of_a_new_bucket(lone_group):
    """Except those with a history, and misfits."""
    params = make_params((2,), (3,), (1,), (1,), (2,), (2,))
    old = synced(params, lone_group)
    params[2].grad = torch.tensor([7.0])  # of a local backward after zero_grad
    params[3].grad = None
    leaf = torch.ones(2, requires_grad=True)
    params[4].grad = tracked = leaf * 2
    params[5].grad = misfit = torch.ones(2).to_sparse()
    new = bucket_of(params, as_view=True)
    new.alias_grads_to_views()
    for param, view in zip(params[:3], new.views, strict=False):
        assert param.grad is view
    assert params[3].grad is None
    assert params[4].grad is tracked
    assert params[5].grad is misfit
    assert new.payload[:6].tolist() == [1, 2, 3, 4, 5, 7]
    assert old.payload[:6].tolist() == [1, 2, 3, 4, 5, 6]


@as_views
def test_gradients_that_require_grad_keep_their_history(lone_group, as_view):
    (param,) = make_params((2,))
    leaf = torch.tensor([3.0, 4.0], requires_grad=True)
    param.grad = leaf * leaf
    bucket = bucket_of([param], as_view=as_view)
    with torch.enable_grad():
        bucket.flatten([param.grad], DivideFactors(2))
    assert bucket.payload.tolist() == [4.5, 8.0]
    assert not bucket.payload.requires_grad
    with torch.no_grad():
        finish(bucket, lone_group)
    assert param.grad.tolist() == [4.5, 8.0]
    (second,) = torch.autograd.grad(param.grad.sum(), leaf)
    assert second.tolist() == [3.0, 4.0]  # d(x^2 / 2)
    assert bucket._tracked == {}


# ------------------------------------------------------------------------- misfits


@as_views
@pytest.mark.parametrize(
    ("grad", "found"),
    [
        (torch.ones(2, 2, dtype=torch.float64), "float64, torch.strided, {}, on cpu"),
        (torch.ones(2, 2).to_sparse(), "float32, torch.sparse_coo, {}, on cpu"),
        (torch.ones(2, 2, device="meta"), "float32, torch.strided, {}, on meta"),
    ],
)
def test_misfits_are_named(grad, found, as_view):
    bucket = bucket_of(make_params((3,), (2, 2)), as_view=as_view)
    with pytest.raises(GradientError, match="do not change dtype, shape") as caught:
        bucket.flatten([torch.ones(3), grad], DivideFactors(1))
    assert str(caught.value).startswith(
        "[rank 0] A gradient does not fit its bucket. Expected: torch.float32, "
        "torch.strided, shape (2, 2), on cpu. "
        f"Found: torch.{found.format('shape (2, 2)')}. Parameters: p1. "
    )


@pytest.mark.parametrize("shape", [(1,), (2, 1), (4, 1)])
def test_a_gradient_of_another_shape_is_not_broadcast(shape):
    bucket = bucket_of(make_params((3,), (4,)))
    misfit = r"shape \(4,\), on cpu\. Found: .* Parameters: p1"
    with pytest.raises(GradientError, match=misfit):
        bucket.flatten([torch.ones(3), torch.ones(shape)], DivideFactors(1))
    with pytest.raises(GradientError, match="Parameters: p0"):  # of the right total
        bucket.flatten([torch.ones(1), torch.ones(6)], DivideFactors(1))


# --------------------------------------------------------------------------- sparse


@pytest.fixture
def embedding():
    return nn.Parameter(torch.zeros(4, 2))


def sparse_grad(row, value):
    values = torch.full((1, 2), value)
    return torch.sparse_coo_tensor([[row]], values, (4, 2), check_invariants=True)


@pytest.mark.parametrize("grad", [sparse_grad(2, 6.0), None], ids=["kept", "None"])
def test_kept_sparse_gradient_stays(lone_group, embedding, grad):
    embedding.grad = grad
    bucket = bucket_of([embedding], sparse=True)
    bucket.flatten([grad], DivideFactors(3), filled={0})
    finish(bucket, lone_group, kept=[0])
    assert embedding.grad is grad
    assert grad is None or grad.to_dense()[2].tolist() == [6, 6]


def test_dense_gradient_in_a_sparse_bucket_is_a_misfit(embedding):
    bucket = bucket_of([embedding], sparse=True)
    with pytest.raises(GradientError) as caught:
        bucket.flatten([torch.ones(4, 2)], DivideFactors(1))
    for part in ("[rank 0]", "sparse=True", "torch.strided", "Parameters: p0."):
        assert part in str(caught.value)


def test_a_bucket_is_launched_on_the_stream_where_it_was_read(monkeypatch, embedding):
    cuda = FakeCuda()
    install(monkeypatch, cuda)
    side, bucket = cuda.Stream(), bucket_of([embedding], sparse=True)
    bucket.streams = kernels.BucketStreams(torch.device("cuda", 0))
    with cuda.stream(side):
        bucket.flatten([torch.zeros(4, 2).to_sparse()], DivideFactors(1))
    with bucket.on_stream():
        assert cuda.current_stream() is side
