"""Medians of paired differences and ratios, with 95% intervals.

Everything is paired by round: in one round all implementations take one step, within
milliseconds of each other. A machine that is slow for a second is slow for all of them,
and the difference (or ratio) within the round hardly notices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]  # seconds; 1D: one per round
RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A median, and the 95% interval of its bootstrap over rounds."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Estimate:
        """In another unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def _bootstrap(statistic: Callable[..., Times], *samples: Times) -> Estimate:
    """Estimate ``statistic(*samples)``; it reduces the last axis, rounds are paired."""
    stacked = np.stack(samples)
    num_rounds = stacked.shape[1]
    rng = np.random.default_rng(0)
    picks = rng.integers(num_rounds, size=(RESAMPLES, num_rounds))
    low, high = np.percentile(statistic(*stacked[:, picks]), [2.5, 97.5])
    return Estimate(float(statistic(*stacked)), float(low), float(high))


def difference(times: Times, base: Times) -> Estimate:
    """How many seconds a step takes longer than one of ``base``."""
    return _bootstrap(lambda extra: np.median(extra, axis=-1), times - base)


def ratio(times: Times, base: Times) -> Estimate:
    """How many times as long as a step of ``base`` a step takes."""
    return _bootstrap(lambda ratios: np.median(ratios, axis=-1), times / base)


def ratio_of_extras(times: Times, base: Times, plain: Times) -> Estimate:
    """What a step adds to a plain one, divided by what ``base`` adds to it."""
    return _bootstrap(
        lambda mine, theirs: np.median(mine, axis=-1) / np.median(theirs, axis=-1),
        times - plain,
        base - plain,
    )
