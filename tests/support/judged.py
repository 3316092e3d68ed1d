"""Tables of cases for the checks of ``minidp doctor``: arguments, status, words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minidp.doctor.findings import Found, Status, named

OK, WARNING, FAILED, SKIPPED = Status


def says(found: Found, status: Status, words: str = "") -> None:
    """Assert that there is one finding, with this status and these words in it."""
    (finding,) = named("check", found)
    assert finding.status is status, finding
    assert words in f"{finding.found} -> {finding.remedy}", finding


def judged(*rows: tuple[Any, ...]) -> Callable[[Callable[..., Found]], Any]:
    """Make a test of a function that judges.

    Each row holds its arguments, and then the status and words of what it returns.
    """

    def decorate(judge: Callable[..., Found]) -> Any:
        @pytest.mark.parametrize("row", rows)
        def test(row: tuple[Any, ...]) -> None:
            *given, status, words = row
            says(judge(*given), status, words)

        return test

    return decorate
