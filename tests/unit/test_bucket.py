"""One bucket: memory, copy in, copy out, and the alias rules."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from minidp._arrivals import COPY_AT_ONCE_BYTES, Mark
from minidp._bucket import BucketState, Division
from minidp._collectives import all_reduce
from minidp._dense_bucket import DenseBucket
from minidp._layout import ParamSpec, build_layout
from minidp._sparse_bucket import SparseBucket
from minidp.errors import GradientError, InternalError

LARGE = COPY_AT_ONCE_BYTES // 4  # elements of fp32


def bucket_of(params, *, as_view=False, sparse=False):
    specs = [
        ParamSpec(f"p{i}", tuple(p.shape), p.stride(), p.dtype, p.device, sparse)
        for i, p in enumerate(params)
    ]
    (plan,) = build_layout(specs, [range(len(params))]).buckets
    names = [spec.name for spec in specs]
    if sparse:
        return SparseBucket(plan, params, names, 0)
    return DenseBucket(plan, params, names, 0, as_view=as_view)


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


@pytest.fixture
def group(lone_group):
    return lone_group


def launch(bucket, group):
    return bucket.launch(partial(all_reduce, group=group))


def reduce(bucket, group, *, factor=1):
    """Launch and wait; ``factor`` stands for what other ranks add."""
    launch(bucket, group)
    bucket.complete()
    if factor != 1:
        bucket.buffer.mul_(factor)


# -------------------------------------------------------------------- dense, copied


def test_copy_in_and_out(group):
    params = make_params((2, 3), (), (0, 2), (4,))
    grads = give_grads(params)
    expected = [grad / 2 for grad in grads]
    bucket = bucket_of(params)
    bucket.flatten(grads, Division(2))
    assert torch.equal(bucket.buffer, torch.arange(1.0, 12.0) / 2)
    reduce(bucket, group)
    bucket.unflatten()
    for param, old, value in zip(params, grads, expected, strict=True):
        assert param.grad is old  # the user's own tensor
        assert torch.equal(param.grad, value)
        assert not bucket._memory.owns(param.grad) or param.numel() == 0


def test_what_other_ranks_add_arrives(group):
    params = make_params((3,), (2,))
    bucket = bucket_of(params)
    bucket.flatten(give_grads(params), Division(2))
    reduce(bucket, group, factor=20)
    bucket.unflatten()
    assert params[0].grad.tolist() == [10, 20, 30]
    assert params[1].grad.tolist() == [40, 50]


@pytest.mark.parametrize("numel", [3, COPY_AT_ONCE_BYTES // 4])
def test_alone_what_was_written_after_the_copy_is_undone(group, numel):
    """As in torch: also where the copy out is left out because nobody wrote."""
    params = make_params((numel,), (numel,), (numel,))
    bucket = bucket_of(params)
    grads = give_grads(params)
    expected = [grad.clone() for grad in grads]
    entries = [bucket.copy_now(k, grad, Division(1)) for k, grad in enumerate(grads)]
    bucket.flatten(entries, Division(1))
    params[0].grad.mul_(7)
    params[1].grad = grads[1] * 7
    reduce(bucket, group)
    bucket.unflatten()
    for param, value in zip(params, expected, strict=True):
        assert torch.equal(param.grad, value)


def test_missing_gradients_contribute_zeros_and_receive(group):
    params = make_params((2,), (2,))
    bucket = bucket_of(params)
    bucket.buffer.fill_(torch.nan)
    bucket.flatten([None, torch.ones(2)], Division(1))
    assert bucket.buffer.tolist() == [0, 0, 1, 1]
    reduce(bucket, group)
    bucket.buffer[:2] = 5
    bucket.unflatten()
    assert params[0].grad.tolist() == [5, 5]
    assert params[0].grad.data_ptr() != bucket.buffer.data_ptr()


def test_fresh_gradients_are_laid_out_like_their_parameter(group):
    param = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    bucket = bucket_of([param])
    assert bucket.views[0].stride() == param.stride()
    bucket.flatten([None], Division(1))
    reduce(bucket, group)
    bucket.unflatten()
    assert param.grad.stride() == param.stride()


@pytest.mark.parametrize("as_view", [False, True])
def test_kept_slots_are_not_written(group, as_view):
    params = make_params((2,), (2,), (2,))
    grads = give_grads(params)
    params[2].grad = None
    bucket = bucket_of(params, as_view=as_view)
    bucket.flatten([grads[0], grads[1], None], Division(1))
    reduce(bucket, group, factor=100)
    bucket.unflatten(kept=[1, 2])
    assert params[0].grad.tolist() == [100, 200]
    assert params[1].grad.tolist() == [3, 4]
    assert params[2].grad is None


def test_dense_gradient_of_any_strides(group):
    param = nn.Parameter(torch.zeros(2, 3))
    param.grad = torch.arange(6.0).reshape(3, 2).t()
    expected, stride = param.grad.clone(), param.grad.stride()
    bucket = bucket_of([param])
    bucket.flatten([param.grad], Division(2))
    assert torch.equal(bucket.views[0], expected / 2)
    reduce(bucket, group, factor=4)
    bucket.unflatten()
    assert torch.equal(param.grad, expected * 2)
    assert param.grad.stride() == stride


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_buffer_has_the_dtype_of_its_parameters(dtype):
    bucket = bucket_of(make_params((3,), dtype=dtype))
    assert bucket.buffer.dtype is dtype


def test_complex_gradients_travel_as_interleaved_reals(group):
    params = make_params((2,), (1,), dtype=torch.complex64)
    grads = [torch.tensor([1 + 2j, 3 + 4j]), torch.tensor([5 + 6j])]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    bucket = bucket_of(params)
    bucket.flatten(grads, Division(2))
    assert bucket.buffer.dtype is torch.float32
    assert bucket.buffer.tolist() == [0.5, 1, 1.5, 2, 2.5, 3]
    reduce(bucket, group, factor=2)
    bucket.unflatten()
    assert params[0].grad.tolist() == [1 + 2j, 3 + 4j]
    assert params[1].grad.tolist() == [5 + 6j]


# ------------------------------------------------------------------ copied at once


@pytest.mark.parametrize("as_view", [False, True])
def test_large_gradients_are_copied_on_arrival(group, as_view):
    params = make_params((3,), (LARGE,), (2,), (LARGE,), (1,))
    grads = give_grads(params)
    expected = torch.cat(grads) * (1.0 / 3)
    bucket = bucket_of(params, as_view=as_view)
    entries = list(grads)
    with torch.no_grad():
        for k in (1, 3):
            entries[k] = bucket.copy_now(k, grads[k], Division(3))
            assert entries[k] is Mark.COPIED
            assert (params[k].grad is bucket.views[k]) == as_view
        bucket.flatten(entries, Division(3))
    assert torch.equal(bucket.buffer, expected)  # each scaled exactly once
    reduce(bucket, group)
    bucket.unflatten()
    found = torch.cat([param.grad for param in params])
    assert torch.equal(found, expected)


def test_copied_slots_beside_missing_ones():
    params = make_params((3,), (LARGE,), (2,))
    grads = give_grads(params)
    bucket = bucket_of(params)
    with torch.no_grad():
        large = bucket.copy_now(1, grads[1], Division(3))
        bucket.flatten([None, large, grads[2]], Division(3))
    third = 1.0 / 3
    assert torch.equal(
        bucket.buffer, torch.cat([torch.zeros(3), grads[1] * third, grads[2] * third])
    )


def test_what_copy_now_leaves_to_flatten():
    params = make_params((4,))
    bucket = bucket_of(params, as_view=True)
    view = bucket.views[0]
    with torch.no_grad():
        for grad in (
            view,
            view[:],  # another tensor on the same memory
            torch.ones(4, dtype=torch.float64),
            torch.ones(2, 2),
            torch.ones(4).to_sparse(),
        ):
            assert bucket.copy_now(0, grad, Division(2)) is grad
    tracked = torch.ones(4)
    assert (
        bucket.copy_now(0, tracked, Division(2)) is tracked
    )  # grad mode: create_graph


# ------------------------------------------------------- gradients that are views


def synced(params, group, *, divisor=1, factor=1):
    """A bucket after one synchronised backward with views."""
    bucket = bucket_of(params, as_view=True)
    bucket.flatten(give_grads(params), Division(divisor))
    reduce(bucket, group, factor=factor)
    bucket.unflatten()
    return bucket


def test_gradients_become_views(group):
    params = make_params((2, 2), (3,))
    bucket = synced(params, group)
    for param, view in zip(params, bucket.views, strict=True):
        assert param.grad is view
    params[0].grad.fill_(9)
    assert bucket.buffer.tolist() == [9, 9, 9, 9, 5, 6, 7]


def test_views_are_divided_not_multiplied(group):
    params = make_params((50,), (50,))
    bucket = synced(params, group)
    values = torch.rand(100)
    bucket.buffer.copy_(values)
    bucket.flatten([p.grad for p in params], Division(3))
    assert torch.equal(bucket.buffer, values / 3)
    assert not torch.equal(values / 3, values * (1.0 / 3))


def test_views_beside_fresh_gradients_each_get_their_formula(group):
    params = make_params((50,), (50,))
    bucket = synced(params, group)
    old, new = torch.rand(50), torch.rand(50)
    params[0].grad.copy_(old)
    bucket.flatten([params[0].grad, new], Division(3))
    assert torch.equal(bucket.buffer, torch.cat([old / 3, new * (1.0 / 3)]))


def test_set_to_none_cuts_the_tie_and_the_same_memory_is_tied_again(group):
    params = make_params((2,))
    bucket = synced(params, group)
    address = params[0].grad.data_ptr()
    params[0].grad = None
    bucket.flatten(give_grads(params), Division(1))
    reduce(bucket, group)
    bucket.unflatten()
    assert params[0].grad is bucket.views[0]
    assert params[0].grad.data_ptr() == address


def test_another_tensor_on_the_same_memory_counts_as_the_view(group):
    params = make_params((2,), (2,))
    bucket = synced(params, group)
    params[1].grad = bucket.buffer[2:]
    bucket.flatten([p.grad for p in params], Division(2))
    assert bucket.buffer.tolist() == [0.5, 1, 1.5, 2]


def test_replaced_gradient_is_tolerated(group):
    params = make_params((2,))
    bucket = synced(params, group)
    params[0].grad = params[0].grad.clone()
    bucket.flatten([params[0].grad], Division(2))
    reduce(bucket, group)
    bucket.unflatten()
    assert params[0].grad is bucket.views[0]
    assert params[0].grad.tolist() == [0.5, 1]


def test_undecided_views_get_their_bytes_back_when_kept(group):
    params = make_params((3,), (2,))
    bucket = synced(params, group)
    before = torch.tensor([0.1, 0.2, 0.3])
    params[0].grad.copy_(before)
    bucket.flatten([p.grad for p in params], Division(3), undecided={0})
    reduce(bucket, group)
    assert not torch.equal(bucket.views[0], before)
    bucket.unflatten(kept=[0])
    assert params[0].grad is bucket.views[0]
    assert torch.equal(params[0].grad, before)  # no ulp of drift


def test_undecided_views_that_are_not_kept_are_reduced(group):
    params = make_params((3,))
    bucket = synced(params, group)
    bucket.flatten([params[0].grad], Division(2), undecided={0})
    reduce(bucket, group)
    bucket.unflatten()
    assert params[0].grad.tolist() == [0.5, 1, 1.5]
    assert bucket._saved == {}


def test_gradients_that_exist_become_views_of_a_new_bucket(group):
    params = make_params((2,), (3,), (1,), (1,))
    old = synced(params, group)
    params[2].grad = torch.tensor([7.0])  # of a local backward after zero_grad
    params[3].grad = None
    new = bucket_of(params, as_view=True)
    new.tie_grads()
    for param, view in zip(params[:3], new.views, strict=False):
        assert param.grad is view
    assert params[3].grad is None
    assert new.buffer[:6].tolist() == [1, 2, 3, 4, 5, 7]
    assert old.buffer[:6].tolist() == [1, 2, 3, 4, 5, 6]


def test_gradients_with_a_history_and_misfits_are_not_tied(group):
    params = make_params((2,), (2,))
    leaf = torch.ones(2, requires_grad=True)
    params[0].grad = tracked = leaf * 2
    params[1].grad = misfit = torch.ones(2).to_sparse()
    bucket_of(params, as_view=True).tie_grads()
    assert params[0].grad is tracked
    assert params[1].grad is misfit


# --------------------------------------------------------- gradients with a history


@pytest.mark.parametrize("as_view", [False, True])
def test_gradients_that_require_grad_keep_their_history(group, as_view):
    (param,) = make_params((2,))
    leaf = torch.tensor([3.0, 4.0], requires_grad=True)
    param.grad = leaf * leaf
    bucket = bucket_of([param], as_view=as_view)
    with torch.enable_grad():
        bucket.flatten([param.grad], Division(2))
    assert bucket.buffer.tolist() == [4.5, 8.0]
    assert not bucket.buffer.requires_grad
    with torch.no_grad():
        reduce(bucket, group)
        bucket.unflatten()
    assert param.grad.tolist() == [4.5, 8.0]
    (second,) = torch.autograd.grad(param.grad.sum(), leaf)
    assert second.tolist() == [3.0, 4.0]  # d(x^2 / 2)
    assert bucket._tracked == {}


# ------------------------------------------------------------------------- misfits


REMEDY = (
    "What to do: do not change dtype, shape or layout of a parameter or of its .grad "
    "after wrapping; wrap the module again instead."
)


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize(
    ("grad", "found"),
    [
        (torch.ones(2, 2, dtype=torch.float64), "float64, torch.strided, {}, on cpu"),
        (torch.ones(2, 2).to_sparse(), "float32, torch.sparse_coo, {}, on cpu"),
        (torch.ones(2, 2, device="meta"), "float32, torch.strided, {}, on meta"),
    ],
)
def test_misfits_are_named(grad, found, as_view):
    params = make_params((3,), (2, 2))
    bucket = bucket_of(params, as_view=as_view)
    with pytest.raises(GradientError) as caught:
        bucket.flatten([torch.ones(3), grad], Division(1))
    assert str(caught.value) == (
        "[rank 0] A gradient does not fit its bucket. Expected: torch.float32, "
        "torch.strided, shape (2, 2), on cpu. "
        f"Found: torch.{found.format('shape (2, 2)')}. Parameters: p1. " + REMEDY
    )


@pytest.mark.parametrize("shape", [(1,), (2, 1), (4, 1)])
def test_a_gradient_of_another_shape_is_not_broadcast(shape):
    params = make_params((3,), (4,))
    bucket = bucket_of(params)
    with pytest.raises(
        GradientError, match=r"shape \(4,\), on cpu\. Found: .* Parameters: p1"
    ):
        bucket.flatten([torch.ones(3), torch.ones(shape)], Division(1))


def test_two_misfits_of_the_right_total_are_found():
    bucket = bucket_of(make_params((3,), (4,)))
    with pytest.raises(GradientError, match="Parameters: p0"):
        bucket.flatten([torch.ones(1), torch.ones(6)], Division(1))


# --------------------------------------------------------------------------- states


def test_states_follow_each_other(group):
    params = make_params((2,))
    bucket = bucket_of(params)
    assert bucket.state is BucketState.FILLING
    bucket.flatten(give_grads(params), Division(1))
    assert bucket.state is BucketState.FULL
    launch(bucket, group)
    assert bucket.state is BucketState.IN_FLIGHT
    bucket.complete()
    assert bucket.state is BucketState.FILLING


def test_launch_before_full_is_a_mistake(group):
    bucket = bucket_of(make_params((2,)))
    with pytest.raises(InternalError) as caught:
        launch(bucket, group)
    assert str(caught.value) == (
        "[rank 0] bucket of p0: FILLING -> IN_FLIGHT is not allowed."
    )


def test_flatten_twice_is_a_mistake():
    params = make_params((2,))
    bucket = bucket_of(params)
    bucket.flatten(give_grads(params), Division(1))
    with pytest.raises(InternalError, match="FULL -> FULL is not allowed"):
        bucket.flatten(give_grads(params), Division(1))


def test_complete_before_launch_is_a_mistake():
    bucket = bucket_of(make_params((2,)))
    with pytest.raises(InternalError, match=r"\[rank 0\] nothing to wait for"):
        bucket.complete()


def test_launch_hands_out_the_work(group):
    params = make_params((2,))
    bucket = bucket_of(params)
    bucket.flatten(give_grads(params), Division(1))
    work = launch(bucket, group)
    work.wait()
    assert work.get_future().done()
    bucket.complete()


# --------------------------------------------------------------------------- sparse


def sparse_grad(row, value, rows=4):
    return torch.sparse_coo_tensor(
        [[row]], torch.full((1, 2), value), (rows, 2), check_invariants=True
    )


@pytest.fixture
def embedding():
    return nn.Parameter(torch.zeros(4, 2))


def test_sparse_gradient_travels_as_a_copy(group, embedding):
    embedding.grad = grad = sparse_grad(1, 6.0)
    bucket = bucket_of([embedding], sparse=True)
    assert bucket.copy_now(0, grad, Division(3)) is grad
    bucket.flatten([grad], Division(3))
    assert bucket.payload.layout is torch.sparse_coo
    assert grad.to_dense()[1].tolist() == [6, 6]  # others may share its memory
    launch(bucket, group)
    bucket.complete()
    bucket.unflatten()
    assert embedding.grad is grad
    assert embedding.grad.to_dense()[1].tolist() == [2, 2]


def test_missing_sparse_gradient_contributes_nothing(group, embedding):
    bucket = bucket_of([embedding], sparse=True)
    bucket.flatten([None], Division(3))
    launch(bucket, group)
    bucket.complete()
    bucket.unflatten()
    assert embedding.grad.layout is torch.sparse_coo
    assert embedding.grad.shape == (4, 2)
    assert embedding.grad.coalesce().indices().numel() == 0


def test_kept_sparse_gradient_stays(group, embedding):
    embedding.grad = sparse_grad(2, 6.0)
    bucket = bucket_of([embedding], sparse=True)
    bucket.flatten([embedding.grad], Division(3), undecided={0})
    launch(bucket, group)
    bucket.complete()
    bucket.unflatten(kept=[0])
    assert embedding.grad.to_dense()[2].tolist() == [6, 6]


def test_kept_missing_sparse_gradient_stays_none(group, embedding):
    bucket = bucket_of([embedding], sparse=True)
    bucket.flatten([None], Division(3), undecided={0})
    launch(bucket, group)
    bucket.complete()
    bucket.unflatten(kept=[0])
    assert embedding.grad is None


def test_dense_gradient_in_a_sparse_bucket_is_a_misfit(embedding):
    bucket = bucket_of([embedding], sparse=True)
    with pytest.raises(GradientError) as caught:
        bucket.flatten([torch.ones(4, 2)], Division(1))
    assert str(caught.value) == (
        "[rank 0] A gradient does not fit its bucket. Expected: a sparse COO gradient "
        "(the embedding has sparse=True). Found: a gradient of layout torch.strided. "
        "Parameters: p0. " + REMEDY
    )
