"""The reference kernels: torch's arithmetic, any strides, no value in a wrong place.

Who waits for which CUDA stream, on a stand-in for the device.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from minidp.core import kernels
from minidp.core.grad_hooks import GradState
from minidp.overlap import stopwatch as clocks
from tests.support.fake_cuda import FakeCuda, install

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


def plan_of(buffer, views, large=()):
    return kernels.CopyPlan(buffer, views, [k in large for k in range(len(views))])


@all_dtypes
@all_strides
def test_flatten_multiplies_by_the_reciprocal(dtype, strides):
    cases = itertools.product([1, 2, 3, 7], [False, True], [SHAPES, [(5,), (3,)]])
    for divisor, column_major, shapes in cases:
        grads = [MAKERS[strides](shape, dtype) for shape in shapes]
        buffer, views = bucket_views(shapes, dtype, column_major=column_major)
        plan = plan_of(buffer, views)
        assert plan.may_fit(views, grads)
        plan.flatten(views, grads, divisor)
        for view, grad in zip(views, grads, strict=True):
            assert torch.equal(view, grad * (1.0 / divisor))
            kernels.multiply_into(view.fill_(torch.nan), grad, divisor)
            assert torch.equal(view, grad * (1.0 / divisor))
        assert not buffer.isnan().any()


@all_dtypes
@divisors
@pytest.mark.parametrize("filled", [(1,), (0,), (1, 3), (0, 1, 2, 3)])
def test_flatten_leaves_slots_alone_that_hooks_have_filled(dtype, divisor, filled):
    """Slots 1 and 3 are large: their hooks copy. (0,) is a case of no plan."""
    shapes = [(4,), (2, 3), (3,), (5,)]
    grads = [torch.randn(shape, dtype=dtype) for shape in shapes]
    buffer, views = bucket_views(shapes, dtype)
    for k in filled:
        views[k].fill_(8)
    rest = [k for k in range(4) if k not in filled]
    plan = plan_of(buffer, views, large=(1, 3))
    plan.flatten([views[k] for k in rest], [grads[k] for k in rest], divisor)
    for k, (view, grad) in enumerate(zip(views, grads, strict=True)):
        expected = torch.full_like(grad, 8) if k in filled else grad * (1.0 / divisor)
        assert torch.equal(view, expected)


@all_dtypes
@divisors
def test_divide_divides_truly(dtype, divisor):
    values = torch.randn(1000, dtype=dtype)
    expected = values / divisor
    kernels.divide(values, divisor)
    assert torch.equal(values, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_two_formulas_against_numpy(dtype):
    """An oracle without torch; and the two do differ, so the choice is tested."""
    grad = torch.randn(1000, dtype=dtype)
    scaled, divided = torch.empty_like(grad), grad.clone()
    kernels.multiply_into(scaled, grad, 3)
    kernels.divide(divided, 3)
    numbers = grad.numpy()
    kind = numbers.dtype.type
    assert np.array_equal(scaled.numpy(), numbers * kind(1.0 / 3))
    assert np.array_equal(divided.numpy(), numbers / kind(3))
    assert not torch.equal(scaled, divided)


def test_half_precision_is_scaled_in_single_precision():
    grad = torch.randn(1000, dtype=torch.bfloat16)
    view = torch.empty_like(grad)
    plan_of(view, [view]).flatten([view], [grad], 3)
    assert torch.equal(view, (grad.float() * np.float32(1.0 / 3)).bfloat16())


def test_a_divisor_of_one_copies_every_bit():
    grad = torch.tensor([-0.0, torch.inf, torch.nan, 1e-45])
    for fill in (
        lambda view: kernels.multiply_into(view, grad, 1),
        lambda view: plan_of(view, [view]).flatten([view], [grad], 1),
    ):
        view = torch.empty_like(grad)
        fill(view)
        assert torch.equal(view.view(torch.int32), grad.view(torch.int32))


DEVICE = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    install(monkeypatch, fake)
    return fake


class Grad(torch.Tensor):
    """A gradient that notes on which streams it is in use."""

    def record_stream(self, stream) -> None:
        self.recorded = [*getattr(self, "recorded", []), stream.cuda_stream]


def test_whoever_flattens_comes_after_all_that_wrote(cuda):
    main, first, second = cuda.default_stream(), cuda.Stream(), cuda.Stream()
    streams, grad = kernels.BucketStreams(DEVICE), torch.zeros(2).as_subclass(Grad)
    numbers = [stream.work() for stream in (first, second)]
    streams.written_on |= {first.cuda_stream, second.cuda_stream}
    streams.gather([grad, None, GradState.COPIED])
    assert main.has_seen(first, numbers[0])
    assert main.has_seen(second, numbers[1])
    assert not first.has_seen(second, numbers[1])
    assert grad.recorded == [0]  # its memory is kept until it is read
    streams.gather([grad])  # written_on was cleared: nobody else wrote
    assert grad.recorded == [0]


def test_it_launches_where_it_flattened_also_after_the_default_stream(cuda):
    """Torch makes a new stream of an external handle of 0, the default stream's."""
    main, side = cuda.default_stream(), cuda.Stream()
    streams = kernels.BucketStreams(DEVICE)
    number = main.work()
    streams.written_on |= {main.cuda_stream, side.cuda_stream}
    with cuda.stream(side):
        streams.gather([])
    assert side.has_seen(main, number)
    with streams.launching():
        assert cuda.current_stream() is side
    assert cuda.current_stream() is main


def test_sparse_gradients_are_kept_by_their_two_tensors(cuda, monkeypatch):
    recorded = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, _: recorded.append(self.layout)
    )
    streams = kernels.BucketStreams(DEVICE)
    streams.written_on.add(cuda.Stream().cuda_stream)
    streams.gather([torch.eye(2).to_sparse()])
    assert recorded == [torch.strided, torch.strided]


# ------------------------------------------------------------------------------- clock


def test_the_clock_of_a_device_does_not_make_the_host_wait(cuda):
    clock = clocks.CudaClock(DEVICE)
    before = cuda.num_waits
    marks = []
    for cuda.now_ms in (1.0, 2.5, 4.0):
        marks.append(clock.read())
    assert cuda.num_waits == before
    clock.settle()
    anchor = clock.resolve(marks[0], marks[0])
    assert clock.resolve(marks[1], marks[0]) - anchor == 1_500_000
    assert clock.resolve(marks[2], marks[0]) - anchor == 3_000_000


def test_the_clock_reads_the_stream_that_is_current(cuda):
    clock, side = clocks.CudaClock(DEVICE), cuda.Stream()
    side.work()
    with cuda.stream(side):
        mark = clock.read()
    assert mark.seen[side.cuda_stream] == 1
