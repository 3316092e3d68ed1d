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


def test_a_seed_is_a_run() -> None:
    expect_the_same("torchft", 2)


def test_nothing_is_left() -> None:
    expect_nothing_left("torchft", 5)
