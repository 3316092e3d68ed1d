"""Predict when the buckets of a layout are reduced, and find the best layout.

Two parts: latency and bandwidth are fitted to measured collectives; then the auto
search (`autotune/`) and the forecasts of a report (`overlap/`) ask what a layout does.

The model knows when each gradient becomes ready in a backward, and a network whose
messages take ``latency + bytes / bandwidth``. Buckets are sent one after the other in
launch order, each when it is full and the bucket before it is done::

    backward   |=========================================|
    ready         0    1  2      3       4    5         6
    network         [ 0 1 ][2 3     ]        [4 5 6        ]
                                              end ^........^ exposed

    start = max(ready, done of the bucket before)
    done = start + latency + bytes / bandwidth
    exposed = max(0, last done - end of the backward)

The last bucket is therefore done at the maximum, over all buckets, of *ready + what
this and all later buckets take*. Two rules follow:

* Buckets are launched in ready order, and each is a run of neighbours (of its kind): a
  gradient that is sent earlier than necessary makes no sum larger.
* Splitting one parameter into several messages never helps: its parts are ready at the
  same moment, so the earliest of their buckets may as well carry all of them.

The model leaves out copies into and out of buckets, collectives that share the network
or the cores, and ranks that differ in speed. Ready times and a network that were
measured in backwards with communication contain part of that.
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
ROUNDING = 1e-9  # relative error of a sum of many times
TRUSTED = 1.5  # a size that errs by more than this many median errors weighs less


@dataclass(frozen=True)
class Network:
    """Model a message of ``n`` bytes as ``latency_s + n / bytes_per_s`` seconds."""

    latency_s: float
    bytes_per_s: float  # of a bucket; an all-reduce sends each byte several times

    def seconds(self, nbytes: float) -> float:
        """Return the predicted seconds of a message of ``nbytes`` bytes."""
        return self.latency_s + nbytes / self.bytes_per_s


def messages_of(
    spans: Iterable[tuple[int, float, float]],
) -> Iterator[tuple[int, float]]:
    """Yield (bytes, duration) of each message, as if they were sent one at a time.

    ``spans``: (bytes, launch, end) in launch order, bytes 0: unknown. A message begins
    when it is launched and the one before has ended. Gloo runs two at a time: messages
    that end no later than an earlier one share its time by their bytes; if one's bytes
    are unknown, none of them is yielded. Durations have the unit of the times.
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
    """Yield (bytes, part of ``time`` by size) per message; nothing if a size is 0.

    Nothing either if ``time`` is not positive.
    """
    if time > 0 and all(together):
        for nbytes in together:
            yield nbytes, time * nbytes / sum(together)


def fit_network(samples: Iterable[tuple[int, float]]) -> Network:
    """Return latency and bandwidth fitted to ``samples``, (bytes, seconds) of messages.

    seconds
       |              .'
       |          .'        slope = 1 / bandwidth
       |      .'
       |  .'
       |' <- latency
       +--------------------- bytes of a bucket

    The fit is a line of least relative squares through the median of each size, where
    rounds of reweighting suppress outliers. A line that is no network is corrected:

    * a negative latency becomes 0, and the line goes through zero;
    * if large messages take no longer than small ones, the bandwidth becomes bytes
      over seconds of the largest message: the true one is not smaller.

    Raises ValueError unless the messages are of two sizes at least.
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
    """Fit seconds ``y`` over bytes ``x`` (ascending) by weighted least squares.

    A negative latency and a slope that is not positive are corrected: `fit_network`.
    """
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
    """Hold when each gradient of one backward became ready, its bytes and its kind.

    All by position in the ready order.
    """

    ready_s: tuple[float, ...]  # since the backward began, ascending, at most `end_s`
    nbytes: tuple[int, ...]
    end_s: float  # from the begin to the end of the backward
    kinds: tuple[int, ...] = ()  # different kinds share no bucket; (): one kind
    order: tuple[int, ...] = ()  # parameter indices

    def positions(self, buckets: Iterable[Sequence[int]]) -> list[list[int]]:
        """Convert parameter indices in ``buckets`` to positions in the ready order."""
        position = {i: k for k, i in enumerate(self.order)}
        return [[position[i] for i in members] for members in buckets]

    def kind(self, position: int) -> int:
        """Return the kind of the gradient at ``position``; 0 if `kinds` is empty."""
        return self.kinds[position] if self.kinds else 0


def in_ready_order(
    ready_s: Mapping[int, float | None],
    nbytes: Sequence[int],
    kinds: Sequence[tuple[Hashable, bool]],
    end_s: float,
) -> Backward:
    """Sort gradients by ready time; return them as a `Backward`.

    All by parameter index: ``ready_s``, seconds since the backward began, cut to 0 ..
    ``end_s`` (None: unknown, sorted last); ``kinds``, what all gradients of a bucket
    share, and True for a sparse one, which is alone in its bucket. The result has only
    the keys of ``ready_s``. Of equal times, the last parameter comes first.
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
    """Hold predicted times of a backward's buckets, in seconds since it began."""

    buckets: tuple[tuple[float, float], ...]  # start and end, in launch order
    end_s: float  # the end of the backward's computation

    @property
    def done_s(self) -> float:
        """Seconds until both the backward and its communication are done."""
        return max([self.end_s, *(done for _, done in self.buckets[-1:])])

    @property
    def exposed_s(self) -> float:
        """Seconds of communication after the end of the backward."""
        return self.done_s - self.end_s


def play(
    backward: Backward, groups: Iterable[Sequence[int]], network: Network
) -> Schedule:
    """Predict when each bucket of a layout is sent and done, on ``network``.

    ``groups``: buckets in launch order, as positions in the ready order. Each is sent
    when its last gradient is ready and the bucket before is done.
    """
    buckets, done_s = [], 0.0
    for group in groups:
        nbytes = sum(backward.nbytes[k] for k in group)
        start_s = max(backward.ready_s[max(group)], done_s)
        done_s = start_s + network.seconds(nbytes)
        buckets.append((start_s, done_s))
    return Schedule(tuple(buckets), backward.end_s)


def lower_bound(backward: Backward, network: Network) -> float:
    """Return a lower bound of `Schedule.done_s` over all layouts, in seconds.

    The bound lets gradients be sent byte by byte: bytes that become ready at some
    moment or later are sent after it, and the last message costs one latency.
    """
    left = accumulate(reversed(backward.nbytes))
    pairs = zip(reversed(backward.ready_s), left, strict=True)
    return max(
        [backward.end_s, *(ready + network.seconds(nbytes) for ready, nbytes in pairs)]
    )


def capped_groups(backward: Backward, limits: Sequence[int]) -> list[list[int]]:
    """Fill buckets in ready order by torch's rule (`fill`); return positions of each.

    ``limits``: bytes at which the first, second, ... bucket of each kind is full; the
    last one repeats.
    """
    gradients = enumerate(backward.nbytes)
    return fill(((k, backward.kind(k), n) for k, n in gradients), limits)


def best_groups(backward: Backward, network: Network) -> list[list[int]]:
    """Return the layout with the least exposed time, as positions per bucket.

    Of equals, the fewest buckets. Exact, up to 1e-9 of a step, for one kind of
    parameters. For several kinds an approximation: the better of two layouts that
    ignore kinds, each bucket of which is then split by kind. The first is the best if
    a bucket costs one latency, the second if it costs one latency per kind.
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

    Ignores kinds; [] for no gradient. Bisects, to a relative 1e-9, the time at which
    the last bucket is done; see `_cuts_in_time`.
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
    """Return cuts into buckets that are all done by ``done_s``; None if there are none.

    Cuts are positions, ascending, from 0 to the number of gradients; ``sums``: bytes
    before each cut. Chooses the last bucket first, each as large as the time allows:
    a gradient that is sent late, but in time, leaves more time to earlier buckets.
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
