"""What a finding must have, how ranks' findings merge, table and JSON."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

import minidp
from minidp.doctor.findings import Finding, Report, Status, merge
from minidp.doctor.timebox import Runner, run_within
from minidp.doctor.words import join, of_ranks

PACKAGE = Path(minidp.__file__).parent
OK, WARNING, FAILED, SKIPPED = Status
FINDINGS = (
    Finding("first", OK, "all is well"),
    Finding("second", WARNING, "this is slow " * 12, "do the other thing " * 8),
    Finding("third", FAILED, "broken", "mend it"),
    Finding("fourth", SKIPPED, "not looked at"),
)


def ok(check, found):
    return Finding(check, OK, found)


@pytest.mark.parametrize("status", [WARNING, FAILED])
def test_a_problem_needs_a_remedy(status):
    with pytest.raises(ValueError, match="remedy"):
        Finding("check", status, "found")


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.check)
def test_json_round_trip(finding):
    assert Finding.of_json(json.loads(json.dumps(finding.as_json()))) == finding


def test_equal_findings_of_all_ranks_become_one():
    same, own = ok("a", "same"), Finding("a", FAILED, "own", "mend it")
    twice = [own, same, ok("b", "x"), own]
    report = merge("title", {0: [same, ok("b", "x")], 1: twice}, 2)
    assert [(f.check, f.found, f.ranks) for f in report] == [
        ("a", "same", ()),
        ("a", "own", (1,)),
        ("b", "x", ()),
    ]


@pytest.mark.parametrize(
    ("findings", "code"),
    [(FINDINGS, 1), (FINDINGS[:2], 0), (FINDINGS[3:], 0), ((), 0)],
)
def test_only_failures_make_the_exit_code(findings, code):
    assert Report("title", findings).exit_code == code


@pytest.mark.parametrize("width", [80, 100, 10])
def test_table_fits_and_says_everything(width):
    table = Report("the title", FINDINGS).table(width)
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


def test_long_words_are_never_broken():
    word = "minidp.SyncBatchNorm.convert_sync_batchnorm(model)" * 2
    assert word in Report("t", (Finding("a", FAILED, "b", word),)).table()


def test_words():
    assert join([]) == ""
    assert join(["a"]) == "a"
    assert join("abc") == "a, b and c"
    assert join("abcde", 2) == "a, b and 3 more"
    assert of_ranks([3]) == "rank 3"
    assert of_ranks([0, 2]) == "ranks 0 and 2"


def test_what_a_check_raises_is_a_finding():
    def broken():
        raise KeyError("of all\n  things")

    runner = Runner(20)
    assert not runner.run("name", broken)
    (finding,) = runner.findings
    assert (finding.check, finding.status) == ("name", FAILED)
    assert finding.found == "KeyError: 'of all\\n things'"
    assert not runner.is_stuck


def test_a_check_that_raises_a_timeout_of_its_own_is_not_late():
    def refused():
        raise TimeoutError("the store did not answer")

    runner = Runner(20)
    assert not runner.run("name", refused)
    (finding,) = runner.findings
    assert "the store did not answer" in finding.found
    assert "did not end within" not in finding.found
    assert not runner.is_stuck  # no thread was left behind
    late, is_over = Runner(0.05), threading.Event()
    assert not late.run("name", is_over.wait)
    assert late.is_stuck
    is_over.set()


def test_a_time_limit_hands_back_what_happened():
    assert run_within(20, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        run_within(20, lambda: 1 / 0)


def checks_of_the_readme():
    """The names in the column "found by" of minidp/doctor/README.md."""
    text = (PACKAGE / "doctor" / "README.md").read_text()
    text = text.partition("\n## Pitfalls\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[-2] for line in text.splitlines() if line.startswith("| ")]
    found_by = [cell for cell in cells if "`" in cell]
    names = [part.split(":") for cell in found_by for part in cell.split(";")]
    return sorted({n.strip() for _, said in names for n in said.split(",")})


@pytest.mark.parametrize("name", checks_of_the_readme())
def test_readme_names_checks_that_exist(name):
    sources = [path.read_text() for path in (PACKAGE / "doctor").rglob("*.py")]
    assert any(re.search(rf'"{name}(, {{backend}})?"', source) for source in sources)
    assert len(checks_of_the_readme()) >= 20
