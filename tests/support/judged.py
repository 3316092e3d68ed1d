"""For the checks of ``minidp doctor``: tables of arguments, status, words; a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from minidp.doctor.findings import Found, Status, named

OK, WARNING, FAILED, SKIPPED = Status


class Net(nn.Module):
    """A model of two layers with batch norm, dropout or an unused layer on request."""

    def __init__(
        self, *, norm: bool = False, drop: bool = False, spare: bool = False
    ) -> None:
        super().__init__()
        self.first = nn.Linear(2, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.drop = nn.Dropout(0.5 if drop else 0.0)
        self.last = nn.Linear(4, 1)
        self.spare = nn.Linear(1, 1) if spare else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number for each row of ``x``, which has two columns."""
        y: torch.Tensor = self.last(self.drop(self.norm(self.first(x))))
        return y


def says(found: Found, status: Status, words: str = "") -> None:
    """Assert that a check found one thing, with this status and these words in it."""
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
