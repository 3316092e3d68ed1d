"""The two lists that the runner judges by, both plain text beside this file.

    baseline.txt     NAME RANKS SECONDS       what torch itself passes
    exceptions.txt   NAME | ROW | REASON      what minidp does not, on purpose

ROW is the beginning of a row of "Differences from torch" in README.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.conformance.outcome import Outcome

_HERE = Path(__file__).parent
BASELINE = _HERE / "baseline.txt"
EXCEPTIONS = _HERE / "exceptions.txt"
README = _HERE.parent.parent / "README.md"
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
        """Whether it runs on request only."""
        return self.seconds > _SLOW_SECONDS


@dataclass(frozen=True)
class Listed:
    """A test that minidp does not pass, on purpose."""

    name: str
    row: str
    reason: str


def read_baseline(path: Path = BASELINE) -> dict[str, Known]:
    """By name, in the order of the file."""
    known = {}
    for line in _lines(path):
        name, num_ranks, seconds = line.split()
        known[name] = Known(name, int(num_ranks), float(seconds))
    return known


def baseline_version(path: Path = BASELINE) -> str:
    """The torch that passed those tests."""
    return path.read_text().split()[3]


def write_baseline(outcomes: Iterable[Outcome], path: Path = BASELINE) -> None:
    """Keep what passed and has to do with the wrapper at all."""
    rows = sorted(
        f"{outcome.name} {outcome.num_ranks} {outcome.seconds:.1f}\n"
        for outcome in outcomes
        if outcome.verdict == "ok" and outcome.wraps_module
    )
    path.write_text(_HEAD.format(version=torch.__version__) + "".join(rows))


def read_exceptions(
    path: Path = EXCEPTIONS, readme: Path = README
) -> dict[str, Listed]:
    """By name; each must point to a row of the README's table."""
    rows = _table_rows(readme)
    listed = {}
    for line in _lines(path):
        name, row, reason = (part.strip() for part in line.split("|", 2))
        if not any(present.startswith(row) for present in rows):
            raise ValueError(
                f"{path.name}: {name} points to the row {row!r}, which is not in the "
                f'table "Differences from torch" of {readme.name}'
            )
        listed[name] = Listed(name, row, reason)
    return listed


def _lines(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            yield line


def _table_rows(readme: Path) -> list[str]:
    section = readme.read_text().split("\n## Differences from torch\n")[1]
    section = section.split("\n## ")[0]
    return [line[2:] for line in section.splitlines() if line.startswith("| ")]
