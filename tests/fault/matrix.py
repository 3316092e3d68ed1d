"""Plays patterns, and prints the table: ``python -m tests.fault.matrix``."""

from __future__ import annotations

import atexit
import functools
import sys
from collections import Counter
from collections.abc import Sequence

from tests.fault.patterns import BY_NAME, MODES, PATTERNS, play_by_name
from tests.fault.play import Outcome, Pattern, Record, Verdict, judge
from tests.support.pool import Pool

SECONDS = 2.0  # timeout of the process group
LIMIT = 25.0  # seconds after which a pattern counts as hung

pool = Pool(2, SECONDS)
atexit.register(pool.close)


@functools.cache
def verdict_of(name: str, wrapper: str) -> Verdict:
    """Play a pattern; its processes live on unless it broke something."""
    records = pool.run(play_by_name, 2, wrapper, name, errors="return", limit=LIMIT)
    if any(not isinstance(r, Record) or r.error or r.recovery for r in records):
        pool.close()
    pattern = BY_NAME[name]
    return judge(records, pattern.culprits, pattern.names, SECONDS)


def outcome_on_torch(pattern: Pattern, *, runs_hangs: bool) -> Outcome:
    """Played, but for hangs, which are only looked up unless they are asked for."""
    if pattern.torch is Outcome.HANG and not runs_hangs:
        return pattern.torch
    return verdict_of(pattern.name, "torch").outcome


def mode_of(pattern: Pattern) -> str:
    """Which options of `DataParallel`."""
    return next((m for m, o in MODES.items() if o == pattern.options), "default")


def base_of(pattern: Pattern) -> str:
    """The wrong use, in whichever mode."""
    return pattern.name.removesuffix(f", {mode_of(pattern)}")


def of_each_base() -> tuple[Pattern, ...]:
    """Each wrong use in one mode only, which is half of the table."""
    first = {base_of(pattern): pattern for pattern in reversed(PATTERNS)}
    return tuple(pattern for pattern in PATTERNS if pattern in first.values())


def table(*, runs_hangs: bool) -> str:
    """Both outcomes of every pattern, in Markdown; alike rows are joined."""
    lines = ["| pattern | torch DDP | minidp |", "|---|---|---|"]
    rows: dict[tuple[str, str, str], list[str]] = {}
    num_modes = Counter(map(base_of, PATTERNS))
    for pattern in PATTERNS:
        torchs = outcome_on_torch(pattern, runs_hangs=runs_hangs)
        ours = verdict_of(pattern.name, "minidp").outcome
        row = (base_of(pattern), torchs.value, ours.value)
        rows.setdefault(row, []).append(mode_of(pattern))
    for (base, theirs, ours), modes in rows.items():
        where = "" if len(modes) == num_modes[base] else f" ({', '.join(modes)})"
        lines.append(f"| {base}{where} | {theirs} | {ours} |")
    return "\n".join([*lines, "", score(runs_hangs=runs_hangs)])


def score(patterns: Sequence[Pattern] = PATTERNS, *, runs_hangs: bool) -> str:
    """How often each outcome came."""
    counts = {
        "torch": Counter(outcome_on_torch(p, runs_hangs=runs_hangs) for p in patterns),
        "minidp": Counter(verdict_of(p.name, "minidp").outcome for p in patterns),
    }
    return "\n".join(
        f"{wrapper}, {len(patterns)} patterns: "
        + ", ".join(f"{count[outcome]} {outcome.value}" for outcome in Outcome)
        for wrapper, count in counts.items()
    )


def main() -> None:
    """Print the table, or with arguments what happened: WRAPPER WORD-OF-THE-NAME."""
    if len(sys.argv) == 1:
        print(table(runs_hangs=True))
        return
    wrapper, word = sys.argv[1:]
    for pattern in PATTERNS:
        if word in pattern.name:
            verdict = verdict_of(pattern.name, wrapper)
            print(f"{pattern.name}: {verdict.outcome.value} ({verdict.details})")
            print(f"    after reset(): {verdict.recovery or 'right'}")


if __name__ == "__main__":
    main()
