"""A few runs of `tests.chaos.chaos`: five deeds, each at another moment.

What minidp says of a rank that is lost, at any moment and in any order of events, is
the simulated ranks' matter. Here is whether torchrun and real processes agree; to them
``exit`` and ``segv`` are what ``kill`` is. Nightly has all, and starts from a shell.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.chaos.chaos import ROOT, draw
from tests.chaos.saboteur import DEEDS, moments

pytestmark = [pytest.mark.fault, pytest.mark.fresh]

RUNS = 5
SEED = 618  # has these deeds in its first runs, and five moments
PLAYED = {"kill", "stop", "delay", "stick", "raise"}


def test_each_deed_at_each_moment():
    drawn = [draw(0, n, 0).plan for n in range(70)]
    cells = {(plan.moment, plan.deed) for plan in drawn}
    assert cells == {(moment, deed) for moment in moments(None) for deed in DEEDS}
    assert drawn == [draw(0, n, 0).plan for n in range(70)]
    assert drawn != [draw(1, n, 0).plan for n in range(70)]


def test_saboteur_and_torchrun_in_short():
    plans = [draw(SEED, n, 0).plan for n in range(RUNS)]
    assert {plan.deed for plan in plans} == PLAYED
    assert len({plan.moment for plan in plans}) == RUNS
    command = ["--runs", str(RUNS), "--seed", str(SEED), "--cold-every", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.chaos", *command, "--jobs", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{RUNS} runs, 0 failed" in done.stdout
