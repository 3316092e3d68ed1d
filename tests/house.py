"""Print the size and shape of the project: the numbers that are to stay small.

    python -m tests.house           each number, and the goal that was set for it
    python -m tests.house --path    also each call that one gradient meets

The path of a gradient is what runs in `minidp` on one of two ranks, in pure Python,
from the hook of the only parameter to the end of the optimizer's step. A return is a
call into a file that the path has already left.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import torch

import minidp
from tests.stages import ROOT
from tests.support.fresh import run_fresh

PACKAGE = Path(minidp.__file__).parent
WARM_UP = 12  # steps: the second one rebuilds buckets, the first ten are sampled


def architecture() -> Any:
    """Return the module of the tests that know the rooms."""
    path = ROOT / "tests/unit/top/test_architecture.py"
    spec = importlib.util.spec_from_file_location("test_architecture", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def calls_of_one_gradient(ctx: Any) -> list[tuple[str, str]]:
    """Return file and name of each function of minidp that one gradient meets."""
    net = torch.nn.Linear(4, 1, bias=False)
    ddp = minidp.DataParallel(net, process_group=ctx.group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    found: list[tuple[str, str]] = []

    def note(frame: Any, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            name = frame.f_code.co_name
            found.append((str(file.relative_to(PACKAGE)), name))

    for step in range(WARM_UP + 1):
        loss = ddp(torch.ones(2, 4)).sum()
        if step == WARM_UP:
            sys.setprofile(note)
        loss.backward()
        optimizer.step()
        sys.setprofile(None)
        optimizer.zero_grad()
    hook = next(n for n, (_, name) in enumerate(found) if name == "grad_hook")
    return found[hook:]  # before it: the probe at the outputs


def lines_in(folder: Path) -> int:
    """Return how many lines the Python files in a folder have."""
    return sum(len(p.read_text().splitlines()) for p in folder.rglob("*.py"))


def main() -> None:
    """Print the table, and the path if asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.house")
    parser.add_argument("--path", action="store_true", help="print each call")
    options = parser.parse_args()
    house, readme = architecture(), (ROOT / "README.md").read_text()
    env = {"MINIDP_NATIVE": "0"}
    calls = run_fresh(calls_of_one_gradient, 2, env=env)[0]
    files = [file for file, _ in itertools.groupby(file for file, _ in calls)]
    core = house.lines_of_core()
    results = [p.stat().st_size for p in (ROOT / "benchmarks/results").iterdir()]
    if options.path:
        for file, name in calls:
            print(f"{file:32}{name}")
    print(f"{'':44}{'now':>8}{'goal':>8}")
    for what, now, goal in (
        ("rooms and files that are not public", len(house.private_entries()), 16),
        ("floors of rooms", max(house.floors().values()), 9),
        ("files of core/", len(core), 12),
        ("lines of core/", sum(core.values()), 2800),
        ("files that a gradient meets", len(set(files)), 12),
        ("returns to a file on its path", len(files) - len(set(files)), 5),
        ("public methods of DataParallel", len(house.public_methods()), 30),
        ("lines of README.md", len(readme.splitlines()), 250),
        ("KB of README.md", round(len(readme.encode()) / 1000, 1), 15),
        ("lines of minidp/", lines_in(PACKAGE), 17000),
        ("lines of tests/", lines_in(ROOT / "tests"), 26000),
        ("MB of benchmarks/results", round(sum(results) / 1e6, 2), 1.5),
    ):
        print(f"{what:44}{now:>8}{goal:>8}  {'' if now <= goal else 'over'}".rstrip())


if __name__ == "__main__":
    # Ranks import what they run, and cannot import "__main__".
    importlib.import_module("tests.house").main()
