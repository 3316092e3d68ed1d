"""Which outcomes are as they should be, and how they are printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tests.conformance.outcome import Outcome
from tests.conformance.records import Listed

_MAX_REASON = 160  # characters


class Judge:
    """Compares outcomes with the list of exceptions, and counts.

    Args:
        exceptions: tests that are meant to fail. One that passes is an error, too:
            its row is stale, and would hide the day on which it fails again.
    """

    def __init__(self, exceptions: Mapping[str, Listed]) -> None:
        self._exceptions = exceptions
        self._counts: Counter[str] = Counter()

    def line(self, outcome: Outcome) -> str:
        """Take note of an outcome; returns what to print."""
        passed, listed = outcome.verdict == "ok", self._exceptions.get(outcome.name)
        verdict, reason = outcome.verdict, outcome.reason
        if listed:
            verdict = "STALE" if passed else "differs"
            reason = "passes, but exceptions.txt lists it" if passed else listed.row
        self._counts[verdict] += 1
        if len(reason) > _MAX_REASON:
            reason = reason[: _MAX_REASON - 3] + "..."
        text = f"{verdict:8}{outcome.name}  {outcome.seconds:.1f} s  {reason}"
        return text.rstrip()

    def summary(self, num_baseline: int) -> str:
        """The last line of a run."""
        passed = self._counts["ok"] + self._counts["STALE"]
        text = f"passed {passed} of {self._counts.total()}"
        text += f" (torch itself: {num_baseline})"
        for verdict in ("differs", "STALE", "FAILED", "skipped"):
            if self._counts[verdict]:
                text += f", {self._counts[verdict]} {verdict}"
        return text

    @property
    def is_satisfied(self) -> bool:
        """Something ran, and nothing failed, was skipped or passed unexpectedly."""
        return bool(self._counts) and self._counts.keys() <= {"ok", "differs"}
