"""Large messages in pieces, so that a rank uses what has come while the rest travels.

Each piece costs a word that the receiver is ready, and a few changes of threads. On a
fast link pieces of 1 MiB take longer for that than what they bring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidp import comm

PIECE_BYTES = 4 * 2**20  # at most, of what one rank gets of another one


class Range(NamedTuple):
    """A part of what one rank owns."""

    start: int
    stop: int


def cut(widths: Sequence[int], flat: Tensor) -> list[list[Range]]:
    """Divide what each rank owns into equally many parts, or into one on a device.

    Args:
        widths: How many elements each rank owns.
        flat: Some tensor of the elements.

    Returns:
        For each piece the range of each rank, which may be empty.
    """
    nbytes = max(widths) * flat.element_size()
    number = max(1, -(-nbytes // PIECE_BYTES)) if flat.is_cpu else 1
    return [
        [Range(w * k // number, w * (k + 1) // number) for w in widths]
        for k in range(number)
    ]


class Piece(NamedTuple):
    """A message, and what to do when it has come."""

    work: comm.Work
    arrived: Callable[[], None]
    sent: Tensor  # which must stay as it is until then


class Pieces:
    """Several messages, as one work.

    Args:
        pieces: The messages, in the order of their launches.
        group: The process group.
    """

    def __init__(self, pieces: Sequence[Piece], group: comm.ProcessGroup) -> None:
        self._pieces = [*pieces]
        self._futures: list[Any] = []
        self.can_time_out = not comm.is_python_group(group)

    def is_completed(self) -> bool:
        """Return whether all messages have come."""
        return all(each.work.is_completed() for each in self._pieces)

    def is_done_within(self, seconds: float) -> bool:
        """Wait at most so long, and return whether they have come, or one has failed.

        What has come is used at once, while the others still travel.
        """
        while self._pieces:
            if not comm.is_done_within(self._pieces[0].work, seconds):
                return False
            if len(self._pieces) == 1:
                return True  # `wait` tells of an error
            self._use_first()
        return True

    def wait(self) -> None:
        """Wait for all messages, and use what they bring.

        Raises:
            RuntimeError: A message has failed.
        """
        while self._pieces:
            self._use_first()

    def _use_first(self) -> None:
        self._pieces[0].work.wait()
        with torch.no_grad():
            self._pieces[0].arrived()
        del self._pieces[0]

    def get_future(self) -> Any:
        """Return a future that is done when all messages have come."""
        futures = [each.work.get_future() for each in self._pieces]
        return torch.futures.collect_all(futures)
