"""All choices of a simulated run, as one row of integers that can be played again."""

from __future__ import annotations

import random
from collections.abc import Sequence


class Tape:
    """Choices drawn by a seed, or read from a row of integers. All are kept.

    Where a row has ended, each further choice is 0. Whoever asks puts the mildest
    choice first (go on with the same thread, no fault, no delay), so that short rows of
    small integers are simple runs, which is how Hypothesis shrinks.

    Args:
        seed: Draws the choices; it is not used if there is a row.
        row: The choices. Each is taken modulo the number of possibilities.
    """

    def __init__(self, seed: int = 0, row: Sequence[int] | None = None) -> None:
        self.seed = seed
        self.made: list[int] = []
        self._random = random.Random(seed)
        self._row = None if row is None else iter(row)

    def choose(self, count: int) -> int:
        """Return a number from 0 to ``count`` - 1."""
        if self._row is None:
            number = int(self._random.random() * count)
        else:
            number = next(self._row, 0) % count
        self.made.append(number)
        return number

    def is_rare(self, one_in: int) -> bool:
        """Return True once in so many calls; a row of zeros never does."""
        if self._row is None:
            number = int(self._random.random() * one_in)
            number = (number + 1) % one_in  # so that True is not the mildest choice
            number = 1 if number == 0 else 0
            self.made.append(number)
            return number == 1
        number = next(self._row, 0)
        self.made.append(number)
        return number == 1

    def pick(self, values: Sequence[object]) -> object:
        """Return one of ``values``, of which the first one is the mildest."""
        return values[self.choose(len(values))]
