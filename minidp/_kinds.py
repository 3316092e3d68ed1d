"""The best layout where parameters of several kinds (dtype, device) share no bucket.

Buckets of one kind are runs of its neighbours, but how the runs of all kinds take turns
on the wire is a choice for each gradient::

    ready   a0  b0  a1  a2  b1      a3
    wire            [a0 a1] [b0 b1] [a2 a3]

From `MANY` gradients on, small neighbours of a kind are taken together first, so that
a bucket ends within one part in `PARTS` of all bytes of where it might.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ._network import ROUNDING, Network

if TYPE_CHECKING:
    from ._schedule import Backward

MANY = 1000
PARTS = 500


def search(
    backward: Backward,
    network: Network,
    max_bytes: int | None,
    in_time_s: float,
    slack_s: float,
) -> list[list[int]]:
    """The buckets, in launch order.

    Args:
        backward: ready times, sizes, kinds.
        network: the wire.
        max_bytes: of a bucket, or None.
        in_time_s: an end of the last bucket that no layout can beat, or need beat.
        slack_s: what may be given up to have fewer buckets.
    """
    members = _neighbours(backward, max_bytes)
    coarse = replace(
        backward,
        ready_s=tuple(backward.ready_s[run[-1]] for run in members),
        nbytes=tuple(sum(backward.nbytes[k] for k in run) for run in members),
        kinds=tuple(backward.kind(run[0]) for run in members),
    )
    groups = _Search(coarse, network, max_bytes, in_time_s).best(slack_s)
    return [sorted(k for run in group for k in members[run]) for group in groups]


def _neighbours(backward: Backward, max_bytes: int | None) -> list[list[int]]:
    """Runs of gradients of a kind that stay together, by their last one."""
    few = 0.0
    if len(backward.ready_s) >= MANY:
        few = sum(backward.nbytes) / PARTS
    most = math.inf if max_bytes is None else max_bytes
    runs: list[list[int]] = []
    open_runs: dict[int, tuple[list[int], int]] = {}  # kind -> run, its bytes
    for k, nbytes in enumerate(backward.nbytes):
        run, filled = open_runs.pop(backward.kind(k), ([], 0))
        if run and filled + nbytes > most:
            runs.append(run)
            run, filled = [], 0
        run.append(k)
        if filled + nbytes >= few:
            runs.append(run)
        else:
            open_runs[backward.kind(k)] = run, filled + nbytes
    runs += [run for run, _ in open_runs.values()]
    return sorted(runs, key=lambda run: run[-1])


@dataclass(frozen=True)
class _Partial:
    """A layout of the gradients up to some position; not all have a bucket yet."""

    free_s: float  # from when on the wire is free
    num_buckets: int
    unsent: tuple[int, ...]  # per kind: bytes that wait for their bucket; -1: nothing
    cuts: tuple[Any, ...] = ()  # (earlier cuts, position of a bucket's last gradient)

    def beats(self, other: _Partial) -> bool:
        """Whether ``other`` cannot become better than this, however both go on."""
        return (
            self.free_s <= other.free_s
            and self.num_buckets <= other.num_buckets
            and all(map(operator.le, self.unsent, other.unsent))
        )


class _Search:
    """Dynamic programming over partial layouts: which does no other one beat?

    After each gradient, the bucket of its kind ends there or goes on. When more than
    ``width`` partial layouts are left, half of those kept are the ones that may end
    first, half the ones with few buckets that may still end in time.
    """

    def __init__(
        self,
        backward: Backward,
        network: Network,
        max_bytes: int | None,
        in_time_s: float,
    ) -> None:
        self._backward = backward
        self._network = network
        self._max_bytes = max_bytes
        kinds = dict.fromkeys(backward.kinds)
        self._slot = {kind: slot for slot, kind in enumerate(kinds)}
        self._width = max(16, math.isqrt(400_000 // len(backward.ready_s)))
        self._most_to_go_on = _most_to_go_on(backward, max_bytes)
        self._in_time_s = in_time_s

    def best(self, slack_s: float) -> list[list[int]]:
        """The buckets, in launch order."""
        partials = [_Partial(0.0, 0, (-1,) * len(self._slot))]
        left = sum(self._backward.nbytes)
        for k, nbytes in enumerate(self._backward.nbytes):
            left -= nbytes
            grown = [
                longer for partial in partials for longer in self._grow(partial, k)
            ]
            partials = _unbeaten(grown)
            if len(partials) > self._width:
                partials = self._promising(partials, left)
        end_s = self._backward.end_s
        allowed_s = max(end_s, min(p.free_s for p in partials))
        allowed_s += slack_s + ROUNDING * allowed_s
        in_time = [p for p in partials if p.free_s <= allowed_s]
        found = min(in_time, key=lambda p: (p.num_buckets, p.free_s))
        return self._with_fewer(self._groups(found), allowed_s)

    def _grow(self, partial: _Partial, k: int) -> Iterator[_Partial]:
        """With gradient ``k``: its bucket goes on, or ends."""
        ready_s = self._backward.ready_s
        slot = self._slot[self._backward.kind(k)]
        soon_s = ready_s[min(k + 1, len(ready_s) - 1)]  # nothing starts before
        unsent = list(partial.unsent)
        unsent[slot] = nbytes = max(unsent[slot], 0) + self._backward.nbytes[k]
        if nbytes <= self._most_to_go_on[k]:
            free_s = max(partial.free_s, soon_s)
            yield _Partial(free_s, partial.num_buckets, tuple(unsent), partial.cuts)
        unsent[slot] = -1
        done_s = max(partial.free_s, ready_s[k]) + self._network.seconds(nbytes)
        yield _Partial(
            max(done_s, soon_s) if k + 1 < len(ready_s) else done_s,
            partial.num_buckets + 1,
            tuple(unsent),
            (partial.cuts, k),
        )

    def _promising(self, partials: list[_Partial], left: int) -> list[_Partial]:
        """The ``width`` to go on with; ``left``: bytes that are not ready yet."""

        def end_s(partial: _Partial) -> float:  # at least
            waiting = sum(nbytes for nbytes in partial.unsent if nbytes > 0)
            return partial.free_s + self._network.seconds(waiting + left)

        by_end = sorted(partials, key=lambda p: (end_s(p), p.num_buckets))
        by_count = sorted(
            by_end[self._width // 2 :],
            key=lambda p: (max(end_s(p), self._in_time_s), p.num_buckets),
        )
        return by_end[: self._width // 2] + by_count[: self._width // 2]

    def _groups(self, partial: _Partial) -> list[list[int]]:
        """Gradients per bucket, from the cuts."""
        stops, cuts = [], partial.cuts
        while cuts:
            cuts, stop = cuts
            stops.append(stop)
        of_kind: dict[int, deque[int]] = defaultdict(deque)
        for k in range(len(self._backward.ready_s)):
            of_kind[self._backward.kind(k)].append(k)
        groups: list[list[int]] = []
        for stop in reversed(stops):
            waiting = of_kind[self._backward.kind(stop)]
            groups.append([])
            while waiting and waiting[0] <= stop:
                groups[-1].append(waiting.popleft())
        return groups

    def _with_fewer(self, groups: list[list[int]], allowed_s: float) -> list[list[int]]:
        """Join buckets of a kind, the last ones first, while all ends in time."""
        into = len(groups) - 1
        while into > 0:
            kind = self._kind(groups[into])
            before = (j for j in reversed(range(into)) if self._kind(groups[j]) == kind)
            joined = next(before, None)
            if joined is not None:
                fewer = groups[:joined] + groups[joined + 1 :]
                fewer[into - 1] = groups[joined] + groups[into]
                if self._fits(fewer[into - 1]) and self._done_s(fewer) <= allowed_s:
                    groups = fewer
            into -= 1
        return groups

    def _kind(self, group: list[int]) -> int:
        return self._backward.kind(group[0])

    def _fits(self, group: list[int]) -> bool:
        limit = self._max_bytes
        return limit is None or sum(self._backward.nbytes[k] for k in group) <= limit

    def _done_s(self, groups: list[list[int]]) -> float:
        """When the last bucket would be done."""
        free_s = 0.0
        for group in groups:
            nbytes = sum(self._backward.nbytes[k] for k in group)
            free_s = max(free_s, self._backward.ready_s[group[-1]])
            free_s += self._network.seconds(nbytes)
        return free_s


def _most_to_go_on(backward: Backward, max_bytes: int | None) -> list[float]:
    """Per position: the most bytes with which its bucket need not end; -1: it must."""
    limit = math.inf if max_bytes is None else max_bytes
    following: dict[int, int] = {}  # kind -> bytes of its next gradient
    most: list[float] = []
    for k in reversed(range(len(backward.ready_s))):
        kind = backward.kind(k)
        most.append(limit - following[kind] if kind in following else -1)
        following[kind] = backward.nbytes[k]
    return most[::-1]


def _unbeaten(partials: Sequence[_Partial]) -> list[_Partial]:
    """Those that no other one beats."""
    kept: list[_Partial] = []
    for partial in sorted(partials, key=lambda p: (p.free_s, p.num_buckets, p.unsent)):
        if not any(other.beats(partial) for other in kept):
            kept.append(partial)
    return kept
