"""The lists that the runner judges by, plain text beside this file.

    baseline_2.15.txt   NAME RANKS SECONDS     what torch 2.15 itself passes
    exceptions.txt      NAME | ROW | REASON    what minidp does not, on purpose

There is a baseline for each version of torch that minidp is tested with; a version
without one is judged by the newest. ROW is the beginning of a row of "Differences from
torch" in the README of minidp/torch_compat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_HERE = Path(__file__).parent
EXCEPTIONS = _HERE / "exceptions.txt"
MINOR = ".".join(torch.__version__.split(".")[:2])
OWN_BASELINE = _HERE / f"baseline_{MINOR}.txt"
BASELINE = OWN_BASELINE if OWN_BASELINE.exists() else max(_HERE.glob("baseline_*.txt"))
README = _HERE.parent.parent / "minidp" / "torch_compat" / "README.md"
_SLOW_SECONDS = 20.0
_HEAD = """\
# What torch {version} passes, of the tests in torch's wheel that wrap a module in DDP.
# Made by: python tests/conformance/run.py --implementation torch --record
# name, ranks, seconds
"""


@dataclass(frozen=True)
class Known:
    """A test that torch itself passes."""

    name: str
    num_ranks: int
    seconds: float

    @property
    def is_slow(self) -> bool:
        """Whether it runs only with --slow."""
        return self.seconds > _SLOW_SECONDS


@dataclass(frozen=True)
class Outcome:
    """How a test went."""

    name: str
    verdict: str  # "ok", "FAILED" or "skipped"
    seconds: float
    num_ranks: int
    reason: str = ""  # the error's first line, or why it was skipped
    details: str = ""  # traceback, and the end of what the ranks printed
    wraps_module: bool = False  # whether it reached the implementation at all


def read_baseline() -> dict[str, Known]:
    """Read the baseline: tests by name, in the order of the file."""
    rows = (line.split() for line in _lines(BASELINE))
    return {name: Known(name, int(num), float(sec)) for name, num, sec in rows}


def baseline_version() -> str:
    """Return the version of torch that passed the tests of the baseline."""
    return BASELINE.read_text().split()[3]


def write_baseline(outcomes: Iterable[Outcome]) -> None:
    """Write this torch's baseline: what passed and built the implementation's class."""
    rows = sorted(
        f"{outcome.name} {outcome.num_ranks} {outcome.seconds:.1f}\n"
        for outcome in outcomes
        if outcome.verdict == "ok" and outcome.wraps_module
    )
    OWN_BASELINE.write_text(_HEAD.format(version=torch.__version__) + "".join(rows))


def read_exceptions() -> dict[str, str]:
    """Read exceptions.txt: tests that minidp fails on purpose -> row of the README.

    Raises:
        ValueError: the README has no such row.
    """
    table = README.read_text().split("\n## Differences from torch\n")[1]
    table = table.split("\n## ")[0]
    listed = {}
    for line in _lines(EXCEPTIONS):
        name, row, _ = (part.strip() for part in line.split("|", 2))
        if f"\n| {row}" not in table:
            raise ValueError(f"{name} points to {row!r}, which is no row of {README}")
        listed[name] = row
    return listed


def _lines(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            yield line


def judge(outcome: Outcome, exceptions: Mapping[str, str]) -> tuple[str, str]:
    """Return a verdict and its reason, in the light of the tests that are listed.

    A listed test that fails "differs". One that passes is "STALE", an error: its row
    would hide the day on which it fails again.
    """
    row = exceptions.get(outcome.name)
    if row is None:
        return outcome.verdict, outcome.reason
    if outcome.verdict == "ok":
        return "STALE", "passes, but exceptions.txt lists it"
    return "differs", row
