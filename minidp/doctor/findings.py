"""Define what a check finds, merge that over ranks, and show it as a table or JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from .words import of_ranks


class Status(Enum):
    """The outcome of a check."""

    OK = "ok"
    WARNING = "warning"  # training runs, but probably not as intended
    FAILED = "failed"  # training is wrong, or will not run
    SKIPPED = "skipped"  # the check did not run; the text says why


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Raises:
        ValueError: It is a warning or a failure, but has no remedy.
    """

    check: str  # the name of the check, in a few words
    status: Status
    found: str  # what was seen, in one sentence or two
    remedy: str = ""  # what to change; warnings and failures must have one
    ranks: tuple[int, ...] = ()  # the ranks that found it; () if all that answered did

    def __post_init__(self) -> None:
        if self.status in (Status.WARNING, Status.FAILED) and not self.remedy:
            raise ValueError(f"a warning or a failure needs a remedy; this is {self}")

    def as_json(self) -> dict[str, Any]:
        """Return the fields as a dict that JSON can hold, for `of_json`."""
        return {**asdict(self), "status": self.status.value, "ranks": [*self.ranks]}

    @classmethod
    def of_json(cls, plain: Mapping[str, Any]) -> Finding:
        """Return the finding of a dict that `as_json` has made."""
        status, ranks = Status(plain["status"]), tuple(plain["ranks"])
        return cls(**{**plain, "status": status, "ranks": ranks})


# A check returns one finding or several, without the check's name, which `named` adds.
Found = Finding | Iterable[Finding]
Check = Callable[[], Found]
ok = partial(Finding, "", Status.OK)
warning = partial(Finding, "", Status.WARNING)
failed = partial(Finding, "", Status.FAILED)
skipped = partial(Finding, "", Status.SKIPPED)


def named(check: str, found: Found) -> list[Finding]:
    """Return findings as a list, with ``check`` as the name of those that lack one.

    A check may be a generator. Then it runs here, and may raise.
    """
    findings = [found] if isinstance(found, Finding) else found
    return [replace(finding, check=finding.check or check) for finding in findings]


@dataclass(frozen=True)
class Report:
    """The findings of all ranks, in the order of the checks.

    ``str(report)`` is the table.
    """

    title: str
    findings: tuple[Finding, ...]
    world_size: int = 1

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        return self.table()

    @property
    def counts(self) -> dict[str, int]:
        """How many findings there are of each status, by the word for the status."""
        found = [finding.status for finding in self.findings]
        return {status.value: found.count(status) for status in Status}

    @property
    def exit_code(self) -> int:
        """The exit status: 1 if a check failed, else 0. Warnings do not count."""
        return int(self.counts["failed"] > 0)

    def table(self, width: int = 80) -> str:
        """Return a table of all findings and remedies, with lines of ``width`` columns.

        They become longer if less than 40 columns were left beside the names of checks.
        """
        names = max((len(finding.check) for finding in self.findings), default=0)
        width = max(width, 40 + names)
        lines, before = [self.title, ""], ""
        for finding in self.findings:
            check = "" if finding.check == before else finding.check
            before, status = finding.check, finding.status.value
            said = f"[{of_ranks(finding.ranks)}] " if finding.ranks else ""
            head = f"{status:<9}{check:<{names}}  "
            lines.append(_wrap(said + finding.found, head, width))
            if finding.remedy:
                lines.append(_wrap(finding.remedy, f"{'':9}-> ", width))
        order = ("failed", "warning", "ok", "skipped")
        counts = ", ".join(f"{self.counts[name]} {name}" for name in order)
        return "\n".join([*lines, "", counts])

    def as_json(self) -> dict[str, Any]:
        """Return the report as a dict that JSON can hold."""
        return {
            "version": 1,
            "title": self.title,
            "world_size": self.world_size,
            "exit_code": self.exit_code,
            "counts": self.counts,
            "findings": [finding.as_json() for finding in self.findings],
        }


def merge(
    title: str, of_rank: Mapping[int, Sequence[Finding]], world_size: int
) -> Report:
    """Return one report of all ranks, in which equal findings of ranks become one.

    A finding that all ranks of ``of_rank`` share names no ranks.
    """
    ranks_of: dict[Finding, set[int]] = {}
    for rank in sorted(of_rank):
        for finding in of_rank[rank]:
            ranks_of.setdefault(finding, set()).add(rank)
    checks = list(dict.fromkeys(finding.check for finding in ranks_of))
    merged = [
        replace(finding, ranks=() if len(ranks) == len(of_rank) else (*sorted(ranks),))
        for finding, ranks in ranks_of.items()
    ]
    merged.sort(key=lambda finding: checks.index(finding.check))  # stable
    return Report(title, tuple(merged), world_size)


def _wrap(text: str, head: str, width: int) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=False,
    )
