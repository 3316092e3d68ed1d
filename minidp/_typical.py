"""Choose the step that stands for all, and say how far the others are spread."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

Spread = tuple[float, float]  # p10, p90 over steps


def spread(values: Sequence[float]) -> Spread:
    """Return two of the values: at most a tenth of all is below, at most one above."""
    ordered, left_out = sorted(values), (len(values) - 1) // 10
    return ordered[left_out], ordered[-1 - left_out]


def typical_step(
    lengths: Sequence[Sequence[float]], exposed: Sequence[Sequence[float]]
) -> int:
    """Return the number of the step to report, the same on all ranks.

    Both of its numbers lie within their spreads on the rank that is reported: a report
    that shows a step beside the p10 and p90 of all must not contradict itself. (There
    is such a step: less than two fifths of them are outside of one of the two.) If
    possible that rank waits most in this step, too. Of what is left it is the nearest
    to the medians of all ranks.

    Args:
        lengths: seconds of each step, by rank.
        exposed: of these, communication that nothing hides.
    """
    shown = usually_largest(exposed)
    spreads = [(values, spread(values)) for values in (lengths[shown], exposed[shown])]
    middles = [(values, median(values)) for values in (*lengths, *exposed)]

    def oddness(number: int) -> tuple[bool, bool, float]:
        is_outside = any(
            not low <= values[number] <= high for values, (low, high) in spreads
        )
        is_not_last = exposed[shown][number] < max(each[number] for each in exposed)
        distance = sum(abs(values[number] - middle) for values, middle in middles)
        return is_outside, is_not_last, distance

    return min(range(len(lengths[0])), key=oddness)


def usually_largest(values: Sequence[Sequence[float]]) -> int:
    """Return the rank with the largest median; of equal ones the first."""
    return max(range(len(values)), key=lambda rank: median(values[rank]))
