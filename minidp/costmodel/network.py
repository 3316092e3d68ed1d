"""Fit latency and bandwidth to measured collectives.

seconds
   |              .'
   |          .'        slope = 1 / bandwidth
   |      .'
   |  .'
   |' <- latency
   +--------------------- bytes of a bucket
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

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
    """Yield (bytes, seconds) of each message, as if they were sent one at a time.

    ``spans`` hold bytes (0: unknown), launch and end, in launch order. Gloo runs two
    collectives at a time: if a later one ends before an earlier one, their common time
    is divided by their bytes, or none is yielded if the bytes of one are unknown.
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
    """Divide ``time`` among messages by size; yield (size, part), none if any is 0."""
    if time > 0 and all(together):
        for nbytes in together:
            yield nbytes, time * nbytes / sum(together)


def fit_network(samples: Iterable[tuple[int, float]]) -> Network:
    """Return latency and bandwidth fitted to collectives timed one at a time.

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
    """Fit a weighted line, seconds ``y`` by bytes ``x``; correct as `fit_network`."""
    mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
    slope = weights @ ((x - mean_x) * (y - mean_y)) / (weights @ (x - mean_x) ** 2)
    if slope <= 0:
        slope = y[-1] / x[-1]
    elif slope * mean_x > mean_y:  # through zero
        slope = weights @ (x * y) / (weights @ x**2)
    return Network(float(max(0.0, mean_y - slope * mean_x)), float(1 / slope))
