"""A rank raises, is late or dies, on a device where waits do not let the host wait.

The other rank has queued everything long before: it is stuck where it reads a number,
or runs ahead. It must come free, and get an error that names the missing rank.

`bash tests/run.sh gpu` runs all this on GPUs.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import signal
import time
from dataclasses import replace

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from minidp import CollectiveError, DataParallel, ReducerFailedError
from minidp.hang import watchdog
from tests.accelerator.training import SMALL, Run, net
from tests.gpu.places import NCCL
from tests.support import sim
from tests.support.both import same
from tests.support.optimized import told
from tests.support.pool import Pool

pytestmark = [pytest.mark.fault, pytest.mark.fresh]

FAULT = 3  # the step in which rank 1 is missing
STEPS = 6


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def fresh(request):
    """New ranks on devices, whose groups wait longer than the limit for hangs."""
    if request.param == "sim":
        request.getfixturevalue("pool")  # builds the device
        ranks = Pool(
            *(2, 60.0),
            backend=f"cpu:gloo,sim:{sim.BACKEND}",
            devices=["sim:0"] * 2,
            subgroups=(),
        )
    else:
        place = replace(NCCL[-2], backend="cpu:gloo,cuda:nccl")
        if place.num_gpus > torch.cuda.device_count():
            pytest.skip(f"needs {place.num_gpus} GPUs")
        ranks = place.pool()
    yield ranks
    ranks.close()


def synchronize():
    """Wait for the device, as scripts for one type of device do."""
    if torch.cuda.is_available():  # torch.accelerator's holds the GIL in torch 2.11
        torch.cuda.synchronize()
    else:
        torch.accelerator.synchronize()


class Missing(Exception):
    """What rank 1 raises."""


class Training:
    """A training that can be interrupted, and goes on at any step."""

    def __init__(self, ctx, kind=None, **options):
        self.rank, kind = ctx.rank, kind or ctx.device.type
        self.run = Run(ctx, DataParallel, kind)
        module = net().to(self.run.device())
        self.model = self.run.wrap(module, **SMALL, **options)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.saved = []

    def step(self, number, *, in_loss=lambda: None, before_step=lambda: None):
        """Make one step; the callables are called in the middle of it."""
        self.sgd.zero_grad()
        loss = self.model(self.run.batch(number)).square().mean()
        in_loss()
        loss.backward()
        before_step()
        self.sgd.step()
        return loss

    def save(self):
        self.saved = copy.deepcopy([self.model.state_dict(), self.sgd.state_dict()])

    def load(self):
        self.model.load_state_dict(self.saved[0])
        self.sgd.load_state_dict(copy.deepcopy(self.saved[1]))

    def state(self):
        momenta = [row["momentum_buffer"] for row in self.sgd.state.values()]
        return [t.detach().cpu() for t in [*self.model.parameters(), *momenta]]


def undisturbed(ctx, group):
    """Return the state after `STEPS`; that of a simulated device is the CPU's."""
    if ctx.device.type == "sim":
        training = Training(ctx, "cpu")
    else:
        training = Training(ctx, process_group=group)
    for number in range(STEPS):
        training.step(number)
    return training.state()


def assert_goes_on(ctx, training):
    """The steps that are left give the bits of a run that nothing has disturbed."""
    for number in range(FAULT, STEPS):
        training.step(number)
    synchronize()
    assert same(training.state(), undisturbed(ctx, training.model.process_group))


def raise_missing():
    raise Missing("no loss today")


def fail(training, waits="item", in_loss=raise_missing):
    """Let rank 1 miss a step; return the error of this rank, and after how long.

    If rank 1 lives, it returns when rank 0 has queued what it is to wait behind.
    """
    store = c10d._get_default_store()
    for number in range(FAULT):
        training.step(number).item()
    training.save()
    if training.rank == 1:
        with pytest.raises(Missing):
            training.step(FAULT, in_loss=in_loss)
        store.get("rank 0 has queued its work")
        return "", 0.0

    def wait_before_the_step():
        store.set("rank 0 has queued its work", "")
        synchronize()

    def go_on():
        if waits == "before the step":
            training.step(FAULT, before_step=wait_before_the_step)
        loss = training.step(FAULT)
        store.set("rank 0 has queued its work", "")
        {"item": loss.item, "copy": loss.cpu}.get(waits, synchronize)()
        training.step(FAULT + 1)

    begin = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        go_on()
    with pytest.raises(ReducerFailedError):
        training.step(FAULT)
    return str(caught.value), time.monotonic() - begin


# ---------------------------------------------------------------------- a rank raises


def recover_by_a_copy(ctx, waits):
    training = Training(ctx, hang_timeout=30)
    if ctx.rank == 1:  # the error reaches rank 0 when this rank calls reset()
        fail(training, waits)
    else:
        error, seconds = fail(training, waits)
        assert seconds < 25, seconds  # at once, and not at the limit
        assert "Missing: rank 1. Rank 1 gave up: it called reset()" in error
        assert "[rank 0]" in error
        assert "all-reduce of bucket 0" in error
        is_applied = waits != "before the step"
        assert ("may hold an incomplete average" in error) == is_applied
        assert ("load a checkpoint" in error) == is_applied
    heard = told(lambda: training.model.reset(copy_from=1))
    assert not heard, heard
    synchronize()  # no stream waits for the old group
    assert_goes_on(ctx, training)


@pytest.mark.parametrize("waits", ["copy", "synchronize", "before the step"])
def test_a_rank_raises(fresh, waits):
    fresh.run(recover_by_a_copy, 2, waits)


def recover_without_a_copy(ctx):
    training = Training(ctx, hang_timeout=30)
    fail(training, "before the step")
    assert not told(training.model.reset)  # nothing was applied
    assert_goes_on(ctx, training)


def test_nothing_is_said_if_no_step_has_applied_anything(fresh):
    fresh.run(recover_without_a_copy, 2)


def raise_ahead_of_the_device(ctx):
    """Rank 1 raises while its device still averages the gradients of the last step."""
    training = Training(ctx, hang_timeout=30)
    for number in range(FAULT - 1):
        training.step(number)
    synchronize()
    if ctx.device.type == "sim":
        sim.delay(4000, seed=ctx.rank + 1)
    else:
        torch.cuda._sleep(500_000_000)  # cycles, some 0.3 s
    training.step(FAULT - 1)
    if ctx.rank == 1:
        with pytest.raises(Missing):
            training.step(FAULT, in_loss=raise_missing)
    else:
        with pytest.raises(CollectiveError):
            training.step(FAULT, before_step=synchronize)
    assert not told(training.model.reset)
    assert_goes_on(ctx, training)
    if ctx.device.type == "sim":
        sim.delay(0, seed=0)


def test_a_host_that_raises_lets_its_device_finish(fresh):
    fresh.run(raise_ahead_of_the_device, 2)


def reset_at_once(ctx):
    """Rank 0 does not wait for the error, so that nobody else aborts the group."""
    training, store = Training(ctx, hang_timeout=30), c10d._get_default_store()
    for number in range(FAULT):
        training.step(number).item()
    if ctx.rank == 0:
        training.step(FAULT)
        store.set("rank 0 has queued its step", "")
    else:
        store.get("rank 0 has queued its step")
    assert not told(lambda: training.model.reset(copy_from=1))
    synchronize()
    assert_goes_on(ctx, training)


def test_reset_leaves_no_stream_behind_the_old_group(fresh):
    fresh.run(reset_at_once, 2)


def forget_to_load(ctx, how):
    training = Training(ctx, hang_timeout=30)
    fail(training)
    if how == "loads before":
        training.load()
    texts = told(training.model.reset)
    if how == "loads before":
        assert not texts
        assert_goes_on(ctx, training)
        return
    # Only of backends that torch ships the replicas are compared, too.
    text, *_ = texts
    assert text.startswith(f"[rank {ctx.rank}] ")
    assert "rank 0 hold an incomplete average" in text
    if how == "loads after":
        training.load()
        assert_goes_on(ctx, training)
        return

    def go_on():
        for number in range(FAULT, STEPS):
            training.step(number).item()

    with pytest.raises(CollectiveError) as caught:
        go_on()
    if ctx.rank == 0:
        assert "of this rank hold an incomplete average" in str(caught.value)
    else:
        assert "Rank 0 gave up: " in str(caught.value)
    # Rank 1 is wrong, too, if it had queued its step before it heard of the error.
    for _ in range(2):  # another reset() mends nothing
        text, *_ = told(training.model.reset)
        assert re.search("rank 0(, 1)? hold an incomplete average", text)
    training.load()
    assert not told(training.model.reset)
    assert_goes_on(ctx, training)


@pytest.mark.parametrize("how", ["forgets", "loads before", "loads after"])
def test_parameters_that_hold_an_incomplete_average_are_not_trained(fresh, how):
    fresh.run(forget_to_load, 2, how)


def wait_on_the_host(ctx):
    """In each step the ranks compare the replicas, through the CPU's backend."""
    training = Training(ctx, hang_timeout=30, check_replicas_every=1)
    for number in range(FAULT):
        training.step(number)
    if ctx.rank == 0:
        with pytest.raises(CollectiveError, match="Rank 1 gave up: it called reset"):
            training.step(FAULT)  # no optimizer step is queued before the error comes
    else:
        with pytest.raises(Missing):
            training.step(FAULT, in_loss=raise_missing)
    assert not told(training.model.reset)
    assert_goes_on(ctx, training)


def test_a_host_that_waits_for_a_message_of_the_cpu_comes_free(fresh):
    fresh.run(wait_on_the_host, 2)


def raise_in_join(ctx, has_cpu):
    """Rank 1 raises, and rank 0 announces its next forward to it."""
    backend = sim.BACKEND if ctx.device.type == "sim" else "nccl"
    group = ctx.group if has_cpu else torch.distributed.new_group(backend=backend)
    expected = undisturbed(ctx, group)  # first: a message stays behind in the group
    training = Training(ctx, hang_timeout=30, process_group=group)

    def train():
        with training.model.join():
            for number in range(FAULT):
                training.step(number)
            if ctx.rank == 1:
                synchronize()
                raise Missing("in join")
            training.step(FAULT)

    begin = time.monotonic()
    with pytest.raises(Missing if ctx.rank == 1 else CollectiveError) as caught:
        train()
    if ctx.rank == 0:
        assert time.monotonic() - begin < 25
        assert "announcing a forward in join()" in str(caught.value)
        assert "Missing: rank 1. Rank 1 gave up: it called reset()" in str(caught.value)
    assert not told(lambda: training.model.reset(copy_from=1))
    for number in range(FAULT, STEPS):
        training.step(number)
    synchronize()
    assert same(training.state(), expected)


@pytest.mark.parametrize("has_cpu", [True, False])
def test_a_rank_raises_in_join(fresh, has_cpu):
    """The host of the other one waits for it: on the CPU, if the group can."""
    fresh.run(raise_in_join, 2, has_cpu)


def share_a_group(ctx):
    """The group is aborted for the first wrapper, and the second one has to know it."""
    first, second = (Training(ctx, hang_timeout=30) for _ in range(2))
    store = c10d._get_default_store()
    for number in range(FAULT):
        first.step(number)
        second.step(number)
    if ctx.rank == 1:
        store.get("rank 0 has launched")
    else:
        first.step(FAULT)
        loss = second.step(FAULT)
        store.set("rank 0 has launched", "")
        loss.item()
        with pytest.raises(CollectiveError, match="Missing: rank 1"):
            second.step(FAULT + 1)
        with pytest.raises(CollectiveError, match="Missing: rank 1"):
            first.step(FAULT + 1)
    for training in (first, second):
        heard = told(lambda t=training: t.model.reset(copy_from=1))
        assert not heard, heard
    for training in (first, second):
        assert_goes_on(ctx, training)


def test_another_wrapper_on_the_group_is_told(fresh):
    fresh.run(share_a_group, 2)


# ---------------------------------------------------------------------- a rank is late


def be_late(ctx):
    training, store = Training(ctx, hang_timeout=4), c10d._get_default_store()

    def come_when_the_other_has_given_up():
        if ctx.rank == 1:
            store.get("rank 0 has given up")

    for number in range(FAULT):
        training.step(number)
    training.save()

    def go_on():
        # What rank 0 has sent by then may still reach rank 1, whose next step hangs.
        for number in range(FAULT, FAULT + 3):
            training.step(number, in_loss=come_when_the_other_has_given_up).item()

    begin = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        go_on()
    error = str(caught.value)
    if ctx.rank == 0:
        assert 4 <= time.monotonic() - begin < 20
        store.set("rank 0 has given up", "")
        assert "Missing: rank 1. Rank 1 runs, but" in error
        assert "did not finish within" in error
    else:
        assert "Missing: rank 0. Rank 0 gave up: CollectiveError: [rank 0]" in error
    told(training.model.reset)
    training.load()
    assert_goes_on(ctx, training)


def test_a_rank_is_late(fresh):
    fresh.run(be_late, 2)


# ------------------------------------------------------------------------ a rank dies


def die(ctx):
    training = Training(ctx, hang_timeout=4)

    def leave():
        os.kill(os.getpid(), signal.SIGKILL)

    error, seconds = fail(training, in_loss=leave)
    assert seconds < 20
    return error


def test_a_rank_dies(fresh):
    first, second = fresh.run(die, 2, errors="return")
    assert second.exit_code == -signal.SIGKILL
    assert "Missing: rank 1. Rank 1 does not answer (killed, stopped" in str(first)


# ------------------------------------------------- nobody calls us again; no abort


def rank_1_stops_earlier(ctx, log, aborts):
    logging.getLogger("minidp").addHandler(logging.FileHandler(log))
    if not aborts:
        watchdog.ABORT_SECONDS = 0.5
        watchdog.abort = lambda group: False
    run = Run(ctx, DataParallel, ctx.device.type)
    model = run.wrap(net().to(ctx.device), hang_timeout=4)
    run.train(model, 3 if ctx.rank else 4)
    has_launched = log.with_suffix(".launched")
    if ctx.rank == 0:
        has_launched.touch()
    while not has_launched.exists():  # rank 1 says that it leaves, once it returns
        time.sleep(0.01)
    synchronize()


@pytest.mark.parametrize("aborts", [True, False])
def test_a_host_that_waits_for_ever(fresh, tmp_path, aborts):
    """It comes free, and the log says why; without an abort the process ends."""
    log = tmp_path / "log"
    first, second = fresh.run(rank_1_stops_earlier, 2, log, aborts, errors="return")
    assert second is None
    assert first is None if aborts else first.exit_code == 1, first
    said = log.read_text()
    assert "Missing: rank 1." in said
    assert ("This process ends" in said) != aborts
