"""What the tests on a GPU measured and found, as files that a person can commit."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass
class Results:
    """Collected during one session.

    Args:
        date: of the session.
    """

    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
    machine: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[Row]] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)  # by test
    reasons: Counter[str] = field(default_factory=Counter)  # of what was skipped
    seconds: float = 0.0

    def add(self, table: str, **row: Any) -> None:
        """One more row of a table; rows may differ in columns."""
        self.tables.setdefault(table, []).append(row)

    def ended(self, test: str, outcome: str, reason: str = "") -> None:
        """How a test ended; the worst of its phases counts."""
        worst = ("passed", "skipped", "failed")
        before = self.outcomes.get(test, "passed")
        self.outcomes[test] = max(before, outcome, key=worst.index)
        if outcome == "skipped":
            self.reasons[reason] += 1

    @property
    def counts(self) -> Counter[str]:
        """Tests by outcome."""
        return Counter(self.outcomes.values())

    def to_json(self) -> str:
        """All there is."""
        content = {
            "date": self.date,
            "machine": self.machine,
            "seconds": round(self.seconds, 1),
            "counts": self.counts,
            "outcomes": self.outcomes,
            "tables": self.tables,
        }
        return json.dumps(content, indent=1) + "\n"

    def to_markdown(self) -> str:
        """For people."""
        counts = ", ".join(f"{n} {what}" for what, n in sorted(self.counts.items()))
        lines = [f"# Tests on a GPU, {self.date}", ""]
        lines += [f"* {name}: {value}" for name, value in self.machine.items()]
        lines += [f"* {counts} in {self.seconds / 60:.1f} minutes", ""]
        lines += _listed(
            "Failed", [t for t, o in self.outcomes.items() if o == "failed"]
        )
        lines += _listed(
            "Skipped", [f"{n} tests: {reason}" for reason, n in self.reasons.items()]
        )
        for title, rows in self.tables.items():
            lines += [f"## {title}", "", *_table(rows), ""]
        return "\n".join(lines)

    def write(self, folder: Path) -> list[Path]:
        """``gpu_NAME_DATE.json`` and ``.md``."""
        name = re.sub(r"\W+", "-", self.machine.get("GPU", "unknown").lower())
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for suffix, text in (("json", self.to_json()), ("md", self.to_markdown())):
            path = folder / f"gpu_{name}_{self.date}.{suffix}"
            path.write_text(text)
            written.append(path)
        return written


def _listed(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    return [f"## {title}", "", *(f"* {item}" for item in items), ""]


def _table(rows: Sequence[Row]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(_short(row.get(name, "")) for name in columns) for row in rows]
    return [f"| {line} |" for line in lines]


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
