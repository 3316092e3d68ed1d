"""A rank raises or dies in a training whose steps are divided among the ranks.

The other one hears of it where the hosts agree on the next step, or its device waits
for gradients or values that do not come, until the watchdog lets it go on.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from minidp import CollectiveError
from minidp.errors import ShardedStepError
from tests.accelerator import test_faults
from tests.accelerator.test_faults import FAULT, STEPS, Missing, Training, synchronize
from tests.support.both import same
from tests.support.optimized import told

pytestmark = [pytest.mark.fault, pytest.mark.fresh]
fresh = test_faults.fresh


class Steps(torch.optim.SGD):
    """Calls something before it steps, when all ranks have agreed on that."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.act = None

    def step(self, closure=None):
        if self.act is not None:
            self.act()
        return super().step(closure)


class Divided(Training):
    """A training with divided steps."""

    def __init__(self, ctx, **options):
        super().__init__(ctx, **options)
        self.sgd = Steps(self.model.parameters())
        self.model.sharded_step(self.sgd, per_parameter=True)

    def values(self):
        return [param.detach().cpu() for param in self.model.parameters()]


def assert_goes_on(ctx, training):
    """The steps that are left give the bits of a plain run without any fault."""
    for number in range(FAULT, STEPS):
        training.step(number)
    synchronize()
    kind = "cpu" if ctx.device.type == "sim" else None
    plain = Training(ctx, kind, process_group=training.model.process_group)
    for number in range(STEPS):
        plain.step(number)
    expected = [param.detach().cpu() for param in plain.model.parameters()]
    assert same(training.values(), expected)


def begin(ctx, **options):
    training = Divided(ctx, **options)
    for number in range(FAULT):
        training.step(number).item()
    training.save()
    return training


def go_on(training):
    """Step, wait for the device, and step once more."""
    training.step(FAULT)
    c10d._get_default_store().set("rank 0 has queued its step", "")
    synchronize()
    training.step(FAULT + 1)


def raise_missing():
    raise Missing("out of luck")


def raise_before_the_backward(ctx):
    training = begin(ctx, hang_timeout=30)
    started = time.monotonic()
    if ctx.rank == 1:
        with pytest.raises(Missing):
            training.step(FAULT, in_loss=raise_missing)
    else:
        with pytest.raises(CollectiveError, match=r"Missing: rank 1\. Rank 1 gave up"):
            training.step(FAULT)
        assert time.monotonic() - started < 25
    texts = told(training.model.reset)
    assert not texts, texts  # nobody has stepped
    synchronize()
    assert_goes_on(ctx, training)


def test_a_rank_raises_before_its_backward(fresh):
    fresh.run(raise_before_the_backward, 2)


def raise_when_the_other_has_stepped():
    c10d._get_default_store().get("rank 0 has queued its step")
    raise Missing("out of luck")


def raise_in_the_step(ctx):
    """Values of the other rank never come, and what is there instead is written."""
    training = begin(ctx, hang_timeout=30)
    if ctx.rank == 1:
        training.sgd.act = raise_when_the_other_has_stepped
        with pytest.raises(Missing):
            training.step(FAULT)
        training.sgd.act = None
        with pytest.raises(ShardedStepError, match="its last step raised"):
            training.step(FAULT)
    else:
        with pytest.raises(CollectiveError) as caught:
            go_on(training)
        assert "Missing: rank 1" in str(caught.value)
        assert "may hold an incomplete average" in str(caught.value)
    texts = "\n".join(told(training.model.reset))
    assert "1 on rank 0, 0 on rank 1" in texts or "4 on rank 0, 3 on rank 1" in texts
    assert "incomplete average" in texts
    with pytest.raises(CollectiveError, match=r"incomplete average|gave up"):
        training.step(FAULT).item()
    told(training.model.reset)
    training.load()
    assert not told(training.model.reset)
    assert_goes_on(ctx, training)


def test_a_rank_raises_in_its_step(fresh):
    """Its share goes to all ranks in a reset, so that a checkpoint is needed."""
    fresh.run(raise_in_the_step, 2)


def die(ctx, when):
    training = begin(ctx, hang_timeout=4)

    def leave():
        os.kill(os.getpid(), signal.SIGKILL)

    started = time.monotonic()
    if ctx.rank == 1 and when == "step":
        training.sgd.act = leave
    elif ctx.rank == 1:
        leave()
    with pytest.raises(CollectiveError) as caught:
        go_on(training)
    assert time.monotonic() - started < 24
    return str(caught.value)


@pytest.mark.parametrize("when", ["step", "backward"])
def test_a_rank_dies(fresh, when):
    first, second = fresh.run(die, 2, when, errors="return")
    assert second.exit_code == -signal.SIGKILL
    assert "ank 1 does not answer (killed, stopped" in str(first), first
    if when == "backward":  # whichever comes to know of it first
        heard = r"the agreement on a step|the all-reduce of bucket \d"
        assert re.search(heard, str(first)), first
    assert "may hold an incomplete average" in str(first), first
