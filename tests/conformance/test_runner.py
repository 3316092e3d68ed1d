from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance import records
from tests.conformance.judge import Judge
from tests.conformance.outcome import Outcome
from tests.conformance.records import Known, Listed

_RUN = Path(__file__).parent / "run.py"
_REDUCES = "test_DistributedDataParallelCPU"
_ACCUMULATES = "test_accumulate_gradients_no_sync"
_WRAPS = "test_ddp_zero_output_features"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(_RUN), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def _line(finished: subprocess.CompletedProcess[str], test: str) -> str:
    lines = [line for line in finished.stdout.splitlines() if f" {test} " in line]
    assert len(lines) == 1, finished.stdout + finished.stderr
    return lines[0]


# ------------------------------------------------------------------ implementations


@pytest.mark.parametrize("implementation", ["torch", "minidp"])
def test_right_implementations_pass(implementation):
    finished = _run("--implementation", implementation, _REDUCES, _ACCUMULATES)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "passed 2 of 2 (torch itself: " in finished.stdout
    assert _line(finished, _REDUCES).startswith("ok ")


def test_a_wrapper_that_never_reduces_fails():
    finished = _run("--implementation", "broken-no-reduce", _REDUCES, _WRAPS)
    assert finished.returncode == 1
    line = _line(finished, _REDUCES)
    assert line.startswith("FAILED")
    assert "AssertionError" in line
    # What has nothing to do with gradients still passes: it is not the runner.
    assert "passed 1 of 2" in finished.stdout


def test_a_wrapper_that_ignores_no_sync_fails():
    finished = _run("--implementation", "broken-no-sync", _REDUCES, _ACCUMULATES)
    assert finished.returncode == 1
    assert _line(finished, _ACCUMULATES).startswith("FAILED")
    assert _line(finished, _REDUCES).startswith("ok ")


def test_a_rank_that_dies_fails_its_test_only():
    finished = _run("--implementation", "broken-dies", _REDUCES, _ACCUMULATES)
    assert finished.returncode == 1
    assert "rank 1: SIGKILL" in _line(finished, _REDUCES)
    assert "rank 1: SIGKILL" in _line(finished, _ACCUMULATES)
    assert "passed 0 of 2" in finished.stdout


def test_a_rank_that_hangs_fails_its_test_and_says_where_it_was():
    finished = _run(
        "--implementation", "broken-hangs", "--timeout", "8", "--details", _REDUCES
    )
    assert finished.returncode == 1
    assert "still running after 8 s" in _line(finished, _REDUCES)
    assert "broken.py" in finished.stdout


# ------------------------------------------------------------------------ selection


def test_an_unknown_test_is_refused():
    finished = _run("test_of_somebody_else")
    assert finished.returncode == 2
    assert "has no test 'test_of_somebody_else'" in finished.stderr


def test_a_test_that_torch_does_not_pass_is_refused():
    finished = _run("test_ddp_device")
    assert finished.returncode == 2
    assert "torch itself does not pass test_ddp_device" in finished.stderr


# ------------------------------------------------------------------------- verdicts


def test_listed_failures_are_expected_and_listed_passes_are_stale():
    listed = {"a": Listed("a", "one row", ""), "b": Listed("b", "another row", "")}
    judge = Judge(listed)
    assert "one row" in judge.line(Outcome("a", "FAILED", 1.0, 2, "some error"))
    assert judge.line(Outcome("c", "ok", 1.0, 2)).startswith("ok ")
    assert judge.is_satisfied
    assert judge.line(Outcome("b", "ok", 1.0, 2)).startswith("STALE")
    assert not judge.is_satisfied
    assert judge.summary(3) == "passed 2 of 3 (torch itself: 3), 1 differs, 1 STALE"


@pytest.mark.parametrize("verdict", ["FAILED", "skipped"])
def test_what_torch_passes_must_not_fail_or_be_skipped(verdict):
    judge = Judge({})
    judge.line(Outcome("a", verdict, 1.0, 2, "why"))
    assert not judge.is_satisfied


def test_a_run_of_no_test_is_not_a_success():
    assert not Judge({}).is_satisfied


# ---------------------------------------------------------------------------- lists


def test_the_lists_in_the_repository_fit_together():
    exceptions, baseline = records.read_exceptions(), records.read_baseline()
    assert exceptions.keys() <= baseline.keys()
    assert len(baseline) > 80


def test_an_exception_must_point_to_a_row_of_the_readme(tmp_path):
    path = tmp_path / "exceptions.txt"
    path.write_text("# a comment\ntest_a | no such row | because\n")
    with pytest.raises(ValueError, match="test_a points to the row 'no such row'"):
        records.read_exceptions(path)
    path.write_text("test_a | failed collective | because\n")
    row = records.read_exceptions(path)["test_a"]
    assert row == Listed("test_a", "failed collective", "because")


def test_only_passed_tests_that_wrap_a_module_are_recorded(tmp_path):
    path = tmp_path / "baseline.txt"
    outcomes = [
        Outcome("b", "ok", 21.04, 4, wraps_module=True),
        Outcome("a", "ok", 1.0, 2, wraps_module=True),
        Outcome("no_wrapper", "ok", 1.0, 2),
        Outcome("no_pass", "FAILED", 1.0, 2, wraps_module=True),
    ]
    records.write_baseline(outcomes, path)
    assert list(records.read_baseline(path).values()) == [
        Known("a", 2, 1.0),
        Known("b", 4, 21.0),
    ]
    assert records.read_baseline(path)["b"].is_slow
