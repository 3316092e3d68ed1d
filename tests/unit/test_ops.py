"""The reference kernels: torch's arithmetic, any strides, no value in a wrong place."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidp import _ops

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
]
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
divisors = pytest.mark.parametrize("divisor", [1, 2, 3, 7])

# How the memory of a gradient may lie, by name: shape -> tensor of that shape.
MAKERS = {
    "contiguous": lambda shape, dtype: torch.randn(shape, dtype=dtype),
    "transposed": lambda shape, dtype: torch.randn(shape[::-1], dtype=dtype).permute(
        list(range(len(shape) - 1, -1, -1))
    ),
    "holes": lambda shape, dtype: torch.randn((*shape, 2), dtype=dtype)[..., 0],
    "expanded": lambda shape, dtype: torch.randn((), dtype=dtype).expand(shape),
}
all_strides = pytest.mark.parametrize("strides", MAKERS)
SHAPES = [(3, 4), (), (5,), (0, 2), (2, 3, 2)]


def bucket_views(shapes, dtype, *, column_major=False):
    """(buffer full of NaN, windows on it)."""
    buffer = torch.full((sum(map(math.prod, shapes)),), torch.nan).to(dtype)
    views, offset = [], 0
    for shape in shapes:
        likeness = MAKERS["transposed" if column_major else "contiguous"](shape, dtype)
        views.append(buffer.as_strided(shape, likeness.stride(), offset))
        offset += math.prod(shape)
    return buffer, views


@all_dtypes
@all_strides
def test_flatten_multiplies_by_the_reciprocal(dtype, strides):
    for divisor, column_major in itertools.product([1, 2, 3, 7], [False, True]):
        grads = [MAKERS[strides](shape, dtype) for shape in SHAPES]
        buffer, views = bucket_views(SHAPES, dtype, column_major=column_major)
        _ops.flatten(views, grads, 1.0 / divisor, [buffer])
        for view, grad in zip(views, grads, strict=True):
            assert torch.equal(view, grad * (1.0 / divisor))
        assert not buffer.isnan().any()


@all_dtypes
@divisors
def test_flatten_scales_its_runs_only(dtype, divisor):
    shapes = [(4,), (6,), (3,)]
    grads = [torch.randn(shape, dtype=dtype) for shape in shapes]
    buffer, views = bucket_views(shapes, dtype)
    buffer[4:10] = 8  # the slot in between was filled by its own hook
    _ops.flatten(
        [views[0], views[2]],
        [grads[0], grads[2]],
        1.0 / divisor,
        [buffer[:4], buffer[10:]],
    )
    assert torch.equal(views[0], grads[0] * (1.0 / divisor))
    assert torch.equal(views[1], torch.full((6,), 8, dtype=dtype))
    assert torch.equal(views[2], grads[2] * (1.0 / divisor))


@all_strides
@divisors
def test_scale_into_is_flatten_of_one(strides, divisor):
    for dtype in DTYPES:
        grad = MAKERS[strides]((4, 5), dtype)
        _, (view,) = bucket_views([(4, 5)], dtype, column_major=True)
        _ops.scale_into(view, grad, 1.0 / divisor)
        assert torch.equal(view, grad * (1.0 / divisor))


@all_dtypes
@divisors
def test_divide_divides_truly(dtype, divisor):
    values = torch.randn(1000, dtype=dtype)
    expected = values / divisor
    _ops.divide(values, divisor)
    assert torch.equal(values, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_two_formulas_against_numpy(dtype):
    """An oracle without torch; and the two do differ, so the choice is tested."""
    grad = torch.randn(1000, dtype=dtype)
    scaled, divided = torch.empty_like(grad), grad.clone()
    _ops.scale_into(scaled, grad, 1.0 / 3)
    _ops.divide(divided, 3)
    numbers = grad.numpy()
    kind = numbers.dtype.type
    assert np.array_equal(scaled.numpy(), numbers * kind(1.0 / 3))
    assert np.array_equal(divided.numpy(), numbers / kind(3))
    assert not torch.equal(scaled, divided)


def test_half_precision_is_scaled_in_single_precision():
    grad = torch.randn(1000, dtype=torch.bfloat16)
    view = torch.empty_like(grad)
    _ops.flatten([view], [grad], 1.0 / 3, [view])
    assert torch.equal(view, (grad.float() * np.float32(1.0 / 3)).bfloat16())


def test_scale_one_copies_every_bit():
    grad = torch.tensor([-0.0, torch.inf, torch.nan, 1e-45])
    for fill in (
        lambda view: _ops.scale_into(view, grad, 1.0),
        lambda view: _ops.flatten([view], [grad], 1.0, [view]),
    ):
        view = torch.empty_like(grad)
        fill(view)
        assert torch.equal(view.view(torch.int32), grad.view(torch.int32))


@st.composite
def gradients(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shapes = draw(
        st.lists(
            st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5
        )
    )
    makers = [
        draw(st.sampled_from(["contiguous", "transposed", "holes"])) for _ in shapes
    ]
    torch.manual_seed(draw(st.integers(0, 99)))
    return [MAKERS[m](shape, dtype) for m, shape in zip(makers, shapes, strict=True)]


@given(gradients())
def test_unflatten_undoes_flatten(grads):
    shapes = [tuple(grad.shape) for grad in grads]
    buffer, views = bucket_views(shapes, grads[0].dtype, column_major=True)
    before = [grad.clone() for grad in grads]
    strides = [grad.stride() for grad in grads]
    _ops.flatten(views, grads, 1.0, [buffer])
    for grad in grads:
        grad.zero_()
    _ops.unflatten(grads, views)
    for grad, old, stride in zip(grads, before, strides, strict=True):
        assert torch.equal(grad, old)
        assert grad.stride() == stride
