"""Replicas of torchft on simulated ranks: some seeds; `tests.simulation` has more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from tests.simulation.faults import Fault, Kind
from tests.simulation.play import Play, Rank
from tests.simulation.scenarios import (
    OF_TORCHFT,
    SCENARIOS,
    add_torchft,
    warm_up,
)
from tests.simulation.seeds import (
    expect_nothing,
    expect_nothing_left,
    expect_the_same,
)
from tests.simulation.tape import Tape

RUNS = {"torchft": 40, "torchft_logical": 20}


@pytest.fixture(autouse=True, scope="module")
def _added() -> Iterator[None]:
    threads = torch.get_num_threads()
    assert add_torchft()
    warm_up()
    yield
    for name in OF_TORCHFT:
        del SCENARIOS[name]
    torch.set_num_threads(threads)


def test_every_scenario_is_played() -> None:
    assert {*RUNS} == {*OF_TORCHFT}


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_found(name: str) -> None:
    expect_nothing(name, RUNS[name])


def test_a_state_is_taken_over_though_its_step_had_no_vote() -> None:
    """The manager takes a replica that has received it for one that has it."""
    scenario = SCENARIOS["torchft"]
    plan = scenario.draw(Tape(row=()))
    plan = replace(plan, late=1, skips=2, pause=0.5)
    told = 0
    for seed in range(10):
        fault = Fault(Kind.NOTHING, rank=0, at=0)
        play = Play(scenario.script, Tape(seed), 3, plan, fault=fault)
        play.run()
        scenario.check(play)
        told += any("ended without a vote" in text for _, text in play.warned)
    assert told


def in_turns(ctx: Rank) -> None:
    """Let the ranks of each phase try a step, of which alone the lighthouse hears."""
    from tests.simulation.scenarios.torchft import Trainer, job_of

    job, done = job_of(ctx._play), ctx.board.setdefault("done", [])
    c10d._world.default_pg = None  # type: ignore[assignment]
    trainer = Trainer(ctx, job, ctx.rank)
    ranks_before: tuple[int, ...] = ()
    for number, ranks in enumerate(ctx.board["phases"]):
        job.wait_until(lambda n=number: len(done) == ctx.size * n)
        if ctx.rank == ranks[0]:
            job.lighthouse.mend()
            others = [rank for rank in range(ctx.size) if rank not in ranks]
            job.lighthouse.cut(others, 100.0)
        ctx.sleep(1.0)  # until the lighthouse hears their hearts no longer
        if ctx.rank in ranks_before:  # if they ask first, they go on alone
            ctx.sleep(1.0)
        if ctx.rank in ranks:
            trainer.try_step()
        ctx.sleep(5.0)
        ctx.board["steps", number, ctx.rank] = trainer.manager.current_step()
        done.append(ctx.rank)
        job.tell()
        ranks_before = ranks


def test_a_step_that_nobody_has_tried_is_no_part_of_a_history() -> None:
    """A replica joins with a state whose step is not the one that was agreed on."""
    scenario = SCENARIOS["torchft"]
    plan = scenario.draw(Tape(row=()))
    play = Play(in_turns, Tape(row=()), 3, plan, fault=Fault(Kind.NOTHING, 0, 0))
    play.board["phases"] = phases = [(0, 1), (0,), (1,), (0, 1), (1, 2), (2,), (1, 2)]
    play.run()
    steps = [
        [play.board["steps", number, rank] for rank in ranks]
        for number, ranks in enumerate(phases)
    ]
    # The second one must take the state of the first over, which is there no longer.
    # The third one gets its state, and goes back to the step of that, too.
    assert steps == [[1, 1], [2], [2], [2, 1], [2, 1], [2], [3, 3]]
    assert {rank for rank, text in play.warned if "different ways" in text} == {0, 1}


def test_a_seed_is_a_run() -> None:
    expect_the_same("torchft", 2)


def test_nothing_is_left() -> None:
    expect_nothing_left("torchft", 5)
