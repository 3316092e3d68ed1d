"""Every wrong use of `patterns`, on minidp and on torch's DDP.

Both outcomes are printed (``pytest -s``); ``python -m tests.fault.matrix`` prints the
whole table. Here each is played in one mode, and torch's hangs are only looked up (they
cost the group's timeout each); ``HYPOTHESIS_PROFILE=nightly`` plays everything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.fault import matrix
from tests.fault.patterns import PATTERNS
from tests.fault.play import GOOD, REMEDY, Outcome, Pattern, Record, judge
from tests.support.pool import RankError

IS_LONG = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
PLAYED = PATTERNS if IS_LONG else matrix.of_each_base()


@pytest.fixture(scope="module", autouse=True)
def _end_teams() -> Iterator[None]:
    yield
    matrix.pool.close()


@pytest.mark.parametrize("pattern", PLAYED, ids=lambda pattern: pattern.name)
def test_pattern(pattern: Pattern) -> None:
    theirs = matrix.outcome_on_torch(pattern, runs_hangs=IS_LONG)
    ours = matrix.verdict_of(pattern.name, "minidp")
    print(f"\n{pattern.name}: torch {theirs.value}, minidp {ours.outcome.value}")
    assert theirs is pattern.torch, "torch does something else now"
    assert ours.outcome in GOOD, ours.details
    assert not ours.recovery, f"after reset(): {ours.recovery}"
    assert ours.outcome is Outcome.RIGHT or not pattern.is_legal, ours.details
    assert not (pattern.is_legal and ours.warned), ours.warned


def test_score() -> None:
    print("\n" + matrix.score(PLAYED, runs_hangs=IS_LONG))
    assert len({p.name for p in PATTERNS}) == len(PATTERNS)


# -- the judge can tell ----------------------------------------------------------------


def record(*steps, right=True, error="", warned="", seconds=0.0):
    states = [{"w": torch.tensor([step])} for step in steps]
    is_named = "[rank" in error
    return Record(
        *(states, [right] * len(steps), error, is_named),
        warned=[warned],
        seconds=seconds,
    )


NAMED = "E: [rank {}] w. " + REMEDY + "x"
TELLS_0, TELLS_1 = NAMED.format(0), NAMED.format(1)


@pytest.mark.parametrize(
    ("records", "outcome"),
    [
        ([record(1, 2), record(1, 2)], Outcome.RIGHT),
        ([record(1, 2), record(1, 3)], Outcome.SILENT),
        ([record(1, right=False), record(1)], Outcome.SILENT),
        ([record(1, warned=TELLS_0), record(2, warned=TELLS_1)], Outcome.WARNED),
        ([record(1, warned=TELLS_0), record(2, warned="[rank 1] hm")], Outcome.SILENT),
        ([record(1, warned=TELLS_0), record(2)], Outcome.SILENT),
        ([record(1, error=TELLS_0), record(1)], Outcome.NAMED),
        ([record(1, error=TELLS_1), record(1)], Outcome.ERROR),
        ([record(1, error="E: [rank 0] w"), record(1)], Outcome.ERROR),
        ([record(1, error=TELLS_0.replace("w", "")), record(1)], Outcome.ERROR),
        ([record(1, error=TELLS_0), record(2)], Outcome.LATE),
        ([record(1, error="timed out", seconds=2.1), record(1)], Outcome.HANG),
        ([record(1), RankError(1, ("Exited",), "")], Outcome.CRASH),
        ([record(1), RankError(1, ("Hang",), "")], Outcome.HANG),
    ],
)
def test_judge(records: list[object], outcome: Outcome) -> None:
    assert judge(records, frozenset({0, 1}), ["w"], 2.0).outcome is outcome
