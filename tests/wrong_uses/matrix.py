"""Plays patterns, and prints the table: ``python -m tests.wrong_uses.matrix``."""

from __future__ import annotations

import atexit
import functools
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.support import simulated
from tests.support.actions import Record, has_drifted
from tests.support.pool import Pool, RankError
from tests.wrong_uses.patterns import (
    BY_NAME,
    MODES,
    PATTERNS,
    Outcome,
    Pattern,
    play_by_name,
)

SECONDS = 2.0  # timeout of the process group
LIMIT = 25.0  # seconds after which a pattern counts as hung
REMEDY = "What to do: "
GOOD = {Outcome.RIGHT, Outcome.NAMED, Outcome.WARNED}

pool = Pool(2, SECONDS)
atexit.register(pool.close)


# -- the judge -------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """An outcome and what it rests on."""

    outcome: Outcome
    details: str
    recovery: str = ""  # why training did not go on after reset(); minidp only
    warned: tuple[str, ...] = ()


def judge(records, culprits, names, timeout) -> Verdict:
    """Return how a pattern ended, and whether training went on after reset().

    Args:
        records: a `Record` or a `RankError` for each rank.
        culprits: the ranks that did wrong.
        names: at least one of them must be in the culprit's error, if there are any.
        timeout: of the process group; an error that took as long is a hang.
    """
    lost = [record for record in records if isinstance(record, RankError)]
    if lost:
        is_hang = all(error.kind == "Hang" for error in lost)
        outcome, recovery = Outcome.HANG if is_hang else Outcome.CRASH, "a rank is gone"
    else:
        outcome = _outcome(records, culprits, names, timeout)
        recovery = " | ".join(record.recovery for record in records if record.recovery)
        if not recovery and has_drifted(records, 1):
            recovery = "wrong gradients, or replicas differ"
    heard = tuple(text for record in records for text in getattr(record, "warned", ()))
    return Verdict(outcome, " | ".join(map(_describe, records)), recovery, heard)


def _outcome(records, culprits, names, timeout) -> Outcome:
    """Return the outcome if no process ended or hung."""
    drifted = has_drifted(records, 0)
    raised = {rank: r.errors[0][1] for rank, r in enumerate(records) if r.errors}
    if not raised:
        warned = (any(_tells(r, w, names) for w in records[r].warned) for r in culprits)
        silent = Outcome.WARNED if all(warned) else Outcome.SILENT
        return silent if drifted else Outcome.RIGHT
    if any(
        records[rank].longest > 0.8 * timeout and f"[rank {rank}]" not in error
        for rank, error in raised.items()
    ):
        return Outcome.HANG
    if drifted:
        return Outcome.LATE
    is_named = all(
        records[rank].is_argument  # a plain TypeError or ValueError, as torch raises
        or _tells(rank, error, names if rank in culprits else ())
        for rank, error in raised.items()
    )
    return Outcome.NAMED if is_named else Outcome.ERROR


def _tells(rank: int, error: str, names: Sequence[str]) -> bool:
    """Whether an error says who speaks, about which parameters, and what to do."""
    knows_names = not names or any(name in error for name in names)
    return f"[rank {rank}]" in error and REMEDY in error and knows_names


def _describe(record: Record | RankError) -> str:
    if isinstance(record, RankError):
        return f"{record.kind} {record.exit_code or ''}"
    text = record.errors[0][1] if record.errors else "no error"
    steps, text = len(record.steps[0]), text.replace("\n", " ")[:400]
    return f"{steps} steps, {record.longest:.1f} s, {text}"


# -- playing ---------------------------------------------------------------------------


def simulated_verdict_of(name: str) -> Verdict:
    """Play a pattern on minidp and simulated ranks, whose waits have the same limit."""
    records = simulated.run(play_by_name, 2, "minidp", name)
    pattern = BY_NAME[name]
    verdict = judge(records, pattern.culprits, pattern.names, SECONDS)
    if max(record.longest for record in records) > LIMIT:
        return replace(verdict, outcome=Outcome.HANG)
    return verdict


@functools.cache
def verdict_of(name: str, wrapper: str) -> Verdict:
    """Play a pattern; its processes live on unless it broke something."""
    records = pool.run(play_by_name, 2, wrapper, name, errors="return", limit=LIMIT)
    if any(not isinstance(r, Record) or r.errors or r.recovery for r in records):
        pool.close()
    pattern = BY_NAME[name]
    return judge(records, pattern.culprits, pattern.names, SECONDS)


def outcome_on_torch(pattern: Pattern, *, runs_hangs: bool) -> Outcome:
    """Play a pattern on torch's DDP; a known hang only if ``runs_hangs``."""
    if pattern.torch is Outcome.HANG and not runs_hangs:
        return pattern.torch
    return verdict_of(pattern.name, "torch").outcome


def mode_of(pattern: Pattern) -> str:
    """Return the mode of a pattern: a key of MODES."""
    return next((m for m, o in MODES.items() if o == pattern.mode), "default")


def base_of(pattern: Pattern) -> str:
    """Return the name of a pattern without its mode."""
    return pattern.name.removesuffix(f", {mode_of(pattern)}")


def of_each_base() -> tuple[Pattern, ...]:
    """Return each wrong use in its first mode only: half of the table."""
    first = {base_of(pattern): pattern for pattern in reversed(PATTERNS)}
    return tuple(pattern for pattern in PATTERNS if pattern in first.values())


def table(*, runs_hangs: bool) -> str:
    """Play all patterns; return a Markdown table that joins modes that end alike."""
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
    """Play patterns; return how often each outcome came."""
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
