"""Decide who audits whom, and which rank is wrong, by integers only.

Ranks have sent checksums; nothing here communicates. A checksum that stands alone
against two others names its rank. Where no two agree, nobody is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from .tree import block

Value = TypeVar("Value")


class Pair(NamedTuple):
    """A logical rank that two ranks compute in one step."""

    owner: int  # the rank that computes it in each step
    auditor: int  # the rank that computes it again
    leaf: int  # the logical rank


def pairs(number: int, leaves: int, ranks: int) -> list[Pair]:
    """Return what is audited: a logical rank of each rank, by owner.

    After so many audits as a rank has logical ranks, times the number of other ranks,
    each logical rank was audited by each other rank.

    Args:
        number: The number of the audit, from 0.
        leaves: How many logical ranks there are.
        ranks: How many ranks there are, at least two.
    """
    turn, shift = divmod(number, ranks - 1)
    found = []
    for owner in range(ranks):
        mine = block(leaves, ranks, owner)
        found.append(Pair(owner, (owner + 1 + shift) % ranks, mine[turn % len(mine)]))
    return found


def arbiter(pair: Pair, ranks: int, suspects: set[int]) -> int | None:
    """Return a third rank for a pair, or None with two; best one without suspicion."""
    others = [r for r in range(ranks) if r not in (pair.owner, pair.auditor)]
    return min(others, key=lambda rank: (rank in suspects, rank), default=None)


@dataclass(frozen=True)
class Verdict:
    """Which ranks are wrong, or between which ranks nobody can decide."""

    ranks: tuple[int, ...]
    is_certain: bool = True
    is_unsteady: bool = False  # two computations of the same rank differ


def of_everybody(values: Sequence[Value]) -> Verdict | None:
    """Judge values of all ranks that should be equal; None if they are.

    More than half of the ranks are right, if they agree.
    """
    value, count = Counter(values).most_common(1)[0]
    if count == len(values):
        return None
    if 2 * count <= len(values):
        return Verdict(tuple(range(len(values))), is_certain=False)
    return Verdict(tuple(r for r, other in enumerate(values) if other != value))


def of_pair(first: Mapping[int, Value], again: Mapping[int, Value]) -> Verdict:
    """Judge two ranks whose results for one logical rank differ.

    Args:
        first: Their results, by rank.
        again: What each of them, and a third rank if there is one, then got.
    """
    thirds = [value for rank, value in again.items() if rank not in first]
    if thirds:
        odd = tuple(rank for rank, value in first.items() if value != thirds[0])
        if len(odd) == 1:
            return Verdict(odd)
        return Verdict(tuple(again), is_certain=False, is_unsteady=True)
    unsteady = tuple(rank for rank, value in first.items() if again[rank] != value)
    if len(unsteady) == 1:
        return Verdict(unsteady, is_unsteady=True)
    return Verdict(tuple(first), is_certain=False, is_unsteady=bool(unsteady))


class SumVerdict(NamedTuple):
    """Who is wrong about the sum of a slice."""

    receivers: tuple[int, ...] = ()  # have not received the sum that is right
    adders: tuple[int, ...] = ()  # have added up the slice again, with another result
    is_certain: bool = True


def of_sum(again: Mapping[int, Value], received: Sequence[Value]) -> SumVerdict:
    """Judge a slice whose sum is not that which was received.

    Args:
        again: What some ranks get when they add up the pieces again, by rank; at least
            two of them, and three if there are so many ranks.
        received: What each rank has received.
    """
    value, count = Counter(again.values()).most_common(1)[0]
    if 2 * count <= len(again):
        if len(again) > 2 or len({*received}) > 1 or received[0] not in again.values():
            return SumVerdict(tuple(again), is_certain=False)
        value = received[0]  # of two ranks, one gets what both have received
    return SumVerdict(
        tuple(rank for rank, other in enumerate(received) if other != value),
        tuple(rank for rank, other in again.items() if other != value),
    )
