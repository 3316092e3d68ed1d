"""The test support itself: rank processes give back what ranks did."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from dataclasses import dataclass

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from tests.support.fresh import run_fresh
from tests.support.pool import Pool, RankError
from tests.support.wire import pack, unpack

# ------------------------------------------------------------------ what ranks run


@dataclass(frozen=True)
class Example:
    values: list[float]


def who(ctx):
    return ctx.rank, ctx.world_size, ctx.global_rank, dist.get_rank(ctx.group)


def pid(ctx):
    return os.getpid()


def total(ctx, example):
    value = torch.tensor(example.values) * (ctx.rank + 1)
    dist.all_reduce(value, group=ctx.group)
    return value


def pair_sum(ctx):
    pair = (0, 1) if ctx.rank < 2 else (2, 3)
    value = torch.tensor([ctx.rank])
    dist.all_reduce(value, group=ctx.subgroups[pair])
    return value.item()


def fail_on(ctx, rank):
    if ctx.rank == rank:
        raise KeyError(f"rank {rank} fails")
    return "fine"


def issue_one_collective_too_many(ctx):
    if ctx.rank == 0:
        dist.all_reduce(torch.zeros(1), group=ctx.group, async_op=True)


def skip_collective(ctx):
    if ctx.rank != 0:
        dist.all_reduce(torch.zeros(1), group=ctx.group)


def die(ctx, rank):
    if ctx.rank == rank:
        os._exit(3)
    dist.all_reduce(torch.zeros(1), group=ctx.group)


def kill_self(ctx, rank):
    if ctx.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return ctx.rank


def sleep_forever(ctx):
    threading.Event().wait()


def warn(ctx):
    warnings.warn("careful", UserWarning, stacklevel=1)


def return_a_lock(ctx):
    return threading.Lock()


def debug_level(ctx):
    return dist.get_debug_level().name, dist.get_world_size()


# ------------------------------------------------------------------------- the pool


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_answers_in_order(pool, world_size):
    expected = [(r, world_size, r, r) for r in range(world_size)]
    assert pool.run(who, world_size) == expected


def test_subgroup_counts_its_own_ranks(pool):
    assert pool.run(who, (1, 2)) == [(0, 2, 1, 0), (1, 2, 2, 1)]


def test_disjoint_groups_work_at_the_same_time(pool):
    assert pool.run(pair_sum, 4) == [1, 1, 5, 5]


def test_group_that_was_not_prepared_is_refused(pool):
    with pytest.raises(ValueError, match=r"\(0, 3\)"):
        pool.run(who, (0, 3))


@hypothesis.given(st.lists(st.floats(width=32, allow_nan=False, max_value=1e6)))
def test_examples_drawn_here_run_there(pool, values):
    ones = torch.tensor(values)
    expected = ones * 1 + ones * 2
    for result in pool.run(total, 2, Example(values)):
        assert torch.equal(result.nan_to_num(), expected.nan_to_num())


def test_local_function_is_refused(pool):
    with pytest.raises(ValueError, match="top level"):
        pool.run(lambda ctx: None, 2)


def test_exception_names_rank_type_and_place(pool):
    with pytest.raises(RankError, match=r"\[rank 1\] KeyError") as caught:
        pool.run(fail_on, 2, 1)
    assert caught.value.rank == 1
    assert caught.value.is_a("LookupError")
    assert "in fail_on" in caught.value.traceback


def test_exceptions_can_be_returned(pool):
    fine, error = pool.run(fail_on, 2, 1, errors="return")
    assert fine == "fine"
    assert isinstance(error, RankError)
    assert error.kind == "KeyError"


def test_plain_exception_does_not_cost_a_restart(pool):
    before = pool.run(pid, 4)
    pool.run(fail_on, 4, 0, errors="return")
    assert pool.run(pid, 4) == before


def test_result_that_cannot_travel_is_an_error_of_its_rank(pool):
    with pytest.raises(RankError, match="pickle"):
        pool.run(return_a_lock, 1)


def test_warnings_are_errors_on_request_only(pool):
    assert pool.run(warn, 1) == [None]
    with pytest.raises(RankError, match="UserWarning: careful"):
        pool.run(warn, 1, strict_warnings=True)


# ----------------------------------------------------------------------- recovery


@pytest.fixture(scope="module")
def small_pool():
    ranks = Pool(world_size=2, group_timeout=2.0)
    yield ranks
    ranks.close()


def assert_replaced(pool, before):
    assert not set(pool.run(pid, 2)) & set(before)
    assert pool.run(total, 2, Example([1.0]))[0].item() == 3.0


def test_recovers_from_ranks_out_of_step(small_pool):
    before = small_pool.run(pid, 2)
    small_pool.run(issue_one_collective_too_many, 2)
    assert_replaced(small_pool, before)
    assert "out of step" in small_pool.statistics().restart_reasons[-1]


def test_recovers_from_a_collective_that_timed_out(small_pool):
    before = small_pool.run(pid, 2)
    with pytest.raises(RankError, match=r"\[rank 1\]"):
        small_pool.run(skip_collective, 2)
    assert_replaced(small_pool, before)


def test_recovers_from_a_dead_rank(small_pool):
    before = small_pool.run(pid, 2)
    dead, bereft = small_pool.run(die, 2, 0, errors="return")
    assert (dead.kind, dead.exit_code) == ("Exited", 3)
    assert isinstance(bereft, RankError)
    assert_replaced(small_pool, before)


def test_hang_shows_the_stacks(small_pool):
    before = small_pool.run(pid, 2)
    with pytest.raises(RankError, match="in sleep_forever") as caught:
        small_pool.run(sleep_forever, 2, limit=0.5)
    assert caught.value.kind == "Hang"
    assert_replaced(small_pool, before)


# ----------------------------------------------------------------- fresh processes


def test_fresh_processes_give_results():
    assert run_fresh(who, 2) == [(0, 2, 0, 0), (1, 2, 1, 1)]


def test_fresh_reports_a_killed_rank_beside_the_living():
    killed, alive = run_fresh(kill_self, 2, 0, errors="return")
    assert (killed.kind, killed.exit_code) == ("Exited", -signal.SIGKILL)
    assert alive == 1


@pytest.mark.slow
def test_fresh_environment_is_there_before_torch():
    results = run_fresh(debug_level, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert results == [("DETAIL", 2)] * 2
    assert "TORCH_DISTRIBUTED_DEBUG" not in os.environ


# ------------------------------------------------------------------------- the wire


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)], ids=str)
def test_tensors_travel_bit_for_bit(dtype, shape):
    sent = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    got = unpack(pack(sent))
    assert got.dtype == dtype
    assert got.shape == sent.shape
    assert torch.equal(got, sent)


def test_nan_payload_travels():
    sent = torch.tensor([0x7FC12345, -1]).to(torch.int32).view(torch.float32)
    got = unpack(pack(sent))
    assert torch.equal(got.view(torch.int32), sent.view(torch.int32))


def test_strided_parameter_travels_as_plain_values():
    sent = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    got = unpack(pack({"weight": sent}))["weight"]
    assert type(got) is torch.Tensor
    assert torch.equal(got, sent)
