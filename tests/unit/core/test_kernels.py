"""The reference kernels' two formulas; who waits for which stream of a stand-in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minidp.core import kernels
from minidp.core.grad_hooks import GradState
from minidp.overlap import stopwatch as clocks
from tests.support.fake_cuda import FakeCuda, install


def flatten(view, grad, divisor):
    kernels.CopyPlan(view, [view], [False]).fill([view], [grad], divisor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divisor", [2, 3])
def test_the_two_formulas_against_numpy(dtype, divisor):
    """An oracle without torch; and the two do differ, so the choice is tested."""
    grad = torch.randn(1000, dtype=dtype)
    scaled, divided = torch.empty_like(grad), grad.clone()
    kernels.multiply_into(scaled, grad, divisor)
    kernels.divide(divided, divisor)
    numbers = grad.numpy()
    kind = numbers.dtype.type
    assert np.array_equal(scaled.numpy(), numbers * kind(1.0 / divisor))
    assert np.array_equal(divided.numpy(), numbers / kind(divisor))
    assert torch.equal(scaled, divided) == (divisor == 2)


def test_half_precision_is_scaled_in_single_precision():
    grad = torch.randn(1000, dtype=torch.bfloat16)
    view = torch.empty_like(grad)
    plan = kernels.CopyPlan(view, [view], [False])
    assert plan.may_fit([view], [grad])
    assert not plan.may_fit([view], [grad[1:]])
    flatten(view, grad, 3)
    assert torch.equal(view, (grad.float() * np.float32(1.0 / 3)).bfloat16())


def test_a_divisor_of_one_copies_every_bit():
    grad = torch.tensor([-0.0, torch.inf, torch.nan, 1e-45])
    for fill, of in (
        (kernels.multiply_into, grad),
        (kernels.multiply_into, torch.complex(grad, grad.flip(0))),
        (flatten, grad),
    ):
        view = torch.full_like(of, 7.0)
        fill(view, of, 1)
        assert torch.equal(view.view(torch.int32), of.view(torch.int32))


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
