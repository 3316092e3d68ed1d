"""Replicas of torchft on simulated ranks: some seeds; `tests.simulation` has more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.simulation.faults import Fault, Kind
from tests.simulation.play import Play
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

RUNS = {"torchft": 40, "torchft_logical": 20, "torchft_turns": 20}


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


def test_a_step_that_nobody_has_tried_is_no_part_of_a_history() -> None:
    """A replica joins with a state whose step is not the one that was agreed on."""
    scenario = SCENARIOS["torchft_turns"]
    together = [(0, 1), (0,), (1,), (0, 1), (1, 2), (2,), (1, 2)]
    plan = scenario.draw(Tape(row=()))
    plan = replace(plan, turns=tuple((ranks, ()) for ranks in together))
    fault = Fault(Kind.NOTHING, rank=0, at=0)
    play = Play(scenario.script, Tape(row=()), 3, plan, fault=fault)
    play.run()
    assert play.board["job"].last_ways[1] == play.board["job"].last_ways[2]
    steps = [[o.step for o in play.outcomes if o.rank == rank] for rank in range(3)]
    # The second one must take the state of the first over, which is there no longer.
    # The third one gets its state, and goes back to the step of that, too.
    assert steps == [[0, 1, 2], [0, 1, 2, 1, 2], [0, 1, 2]]
    commits = play.board["job"].commits
    assert {each.rank for each in commits if each.step == 2} == {1, 2}
    assert {rank for rank, text in play.warned if "different ways" in text} == {0, 1}


def test_a_state_is_not_read_after_forwards_have_changed_the_buffers_in_it() -> None:
    from tests.simulation.scenarios.torchft_checks import of_one_process

    # Without a vote the manager lets who joins next read what it has sent before.
    scenario = SCENARIOS["torchft_turns"]
    plan = scenario.draw(Tape(row=()))
    turns = ((0,), ()), ((0, 1), (0,)), ((0, 2), (0, 2)), ((2,), ()), ((2,), ())
    plan = replace(plan, number=4, turns=turns)
    for seed in range(20):
        fault = Fault(Kind.NOTHING, rank=0, at=0)
        play = Play(scenario.script, Tape(seed), 3, plan, fault=fault, has_numbers=True)
        play.run()
        right = of_one_process(plan.training, plan.number)
        for each in play.board["job"].commits:
            assert each.buffer in (None, right[each.step][1]), (seed, each.rank)


def test_a_seed_is_a_run() -> None:
    expect_the_same("torchft", 2)


def test_nothing_is_left() -> None:
    expect_nothing_left("torchft", 5)
