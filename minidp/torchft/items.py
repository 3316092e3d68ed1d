"""Count items (``average_over="items"``) where the number of ranks changes.

Elsewhere the counts travel at the end of a bucket, with a row for each rank: their
length would change with the quorum. Here they are a message of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minidp.comm import ItemCounts
from minidp.core import Reducer

from .quorum import Quorum, Sum


class ItemRows(ItemCounts):
    """`ItemCounts` summed over the quorum by a message of their own, in no bucket.

    A row for each replica in `Quorum.members`. The manager sends zeros for a replica
    that is catching up: as if it had no items.
    """

    tail = 0  # no elements in a bucket

    def __init__(self, quorum: Quorum, reducer: Reducer) -> None:
        super().__init__(reducer.communicator)
        self._quorum = quorum
        self._sum: Sum | None = None

    def ranks(self, count: int) -> Sequence[int]:
        """Return the replicas' numbers, for errors, by row; may wait for the quorum.

        ``count`` is not read.
        """
        return self._quorum.members()

    def send(self, device: torch.device) -> None:
        """Start to sum the counts over the quorum; count anew, for the next step.

        Does not wait for the sum. If the quorum changes, the same counts are sent
        again.
        """
        step, quorum = self._step, self._quorum
        row = super().tail  # of the group of one rank

        def rows() -> torch.Tensor:
            self._step = step
            message = torch.zeros(
                row * len(quorum.members()), dtype=torch.float32, device=device
            )
            self.write(message[row * quorum.position() :])
            return message

        self._sum = Sum(quorum, rows)

    def settle(self) -> None:
        """If counts were sent, wait for all sums of the backward; store the counts'.

        Nothing is raised if a sum failed: see `Quorum.settle`.
        """
        if self._sum is not None:
            self._message, self._sum = self._sum.wait(), None

    def read(self, tail: torch.Tensor | None, divisor: int) -> float | torch.Tensor:
        """Wait for all sums; return contributors / all items; may raise ItemCountError.

        Reads no argument. 1.0, of no meaning, if a sum failed for good: then the step
        is not committed.
        """
        self.settle()
        if self._quorum.has_failed:
            self._message, self.is_sent, self.holds_averages = None, False, True
            return 1.0
        return super().read(None, self._quorum.contributors)

    def reset(self) -> None:
        """Forget what was counted and sent, without waiting; keep `totals`."""
        super().reset()
        self._sum = None
