"""What tests on simulated ranks rely on: their own warnings, results, and failures."""

from __future__ import annotations

import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.simulation.scheduler import Finding
from tests.support import simulated
from tests.support.ranks import on_simulated_ranks


def warn_in_turns(ctx: Any) -> list[str]:
    """Let the ranks catch warnings at the same time."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            warnings.warn(f"{number} of rank {ctx.rank}", stacklevel=2)
            dist.barrier(ctx.group)
            with warnings.catch_warnings(record=True) as inner:
                warnings.warn("only the inner one hears it", stacklevel=2)
            assert len(inner) == 1
    return [str(each.message) for each in caught]


def test_each_rank_hears_its_own_warnings() -> None:
    catch, show = warnings.catch_warnings, warnings.showwarning
    results = simulated.run(warn_in_turns, 3)
    assert results == [[f"{n} of rank {rank}" for n in range(3)] for rank in range(3)]
    assert (warnings.catch_warnings, warnings.showwarning) == (catch, show)


def sum_later(ctx: Any, values: list[float]) -> Any:
    values.append(float(ctx.rank))  # its own copy
    time.sleep(1000.0)
    total = torch.tensor(sum(values))
    dist.all_reduce(total, group=ctx.group)
    return ctx.rank, ctx.world_size, total.item(), len(values)


def test_results_come_in_rank_order_without_a_wait() -> None:
    began, values = time.monotonic(), [1.0]
    assert simulated.run(sum_later, 2, values) == [(0, 2, 3.0, 2), (1, 2, 3.0, 2)]
    assert time.monotonic() - began < 500
    assert values == [1.0]


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_fails_or_does_not_come_fails_the_test(seed: int) -> None:
    def raises(ctx: Any) -> None:
        assert ctx.rank == 0, "one too many"

    def stays_away(ctx: Any) -> None:
        if ctx.rank:
            dist.barrier(ctx.group)

    with pytest.raises(Finding, match=r"rank 1 raised AssertionError in raises .*many"):
        simulated.run(raises, 2, seed=seed)
    with pytest.raises(Finding, match=r"rank 1 raised .* in stays_away"):
        simulated.run(stays_away, 2, seed=seed)
    assert simulated.run(sum_later, 2, [])[1] == (1, 2, 1.0, 1)  # nothing is left


@on_simulated_ranks(2)
@pytest.mark.parametrize("is_alike", [True])
def test_ranks_are_threads_here_by_day(ctx: Any, is_alike: bool) -> int | None:
    is_thread = threading.current_thread() is not threading.main_thread()
    assert is_thread is not simulated.ARE_REAL
    return None if is_alike else ctx.rank


@pytest.mark.skipif(simulated.ARE_REAL, reason="the ranks are those of `on_ranks`")
def test_ranks_that_return_something_else_fail_the_test() -> None:
    case: Any = test_ranks_are_threads_here_by_day
    with pytest.raises(AssertionError, match="rank 1: 1, 0"):
        case(is_alike=False)
