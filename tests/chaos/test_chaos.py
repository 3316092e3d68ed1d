"""A few runs of `tests.chaos.chaos`: each deed, and five of the moments."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.chaos.chaos import ROOT, draw
from tests.chaos.saboteur import DEEDS, moments

pytestmark = [pytest.mark.fault, pytest.mark.fresh]

RUNS = 8
SEED = 267  # has each deed in its first runs, and five moments


def test_each_deed_at_each_moment():
    drawn = [draw(0, n, 0).plan for n in range(70)]
    cells = {(plan.moment, plan.deed) for plan in drawn}
    assert cells == {(moment, deed) for moment in moments(None) for deed in DEEDS}
    assert drawn == [draw(0, n, 0).plan for n in range(70)]
    assert drawn != [draw(1, n, 0).plan for n in range(70)]


def test_saboteur_and_torchrun_in_short():
    trials = [draw(SEED, n, RUNS) for n in range(RUNS)]
    assert {trial.plan.deed for trial in trials} == set(DEEDS)
    command = ["--runs", str(RUNS), "--seed", str(SEED), "--cold-every", str(RUNS)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.chaos", *command, "--jobs", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{RUNS} runs, 0 failed" in done.stdout
