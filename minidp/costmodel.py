"""Predict when the buckets of a layout are reduced, and find the best layout.

Small buckets are launched early, so that the network is busy while the backward still
computes. But each message costs a latency, so that many small ones take longer. Which
layout is best depends on the model and on the network, and this file says which one.
The automatic search (`autotune/`) and the forecasts of a report (`overlap/`) use it.

There are two parts. `fit_network` finds latency and bandwidth from measured
collectives. `play` and `best_groups` say what a layout does on such a network, and
which layout is the best.

The model knows when each gradient becomes ready in a backward, and a network whose
messages take ``latency + bytes / bandwidth`` (the model of Hockney, 1994). Buckets are
sent one after the other in launch order, each as soon as it is full and the bucket
before it is done::

    backward   |=========================================|
    ready         0    1  2      3       4    5         6
    network         [ 0 1 ][2 3     ]        [4 5 6        ]
                                              end ^........^ exposed

    start = max(ready, done of the bucket before)
    done = start + latency + bytes / bandwidth
    exposed = max(0, last done - end of the backward)

The last bucket is therefore done at the maximum, over all buckets, of *the time at
which it is ready + what it and all later buckets take*. Two rules follow:

* The best layout launches buckets in ready order, and each of them is a run of
  neighbours (of its kind), because sending a gradient earlier than necessary makes none
  of these sums smaller.
* Splitting one parameter into several messages never helps: its parts are ready at the
  same moment, so the earliest of their buckets may as well carry all of them.

The model leaves out the copies into and out of buckets, collectives that share the
network or the cores, and ranks that differ in speed. Ready times and networks that were
measured in backwards with communication contain a part of that.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import numpy as np

from minidp.layout import fill

ROUNDS = 20  # rounds of reweighting; the fit converges within a few
ROUNDING = 1e-9  # the relative error of a sum of many times
TRUSTED = 1.5  # a size whose error exceeds this many median errors counts less


@dataclass(frozen=True)
class Network:
    """A network on which a bucket of n bytes takes latency_s + n / bytes_per_s seconds.

    ``bytes_per_s`` counts the bytes of the bucket. An all-reduce sends each of them
    several times, so the rate of the link is higher.
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        """Predict how many seconds a message of ``nbytes`` bytes takes."""
        return self.latency_s + nbytes / self.bytes_per_s


def messages_of(
    spans: Iterable[tuple[int, float, float]],
) -> Iterator[tuple[int, float]]:
    """Yield bytes and duration of each message, as if they were sent one at a time.

    A message begins when it is launched and the one before it has ended. But Gloo sends
    two at a time: messages that end no later than an earlier one share its time, in
    proportion to their bytes. If the bytes of one of them are unknown, none of them is
    yielded.

    Args:
        spans: The bytes of each message (0: unknown), when it was launched, and when it
            was done, in the order of launches.

    Yields:
        The bytes, and the duration in the unit of the times.
    """
    free, began = 0.0, 0.0
    together: list[int] = []
    for nbytes, launched, done in spans:
        if done > free:
            yield from _shares(together, free - began)
            began, together = max(free, launched), [nbytes]
            free = done
        else:
            together.append(nbytes)
    yield from _shares(together, free - began)


def _shares(together: Sequence[int], time: float) -> Iterator[tuple[int, float]]:
    """Yield each message's bytes and its share of ``time``, or nothing if one is 0."""
    if time > 0 and all(together):
        for nbytes in together:
            yield nbytes, time * nbytes / sum(together)


def fit_network(samples: Iterable[tuple[int, float]]) -> Network:
    """Fit latency and bandwidth to measured messages.

    seconds
       |              .'
       |          .'        slope = 1 / bandwidth
       |      .'
       |  .'
       |' <- latency
       +--------------------- bytes of a bucket

    The line is the one with the least squares of relative errors, through the median
    time of each size. A size that lies far from it counts less in the next round
    (iteratively reweighted least squares with Huber's weights), because a slow moment
    of the machine may have hit all messages of a size. A line that is no network is
    corrected:

    * a negative latency becomes 0, and the line goes through zero;
    * if large messages take no longer than small ones, the bandwidth becomes bytes over
      seconds of the largest message, because the true one is not smaller.

    Args:
        samples: The bytes and the seconds of each message.

    Raises:
        ValueError: The messages are all of one size, or there are none.
    """
    times: dict[int, list[float]] = defaultdict(list)
    for nbytes, seconds in samples:
        times[nbytes].append(seconds)
    if len(times) < 2:
        raise ValueError(
            "Latency and bandwidth need messages of at least two sizes, but those "
            f"measured are of {len(times)} size(s)."
        )
    sizes = np.array(sorted(times), float)
    medians = np.array([median(times[nbytes]) for nbytes in sorted(times)])
    # A relative error counts the same at every size.
    weights = np.array([len(times[nbytes]) for nbytes in sorted(times)]) / medians**2
    trust = np.ones_like(medians)
    for _ in range(ROUNDS):
        network = _fit_line(sizes, medians, weights * trust)
        predicted = network.latency_s + sizes / network.bytes_per_s
        errors = abs(1 - predicted / medians)
        # Two sizes lie on their line.
        usual = max(TRUSTED * float(np.median(errors)), ROUNDING)
        trust = usual / np.maximum(errors, usual)
    return network


def _fit_line(x: Any, y: Any, weights: Any) -> Network:
    """Fit seconds ``y`` over bytes ``x``, ascending, by weighted least squares."""
    mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
    slope = weights @ ((x - mean_x) * (y - mean_y)) / (weights @ (x - mean_x) ** 2)
    if slope <= 0:
        slope = y[-1] / x[-1]
    elif slope * mean_x > mean_y:  # through zero
        slope = weights @ (x * y) / (weights @ x**2)
    return Network(float(max(0.0, mean_y - slope * mean_x)), float(1 / slope))


# ------------------------------------------------------------------------- schedules


@dataclass(frozen=True)
class Backward:
    """When each gradient of a backward becomes ready, its bytes, and its kind.

    Gradients are known by their position in the ready order.
    """

    ready_s: tuple[float, ...]  # seconds since its begin, ascending, at most `end_s`
    nbytes: tuple[int, ...]
    end_s: float  # seconds from the start to the end of the backward
    kinds: tuple[int, ...] = ()  # different kinds share no bucket; (): there is one
    order: tuple[int, ...] = ()  # the parameter at each position, by its index

    def positions(self, buckets: Iterable[Sequence[int]]) -> list[list[int]]:
        """Convert parameter indices in ``buckets`` to positions in the ready order."""
        position = {i: k for k, i in enumerate(self.order)}
        return [[position[i] for i in members] for members in buckets]

    def kind(self, position: int) -> int:
        """Return the kind of the gradient at ``position``."""
        return self.kinds[position] if self.kinds else 0


def in_ready_order(
    ready_s: Mapping[int, float | None],
    nbytes: Sequence[int],
    kinds: Sequence[tuple[Hashable, bool]],
    end_s: float,
) -> Backward:
    """Sort gradients by the time at which they became ready.

    All arguments but the last go by parameter index. Of equal times, the last parameter
    comes first, as in a backward.

    Args:
        ready_s: Seconds since the backward began. They are cut to 0 .. ``end_s``; None
            (unknown) is sorted last. The result has only these parameters.
        nbytes: The bytes of each gradient.
        kinds: What all gradients of a bucket share, and whether this one is sparse: a
            sparse one is alone in its bucket.
        end_s: The seconds from the start to the end of the backward.
    """
    times = {i: math.inf if time is None else time for i, time in ready_s.items()}
    order = sorted(times, key=lambda i: (times[i], -i))
    kind_of = [(kinds[i], i if kinds[i][1] else -1) for i in order]
    numbers = {kind: n for n, kind in enumerate(dict.fromkeys(kind_of))}
    return Backward(
        tuple(max(0.0, min(times[i], end_s)) for i in order),
        tuple(nbytes[i] for i in order),
        end_s,
        tuple(numbers[kind] for kind in kind_of),
        tuple(order),
    )


@dataclass(frozen=True)
class Schedule:
    """The predicted times of a backward's buckets, in seconds since it began."""

    buckets: tuple[tuple[float, float], ...]  # when each is sent and done, as launched
    end_s: float  # the end of the backward's computation

    @property
    def done_s(self) -> float:
        """How many seconds pass until the backward and its communication are done."""
        return max([self.end_s, *(done for _, done in self.buckets[-1:])])

    @property
    def exposed_s(self) -> float:
        """How many seconds the communication takes after the end of the backward."""
        return self.done_s - self.end_s


def play(
    backward: Backward, groups: Iterable[Sequence[int]], network: Network
) -> Schedule:
    """Predict when each bucket of a layout is sent and done on a network.

    Args:
        backward: When the gradients become ready.
        groups: The buckets in launch order, as positions in the ready order.
        network: The network on which they are sent.
    """
    buckets, done_s = [], 0.0
    for group in groups:
        nbytes = sum(backward.nbytes[k] for k in group)
        start_s = max(backward.ready_s[max(group)], done_s)
        done_s = start_s + network.seconds(nbytes)
        buckets.append((start_s, done_s))
    return Schedule(tuple(buckets), backward.end_s)


def lower_bound(backward: Backward, network: Network) -> float:
    """Return how many seconds `Schedule.done_s` is at least, with any layout.

    Whatever the layout, the bytes that become ready at some moment or later are sent
    after it, and the last message costs one latency. The bound is reached if gradients
    could be sent byte by byte.
    """
    left = accumulate(reversed(backward.nbytes))
    pairs = zip(reversed(backward.ready_s), left, strict=True)
    return max(
        [backward.end_s, *(ready + network.seconds(nbytes) for ready, nbytes in pairs)]
    )


def capped_groups(backward: Backward, limits: Sequence[int]) -> list[list[int]]:
    """Fill buckets in ready order by torch's rule (`fill`).

    Args:
        backward: The gradients.
        limits: The bytes at which the first, the second ... bucket of each kind is
            full; the last one holds for all further buckets.

    Returns:
        The positions of each bucket's gradients.
    """
    gradients = enumerate(backward.nbytes)
    return fill(((k, backward.kind(k), n) for k, n in gradients), limits)


def best_groups(backward: Backward, network: Network) -> list[list[int]]:
    """Return the layout with the least exposed time, as the positions of each bucket.

    Of equal layouts it is one with the fewest buckets. For one kind of parameters it is
    exact, up to 1e-9 of a step. For several kinds it is an approximation: the better of
    two layouts that ignore kinds, whose buckets are then split by kind. The first of
    the two is the best if a bucket costs one latency, the second if it costs one
    latency for each kind.
    """
    candidates, num_kinds = [], max(1, len(set(backward.kinds)))
    for messages in {1, num_kinds}:  # that one bucket becomes, at least and at most
        slower = replace(network, latency_s=messages * network.latency_s)
        together = _best_mixed(backward, slower)
        parts = [part for group in together for part in _by_kind(backward, group)]
        candidates.append(sorted(parts, key=max))

    def cost(groups: list[list[int]]) -> tuple[float, int]:
        return play(backward, groups, network).exposed_s, len(groups)

    return min(candidates, key=cost)


def _by_kind(backward: Backward, group: Iterable[int]) -> list[list[int]]:
    parts: dict[int, list[int]] = defaultdict(list)
    for k in group:
        parts[backward.kind(k)].append(k)
    return list(parts.values())


def _best_mixed(backward: Backward, network: Network) -> list[list[int]]:
    """Split all positions, in ready order, into the buckets that are done earliest.

    This ignores kinds. It bisects the time at which the last bucket is done, because
    whether a layout is done by a given time is easily said (`_cuts_in_time`).
    """
    count, sums = len(backward.ready_s), [0, *accumulate(backward.nbytes)]
    if count == 0:
        return []
    cuts = [0, count]  # one bucket
    early = lower_bound(backward, network)
    late = play(backward, [range(count)], network).done_s
    while late - early > ROUNDING * late:
        middle = (early + late) / 2
        found = _cuts_in_time(backward, network, sums, middle)
        if found is None:
            early = middle
        else:
            late, cuts = middle, found
    return [list(range(start, stop)) for start, stop in pairwise(cuts)]


def _cuts_in_time(
    backward: Backward, network: Network, sums: Sequence[int], done_s: float
) -> list[int] | None:
    """Return cuts into buckets that are all done by ``done_s``, or None if none are.

    Cuts are positions, ascending, from 0 to the number of gradients, and ``sums`` has
    the bytes before each position. The last bucket is chosen first, and each is made as
    large as the time allows: a gradient that is sent late, but in time, leaves more
    time to earlier buckets.
    """
    cuts = [len(backward.ready_s)]
    while cuts[-1] > 0:
        stop = cuts[-1]
        spare_s = done_s - network.latency_s - backward.ready_s[stop - 1]
        room = spare_s * network.bytes_per_s
        if room < sums[stop] - sums[stop - 1]:
            return None
        start = bisect_left(sums, sums[stop] - room, 0, stop - 1)
        done_s -= network.seconds(sums[stop] - sums[start])
        cuts.append(start)
    return cuts[::-1]
