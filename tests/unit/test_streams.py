"""Who waits for which CUDA stream, on a stand-in for the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minidp import _clock, _streams
from minidp._arrivals import Mark
from minidp._bucket import Division
from minidp._layout import BucketPlan, ParamSpec, initial_layout
from minidp._sparse_bucket import SparseBucket
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


def grad() -> Grad:
    return torch.zeros(2).as_subclass(Grad)


def test_whoever_flattens_comes_after_all_that_wrote(cuda):
    main, first, second = cuda.default_stream(), cuda.Stream(), cuda.Stream()
    streams = _streams.BucketStreams(DEVICE)
    numbers = [stream.work() for stream in (first, second)]
    streams.written_on |= {first.cuda_stream, second.cuda_stream}
    streams.gather([])
    assert main.has_seen(first, numbers[0])
    assert main.has_seen(second, numbers[1])
    assert not first.has_seen(second, numbers[1])


def test_the_default_stream_is_waited_for_although_its_handle_is_0(cuda):
    """Torch makes a new stream of an external handle of 0."""
    main, side = cuda.default_stream(), cuda.Stream()
    streams = _streams.BucketStreams(DEVICE)
    number = main.work()
    streams.written_on |= {main.cuda_stream, side.cuda_stream}
    with cuda.stream(side):
        streams.gather([])
    assert side.has_seen(main, number)


def test_it_launches_where_it_flattened(cuda):
    side = cuda.Stream()
    streams = _streams.BucketStreams(DEVICE)
    with cuda.stream(side):
        streams.gather([])
    with streams.launching():
        assert cuda.current_stream() is side
    assert cuda.current_stream() is cuda.default_stream()


def test_gradients_of_other_streams_are_kept_until_they_are_read(cuda):
    side, mine = cuda.Stream(), grad()
    streams = _streams.BucketStreams(DEVICE)
    streams.written_on.add(side.cuda_stream)
    streams.gather([mine, None, Mark.COPIED])
    assert mine.recorded == [0]
    streams.gather([mine])  # written_on was cleared: nobody else wrote
    assert mine.recorded == [0]


def test_sparse_gradients_are_kept_by_their_two_tensors(cuda, monkeypatch):
    recorded = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, _: recorded.append(self.layout)
    )
    streams = _streams.BucketStreams(DEVICE)
    streams.written_on.add(cuda.Stream().cuda_stream)
    streams.gather([torch.eye(2).to_sparse()])
    assert recorded == [torch.strided, torch.strided]


def sparse_plan() -> BucketPlan:
    spec = ParamSpec(
        "w", (2, 2), (2, 1), torch.float32, torch.device("cpu"), sparse=True
    )
    (plan,) = initial_layout([spec], [100]).buckets
    return plan


def test_a_sparse_bucket_is_launched_where_it_was_read(cuda):
    side = cuda.Stream()
    param = torch.nn.Parameter(torch.eye(2))
    bucket = SparseBucket(sparse_plan(), [param], ["w"], 0)
    bucket.streams = _streams.BucketStreams(DEVICE)
    with cuda.stream(side):
        bucket.flatten([torch.eye(2).to_sparse()], Division())
    launched_on = []
    work = SimpleNamespace(wait=lambda: None)

    def start(_payload):
        launched_on.append(cuda.current_stream())
        return work

    bucket.launch(start)
    assert launched_on == [side]


def test_on_cpu_there_is_nothing_to_order():
    streams = _streams.streams_for(torch.device("cpu"))
    streams.gather([torch.zeros(1)])
    with streams.launching():
        pass
    assert not streams.written_on


# ------------------------------------------------------------------------------- clock


def test_the_clock_of_a_device_does_not_make_the_host_wait(cuda):
    clock = _clock.CudaClock(DEVICE)
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
    clock, side = _clock.CudaClock(DEVICE), cuda.Stream()
    side.work()
    with cuda.stream(side):
        mark = clock.read()
    assert mark.seen[side.cuda_stream] == 1
