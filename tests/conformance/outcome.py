"""What is known of a test after it ran."""

from __future__ import annotations

from dataclasses import dataclass


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
