"""All interleavings of a small model of ``csrc/shared_memory.cpp``.

Each rank is a program of atomic operations on shared counters, as the C++ code does
them in that order. The search visits every reachable state of a few ranks, buckets of
a few pieces, and two rounds, so that ranks meet the next round of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.laws


class State(NamedTuple):
    """What all ranks see, and where each rank stands."""

    posted: int
    claimed: int
    done: int
    events: int
    sleepers: int
    values: tuple[int, ...]  # per rank, the round of the values in its buffer
    sums: tuple[int, ...]  # per piece, how many rounds were summed
    ranks: tuple[tuple[str, int, int], ...]  # per rank: next operation, round, operand


class Broken(AssertionError):
    """A law that does not hold in a reachable state."""


def steps(  # noqa: C901 -- one case per atomic operation
    s: State, rank: int, pieces: int, rounds: int
) -> Iterator[State]:
    """Yield the state after the next operation of ``rank``; none if it sleeps."""
    size = len(s.ranks)
    at, turn, x = s.ranks[rank]
    all_done = turn * pieces

    def go(at: str, turn: int = turn, x: int = 0, **shared: object) -> State:
        ranks = (*s.ranks[:rank], (at, turn, x), *s.ranks[rank + 1 :])
        return s._replace(ranks=ranks, **shared)  # type: ignore[arg-type]

    match at:
        case "write":  # flatten: the buffer must be nobody else's
            if turn == rounds:
                yield go("end")
                return
            if s.done != all_done:
                raise Broken("a buffer is written before its round is done")
            values = (*s.values[:rank], turn + 1, *s.values[rank + 1 :])
            yield go("post", turn + 1, values=values)
        case "post":
            last = s.posted + 1 == turn * size
            yield go("tell" if last else "look", posted=s.posted + 1)
        case "tell":  # announce: count the event, then wake whoever sleeps
            yield go("wake", events=s.events + 1)
        case "wake":
            yield go("look") if not s.sleepers else go("call")
        case "call":
            ranks = tuple(
                ("woken", t, 0) if where == "asleep" else (where, t, old)
                for where, t, old in go("look").ranks
            )
            yield s._replace(ranks=ranks)
        case "look":  # wait: remember the events, then advance
            yield go("advance", x=s.events)
        case "advance":
            if s.done == all_done:
                yield go("write")
            elif s.posted != turn * size:
                yield go("doze", x=x)
            else:
                yield go("claim", x=x)
        case "claim":
            if s.claimed == all_done:
                yield go("recheck", x=x)
            else:
                yield go("sum", x=s.claimed, claimed=s.claimed + 1)
        case "sum":
            if any(value != turn for value in s.values):
                raise Broken("a piece is summed while a rank's values are not there")
            piece = x - (turn - 1) * pieces
            if s.sums[piece] != turn - 1:
                raise Broken("a piece is summed twice")
            sums = (*s.sums[:piece], turn, *s.sums[piece + 1 :])
            yield go("finish", sums=sums)
        case "finish":
            last = s.done + 1 == all_done
            yield go("tell" if last else "look", done=s.done + 1)
        case "recheck":
            yield go("write") if s.done == all_done else go("doze", x=x)
        case "doze":
            yield go("compare", x=x, sleepers=s.sleepers + 1)
        case "compare":  # the kernel: sleep only if nothing has happened since
            yield go("asleep") if s.events == x else go("woken")
        case "woken":
            yield go("look", sleepers=s.sleepers - 1)


def search(size: int, pieces: int, rounds: int) -> int:
    """Visit all states; return how many there are.

    Raises:
        Broken: a law does not hold, or no rank can go on although one has not ended.
    """
    ranks = (("write", 0, 0),) * size
    start = State(0, 0, 0, 0, 0, (0,) * size, (0,) * pieces, ranks)
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        following = [n for r in range(size) for n in steps(state, r, pieces, rounds)]
        if not following:
            if {where for where, *_ in state.ranks} != {"end"}:
                raise Broken(f"no rank can go on: {state}")
            if set(state.sums) != {rounds}:
                raise Broken(f"a piece was not summed: {state}")
        for found in following:
            if found not in seen:
                seen.add(found)
                todo.append(found)
    return len(seen)


@pytest.mark.parametrize(
    ("size", "pieces", "rounds"),
    [(2, 1, 2), (2, 2, 2), (2, 3, 2), (3, 1, 1), (3, 2, 1)],
)
def test_no_interleaving_breaks_a_law(size, pieces, rounds):
    assert search(size, pieces, rounds) > 100


@pytest.mark.parametrize("broken", ["advance", "doze"])
def test_the_search_finds_mistakes(broken, monkeypatch):
    """A rank that does not wait for the others; a sleeper that does not look again."""

    def mistaken(s: State, rank: int, pieces: int, rounds: int) -> Iterator[State]:
        at, turn, x = s.ranks[rank]
        if at == broken:
            skipped = {"advance": ("claim", turn, x), "doze": ("asleep", turn, 0)}
            ranks = (*s.ranks[:rank], skipped[broken], *s.ranks[rank + 1 :])
            yield s._replace(ranks=ranks, sleepers=s.sleepers + (broken == "doze"))
        else:
            yield from original(s, rank, pieces, rounds)

    original = steps
    monkeypatch.setitem(search.__globals__, "steps", mistaken)
    with pytest.raises(Broken):
        search(2, 1, 2)
