"""Every wrong use of `patterns`, on minidp and on torch's DDP.

Both outcomes are printed (``pytest -s``); ``python -m tests.wrong_uses.matrix`` prints
the whole table. Here each is played in one mode, on minidp only, by simulated ranks:
real ones are new processes after each error. With ``HYPOTHESIS_PROFILE=nightly`` all
modes are played by real ranks, and torch's DDP has to end as the table says, also in
hangs, which cost the group's timeout each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support import simulated
from tests.wrong_uses import matrix
from tests.wrong_uses.matrix import GOOD
from tests.wrong_uses.patterns import PATTERNS, Outcome, Pattern

pytestmark = pytest.mark.fault

IS_LONG = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
PLAYED = PATTERNS if IS_LONG else matrix.of_each_base()
# Some are played by real ranks each time; and RPC has one worker in a process.
BY_REAL_RANKS = {each.name for each in PLAYED[::12]}
BY_REAL_RANKS |= {"backward of distributed autograd"}


@pytest.fixture(scope="module", autouse=True)
def _end_teams() -> Iterator[None]:
    yield
    matrix.pool.close()


@pytest.mark.parametrize("pattern", PLAYED, ids=lambda pattern: pattern.name)
def test_pattern(pattern: Pattern) -> None:
    theirs = pattern.torch
    if IS_LONG:
        theirs = matrix.outcome_on_torch(pattern, runs_hangs=True)
    if simulated.ARE_REAL or pattern.name in BY_REAL_RANKS:
        ours = matrix.verdict_of(pattern.name, "minidp")
    else:
        ours = matrix.simulated_verdict_of(pattern.name)
    print(f"\n{pattern.name}: torch {theirs.value}, minidp {ours.outcome.value}")
    assert theirs is pattern.torch, "torch does something else now"
    assert ours.outcome in GOOD, ours.details
    assert not ours.recovery, f"after reset(): {ours.recovery}"
    assert ours.outcome is Outcome.RIGHT or not pattern.is_legal, ours.details
    assert not (pattern.is_legal and ours.warned), ours.warned


def test_patterns_differ_in_name() -> None:
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)
