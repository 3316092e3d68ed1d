"""What benchmarks/ publishes: charts in the units they name, bounds that are bounds."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BOUNDED = sorted(
    path
    for pattern in ("overlap_*.json", "bucket_sweep_*.json")
    for path in (BENCHMARKS / "results").glob(pattern)
)


@pytest.fixture
def script(monkeypatch):
    """Import one of the benchmarks."""
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def cell(place, **extra_us):
    rows = [
        {"name": name, "extra": {"value": us / 1e6, "low": 0.0, "high": 1.0}}
        for name, us in extra_us.items()
    ]
    return {"title": f"net; {place}", "num_params": 500, "rows": rows}


def test_overheads_chart_is_of_milliseconds_per_step(script, monkeypatch, tmp_path):
    overhead, drawn = script("overhead"), []
    monkeypatch.setattr(overhead, "draw_pairs", lambda *given: drawn.append(given))
    cells = [
        cell("1 rank", torch=10, minidp=4),
        cell("2 ranks", torch=20, minidp=10),
        cell("2 ranks on a 2 Gbit/s link", plain=1),
    ]
    header = {"native": "loaded", "torch": "2.13", "date": "today"}
    overhead.chart(tmp_path / "f.png", {"header": header, "cells": cells})
    ((_, words, groups),) = drawn
    assert words.unit.startswith("ms added to each step")
    found = {
        place: [(p.label, {who: e.value for who, e in p.bars.items()}) for p in pairs]
        for place, pairs in groups.items()
    }
    assert found == {
        "1 rank": [("net", pytest.approx({"torch": 5.0, "minidp": 2.0}))],
        "2 ranks": [("net", pytest.approx({"torch": 10.0, "minidp": 5.0}))],
    }


def test_overheads_chart_is_drawn_again_from_its_file(script, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    overhead = script("overhead")
    header = {"native": "loaded", "torch": "2.13", "date": "today"}
    cells = [cell("1 rank", torch=10, minidp=-4)]
    (tmp_path / "f.json").write_text(json.dumps({"header": header, "cells": cells}))
    monkeypatch.setattr(
        "sys.argv", ["overhead.py", "--redraw", str(tmp_path / "f.json")]
    )
    assert overhead.main() == 0
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_of_several_trainings_the_median_is_shown(script):
    timeline = script("timeline")
    runs = [
        SimpleNamespace(shown=SimpleNamespace(typical=SimpleNamespace(seconds=seconds)))
        for seconds in (5, 1, 9, 4, 7)
    ]
    assert timeline.median_of(runs) is runs[0]


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
