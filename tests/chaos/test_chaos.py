"""One run of `tests.chaos.chaos`: a rank is killed in a save, and all of them resume.

What minidp says of a rank that is lost, at any moment and in any order of events, is
the simulated ranks' matter; ranks that raise, or come late, are in ``reset`` and
``hang``. Here is whether torchrun and real processes agree: they restart, and resume
from the last whole checkpoint. Nightly has all deeds at all moments, also a rank that
is stopped, which torchrun takes half a minute to end, and starts from a shell.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.chaos.chaos import ROOT, draw
from tests.chaos.saboteur import DEEDS, moments

pytestmark = [pytest.mark.fault, pytest.mark.fresh]

SEED = 244  # has this in its first run, with three ranks
PLAYED = ("kill", "in the save")


def test_each_deed_at_each_moment():
    drawn = [draw(0, n, 0).plan for n in range(70)]
    cells = {(plan.moment, plan.deed) for plan in drawn}
    assert cells == {(moment, deed) for moment in moments(None) for deed in DEEDS}
    assert drawn == [draw(0, n, 0).plan for n in range(70)]
    assert drawn != [draw(1, n, 0).plan for n in range(70)]


def test_saboteur_and_torchrun_in_short():
    plan = draw(SEED, 0, 0).plan
    assert (plan.deed, plan.moment) == PLAYED
    command = ["--runs", "1", "--seed", str(SEED), "--cold-every", "0"]
    # Beside load a rank comes late by some seconds, which must not restart it.
    command += ["--hang-timeout", "20"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.chaos", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 runs, 0 failed" in done.stdout
