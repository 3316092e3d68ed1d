"""What a comm hook sees of a bucket."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from minidp import GradBucket
from minidp.hooks.grad_bucket import BucketInfo
from minidp.layout.plan import ParamSpec, build_layout


def make(*params, sparse=False):
    """A bucket over ``params`` whose elements are 0, 1, 2, ... in memory order."""
    specs = [
        ParamSpec(f"p{i}", tuple(p.shape), p.stride(), p.dtype, p.device, sparse)
        for i, p in enumerate(params)
    ]
    (plan,) = build_layout(specs, [range(len(params))]).buckets
    if sparse:
        buffer = torch.eye(3).to_sparse()
    else:
        numel = plan.numel * (2 if plan.dtype.is_complex else 1)
        dtype = torch.empty(0, dtype=plan.dtype).real.dtype
        buffer = torch.arange(numel).to(dtype)
    return GradBucket(plan, buffer, params, BucketInfo(2, False, 3, "group"))


def test_has_everything_that_torchs_has():
    def public(kind):
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(dist.GradBucket) <= public(GradBucket)


def test_gradients_are_views_in_the_order_of_the_parameters():
    params = torch.zeros(2, 2), torch.zeros(()), torch.zeros(0, 3), torch.zeros(3)
    bucket = make(*params)
    grads = bucket.gradients()
    assert [g.shape for g in grads] == [p.shape for p in params]
    assert [g.tolist() for g in grads] == [[[0, 1], [2, 3]], 4, [], [5, 6, 7]]
    grads[1].fill_(-1.0)
    assert bucket.buffer()[4] == -1
    bucket.parameters().clear()  # of a list of its own
    assert all(a is b for a, b in zip(bucket.parameters(), params, strict=True))
    assert (bucket.index(), bucket.is_last(), bucket.divisor()) == (2, False, 3)
    assert bucket.process_group() == "group"


def test_channels_last_gradients_have_the_parameters_strides():
    param = torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
    (grad,) = make(param).gradients()
    assert grad.is_contiguous(memory_format=torch.channels_last)
    assert grad.permute(0, 2, 3, 1).flatten().tolist() == list(range(24))


def test_complex_gradients_are_complex_views():
    bucket = make(torch.zeros(2, dtype=torch.complex64), torch.zeros(1).cfloat())
    assert bucket.buffer().dtype == torch.float32
    first, second = bucket.gradients()
    assert first.tolist() == [0 + 1j, 2 + 3j]
    assert second.tolist() == [4 + 5j]
    second.zero_()
    assert bucket.buffer().tolist() == [0, 1, 2, 3, 0, 0]


def test_a_sparse_bucket_has_its_one_gradient():
    bucket = make(torch.zeros(3, 3), sparse=True)
    assert bucket.gradients() == [bucket.buffer()]
    assert bucket.gradients()[0].is_sparse
    assert bucket.in_row_major() is bucket


def test_set_buffer_changes_what_the_rest_of_a_chain_sees():
    bucket = make(torch.zeros(2), torch.zeros(2, 1))
    before = bucket.buffer()
    half = torch.arange(10.0, 14.0).half()
    bucket.set_buffer(half)
    assert bucket.buffer() is half
    assert [g.dtype for g in bucket.gradients()] == [torch.float16] * 2
    assert bucket.gradients()[1].tolist() == [[12], [13]]
    assert before.tolist() == [0, 1, 2, 3]
    bucket.set_buffer(torch.arange(10.0)[5:9])  # starts in the middle of its memory
    assert [g.flatten().tolist() for g in bucket.gradients()] == [[5, 6], [7, 8]]


def test_row_major_copy():
    last = torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
    bucket = make(last, torch.zeros(3, 2).t(), torch.zeros(5))
    plain = bucket.in_row_major()
    assert plain is not bucket
    for mine, theirs in zip(bucket.gradients(), plain.gradients(), strict=True):
        assert theirs.is_contiguous()
        assert torch.equal(mine, theirs)
    flat = torch.cat([g.view(-1) for g in plain.gradients()])
    assert torch.equal(plain.buffer(), flat)
    plain.buffer().zero_()
    assert bucket.buffer().sum() > 0
    assert (plain.index(), plain.divisor(), plain.process_group()) == (2, 3, "group")
    assert plain.parameters()[0] is last


def test_row_major_copy_of_complex_gradients():
    plain = make(torch.zeros(3, 2, dtype=torch.complex64).t()).in_row_major()
    assert plain.buffer().dtype == torch.float32
    assert plain.gradients()[0].tolist() == [
        [0 + 1j, 4 + 5j, 8 + 9j],
        [2 + 3j, 6 + 7j, 10 + 11j],
    ]


@pytest.mark.parametrize("shape", [(4, 3), (1, 3, 1, 1), (0, 2), ()], ids=str)
def test_a_row_major_bucket_is_not_copied(shape):
    bucket = make(torch.zeros(shape))
    assert bucket.in_row_major() is bucket
