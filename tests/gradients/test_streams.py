"""Who waits for which stream of a stand-in for the device."""

from __future__ import annotations

import pytest
import torch

from minidp import accelerator
from minidp.core.grad_hooks import GradState
from minidp.overlap import stopwatch as clocks
from tests.support.fake_cuda import FakeCuda, install

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
    streams, grad = accelerator.BucketStreams(DEVICE), torch.zeros(2).as_subclass(Grad)
    numbers = [stream.work() for stream in (first, second)]
    streams.written_on |= {first, second}
    streams.gather([grad, None, GradState.COPIED])
    assert main.has_seen(first, numbers[0])
    assert main.has_seen(second, numbers[1])
    assert not first.has_seen(second, numbers[1])
    assert grad.recorded == [0]  # its memory is kept until it is read
    streams.gather([grad])  # written_on was cleared: nobody else wrote
    assert grad.recorded == [0]


def test_it_launches_where_it_flattened_also_after_the_default_stream(cuda):
    main, side = cuda.default_stream(), cuda.Stream()
    streams = accelerator.BucketStreams(DEVICE)
    number = main.work()
    streams.written_on |= {main, side}
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
    streams = accelerator.BucketStreams(DEVICE)
    streams.written_on.add(cuda.Stream())
    streams.gather([torch.eye(2).to_sparse()])
    assert recorded == [torch.strided, torch.strided]


# ------------------------------------------------------------------------------- clock


def test_the_clock_of_a_device_does_not_make_the_host_wait(cuda):
    clock = clocks.DeviceClock(DEVICE)
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
    clock, side = clocks.DeviceClock(DEVICE), cuda.Stream()
    side.work()
    with cuda.stream(side):
        mark = clock.read()
    assert mark.seen[side.cuda_stream] == 1
