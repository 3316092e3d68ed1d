"""Targets, judged at the end of a report; they do not affect the exit status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from support.comparison import with_interval
from support.estimates import Estimate


@dataclass(frozen=True)
class Verdict:
    """One target, and whether it was met.

    Args:
        what: was measured.
        found: the measurement.
        limit: of the target.
        at_least: the limit is a lower one.
    """

    what: str
    found: Estimate
    limit: float
    at_least: bool = False

    @property
    def word(self) -> str:
        """Met, missed, or so close that the noise decides."""
        if self.found.low <= self.limit < self.found.high:
            return "unclear"
        return "met" if (self.found.value > self.limit) is self.at_least else "MISSED"

    def __str__(self) -> str:
        found, sign = with_interval(self.found), ">=" if self.at_least else "<="
        return f"{self.word:8}{found:22} {sign} {self.limit:.2f}  {self.what}"

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {**vars(self), "found": vars(self.found), "word": self.word}


def print_verdicts(console: Console, title: str, verdicts: Sequence[Verdict]) -> None:
    """Print one line for each."""
    console.print(f"[bold]targets[/]: {title} (95%)")
    for verdict in verdicts:
        colour = {"met": "green", "MISSED": "red"}.get(verdict.word, "")
        console.print(str(verdict), style=colour, soft_wrap=True)
    console.print()
