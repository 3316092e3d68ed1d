"""The group ``simccl`` keeps to the rules of NCCL's."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.accelerator.training import no_races
from tests.support import sim
from tests.support.fresh import run_fresh
from tests.support.pool import RankError
from tests.support.ranks import on_ranks


@contextlib.contextmanager
def mutant(name):
    """Take a wait out of the group."""
    sim.load().set_group_mutant(name)
    yield
    sim.load().drain()
    sim.load().set_group_mutant("")


def filled(ctx, size=1000):
    return torch.full((size,), float(ctx.rank + 1), device=ctx.device)


# ------------------------------------------------------------------------------ results


@on_ranks(2)
def test_collectives(ctx):
    warnings.simplefilter("ignore", FutureWarning)  # torch renames two of them
    with no_races():
        x, peers = filled(ctx, 4), range(2)
        dist.all_reduce(x, group=ctx.group)
        assert x.tolist() == [3] * 4
        dist.all_reduce(x := filled(ctx, 4), dist.ReduceOp.AVG, group=ctx.group)
        assert x.tolist() == [1.5] * 4
        dist.broadcast(x := filled(ctx, 4), src=1, group=ctx.group)
        assert x.tolist() == [2] * 4
        parts = [torch.empty(2, device="sim") for _ in peers]
        dist.all_gather(parts, filled(ctx, 2), group=ctx.group)
        assert [part.tolist() for part in parts] == [[1, 1], [2, 2]]
        dist.all_gather_into_tensor(
            x := torch.empty(4, device="sim"), filled(ctx, 2), group=ctx.group
        )
        assert x.tolist() == [1, 1, 2, 2]
        dist.reduce_scatter_tensor(
            x := torch.empty(2, device="sim"), filled(ctx, 4), group=ctx.group
        )
        assert x.tolist() == [3, 3]
        dist.all_to_all_single(
            x := torch.empty(4, device="sim"), filled(ctx, 4), group=ctx.group
        )
        assert x.tolist() == [1, 1, 2, 2]
        if ctx.rank == 0:
            dist.send(filled(ctx, 3), dst=1, group=ctx.group)
        else:
            dist.recv(x := filled(ctx, 3), src=0, group=ctx.group)
            assert x.tolist() == [1, 1, 1]


@on_ranks(2)
def test_several_as_one(ctx):
    tensors = [filled(ctx, size) for size in (3, 5)]
    with no_races(), sim.costs() as costs:
        with dist._coalescing_manager(
            device=ctx.device, async_ops=True, group=ctx.group
        ) as handle:
            for tensor in tensors:
                dist.all_reduce(tensor, async_op=True, group=ctx.group)
        handle.wait()
    assert costs.collectives == 1
    assert all(tensor.eq(3).all() for tensor in tensors)


@on_ranks(2)
def test_two_devices_do_not_mix_their_collectives_up(ctx):
    with no_races():
        first, second = (torch.ones(100, device=f"sim:{index}") for index in range(2))
        # Their streams run at the same time, in another order on each rank.
        sim.delay(2000, seed=ctx.rank)
        works = [
            dist.all_reduce(t, async_op=True, group=ctx.group)
            for t in (first, second) * 3
        ]
        for work in works:
            work.wait()
        assert first.eq(8).all()
        assert second.eq(8).all()
    sim.delay(0, seed=0)


# --------------------------------------------------------------------- order and memory


@on_ranks(2)
def test_the_stream_waits_and_the_host_does_not(ctx):
    x = filled(ctx)
    with no_races(), sim.no_host_waits():
        work = dist.all_reduce(x, async_op=True, group=ctx.group)
        assert work.wait()
        y = x * 2
    assert y.eq(6).all()


@on_ranks(2)
def test_a_result_that_nobody_waits_for_is_a_race(ctx):
    x = filled(ctx)
    work = dist.all_reduce(x, async_op=True, group=ctx.group)
    x.mul(2)
    assert "aten::mul.Tensor reads" in sim.races()[0]
    work.wait()


@on_ranks(2)
@pytest.mark.parametrize("name", ["launch", "work"])
def test_without_one_of_its_waits_the_group_races(ctx, name):
    with mutant(name):
        x = filled(ctx)
        dist.all_reduce(x, async_op=True, group=ctx.group).wait()
        x.mul(2)
        assert "allreduce" in sim.races()[0]


@on_ranks(2)
def test_a_synchronous_collective_is_on_the_current_stream(ctx):
    side = sim.new_stream()
    with no_races(), side:
        x = filled(ctx)
        dist.all_reduce(x, group=ctx.group)
        assert x.eq(3).all()


@on_ranks(2)
def test_tensors_live_until_the_work_is_waited_for(ctx):
    sim.delay(3000, seed=1)
    with no_races():
        x = filled(ctx)
        address = x.data_ptr()
        work = dist.all_reduce(x, async_op=True, group=ctx.group)
        del x
        assert torch.empty(1000, device="sim").data_ptr() != address
        work.wait()
        assert torch.empty(1000, device="sim").data_ptr() != address  # `work.result()`
        del work
    sim.delay(0, seed=0)


@on_ranks(2)
def test_a_future_orders_streams_as_the_work_does(ctx):
    def double(future):
        return future.value()[0] * 2

    with no_races(), sim.no_host_waits():
        future = (
            dist.all_reduce(filled(ctx), async_op=True, group=ctx.group)
            .get_future()
            .then(double)
        )
        result = future.wait() + 1
    assert result.eq(7).all()


@on_ranks(2)
def test_a_barrier_lets_the_host_wait(ctx):
    with sim.costs() as costs:
        dist.barrier(device_ids=[0], group=ctx.group)
    assert costs.host_waits == ("barrier",)


# ------------------------------------------------------------------------------- faults


def start(ctx):
    """Make the device in a new process, and a group on it."""
    sim.load()
    group = dist.new_group(backend=sim.BACKEND, timeout=timedelta(seconds=1))
    dist.all_reduce(torch.ones(3, device="sim"), group=group)
    return group


def wait_for_a_rank_that_does_not_come(ctx):
    group = start(ctx)
    if ctx.rank == 0:
        dist.all_reduce(torch.ones(3, device="sim"), group=group)
        torch.accelerator.synchronize()
    # `run_fresh` lets the other rank live until both have answered.


def abort_what_waits(ctx):
    group = start(ctx)
    if ctx.rank == 0:
        x = torch.ones(3, device="sim")
        work = dist.all_reduce(x, group=group, async_op=True)
        begin = time.monotonic()
        group.abort()
        torch.accelerator.synchronize()  # the kernels of the group have ended
        assert time.monotonic() - begin < 30
        with pytest.raises(dist.DistBackendError, match="aborted: by a call of abort"):
            work.wait()
        with pytest.raises(dist.DistBackendError, match="aborted: by a call of abort"):
            dist.all_reduce(x, group=group)
        assert (x + 1).shape == (3,)  # the device goes on


def be_saved_by_the_watchdog(ctx):
    group = start(ctx)
    sim.load().abort_group_on_timeout(True)
    if ctx.rank == 0:
        work = dist.all_reduce(torch.ones(3, device="sim"), group=group, async_op=True)
        torch.accelerator.synchronize()
        with pytest.raises(dist.DistBackendError, match="allreduce took longer than"):
            work.wait()


@pytest.mark.fault
def test_the_watchdog_ends_a_process_whose_collective_is_late(pool):
    with pytest.raises(RankError) as caught:
        run_fresh(wait_for_a_rank_that_does_not_come, 2, group_timeout=3)
    errors = [caught.value, *caught.value.others]
    assert [e.exit_code for e in errors if e.rank == 0] == [134]


def connect_to_nobody(ctx):
    sim.load()
    group = dist.new_group(backend=sim.BACKEND, timeout=timedelta(seconds=3))
    if ctx.rank == 0:
        threading.Timer(0.5, group.abort).start()
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="did not connect in time"):
            dist.all_reduce(torch.ones(3, device="sim"), group=group)
        assert 2 < time.monotonic() - begin < 60


@pytest.mark.fault
def test_the_host_waits_in_the_first_collective_and_no_abort_ends_that(pool):
    run_fresh(connect_to_nobody, 2)


def copy_behind_a_collective(ctx):
    group, ends = start(ctx), {}

    def act(event):
        event.query()
        ends["asked"] = time.monotonic()
        event.record()
        ends["recorded"] = time.monotonic()

    x = torch.ones(3, device="sim")
    if ctx.rank == 1:
        time.sleep(0.6)
        dist.all_reduce(x, group=group)
        return
    event = torch.Event("sim")
    event.record()
    dist.all_reduce(x, group=group)
    thread = threading.Timer(0.1, act, [event])
    thread.start()
    x.tolist()
    end = time.monotonic()
    thread.join()
    assert ends["asked"] < end - 0.1
    assert ends["recorded"] > end - 0.1


@pytest.mark.fault
def test_a_copy_to_pageable_memory_keeps_other_threads_out(pool):
    """Their questions are answered, as CUDA does."""
    run_fresh(copy_behind_a_collective, 2)


@pytest.mark.fault
@pytest.mark.parametrize("scenario", [abort_what_waits, be_saved_by_the_watchdog])
def test_an_aborted_group_raises_and_the_process_lives(pool, scenario):
    run_fresh(scenario, 2)
