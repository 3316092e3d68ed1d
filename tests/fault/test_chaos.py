"""A few runs of `tests.fault.chaos`, and whether its judge sees what is wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fault.chaos import ROOT, Run, Trial, draw, judge
from tests.fault.saboteur import DEEDS, Plan, moments

RUNS = 8
SEED = 267  # has each deed in its first runs, and five moments


def test_each_deed_at_each_moment():
    drawn = [draw(0, n, 5.0, 0).plan for n in range(70)]
    cells = {(plan.moment, plan.deed) for plan in drawn}
    assert cells == {(moment, deed) for moment in moments(None) for deed in DEEDS}
    assert drawn == [draw(0, n, 5.0, 0).plan for n in range(70)]
    assert drawn != [draw(1, n, 5.0, 0).plan for n in range(70)]


def test_saboteur_and_torchrun_in_short():
    trials = [draw(SEED, n, 5.0, RUNS) for n in range(RUNS)]
    assert {trial.plan.deed for trial in trials} == set(DEEDS)
    command = ["--runs", str(RUNS), "--seed", str(SEED), "--cold-every", str(RUNS)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fault.chaos", *command, "--jobs", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{RUNS} runs, 0 failed" in done.stdout


# --------------------------------------------------------------------------- the judge

DIGEST = "0123abcd"
GOOD = {
    "struck": "",
    "torchrun.log": "E1121 failed (exitcode: -9) local_rank: 1 (pid: 3) of fn: x",
    "logs/job/attempt_0/0/stdout.log": "[attempt 0] starts after step 0",
    "logs/job/attempt_1/0/stdout.log": f"digest after step 24: {DIGEST}",
    "logs/job/attempt_0/0/stderr.log": "Rank 1 failed to pass monitoredBarrier in 5",
}


def verdict_of(folder, files, deed="kill", status=0):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    plan = Plan(str(folder), 1, "forward", 3, deed, 1.0)
    trial = Trial(1, 2, plan, is_cold=False, hang_timeout=5.0)
    run = Run(trial, folder, -1, 0.0)
    judge(run, status, DIGEST)
    return run


def test_a_good_run(tmp_path):
    verdict = verdict_of(tmp_path, GOOD)
    assert verdict.complaints == []
    assert verdict.named_by == "torchrun, peer"


OUT, ERR = "logs/job/attempt_1/0/stdout.log", "logs/job/attempt_0/0/stderr.log"
WRONG_RANK = {"torchrun.log": "failed (exitcode: -9) local_rank: 0 (pid: 3)"}


@pytest.mark.parametrize(
    ("change", "options", "complaint"),
    [
        ({}, {"status": 1}, "torchrun ended with status 1"),
        ({"struck": None}, {}, "the saboteur never struck"),
        ({OUT: "digest after step 24: 99"}, {}, "digest 99, undisturbed 0123abcd"),
        ({OUT: ""}, {}, "digest missing, undisturbed 0123abcd"),
        ({"logs/job/attempt_2/0/x": ""}, {}, "3 attempts instead of 2"),
        ({}, {"deed": "delay"}, "2 attempts instead of 1"),
        ({"torchrun.log": "", ERR: "boo"}, {}, "nobody names rank 1"),
        (WRONG_RANK, {"deed": "segv"}, None),
        (
            {ERR: "Rank 0 failed to pass monitoredBarr"},
            {"deed": "stop"},
            "nobody names rank 1",
        ),
        ({}, {"deed": "raise"}, "its own log does not say what it raised"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(tmp_path, change, options, complaint):
    files = {n: t for n, t in (GOOD | change).items() if t is not None}
    complaints = verdict_of(tmp_path, files, **options).complaints
    assert (complaint in complaints) if complaint else complaints == []
