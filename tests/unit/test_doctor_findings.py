"""What a finding must have, how ranks' findings merge, table and JSON."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

import minidp
from minidp.doctor._findings import (
    Finding,
    Report,
    Status,
    failed,
    join,
    merge,
    of_ranks,
    ok,
    skipped,
    warning,
)
from minidp.doctor._timebox import Limits, Runner, Timebox

PACKAGE = Path(minidp.__file__).parent
FINDINGS = (
    ok("first", "all is well"),
    warning("second", "this is slow " * 12, "do the other thing " * 8),
    failed("third", "broken", "mend it"),
    skipped("fourth", "not looked at"),
)


@pytest.mark.parametrize("status", [Status.WARNING, Status.FAILED])
def test_a_problem_needs_a_remedy(status):
    with pytest.raises(ValueError, match="remedy"):
        Finding("check", status, "found")


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.check)
def test_json_round_trip(finding):
    assert Finding.of_json(json.loads(json.dumps(finding.as_json()))) == finding


def test_equal_findings_of_all_ranks_become_one():
    same, own = ok("a", "same"), failed("a", "own", "mend it")
    report = merge("title", {0: [same, ok("b", "x")], 1: [own, same, ok("b", "x")]}, 2)
    assert [(f.check, f.found, f.ranks) for f in report] == [
        ("a", "same", ()),
        ("a", "own", (1,)),
        ("b", "x", ()),
    ]


def test_a_rank_that_says_the_same_twice_counts_once():
    twice = ok("a", "same")
    report = merge("title", {0: [twice, twice], 1: [ok("a", "other")]}, 2)
    assert [f.ranks for f in report] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("findings", "code"),
    [(FINDINGS, 1), (FINDINGS[:2], 0), (FINDINGS[3:], 0), ((), 0)],
)
def test_only_failures_make_the_exit_code(findings, code):
    assert Report("title", findings).exit_code == code


@pytest.mark.parametrize("width", [80, 100, 10])
def test_table_fits_and_says_everything(width):
    table = Report("the title", FINDINGS).table(width=width)
    lines = table.splitlines()
    assert lines[0] == "the title"
    assert lines[-1] == "1 failed, 1 warning, 1 ok, 1 skipped"
    assert max(map(len, lines)) <= max(width, 60)
    words = " ".join(table.split())
    for finding in FINDINGS:
        assert " ".join(finding.found.split()) in words
        assert " ".join(finding.remedy.split()) in words


def test_table_names_a_check_once_and_ranks_where_they_differ():
    report = merge("t", {0: [ok("a", "x"), ok("a", "y")], 1: [ok("a", "x")]}, 2)
    assert report.table().splitlines()[2:4] == [
        "ok       a  x",
        "ok          [rank 0] y",
    ]


def test_colours_are_sequences_around_the_status():
    table = Report("t", (failed("a", "b", "c"),)).table(colour=True)
    assert "\033[31mfailed\033[0m   a  b" in table


def test_long_words_are_never_broken():
    word = "minidp.SyncBatchNorm.convert_sync_batchnorm(model)" * 2
    assert word in Report("t", (failed("a", "b", word),)).table()


def test_words():
    assert join([]) == ""
    assert join(["a"]) == "a"
    assert join("abc") == "a, b and c"
    assert join("abcde", 2) == "a, b and 3 more"
    assert of_ranks([3]) == "rank 3"
    assert of_ranks([0, 2]) == "ranks 0 and 2"


# --------------------------------------------------------------------- the time box


def test_what_a_check_raises_is_a_finding():
    def broken():
        raise KeyError("of all\n  things")

    runner = Runner(Limits())
    assert not runner.run("name", broken)
    (finding,) = runner.findings
    assert finding.status is Status.FAILED
    assert finding.found == "KeyError: 'of all\\n things'"
    assert not runner.is_stuck


def test_a_check_that_hangs_is_left_behind():
    stay = threading.Event()
    runner = Runner(Limits(check=0.05))
    assert not runner.run("name", stay.wait)
    stay.set()
    (finding,) = runner.findings
    assert finding.status is Status.FAILED
    assert "did not end within 0.05 s" in finding.found
    assert runner.is_stuck


def test_a_check_may_find_several_things():
    runner = Runner(Limits())
    assert runner.run("name", lambda: list(FINDINGS))
    assert runner.findings == list(FINDINGS)


def test_timebox_hands_back_what_happened():
    assert Timebox(lambda: 3).run(20) == 3
    with pytest.raises(ZeroDivisionError):
        Timebox(lambda: 1 / 0).run(20)


@pytest.mark.parametrize("limits", [{"check": 0}, {"wait": -1}])
def test_limits_are_positive(limits):
    with pytest.raises(ValueError, match="positive"):
        Limits(**limits)


# ---------------------------------------------------------------- the pitfalls' table


def checks_of_the_readme():
    """The names after "found by" in the tables of minidp/README.md."""
    text = (PACKAGE / "README.md").read_text()
    text = text.partition("\n## Pitfalls\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[-2] for line in text.splitlines() if line.startswith("| ")]
    found_by = [cell for cell in cells if "`" in cell]
    names = [part.split(":") for cell in found_by for part in cell.split(";")]
    return sorted({n.strip() for _, said in names for n in said.split(",")})


@pytest.mark.parametrize("name", checks_of_the_readme())
def test_readme_names_checks_that_exist(name):
    sources = [path.read_text() for path in (PACKAGE / "doctor").glob("_*.py")]
    assert any(re.search(rf'"{name}(, {{backend}})?"', source) for source in sources)


def test_readme_names_enough_checks():
    assert len(checks_of_the_readme()) >= 20
