"""What tests/gpu looks and reports with, on a stand-in for the device."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from tests.gpu import (
    measure,
    places,
    scenarios,
    test_kernels,
    test_order,
    test_resources,
)
from tests.gpu.conftest import is_ours, pytest_collection_modifyitems
from tests.gpu.places import Place
from tests.gpu.results import Results
from tests.support.both import same
from tests.support.fake_cuda import FakeCuda, install
from tests.support.worker import Context

CYCLES_PER_MS = 1e6


class SleepingCuda(FakeCuda):
    """Its device sleeps when told to; a host that waits lets time pass."""

    def sleep(self, cycles: int) -> None:
        self.now_ms += cycles / CYCLES_PER_MS


@pytest.fixture
def cuda() -> SleepingCuda:
    return SleepingCuda()


# --------------------------------------------------------------------------- measure


def test_a_wait_is_an_error_only_inside(cuda):
    modes = []

    def fail() -> None:
        with measure.waiting_is_an_error(cuda):
            modes.append(cuda.get_sync_debug_mode())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [*modes, cuda.get_sync_debug_mode()] == [2, 0]


def test_it_knows_how_fast_a_devices_clock_is(cuda):
    busy = measure.Busy(cuda, cuda.sleep)
    assert busy.cycles_per_second == pytest.approx(1e3 * CYCLES_PER_MS)
    before = cuda.now_ms
    busy.for_seconds(0.5)
    assert cuda.now_ms - before == pytest.approx(500)


def test_who_waits_is_seen_and_who_does_not_is_not(cuda):
    busy = measure.Busy(cuda, cuda.sleep)
    cuda.synchronize()
    assert not measure.waits(busy, 1.0, lambda: None)
    assert measure.waits(busy, 1.0, cuda.synchronize)


def event(name, device="DeviceType.CUDA", **more):
    return SimpleNamespace(name=name, device_type=device, **more)


def test_launches_are_what_the_device_did():
    events = [
        event("copy"),
        event("copy", is_user_annotation=False),
        event("fill", "DeviceType.CPU"),
        event("anything", is_user_annotation=True),
        event("minidp::flatten 0"),
    ]
    assert measure.launches_in(events) == {"copy": 2}


def test_the_difference_is_what_was_added():
    more, less = Counter(a=3, b=1, c=2), Counter(a=1, b=1, d=5)
    assert measure.difference(more, less) == {"a": 2, "c": 2}


def test_the_peak_is_counted_from_what_was_there(cuda):
    cuda.allocate(1000)
    cuda.allocate(-900)

    def work() -> None:
        cuda.allocate(50)
        cuda.allocate(-50)
        cuda.allocate(20)

    assert measure.peak_bytes(cuda, work) == 50


def test_times_are_the_devices(cuda):
    found = measure.milliseconds(cuda, lambda: cuda.sleep(int(3e6)), 4)
    assert found == [3.0] * 4


# ---------------------------------------------------------------------------- places


def test_places_have_the_devices_that_their_backend_allows():
    found = {place.name: place.devices for place in places.EVERYWHERE}
    for kernels in ("python", "native"):
        assert found[f"nccl-1-{kernels}"] == ["cuda:0"]
        assert found[f"gloo-2-{kernels}"] == ["cuda:0", "cuda:0"]  # NCCL refuses that
        assert found[f"nccl-2-{kernels}"] == ["cuda:0", "cuda:1"]
    assert found["cpu-2"] == ["cpu", "cpu"]


def test_each_place_on_a_gpu_says_which_kernels():
    for place in [*places.ONE_GPU, *places.TWO_GPUS]:
        wanted = "1" if place.name.endswith("native") else "0"
        assert place.environment["MINIDP_NATIVE"] == wanted


@pytest.mark.parametrize(
    ("place", "num_gpus", "reason"),
    [
        (Place("nccl", 2, on_gpu=True), 1, "needs 2 GPUs, there are 1"),
        (Place("nccl", 2, on_gpu=True), 2, ""),
        (Place("gloo", 2, on_gpu=True), 1, ""),
        (Place("gloo", 2, on_gpu=False), 0, ""),
        (Place("nccl", 1, on_gpu=True, kernels="native"), 1, "no nvcc"),
        (Place("nccl", 1, on_gpu=True, kernels="python"), 1, ""),
    ],
)
def test_a_skip_says_what_is_missing(place, num_gpus, reason):
    assert places.why_not(place, num_gpus, lambda: "no nvcc") == reason


def test_only_places_on_gpus_have_the_marker():
    (params,) = [mark.args[1] for mark in [places.at(places.EVERYWHERE).mark]]
    for param in params:
        on_gpu = not param.id.startswith("cpu")
        assert [mark.name for mark in param.marks] == ["gpu"] * on_gpu


# --------------------------------------------------------------------------- results


def test_the_worst_phase_of_a_test_counts():
    results = Results()
    for outcome in ("passed", "failed", "passed"):
        results.ended("a", outcome)
    results.ended("b", "skipped", "no GPU")
    results.ended("c", "passed")
    assert results.counts == {"failed": 1, "skipped": 1, "passed": 1}
    assert results.reasons == {"no GPU": 1}


def test_files_hold_what_was_found(tmp_path):
    results = Results("2026-01-02", {"GPU": "NVIDIA H200"})
    results.ended("test_x[a]", "failed")
    results.ended("test_x[b]", "skipped", "there is no nvcc")
    results.add("Speed", way="copy", gbs=1234.56)
    results.add("Speed", way="native", gbs=0.123456, note="slow")
    as_json, as_text = results.write(tmp_path / "new")
    assert as_json.name == "gpu_nvidia-h200_2026-01-02.json"
    found = json.loads(as_json.read_text())
    assert found["outcomes"] == {"test_x[a]": "failed", "test_x[b]": "skipped"}
    assert found["tables"]["Speed"][0] == {"way": "copy", "gbs": 1234.56}
    text = as_text.read_text()
    assert "* 1 failed, 1 skipped in" in text
    assert "* 1 tests: there is no nvcc" in text
    assert "* test_x[a]" in text
    assert "| way | gbs | note |\n| --- | --- | --- |\n| copy | 1235 |  |" in text
    assert "| native | 0.1235 | slow |" in text


# -------------------------------------------------------------------------- conftest


def item(name: str, *markers: str, path=places.ROOT / "tests" / "gpu" / "test_x.py"):
    return SimpleNamespace(
        name=name,
        path=path,
        get_closest_marker=lambda marker: marker if marker in markers else None,
    )


def test_slow_tests_come_last_and_other_folders_stay_where_they_are():
    elsewhere = places.ROOT / "tests" / "unit" / "test_y.py"
    items = [
        item("slow", "gpu", "slow"),
        item("quick", "gpu"),
        item("cpu", "slow"),
        item("other", "gpu", "slow", path=elsewhere),
    ]
    assert [is_ours(each) for each in items] == [True, True, False, False]
    pytest_collection_modifyitems(items)
    assert [each.name for each in items] == ["quick", "cpu", "other", "slow"]


# -------------------------------------------------- what ranks do, on the stand-in


@pytest.fixture
def ctx(cuda, lone_group, monkeypatch) -> Context:
    """A rank whose device is the stand-in; its tensors are on the CPU."""
    install(monkeypatch, cuda)
    monkeypatch.setattr(torch.cuda, "_sleep", cuda.sleep, raising=False)
    return Context(0, 1, lone_group, 0, {})


def test_slow_branches_have_gradients_of_their_inputs(ctx):
    theirs, ours = scenarios.compare(ctx, test_order.slow_branches, {})
    assert same(theirs, ours)
    history, _ = ours
    x = scenarios.inputs(ctx, 4, 5000)
    assert same(history[4], [x, 2 * x, 3 * x])


def test_no_backward_waits_for_the_stand_in(ctx):
    assert test_order.backwards_without_wait(ctx, {}, "") == [False, False]
    static = {"static_graph": True}
    assert test_order.backwards_without_wait(ctx, static, "") == [False, False]
    with_hook = test_order.backwards_without_wait(ctx, {}, "fp16_compress_hook")
    assert with_hook == [False, False]


def test_a_copy_on_the_stand_in(ctx, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    assert test_order.in_order(ctx, "side", "default")


def test_memory_is_asked_for(ctx, cuda, monkeypatch):
    monkeypatch.setattr(test_resources, "CYCLES", 2)
    cuda.allocate(5)
    assert test_resources.peaks(ctx, {}) == [0, 0]
    assert set(test_resources.left_behind(ctx, {})) == {5}


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_profile_without_kernels_is_an_error(ctx):
    with pytest.raises(AssertionError, match="no kernels"):
        test_kernels.added_launches(ctx, 2)
