"""benchmarks/: reports, charts, wrong gradients; published results are consistent."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"
README = (BENCHMARKS / "README.md").read_text()
BOUNDED = sorted(
    [*RESULTS.glob("overlap_*.json"), *RESULTS.glob("bucket_sweep_*.json")]
)


@pytest.fixture
def benchmarks(monkeypatch):
    """Import a module from benchmarks/."""
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


# ------------------------------------------------------------------ what is published


def test_the_readme_names_every_script():
    named = set(re.findall(r"\b(\w+\.py)\b", README))
    assert named == {path.name for path in BENCHMARKS.glob("*.py")}


def test_every_committed_result_is_named_in_the_readme():
    named = set(re.findall(r"results/([\w.-]+)\.md", README))
    assert all((RESULTS / f"{stem}.md").exists() for stem in named)
    command = ["git", "-C", str(RESULTS), "ls-files"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout: files of own runs cannot be told apart")
    committed = listed.stdout.split()
    assert not [each for each in committed if not each.startswith(tuple(named))]
    assert sum((RESULTS / each).stat().st_size for each in committed) < 1.5e6


@pytest.mark.parametrize("path", BOUNDED, ids=lambda path: path.stem)
def test_no_published_step_is_below_its_bound(path):
    content = json.loads(path.read_text())
    cells = content["cells"].values() if "cells" in content else [content["sweep"]]
    bounded = [
        (row["microseconds_of_each_round"], row["bound_microseconds_of_each_round"])
        for each in cells
        for row in each["rows"]
        if "bound_microseconds_of_each_round" in row
    ]
    assert bounded
    for steps, bounds in bounded:
        pairs = zip(steps.split(), bounds.split(), strict=True)
        assert all(int(bound) <= int(step) for step, bound in pairs)


# -------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("count", [2, 3, 9, 10])
def test_everyone_follows_everyone_else_equally_often(benchmarks, count):
    rounds = benchmarks("support.rounds")
    orders = [rounds.turn(number, count) for number in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    followed = Counter(pair for order in orders for pair in pairwise(order))
    assert len(followed) == count * (count - 1)
    assert set(followed.values()) == {2}


@pytest.mark.parametrize(
    ("error", "exact", "rounding"), [(0, 0, 0), (1e-7, 1, 0), (1, 1, 1)]
)
def test_wrong_gradients_are_counted(benchmarks, lone_group, error, exact, rounding):
    """A wrapper changes the gradient of one of two parameters."""
    baselines, rounds = benchmarks("support.baselines"), benchmarks("support.rounds")
    models = benchmarks("support.models")

    def wrong(module):
        weight = module.layers[1].weight
        weight.register_hook(lambda grad: grad + error * grad.abs().max())
        return module

    everyone = [
        rounds.Implementation("right", baselines.theirs(), "right"),
        rounds.Implementation("exact", wrong, "right"),
        rounds.Implementation("rounding", wrong, "right", is_exact=False),
        baselines.bare(),
    ]
    net, plan = models.Mlp(2, 8, batch=4), rounds.Plan.of(0, smoke=True)
    measured = rounds.Contest("a title", everyone, net, plan).run()
    expected = {"right": 0, "exact": exact, "rounding": rounding}
    assert measured.wrong == {**expected, baselines.BARE: None}
    assert measured.num_params == 2
    assert all((times > 0).all() for times in measured.times.values())


# -------------------------------------------------------------------- how it is shown


def estimate(benchmarks, *numbers):
    return benchmarks("support.estimates").Estimate(*numbers)


@pytest.mark.parametrize(
    ("numbers", "at_least", "word"),
    [
        ((1.0, 0.9, 1.05), False, "met"),
        ((1.2, 1.15, 1.3), False, "MISSED"),
        ((1.1, 1.05, 1.2), False, "unclear"),
        ((1.2, 1.15, 1.3), True, "met"),
        ((1.0, 0.9, 1.05), True, "MISSED"),
    ],
)
def test_a_target_is_unclear_if_noise_decides(benchmarks, numbers, at_least, word):
    report = benchmarks("support.report")
    found = estimate(benchmarks, *numbers)
    assert report.Verdict("it", found, 1.1, at_least).word == word


@pytest.mark.parametrize("wrong", [0, 2])
def test_without_matplotlib_there_are_tables_only(
    benchmarks, monkeypatch, tmp_path, capsys, wrong
):
    module = benchmarks("support.report")
    monkeypatch.setattr(module, "can_draw", lambda: False)
    args = argparse.Namespace(smoke=False, out=tmp_path)
    report = module.Report(args, "A title", ranks="7")
    report.show(module.table("a table", "facts", ["name", "value"], [["a", "1"]]))
    report.count_wrong([None, wrong])
    report.judge([module.Verdict("it", estimate(benchmarks, 2.0, 1.9, 2.1), 1.0)])
    assert report.finish("stem", {"numbers": [1]}, pytest.fail) == (wrong > 0)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md"}
    content = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert content["numbers"] == [1]
    assert content["targets"][0]["what"] == "it"
    assert "pip install matplotlib" in content["header"]["pictures"]
    text = next(tmp_path.glob("*.md")).read_text()
    assert all(word in text for word in ("# A title", "a table", "MISSED", "ranks"))
    assert ("WRONG" in text) == (wrong > 0)
