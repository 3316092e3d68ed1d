"""Runs patterns on a wrapper, and prints the table: ``python -m tests.fault.matrix``."""

from __future__ import annotations

import atexit
import functools
import sys
from typing import Any

from tests.fault.outcomes import GOOD, Verdict, judge
from tests.fault.patterns import BY_NAME, PATTERNS
from tests.fault.play import play
from tests.support.pool import _unbalanced
from tests.support.team import RankError, Team, make_job

SECONDS = 2.0  # timeout of the process group
LIMIT = 25.0  # seconds after which a pattern counts as hung
MODULE = "tests.fault.patterns"


class Teams:
    """Two rank processes that play pattern after pattern until one breaks something."""

    def __init__(self) -> None:
        self._team: Team | None = None

    def play(self, wrapper: str, name: str) -> list[Any]:
        """A `Record` or `RankError` for each rank."""
        if self._team is None:
            self._team = Team(2, group_timeout=SECONDS)
        args = (wrapper, MODULE, name)
        job = make_job(play, (0, 1), args, strict_warnings=False)
        try:
            records = self._team.run(job, LIMIT)
        except BaseException:
            self.close()
            raise
        if _unbalanced(self._team) or any(map(_is_broken, records)):
            self.close()
        return records

    def close(self) -> None:
        """End them."""
        if self._team is not None:
            self._team.kill()
            self._team = None


def _is_broken(record: Any) -> bool:
    return isinstance(record, RankError) or bool(record.error or record.recovery)


teams = Teams()
atexit.register(teams.close)


@functools.cache
def verdict_of(name: str, wrapper: str) -> Verdict:
    """Play a pattern."""
    records = teams.play(wrapper, name)
    pattern = BY_NAME[name]
    return judge(records, pattern.culprits, pattern.names, SECONDS)


def main() -> None:
    chosen = [p for p in PATTERNS if not sys.argv[2:] or sys.argv[2] in p.name]
    for pattern in chosen:
        for wrapper in sys.argv[1].split(","):
            v = verdict_of(pattern.name, wrapper)
            bad = ""
            if wrapper == "minidp":
                bad = "" if v.outcome in GOOD and not v.recovery else "  <<<<<"
            elif v.outcome is not pattern.torch:
                bad = f"  !!!! expected {pattern.torch.name}"
            print(
                f"{pattern.name:50} {wrapper:7} {v.outcome.value:12} {bad}", flush=True
            )
            if bad:
                print(
                    "      ",
                    v.details[:700],
                    "\n       REC",
                    v.recovery[:300],
                    flush=True,
                )


if __name__ == "__main__":
    main()
