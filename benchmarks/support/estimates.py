"""Estimate medians of paired differences and ratios, with 95% intervals.

Everything is paired by round. In one round each implementation takes one step, within
milliseconds of the others. A slow moment of the machine slows all of them down, and
cancels out of their ratios and differences.
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
    """A median and its 95% interval, bootstrapped over rounds."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}-{self.high:.3f})"

    def scaled(self, factor: float) -> Estimate:
        """Return value and interval times ``factor``, to convert a unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def _bootstrap(statistic: Callable[..., Times], *samples: Times) -> Estimate:
    """Estimate ``statistic(*samples)``, which reduces the last axis to one number.

    ``samples``: one number per round, paired by round.
    """
    stacked = np.stack(samples)
    num_rounds = stacked.shape[1]
    rng = np.random.default_rng(0)
    picks = rng.integers(num_rounds, size=(RESAMPLES, num_rounds))
    low, high = np.percentile(statistic(*stacked[:, picks]), [2.5, 97.5])
    return Estimate(float(statistic(*stacked)), float(low), float(high))


def median(times: Times) -> Estimate:
    """Estimate the median of one number per round."""
    return _bootstrap(lambda each: np.median(each, axis=-1), times)


def ratio(times: Times, base: Times) -> Estimate:
    """Estimate the median over rounds of ``times / base``."""
    return median(times / base)


def ratio_of_extras(times: Times, base: Times, plain: Times) -> Estimate:
    """Estimate what a step adds to ``plain``, over what ``base`` adds to it."""
    return _bootstrap(
        lambda mine, theirs: np.median(mine, axis=-1) / np.median(theirs, axis=-1),
        times - plain,
        base - plain,
    )


def short(value: float) -> str:
    """Format with three significant digits, at most two after the point."""
    size = abs(value)
    return f"{value:.{2 if size < 10 else 1 if size < 100 else 0}f}"
