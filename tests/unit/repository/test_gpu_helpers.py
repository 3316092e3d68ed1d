"""What ranks of tests/gpu do, on a stand-in for the device."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import measure, scenarios, test_order
from tests.support.both import same
from tests.support.fake_cuda import FakeCuda, install
from tests.support.worker import Context

CYCLES_PER_MS = 1e6


class SleepingCuda(FakeCuda):
    """Its device sleeps when told to; a host that waits lets time pass."""

    def sleep(self, cycles: int) -> None:
        self.now_ms += cycles / CYCLES_PER_MS


@pytest.fixture
def ctx(lone_group, monkeypatch) -> Context:
    """A rank whose device is the stand-in; its tensors are on the CPU."""
    cuda = SleepingCuda()
    install(monkeypatch, cuda)
    monkeypatch.setattr(torch.cuda, "_sleep", cuda.sleep, raising=False)
    return Context(0, 1, lone_group, 0, {})


def test_who_waits_is_seen_and_who_does_not_is_not(ctx):
    busy = measure.Busy(torch.cuda, torch.cuda._sleep)
    torch.cuda.synchronize()
    assert not measure.waits(busy, 1.0, lambda: None)
    assert measure.waits(busy, 1.0, torch.cuda.synchronize)


def test_slow_branches_have_gradients_of_their_inputs(ctx):
    theirs, ours = scenarios.compare(ctx, test_order.slow_branches, {})
    assert same(theirs, ours)
    x = scenarios.inputs(ctx, 4, 5000)
    assert same(ours[0][4], [x, 2 * x, 3 * x])


@pytest.mark.parametrize(
    ("options", "hook"),
    [({}, ""), ({"static_graph": True}, ""), ({}, "fp16_compress_hook")],
)
def test_no_backward_waits_for_the_stand_in(ctx, options, hook):
    assert test_order.backwards_without_wait(ctx, options, hook) == [False, False]


def test_a_copy_on_the_stand_in(ctx, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    assert test_order.copied(ctx, "side", "default", True)
