"""How long a collective takes: latency and bandwidth, fitted to measurements.

seconds
   |              .'
   |          .'        slope = 1 / bandwidth
   |      .'
   |  .'
   |' <- latency
   +--------------------- bytes of a bucket
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

ROUNDS = 20  # of reweighting; it settles within a few
ROUNDING = 1e-9  # of a time: what sums of many floats may be off
TRUSTED = 1.5  # median deviations: what is farther off counts less


@dataclass(frozen=True)
class Network:
    """A message of ``n`` bytes takes ``latency_s + n / bytes_per_s`` seconds.

    Args:
        latency_s: seconds that every message costs, whatever its size.
        bytes_per_s: bytes of a bucket per second, not of the wire: an all-reduce moves
            each byte several times.

    Raises:
        ValueError: a negative or infinite latency, or no positive finite bandwidth.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(
                f"Expected a latency of 0 seconds or more, but got {self.latency_s}."
            )
        if not 0 < self.bytes_per_s < math.inf:
            raise ValueError(
                "Expected a positive, finite number of bytes per second, "
                f"but got {self.bytes_per_s}."
            )

    def seconds(self, nbytes: float) -> float:
        """How long a message of ``nbytes`` bytes takes."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class _Size:
    """All messages of one size."""

    nbytes: int
    seconds: float  # the median
    weight: float  # a relative error counts the same at every size


def messages_of(
    spans: Iterable[tuple[int, float, float]],
) -> Iterator[tuple[int, float]]:
    """Bytes and seconds of each message on a wire that is used by one after the other.

    Gloo runs two collectives at a time. Of one that overtakes those before it nobody
    knows when it moved; together they say how fast the wire is, and so each counts with
    its share of their bytes in their time.

    Args:
        spans: bytes, launch and end of each collective, in launch order; 0 bytes: not
            known, only keeps the wire busy.
    """
    free_s, began = 0.0, 0.0
    together: list[int] = []
    for nbytes, launched_s, done_s in spans:
        if done_s > free_s:
            yield from _shares(together, free_s - began)
            began, together = max(free_s, launched_s), [nbytes]
            free_s = done_s
        else:
            together.append(nbytes)
    yield from _shares(together, free_s - began)


def _shares(together: Sequence[int], seconds: float) -> Iterator[tuple[int, float]]:
    """None if one of them is of unknown size, or clocks show no time."""
    if seconds > 0 and all(together):
        for nbytes in together:
            yield nbytes, seconds * nbytes / sum(together)


def fit_network(samples: Sequence[tuple[int, float]]) -> Network:
    """Fit latency and bandwidth to collectives that were timed alone on the wire.

    Least squares of relative errors on the median of each size; sizes far off the line
    count less, in rounds. Where the line does not make sense, one of its two numbers is
    given up:

    * it would meet zero bytes below zero seconds: the latency is 0;
    * large messages take no longer than small ones: the bandwidth, which then cannot be
      seen, is what the largest message shows at least (its bytes over its seconds).

    Args:
        samples: bytes of a bucket and seconds from its start to its end; two sizes at
            least. Waiting for earlier buckets or for slower ranks must not be in it.

    Raises:
        ValueError: less than two sizes, negative bytes, or a time that is not positive.
    """
    times: dict[int, list[float]] = defaultdict(list)
    for nbytes, seconds in samples:
        if nbytes < 0 or not 0 < seconds < math.inf:
            raise ValueError(
                "Expected bytes of 0 or more and a positive time for each message, "
                f"but got {nbytes} bytes in {seconds} s."
            )
        times[nbytes].append(seconds)
    if len(times) < 2:
        raise ValueError(
            "Expected messages of at least two sizes, to tell latency from bandwidth, "
            f"but got {len(samples)} of {len(times)} size(s). Time some of another "
            "size, e.g. of a few bytes."
        )
    sizes = [
        _Size(nbytes, median(found), len(found) / median(found) ** 2)
        for nbytes, found in sorted(times.items())
    ]
    trust = [1.0] * len(sizes)
    for _ in range(ROUNDS):
        network = _least_squares(sizes, trust)
        errors = [abs(1 - network.seconds(s.nbytes) / s.seconds) for s in sizes]
        usual = max(TRUSTED * median(errors), ROUNDING)  # two sizes lie on their line
        trust = [usual / error if error > usual else 1.0 for error in errors]
    return network


def _least_squares(sizes: Sequence[_Size], trust: Sequence[float]) -> Network:
    """The line through all sizes, among those that are a network."""
    weights = [size.weight * t for size, t in zip(sizes, trust, strict=True)]
    total = sum(weights)
    rows = list(zip(sizes, weights, strict=True))
    mean_bytes = sum(w * size.nbytes for size, w in rows) / total
    mean_s = sum(w * size.seconds for size, w in rows) / total
    spread = sum(w * (size.nbytes - mean_bytes) ** 2 for size, w in rows)
    common = sum(w * (s.nbytes - mean_bytes) * (s.seconds - mean_s) for s, w in rows)
    slope = common / spread
    largest = sizes[-1]
    if slope <= 0:
        slope = largest.seconds / largest.nbytes
    elif slope * mean_bytes > mean_s:  # through zero
        slope = sum(w * s.nbytes * s.seconds for s, w in rows)
        slope /= sum(w * s.nbytes**2 for s, w in rows)
    return Network(max(0.0, mean_s - slope * mean_bytes), 1 / slope)
