"""When a layout's communication would end, by a model, and the best layout by it.

Given are the moments at which gradients become ready in a backward, and a network whose
messages take ``latency + bytes / bandwidth``. Buckets leave in launch order, one after
the other, each when it is full and the one before is done::

    backward   |=========================================|
    ready         0    1  2      3       4    5         6
    wire            [ 0 1 ][2 3     ]        [4 5 6        ]
                                              end ^........^ exposed

    start = max(ready, done of the bucket before)
    done = start + latency + bytes / bandwidth
    exposed = max(0, last done - end of the backward)

So the last bucket is done at the maximum, over all buckets, of *ready + what this and
all later buckets take*. Everything here follows from these sums:

* Launch order is ready order, and each bucket is a run of neighbours (of its kind): a
  gradient that travels earlier than it could makes no sum larger.
* Cutting one parameter into several messages never helps. Its parts are ready at the
  same moment, so all may join the earliest of their buckets: the sum of that one stays
  what it was, those of later buckets do not grow, and there is no more latency. Buckets
  of whole parameters, as minidp has them, lose nothing in this model, however large one
  parameter is; such a one simply stands alone.

What the model leaves out: copies into and out of buckets; collectives that share the
wire or the cores (Gloo has two threads, and they take time from the backward); ranks
that are not equally fast. Take ready times from backwards that communicated, and fit
the network to their collectives, and part of it is inside the numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from . import _kinds
from ._network import ROUNDING, Network, fit_network

__all__ = [
    "Backward",
    "Network",
    "Schedule",
    "Transfer",
    "best_groups",
    "capped_groups",
    "fit_network",
    "lower_bound",
    "play",
]


@dataclass(frozen=True)
class Backward:
    """One backward: parameters in the order in which their gradients became ready.

    Args:
        ready_s: seconds since the backward began; not falling.
        nbytes: bytes of each gradient.
        end_s: seconds until the backward ended.
        kinds: parameters of different kinds (dtype, device) share no bucket; empty:
            all are of one kind.

    Raises:
        ValueError: lengths differ, times fall, or the end is before the last gradient.
    """

    ready_s: tuple[float, ...]
    nbytes: tuple[int, ...]
    end_s: float
    kinds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.ready_s)
        if len(self.nbytes) != count or len(self.kinds) not in (0, count):
            raise ValueError(
                f"Expected as many sizes and kinds as the {count} ready times, but got "
                f"{len(self.nbytes)} sizes and {len(self.kinds)} kinds."
            )
        times = (0.0, *self.ready_s, self.end_s)
        for k, (before, after) in enumerate(pairwise(times)):
            if not before <= after < math.inf:
                what = f"gradient {k} is ready" if k < count else "the backward ends"
                raise ValueError(
                    "Expected ready times that do not fall, and then the end of the "
                    f"backward, but {what} at {after} s, after {before} s. Sort the "
                    "gradients by their ready time."
                )
        for k, nbytes in enumerate(self.nbytes):
            if nbytes < 0:
                raise ValueError(
                    f"Gradient {k} has {nbytes} bytes, expected 0 or more."
                )

    def kind(self, position: int) -> int:
        """The kind of the gradient at ``position``."""
        return self.kinds[position] if self.kinds else 0


@dataclass(frozen=True)
class Transfer:
    """One bucket on the wire; seconds since the backward began."""

    positions: tuple[int, ...]  # of its gradients, in ready order
    nbytes: int
    ready_s: float  # its last gradient is
    start_s: float
    done_s: float

    @property
    def waited_s(self) -> float:
        """Seconds from full to start: earlier buckets had the wire."""
        return self.start_s - self.ready_s


@dataclass(frozen=True)
class Schedule:
    """All buckets of a backward, in launch order."""

    transfers: tuple[Transfer, ...]
    end_s: float  # of the backward

    @property
    def done_s(self) -> float:
        """When backward and communication are over."""
        return max([self.end_s, *(t.done_s for t in self.transfers[-1:])])

    @property
    def exposed_s(self) -> float:
        """Seconds of communication after the end of the backward."""
        return self.done_s - self.end_s


def play(
    backward: Backward, groups: Sequence[Sequence[int]], network: Network
) -> Schedule:
    """When each bucket of a layout would be full, on the wire and done.

    Args:
        backward: ready times and sizes.
        groups: positions in ready order, per bucket, in launch order.
        network: the wire.

    Raises:
        ValueError: not every position is in exactly one bucket, a bucket is empty, or
            one has parameters of several kinds.
    """
    _check(backward, groups)
    transfers = []
    free_s = 0.0
    for group in groups:
        nbytes = sum(backward.nbytes[k] for k in group)
        ready_s = backward.ready_s[max(group)]
        start_s = max(ready_s, free_s)
        free_s = start_s + network.seconds(nbytes)
        positions = tuple(sorted(group))
        transfers.append(Transfer(positions, nbytes, ready_s, start_s, free_s))
    return Schedule(tuple(transfers), backward.end_s)


def _check(backward: Backward, groups: Sequence[Sequence[int]]) -> None:
    placed = sorted(k for group in groups for k in group)
    if placed != list(range(len(backward.ready_s))):
        raise ValueError(
            f"Expected each of {len(backward.ready_s)} gradients in one bucket, "
            f"but the buckets hold {placed}."
        )
    for number, group in enumerate(groups):
        kinds = sorted({backward.kind(k) for k in group})
        if len(kinds) != 1:
            raise ValueError(
                f"Expected gradients of one kind in bucket {number}, "
                f"but they are of kinds {kinds}."
            )


def lower_bound(backward: Backward, network: Network) -> float:
    """Seconds of backward and communication that no layout can beat.

    As if gradients could travel byte by byte from the first one on: what becomes ready
    at some moment or later is sent after it, and the last message has its latency.
    Includes the backward: it is at least ``end_s``.
    """
    latest = backward.end_s
    left = 0
    for ready_s, nbytes in zip(
        reversed(backward.ready_s), reversed(backward.nbytes), strict=True
    ):
        left += nbytes
        latest = max(latest, ready_s + network.seconds(left))
    return latest


def capped_groups(
    backward: Backward, limits: Sequence[int], *, from_the_end: bool = False
) -> list[list[int]]:
    """The buckets that torch's rule makes of a ready order, for `play`.

    A bucket is closed when it has reached its limit. Each kind walks through the limits
    on its own and stays at the last one. What never reached a limit comes last.

    Args:
        backward: sizes and kinds, in ready order.
        limits: bytes, at least one.
        from_the_end: the last bucket gets the first limit.
    """
    open_groups: dict[int, list[int]] = {}
    closed: dict[int, int] = defaultdict(int)  # kind -> number of its closed groups
    groups: list[list[int]] = []
    order = range(len(backward.ready_s))
    for k in reversed(order) if from_the_end else order:
        kind = backward.kind(k)
        group = open_groups.pop(kind, [])  # put back last: sorted by last use
        group.append(k)
        limit = limits[min(closed[kind], len(limits) - 1)]
        if sum(backward.nbytes[member] for member in group) >= limit:
            groups.append(group)
            closed[kind] += 1
        else:
            open_groups[kind] = group
    groups += open_groups.values()
    return [sorted(group) for group in (groups[::-1] if from_the_end else groups)]


# -- the best layout -------------------------------------------------------------------


def best_groups(
    backward: Backward,
    network: Network,
    *,
    max_bytes: int | None = None,
    slack_s: float = 0.0,
) -> list[list[int]]:
    """The layout with the least exposed time, and among those the fewest buckets.

    With one kind of parameters this is exact, in linear time: 0.1 s for 10,000. With
    several kinds it is exact for a dozen parameters; for more, the most promising of
    the partial layouts are kept: a second, whatever their number.

    Args:
        backward: ready times, sizes, kinds.
        network: the wire.
        max_bytes: of a bucket; a larger parameter has a bucket of its own.
        slack_s: seconds of exposed time that may be given up to have fewer buckets.

    Returns:
        Positions in ready order, per bucket, in launch order. Exposed time is the least
        up to one part in 10^9 of the step.
    """
    if len(set(backward.kinds)) > 1:
        bound_s = lower_bound(backward, network)
        return _kinds.search(backward, network, max_bytes, bound_s, slack_s)
    sums = [0, *accumulate(backward.nbytes)]
    done_s = max(_least_done(backward, network, sums, max_bytes), backward.end_s)
    done_s += slack_s + ROUNDING * done_s
    cuts = [len(backward.ready_s)]
    while cuts[-1] > 0:  # each bucket as large as `done_s` allows, from the last one on
        stop = cuts[-1]
        spare = done_s - network.latency_s - backward.ready_s[stop - 1]
        room = spare * network.bytes_per_s
        if max_bytes is not None:
            room = min(room, max_bytes)
        start = bisect_left(sums, sums[stop] - room, 0, stop - 1)
        done_s -= network.seconds(sums[stop] - sums[start])
        cuts.append(start)
    cuts.reverse()
    return [list(range(start, stop)) for start, stop in pairwise(cuts)]


def _least_done(
    backward: Backward, network: Network, sums: Sequence[int], max_bytes: int | None
) -> float:
    """The earliest end of communication; parameters of one kind.

    ``done[j]``, of the first ``j`` parameters, is the least, over ``i < j``, of

        max(ready[j - 1], done[i]) + latency + (sums[j] - sums[i]) / bandwidth

    for a last bucket of ``i .. j - 1``. It does not fall with ``j``. So of all ``i``
    with ``done[i] <= ready`` the largest is best; of the others the one with the least
    ``done[i] - sums[i] / bandwidth``, which a deque keeps while the window of ``i``
    moves: linear time.
    """
    done = [0.0]
    waiting: deque[tuple[float, int]] = deque()  # done - sums / bandwidth, i; rising
    idle = 0  # the largest i with done[i] <= ready
    first = 0  # the smallest i whose bucket is not too large
    for j, ready_s in enumerate(backward.ready_s, 1):
        i = j - 1
        head = done[i] - sums[i] / network.bytes_per_s
        while waiting and waiting[-1][0] >= head:
            waiting.pop()
        waiting.append((head, i))
        while idle < i and done[idle + 1] <= ready_s:
            idle += 1
        if max_bytes is not None:
            while first < i and sums[j] - sums[first] > max_bytes:
                first += 1
        while waiting and waiting[0][1] < max(first, idle + 1):
            waiting.popleft()
        best = math.inf
        if first <= idle:
            best = ready_s - sums[idle] / network.bytes_per_s
        if waiting:
            best = min(best, waiting[0][0])
        done.append(best + network.latency_s + sums[j] / network.bytes_per_s)
    return done[-1]
