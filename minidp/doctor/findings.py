"""Define findings; merge them over ranks; format them as a table or JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from .words import of_ranks


class Status(Enum):
    """Outcome of a check: ok, warning, failed, skipped; reports show the value."""

    OK = "ok"
    WARNING = "warning"  # training runs, but probably not as intended
    FAILED = "failed"  # training is wrong, or will not run
    SKIPPED = "skipped"  # the check did not run; the text says why


@dataclass(frozen=True)
class Finding:
    """One result of a check; ValueError for a warning or failure without a remedy."""

    check: str  # its name, a few words
    status: Status
    found: str  # what was seen, in one sentence or two
    remedy: str = ""  # what to change; required for warnings and failures
    ranks: tuple[int, ...] = ()  # with this finding; empty: all that answered

    def __post_init__(self) -> None:
        if self.status in (Status.WARNING, Status.FAILED) and not self.remedy:
            raise ValueError(f"a warning or a failure needs a remedy; this is {self}")

    def as_json(self) -> dict[str, Any]:
        """Return the fields as a dict that JSON can hold; `of_json` is the inverse."""
        return {**asdict(self), "status": self.status.value, "ranks": [*self.ranks]}

    @classmethod
    def of_json(cls, plain: Mapping[str, Any]) -> Finding:
        """Return the Finding of an `as_json` dict.

        KeyError, TypeError or ValueError if it is none.
        """
        status, ranks = Status(plain["status"]), tuple(plain["ranks"])
        return cls(**{**plain, "status": status, "ranks": ranks})


# A check returns findings without a name; `named` adds the name.
Found = Finding | Iterable[Finding]
Check = Callable[[], Found]
ok = partial(Finding, "", Status.OK)
warning = partial(Finding, "", Status.WARNING)
failed = partial(Finding, "", Status.FAILED)
skipped = partial(Finding, "", Status.SKIPPED)


def named(check: str, found: Found) -> list[Finding]:
    """Return one or several findings as a list; set ``check`` where the name is empty.

    A generator (``found`` of a check that yields) runs here, and may raise.
    """
    findings = [found] if isinstance(found, Finding) else found
    return [replace(finding, check=finding.check or check) for finding in findings]


@dataclass(frozen=True)
class Report:
    """All ranks' findings in the order of checks; iterable; ``str()`` is the table."""

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
        """Return the number of findings by status word ("ok", ...), zeros included."""
        found = [finding.status for finding in self.findings]
        return {status.value: found.count(status) for status in Status}

    @property
    def exit_code(self) -> int:
        """Return 1 if any finding is ``failed``, else 0; warnings do not count."""
        return int(self.counts["failed"] > 0)

    def table(self, width: int = 80) -> str:
        """Return title, rows of findings with remedies, counts, folded at ``width``.

        Wider if that leaves less than 40 columns beside the names of checks.
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
        """Return version, title, world size, exit code, counts, findings, for JSON."""
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
    """Return one Report of all ranks; equal findings become one with all their ranks.

    ``ranks`` becomes () if every rank of ``of_rank`` has the finding.
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
