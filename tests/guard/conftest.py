"""One rank plays two: the other rank always has other values than this one."""

from __future__ import annotations

import pytest

from minidp.guard.comparison import Comparison, Verdict


class OtherRank:
    """What the other rank answers to comparisons, and what was asked."""

    def __init__(self):
        self.is_equal = False
        self.asked = []

    def compare(self, comparison, moment, tensors, *, question=None, **_others):
        self.asked.append(moment)
        # Where this rank left out a step, the other one did so, too.
        values = {0: 1, 1: 1 if self.is_equal or question else 2}
        return Verdict(values, frozenset({0, 1}))


@pytest.fixture(autouse=True)
def other_rank(monkeypatch):
    other = OtherRank()
    monkeypatch.setattr(Comparison, "is_needed", True)
    monkeypatch.setattr(
        Comparison, "_compare", lambda *args, **more: other.compare(*args, **more)
    )
    return other
