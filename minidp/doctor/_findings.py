"""What a check of `doctor` says: findings, merged over ranks, as table and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

JSON_VERSION = 1
WIDTH = 80
_NARROWEST = 40
_COLOURS = {"ok": "32", "warning": "33", "failed": "31", "skipped": "2"}


class Status(Enum):
    """How a check ended; the value is what is printed."""

    OK = "ok"
    WARNING = "warning"  # it works, but probably not as it is meant
    FAILED = "failed"  # training is wrong, or will not run
    SKIPPED = "skipped"  # it could not be looked at; the text says why


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Args:
        check: name of the check, a few words.
        status: how it ended.
        found: what was seen, in one sentence or two.
        remedy: what to change; required for warnings and failures.
        ranks: who found it; empty: all that were asked.
    """

    check: str
    status: Status
    found: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        needs_remedy = self.status in (Status.WARNING, Status.FAILED)
        if not self.check or not self.found or (needs_remedy and not self.remedy):
            raise ValueError(
                "a finding needs a check, what was found, and a remedy if it is a "
                f"warning or a failure; this one is {self}"
            )

    def as_json(self) -> dict[str, Any]:
        """Plain data; `of_json` is its inverse."""
        return {
            "check": self.check,
            "status": self.status.value,
            "found": self.found,
            "remedy": self.remedy,
            "ranks": list(self.ranks),
        }

    @classmethod
    def of_json(cls, plain: Mapping[str, Any]) -> Finding:
        """From what `as_json` gave."""
        words = {key: plain[key] for key in ("check", "found", "remedy")}
        return cls(status=Status(plain["status"]), ranks=tuple(plain["ranks"]), **words)


def ok(check: str, found: str) -> Finding:
    """Nothing to change."""
    return Finding(check, Status.OK, found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """Something to change, although training runs."""
    return Finding(check, Status.WARNING, found, remedy)


def failed(check: str, found: str, remedy: str) -> Finding:
    """Something that must be changed."""
    return Finding(check, Status.FAILED, found, remedy)


def skipped(check: str, found: str, remedy: str = "") -> Finding:
    """Nothing was looked at; ``found`` says why."""
    return Finding(check, Status.SKIPPED, found, remedy)


@dataclass(frozen=True)
class Report:
    """Findings in the order of the checks, each with the ranks that it holds for.

    Iterating gives the `Finding` objects, ``str()`` the table.
    """

    title: str
    findings: tuple[Finding, ...]
    world_size: int = 1

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        return self.table()

    def count(self, status: Status) -> int:
        """How many findings ended so."""
        return sum(finding.status is status for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """1 if anything failed, else 0."""
        return int(self.count(Status.FAILED) > 0)

    def summary(self) -> str:
        """One line of counts; failures first."""
        failures, warnings = self.count(Status.FAILED), self.count(Status.WARNING)
        return (
            f"{failures} failed, {warnings} warning{'s' * (warnings != 1)}, "
            f"{self.count(Status.OK)} ok, {self.count(Status.SKIPPED)} skipped"
        )

    def table(self, *, width: int = WIDTH, colour: bool = False) -> str:
        """A row per finding, wrapped at ``width`` columns, remedies below.

        Args:
            width: columns of the terminal; less than 40 count as 40.
            colour: colour the status with ANSI sequences.
        """
        names = max((len(finding.check) for finding in self.findings), default=0)
        width = max(width, _NARROWEST + names)
        lines = [self.title, ""]
        before = ""
        for finding in self.findings:
            check = "" if finding.check == before else finding.check
            before = finding.check
            head = f"{finding.status.value:<9}{check:<{names}}  "
            rows = _wrap(_said_by(finding.ranks) + finding.found, head, width)
            if colour:
                rows = _paint(rows, finding.status.value)
            lines.append(rows)
            if finding.remedy:
                lines.append(_wrap(finding.remedy, f"{'':9}-> ", width))
        return "\n".join([*lines, "", self.summary()])

    def as_json(self) -> dict[str, Any]:
        """Plain data: version, title, world_size, exit_code, counts, findings."""
        return {
            "version": JSON_VERSION,
            "title": self.title,
            "world_size": self.world_size,
            "exit_code": self.exit_code,
            "counts": {status.value: self.count(status) for status in Status},
            "findings": [finding.as_json() for finding in self.findings],
        }


def merge(
    title: str, of_rank: Mapping[int, Sequence[Finding]], world_size: int
) -> Report:
    """One report of what several ranks found; equal findings become one.

    Args:
        title: its first line.
        of_rank: findings by rank; a rank that did not answer has no entry.
        world_size: how many ranks there should be.
    """
    ranks_of: dict[Finding, list[int]] = {}
    for rank in sorted(of_rank):
        for finding in of_rank[rank]:
            said = ranks_of.setdefault(finding, [])
            if rank not in said:
                said.append(rank)
    checks = list(dict.fromkeys(finding.check for finding in ranks_of))
    merged = [
        replace(finding, ranks=() if len(ranks) == len(of_rank) else tuple(ranks))
        for finding, ranks in ranks_of.items()
    ]
    merged.sort(key=lambda finding: checks.index(finding.check))  # stable
    return Report(title, tuple(merged), world_size)


def join(items: Iterable[object], limit: int = 8) -> str:
    """``a, b and c``; what exceeds the limit is counted."""
    texts = [str(item) for item in items]
    if len(texts) > limit:
        texts = [*texts[:limit], f"{len(texts) - limit} more"]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)


def of_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0, 1 and 2``."""
    return f"rank{'s' * (len(ranks) != 1)} {join(ranks)}"


def _said_by(ranks: Sequence[int]) -> str:
    return f"[{of_ranks(ranks)}] " if ranks else ""


def _wrap(text: str, head: str, width: int) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _paint(row: str, status: str) -> str:
    return f"\033[{_COLOURS[status]}m{status}\033[0m" + row[len(status) :]
