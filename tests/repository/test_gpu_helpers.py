"""What ranks of tests/gpu do, on a stand-in for the device."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import measure, scenarios, test_order
from tests.support.both import on_both, same
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
    torch.cuda.synchronize()
    assert not measure.waits(1.0, lambda: None)
    assert measure.waits(1.0, torch.cuda.synchronize)


def test_slow_branches_have_gradients_of_their_inputs(ctx):
    theirs, ours = scenarios.exactly(ctx, on_both, test_order.slow_branches, {})
    assert same(theirs, ours)
    x = scenarios.inputs(ctx, 4, 5000)
    assert same(ours[0][4], [x, 2 * x, 3 * x])


@pytest.mark.parametrize(
    ("options", "hook"),
    [
        *(({}, ""), ({"static_graph": True}, ""), (test_order.ITEMS, "")),
        ({}, test_order.FP16),
    ],
)
def test_no_backward_waits_for_the_stand_in(ctx, options, hook):
    assert test_order.backwards_without_wait(ctx, options, hook) == [False, False]
