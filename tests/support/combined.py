"""Combinations of two parameters of a test, most of which are for the night.

    @pytest.mark.parametrize(("name", "way"), combined(SCENARIOS, WAYS, always="mixed"))
    def test_bits(name, way): ...

Other stages than the nightly `combinations` take each value of both, but not each pair.
Where the cases of one parameter are many and alike, `in_turns` leaves some of them to
the night.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def combined(
    rows: Iterable[Any], columns: Sequence[Any], *, always: Any = None, every: int = 1
) -> list[Any]:
    """Return all pairs; those are marked ``nightly`` that need not be in each run.

    In each run a row comes with the column ``always``, if there is one, and with one of
    the others, which take turns. If there is an ``always``, then ``every`` so many rows
    only may come with another one.
    """
    others = [column for column in columns if column != always]
    params = []
    for number, row in enumerate(rows):
        turn, is_left = divmod(number, every)
        chosen = (always,) if is_left else (always, others[turn % len(others)])
        for column in columns:
            marks = [] if column in chosen else [pytest.mark.nightly]
            name = f"{_name(row)}-{_name(column)}"
            params.append(pytest.param(row, column, marks=marks, id=name))
    return params


def in_turns(cases: Iterable[Any], every: int = 2) -> list[Any]:
    """Return all cases; one in ``every`` so many is not marked ``nightly``."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.nightly] if number % every else [],
        )
        for number, case in enumerate(cases)
    ]


def leave_to_the_night(items: Iterable[pytest.Item], every: int) -> None:
    """Mark the cases of each test ``nightly``, but for one in ``every`` so many."""
    turns: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("nightly") is None:
            test = item.nodeid.partition("[")[0]
            if turns[test] % every:
                item.add_marker("nightly")
            turns[test] += 1


def _name(value: Any) -> str:
    if isinstance(value, frozenset):
        return "+".join(sorted(value))
    return str(getattr(value, "__name__", value))
