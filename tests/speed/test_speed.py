"""`minidp.watch_speed`: which rank is slow, from times that ranks posted."""

from __future__ import annotations

import gc
import logging
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minidp
from minidp.speed.judge import (
    BACKWARD,
    FORWARD,
    PHASES,
    Judge,
    align,
    find_slow,
    late_bucket,
)
from minidp.speed.watch import _ENDS
from minidp.trace import StepEvent

STEP = [0.001, 0.010, 0.020, 0.004, 0.002]  # seconds by phase


def times(ranks, steps, **slow):
    """Times of equal ranks, with the phases in ``slow`` longer on the last rank."""
    found = np.array([[STEP] * steps] * ranks)
    for phase, seconds in slow.items():
        found[-1, :, PHASES.index(phase)] += seconds
    return found


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_a_rank_that_works_longer_is_found_with_its_phase(phase):
    slow = find_slow(times(3, 5, **{phase: 0.020}), 0.25)
    assert slow is not None
    assert (slow.rank, PHASES[slow.phase]) == (2, phase)
    assert slow.cost == pytest.approx(0.020)
    assert slow.here - slow.others == pytest.approx(0.020)


def test_small_differences_waiting_and_one_odd_step_are_not_slow():
    once, but_once = times(2, 5), times(2, 5, forward=0.020)
    once[1, 2, FORWARD] += 10
    but_once[1, 2] = STEP
    for each in (times(2, 5), times(2, 5, forward=0.005), times(2, 5, waiting=1), once):
        assert find_slow(each, 0.25) is None
    assert find_slow(but_once, 0.25) is not None


@given(st.integers(2, 5), st.lists(st.floats(0.9, 1.1), min_size=25, max_size=25))
def test_times_that_differ_by_a_tenth_are_not_slow(ranks, noise):
    factors = np.resize(np.array(noise), (ranks, 5, 1))
    assert find_slow(times(ranks, 5) * factors, 0.25) is None


def rows(first, count):
    return [(n, [float(n)] * len(PHASES)) for n in range(first, first + count)]


def test_ranks_are_compared_in_the_steps_that_all_have_or_in_their_last_ones():
    numbers, found = align([rows(3, 10), rows(5, 10)])
    assert numbers == list(range(5, 13))
    assert np.array_equal(found[0], found[1])
    numbers, found = align([rows(1, 4), rows(100, 6)])
    assert numbers == [1, 2, 3, 4]
    assert found[1, :, 0].tolist() == [102, 103, 104, 105]
    numbers, found = align([[], rows(1, 3)])
    assert numbers == []
    assert found.shape == (2, 0, len(PHASES))


def test_each_event_of_a_step_ends_a_phase():
    assert set(_ENDS) == set(StepEvent)


def test_the_bucket_before_which_time_is_lost():
    full = {0: {"0": 0.01, "1": 0.02, "2": 0.03}, 1: {"0": 0.01, "1": 0.07, "2": 0.08}}
    assert late_bucket(full, 1) == 1
    assert late_bucket({0: {}, 1: {}}, 1) is None
    assert late_bucket({0: {"0": 0.01}, 1: {"0": 0.01, "1": 0.02}}, 1) is None


class OneBucket:
    """What `Judge` reads of a reducer."""

    class queue:
        class bucket:
            names = ("head.weight", "head.bias")

        buckets = (bucket,)


def posted(first, steps, slow):
    both = {}
    for rank in (0, 1):
        each = list(STEP)
        each[BACKWARD] += slow * rank
        both[rank] = {
            "host": f"h{rank}",
            "steps": [(number, each) for number in range(first, first + steps)],
            "full": {"0": each[BACKWARD]},
        }
    return both


WORK = [  # first step, steps, seconds that rank 1 works longer
    (1, 8, 0.0),
    (9, 6, 0.030),
    (9, 6, 0.030),  # the same steps again
    (15, 8, 0.030),
    (23, 6, 0.0),
]


def test_rank_0_logs_once_and_once_when_it_is_over(caplog):
    """Rank 1 is slow from the second line of the table on, to before the last."""
    reducer = OneBucket()  # the judge does not keep it alive
    judge = Judge(reducer)
    with caplog.at_level(logging.WARNING, "minidp"):
        for post in WORK:
            judge.judge(posted(*post))
    rank_1 = "[rank 0] Rank 1 "
    assert caplog.messages == [
        f"{rank_1}(h1) slows all ranks down, since step 9: its backward (most of it "
        "before bucket 0: head.weight to head.bias) takes 50 ms, that of the others "
        "20 ms. This costs 30 ms of each step of 67 ms (45 %).",
        f"{rank_1}slows the others down no longer, at step 27. It did for 18 steps, "
        "which cost about 0.54 s.",
    ]


def test_numbers_of_one_rank_and_the_model_may_go(lone_group):
    ddp = minidp.DataParallel(nn.Linear(4, 2))
    speed = minidp.watch_speed(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(6):
        ddp(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    numbers = speed.numbers()
    more = ("step", "slow_rank", "slow_cost_s")
    assert set(numbers) == {*(f"{name}_s" for name in PHASES), *more}
    assert numbers["step"] == 5
    assert numbers["slow_rank"] == -1
    assert all(numbers[f"{name}_s"] > 0 for name in PHASES)
    speed.stop()
    speed.stop()
    ddp(torch.ones(3, 4)).sum().backward()
    ddp(torch.ones(3, 4)).sum().backward()
    assert speed.numbers() == numbers
    gone = weakref.ref(ddp)
    del ddp, optimizer
    gc.collect()
    assert gone() is None


def test_a_model_that_minidp_does_not_synchronise_is_refused():
    with pytest.raises(TypeError, match=r"watch_speed\(\) needs a minidp.DataParallel"):
        minidp.watch_speed(nn.Linear(2, 2))
