"""Benchmarks measure, print and write their tables also where matplotlib is missing."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from minidp._timeline import to_json
from tests.support.timelines import step, timeline

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def drawing_functions():
    """Those of benchmarks/support/ that import matplotlib: (module, function)."""
    for path in sorted((BENCHMARKS / "support").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(inner, ast.Import | ast.ImportFrom)
                and "matplotlib" in ast.unparse(inner)
                for inner in ast.walk(node)
            ):
                yield path.stem, node.name


@pytest.fixture
def benchmarks(monkeypatch):
    """Imports from benchmarks/, where there is no matplotlib."""
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    return importlib.import_module


def test_there_are_pictures():
    assert len(list(drawing_functions())) >= 2


@pytest.mark.parametrize(("module", "name"), list(drawing_functions()))
def test_without_matplotlib_nothing_is_drawn(module, name, benchmarks, tmp_path):
    draw = getattr(benchmarks(f"support.{module}"), name)
    others = len(inspect.signature(draw).parameters) - 1
    assert draw(tmp_path / "picture.png", *[None] * others) is None
    assert not list(tmp_path.iterdir())


def test_the_header_says_so_before_anything_is_measured(benchmarks, monkeypatch):
    report = benchmarks("support.report")
    assert "pip install matplotlib" in report.header()["pictures"]
    monkeypatch.setattr(report, "can_draw", lambda: True)
    assert "pictures" not in report.header()


def test_a_timeline_without_a_picture(benchmarks, monkeypatch, tmp_path, capsys):
    script = benchmarks("timeline")
    steps = [step(n, [(20, 20, 28, 35)], at=60 * n) for n in range(3)]
    found = json.dumps({"recorded": to_json([timeline(steps)]), "said": []})
    monkeypatch.setattr(script, "run_ranks", lambda *_, **__: found)
    script.run(Namespace(link=script.LOOPBACK, ranks=2, smoke=True), tmp_path)
    kinds = {path.suffix for path in tmp_path.iterdir()}
    assert kinds == {".md", ".gz"}
    assert "Is communication hidden?" in capsys.readouterr().out
