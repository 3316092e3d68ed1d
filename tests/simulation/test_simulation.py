"""Simulated ranks: some hundreds of runs by seed, and what the simulation promises."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d as c10d

from minidp import world

from . import own
from .faults import Fault, Kind
from .mutants import MUTANTS, changed
from .play import Play, Rank
from .scenarios import SCENARIOS, warm_up
from .scenarios.auto import check_auto, train_by_auto
from .scenarios.logical import Logical
from .scenarios.odd import Odd, train_oddly
from .scenarios.sharded import LogicalSharded
from .scheduler import Deadlock, Finding
from .seeds import expect_nothing, expect_nothing_left, expect_the_same
from .tape import Tape
from .training import Settings

pytestmark = pytest.mark.laws

IS_LONG = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
# How many seeds of each scenario are played here. `python -m tests.simulation` goes on.
RUNS = {
    "train": 20,
    "faults": 30,
    "reset": 5,
    "hook": 8,
    "join": 8,
    "hangs": 10,
    "logical": 8,
    "logical_reset": 5,
    "sharded": 8,
    "sharded_reset": 5,
    "logical_sharded": 5,
    "logical_sharded_reset": 3,
    "auto": 3,
    "auto_reset": 3,
    "legal": 10,
    "mistake": 10,
    "leave_out": 5,
}


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> Iterator[None]:
    """Let `reset`, which looks at all objects of a process, find few of them."""
    threads = torch.get_num_threads()
    warm_up()
    yield
    torch.set_num_threads(threads)


def test_every_scenario_is_played():
    assert RUNS.keys() == SCENARIOS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_found(name: str) -> None:
    expect_nothing(name, RUNS[name])


def test_a_repeated_step_of_logical_ranks_begins_with_the_same_buffers() -> None:
    """Rank 0 ends the loop, and the broadcast of module buffers that follows fails."""
    plan = Logical(Settings(), 2, rank=1, step=0, place="after a turn")
    scenario = SCENARIOS["logical_reset"]
    for seed in range(20 if IS_LONG else 8):
        fault = Fault(Kind.NOTHING, rank=0, at=0)
        tape = Tape(seed)
        play = Play(scenario.script, tape, 2, plan, fault=fault, has_numbers=True)
        play.run()
        scenario.check(play)


@pytest.mark.parametrize("is_slow", [False, True])
def test_the_faster_layout_stays_if_no_message_is_late(is_slow: bool) -> None:
    plan = replace(SCENARIOS["auto"].draw(Tape(row=())), is_slow=is_slow)
    play = Play(train_by_auto, Tape(row=()), 2, plan)
    play.run()
    check_auto(play)
    layout, _ = play.board["layout", 0, plan.training.steps - 1, 0]
    assert (len(layout) > 1) is is_slow


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=200))
def test_nothing_is_found_by_hypothesis(row: list[int]) -> None:
    SCENARIOS["faults"].play(Tape(row=row))


@pytest.mark.parametrize("name", ["faults", "reset", "auto"])
def test_a_seed_is_a_run(name: str) -> None:
    expect_the_same(name, 1 if name == "auto" else 6)


def test_nothing_is_left() -> None:
    expect_nothing_left("faults", 10)


PLANS: dict[str, Any] = {
    "train": Settings(),
    "join": SCENARIOS["join"].draw(Tape(row=())),
    "logical": Logical(Settings(steps=2), 5),  # each rank has two sums
    "sharded": SCENARIOS["sharded"].draw(Tape(row=())),
    "logical_sharded": LogicalSharded(Settings(steps=2), "adamw", True, False, True, 5),
}


@pytest.mark.parametrize("kind", [Kind.DIES, Kind.DIES_SILENTLY, Kind.INTERRUPTED])
@pytest.mark.parametrize("name", PLANS)
def test_waits_end_wherever_a_rank_is_lost(name: str, kind: Kind) -> None:
    """At every so many-th seam of the constructor, of steps, of `join`."""
    scenario, plan = SCENARIOS[name], PLANS[name]
    stride = {"logical": 2, "logical_sharded": 8}.get(name, 5)
    for at in itertools.count(0, stride if IS_LONG else 2 * stride + 1):
        fault = Fault(kind, rank=1, at=at)
        tape = Tape(seed=0)  # the same seams each time
        play = Play(scenario.script, tape, 2, plan, fault=fault, has_numbers=True)
        play.run()
        scenario.check(play)
        if not fault.has_struck:
            break
    assert at > 60


LATE = [Kind.HEARS_LATE, Kind.IS_SLOW]


def num_late_runs(scenario: str, odd: Odd, kind: Kind, stride: int = 1) -> int:
    """Let rank 0 be late, for 8 s or 25 s, at every so many-th seam; check each run."""
    for at in itertools.count(0, stride):
        fault = Fault(kind, rank=0, at=at, seconds=(8.0, 25.0)[at % 2])
        play = Play(train_oddly, Tape(seed=at), 2 + at % 2, odd, fault=fault)
        play.run()
        SCENARIOS[scenario].check(play)
        if not fault.has_struck:
            return at
    raise AssertionError


@pytest.mark.parametrize("kind", LATE)
def test_to_be_late_is_no_mistake(kind: Kind) -> None:
    odd = Odd(Settings(steps=4), "by hand", step=1)
    assert num_late_runs("legal", odd, kind, stride=1 if IS_LONG else 3) > 60


@pytest.mark.parametrize("kind", LATE)
def test_a_step_that_is_left_out_is_found_though_another_rank_is_late(
    kind: Kind,
) -> None:
    odd = Odd(Settings(steps=6), "skip", step=1, who=1)
    assert num_late_runs("mistake", odd, kind, stride=3) > 30


# ---------------------------------------------- what the simulation itself can find


def found_in(script: Any, tape: Tape | None = None) -> str:
    play = Play(script, tape or Tape(row=()), ranks=2)
    with pytest.raises(Finding) as caught:
        play.run()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_wait_that_nobody_ends_is_a_deadlock():
    def script(ctx: Rank) -> None:
        if ctx.rank == 1:
            world.event().wait()

    assert "rank 1, main: an event" in found_in(script)
    assert issubclass(Deadlock, Finding)


def test_a_write_to_a_tensor_in_flight_is_found():
    def script(_ctx: Rank) -> None:
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, async_op=True)
        tensor.add_(1)
        assert work is not None
        work.wait()

    assert "wrote to a tensor of allreduce 0" in found_in(script)


def test_collectives_that_do_not_belong_together_are_found():
    def script(ctx: Rank) -> None:
        dist.all_reduce(torch.ones(3 + ctx.rank))

    assert "is matched with" in found_in(script)


def test_an_error_of_a_thread_is_found():
    def script(_ctx: Rank) -> None:
        thread = world.thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()

    assert "ZeroDivisionError" in found_in(script)


def test_a_wait_takes_no_time():
    play = Play(lambda ctx: ctx.sleep(3600.0), Tape(row=()), ranks=2)
    play.run()
    assert play.scheduler.time > 3600
    assert play.scheduler.num_seams < 10


def races(rank: int) -> None:
    """A script with a race: whether rank 1 takes part depends on who is first."""
    store = c10d._get_default_store()
    if rank == 0:
        store.set("ready", "")
        dist.all_reduce(torch.ones(2))
    elif store.check(["ready"]):
        dist.all_reduce(torch.ones(2))
    dist.barrier()


def test_the_race_of_a_users_function_is_found_and_replayed():
    seed = own.find(races, range(100))
    assert seed is not None
    accounts = set()
    for _ in range(2):
        with pytest.raises(Finding, match="is matched with") as caught:
            own.play(races, seed)
        accounts.add(caught.value.play.tell())  # type: ignore[attr-defined]
    assert len(accounts) == 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_mutants_are_up_to_date(mutant: Any) -> None:
    assert changed(mutant)
