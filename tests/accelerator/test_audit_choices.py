"""What the device decides, seen without one: groups, limits, captures, order."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from minidp import DataParallel, accelerator
from minidp.comm import Communicator, backends
from minidp.core import BucketQueue, kernels
from minidp.replica import digest, verify
from tests.support.ranks import on_ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class Group:
    """Three ranks of ``init_process_group()`` without the name of a backend."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 3


@pytest.fixture
def group(monkeypatch) -> Any:
    config = "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(backends.dist, "get_backend_config", lambda _: config)
    return Group()


@pytest.fixture
def of_gpu(group, monkeypatch) -> Communicator:
    """A communicator whose collectives run on a GPU, and are late at once."""
    monkeypatch.setattr(accelerator, "has_streams", lambda each: each.type != "cpu")
    monkeypatch.setattr(accelerator, "is_capturing", lambda _: False)
    monkeypatch.setattr(accelerator, "selected", lambda _: selecting([]))
    return Communicator(group, -1.0, device=GPU)


@contextmanager
def selecting(now: list[torch.device], device: torch.device | None = None):
    now.append(device)
    yield
    now.pop()


def work(is_completed=lambda: False) -> Any:
    return SimpleNamespace(is_completed=is_completed, wait=lambda: None)


def start(communicator: Communicator, *works: Any) -> None:
    with communicator.watching("launching the all-reduce", 0):
        for each in works:
            communicator.note_started(each, GPU)


# ------------------------------------------------------------- the backend that is used


def test_the_backend_of_the_parameters_device_decides_who_limits_a_wait(group):
    assert backends.is_timed(group, CPU)
    assert not backends.is_timed(group, GPU)
    assert not backends.is_timed(group, torch.device("xpu"))  # has no backend there
    assert not backends.is_timed(group)


def test_a_group_of_several_backends_has_a_limit_on_the_device(of_gpu):
    running = work()
    start(of_gpu, running)
    late = of_gpu.find_late_on_device()
    assert late is not None
    assert late.work is running


def test_on_the_cpu_the_host_waits_and_nothing_is_listed(group):
    communicator = Communicator(group, -1.0, device=CPU)
    with communicator.watching("launching the all-reduce", 0):
        communicator.note_started(work())
    assert communicator.find_late_on_device() is None


# -------------------------------------------------------------------- the hang detector


def test_whoever_asks_a_device_has_selected_it(of_gpu, monkeypatch):
    """A thread that has not would take memory on device 0 for each rank."""
    now: list[torch.device] = []
    asked_on = []
    monkeypatch.setattr(accelerator, "selected", lambda d: selecting(now, d))
    start(of_gpu, work(lambda: bool(asked_on.append(list(now)))))
    of_gpu.find_late_on_device()
    assert asked_on == [[GPU]]


def test_nothing_is_asked_while_a_graph_is_captured(of_gpu, monkeypatch):
    asked = []
    start(of_gpu, work(lambda: bool(asked.append("before"))))
    monkeypatch.setattr(accelerator, "is_capturing", lambda device: device == GPU)
    start(of_gpu, work(lambda: bool(asked.append("captured"))))
    assert of_gpu.find_late_on_device() is None  # the watchdog asks meanwhile, too
    assert asked == []


def test_a_device_that_cannot_tell_captures_nothing(monkeypatch):
    """Torch 2.12 raises for each type that does not answer, and later ones do not."""
    asked = []

    def refuse():
        asked.append("refused")
        raise RuntimeError("Backend doesn't support stream capture query.")

    stream = SimpleNamespace(is_capturing=refuse)
    monkeypatch.setattr(accelerator, "current_stream", lambda _: stream)
    monkeypatch.setattr(accelerator, "_CANNOT_TELL", set())
    device = torch.device("mtia", 0)
    assert [accelerator.is_capturing(device) for _ in range(3)] == [False] * 3
    assert len(asked) == 1  # an error in C++ costs much more than the answer


def test_a_collective_that_was_waited_for_keeps_no_tensor(of_gpu, monkeypatch):
    monkeypatch.setattr(torch, "Event", lambda *_, **__: Event())
    monkeypatch.setattr(accelerator, "current_stream", lambda _: None)
    first, second = work(), work()
    start(of_gpu, first, second)
    of_gpu.wait(first)
    late = of_gpu.find_late_on_device()
    assert late is not None
    assert late.work is None
    Event.has_come = True
    late = of_gpu.find_late_on_device()
    assert late is not None
    assert late.work is second


class Event:
    """An event of a device, which the device has not reached at first."""

    has_come = False

    def record(self, _stream: object) -> None:
        pass

    def query(self) -> bool:
        return self.has_come


# ---------------------------------------------------------------------- memory, kernels


@on_ranks(2)
def test_parameters_travel_while_there_are_no_buckets(ctx):
    """Their messages are as large as the buckets: both at once would be the peak."""
    order = []
    with pytest.MonkeyPatch.context() as patch:
        for place, name in (
            *((BucketQueue, "adopt"), (BucketQueue, "free")),
            (verify, "broadcast_coalesced"),
        ):
            patch.setattr(place, name, noting(order, name, getattr(place, name)))
        DataParallel(nn.Linear(3, 3), process_group=ctx.group)
    before = order[: order.index("broadcast_coalesced")]
    assert before[-1] == "free"
    assert "adopt" in order[len(before) :]


def noting(order, name, function):
    def noted(*args, **kwargs):
        order.append(name)
        return function(*args, **kwargs)

    return noted


@on_ranks(2)
@pytest.mark.parametrize("views", [False, True])
def test_a_hook_copies_a_large_gradient_itself_only_to_save_memory(ctx, views):
    """A launch per gradient is what costs on a device, and a bucket needs two."""
    copied = []
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))).to(ctx.device)
    ddp = DataParallel(
        net, process_group=ctx.group, gradient_as_bucket_view=views, bucket_cap_mb=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "multiply_into", lambda view, *_: copied.append(view))
        ddp(torch.ones(2, 256).to(ctx.device)).sum().backward()
    assert len([view for view in copied if view.dim() == 2]) == 3 * views


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_table_of_chunks_has_the_sum_of_its_chunks(rows):
    """Off the CPU all chunks are summed at once."""
    width = digest._CHUNK
    values = torch.randn(rows * width, generator=torch.Generator().manual_seed(rows))
    factors = 2 * torch.arange(width) + 1
    table = values.view(torch.int32).view(rows, width)
    found = digest._sum_of_table(table, factors, 0)
    assert torch.equal(found, digest.sum_of_bits(values))
