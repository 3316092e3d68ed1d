"""Say which counts of items give no mean, and what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from minidp.errors import ItemCountError, explain, shortened

# What a rank says of its counts: a sum of those that apply.
SILENT = 1  # this rank has counted nothing
STALE = 2  # its backward added to averages
EACH = 4  # it has counted once for each of several forwards
FEWER = 8  # it has counted, but less often than it ran forwards
_MOST = sys.float_info.max  # of the sum of all counts


def refuse_counts(rank: int, rows: Sequence[Sequence[float]]) -> None:
    """Raise an error if no mean can be taken over the items of all ranks.

    Args:
        rank: This rank, which the text names.
        rows: What each rank said, in rank order: flags (the constants above, added up),
            the number of its items, and the sum of their losses.

    Raises:
        ItemCountError: A rank counted nothing, or its number is negative, NaN or too
            large. A backward added to averages. A rank counted less often than it ran
            forwards, though another counted once for each of several. Or all numbers
            are 0.
    """
    told = [(r, int(flags), count) for r, (flags, count, _) in enumerate(rows)]
    if (problem := _problem(told)) is None:
        return
    what, expected, remedy = problem
    found = [
        f"rank {r}: {'nothing' if said & SILENT else f'{n:g}'}" for r, said, n in told
    ]
    raise ItemCountError(
        explain(
            rank,
            f"{what}.",
            expected=expected,
            found=shortened(found),
            remedy=f"{remedy}; then call reset() on all ranks, and zero_grad()",
        )
    )


def _problem(told: Sequence[tuple[int, int, float]]) -> tuple[str, str, str] | None:
    """Return the first problem, or None if a mean can be taken.

    The problem is three texts: what is wrong, what was expected, and what to do.

    Args:
        told: For each rank its own number, its flags, and how many items it counted.
    """
    silent, stale, each, few = (
        [r for r, flags, _ in told if flags & flag]
        for flag in (SILENT, STALE, EACH, FEWER)
    )
    wrong = [r for r, _, n in told if not 0 <= n <= _MOST / len(told)]
    expected = "the number of its items from each rank"
    if stale:
        return (
            f"A backward added to averages of an earlier one, on {_names(stale)}",
            "zeros, or None, in .grad",
            "call zero_grad() after each step; to accumulate, run all but the last "
            "forward and backward inside no_sync()",
        )
    if silent:
        return (
            f"{_names(silent).capitalize()} gave no number of items in this step",
            expected,
            "on every rank call count_items(n) or weigh_loss(loss, n) before "
            "backward(), with 0 where a rank has no items",
        )
    if few and each:
        return (
            "Items were counted fewer times than the model was called on "
            f"{_names(few)}, but once per call on {_names(each)}",
            expected,
            "count items once for each forward on all ranks; for one whose loss has no "
            "items count_items(0), or call it under no_grad()",
        )
    if wrong:
        return (
            f"The number of items is negative, too large or NaN on {_names(wrong)}",
            expected,
            "look at how it is computed there",
        )
    if sum(n for _, _, n in told) > 0:
        return None
    return (
        "All ranks counted 0 items: there is nothing to average",
        expected,
        "skip this step on all ranks; if there should be items, look at n",
    )


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {shortened(ranks)}"
