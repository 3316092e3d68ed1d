"""Which parameters were used, here and on any rank (``find_unused_parameters``)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from ._collectives import all_reduce, start_gathering
from ._groups import group_of_forwards
from ._waiting import Work, wait_for
from ._watch import Watch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class UsedMap:
    """One int32 per parameter, summed over the ranks, awaited only when it matters.

    Args:
        num_params: managed parameters.
        device: where they live.
        watch: over its collectives.
        is_odd: not launched in every backward, so that it must not travel between
            buckets; but with what forwards exchange, in an all-gather: ranks wait.
    """

    def __init__(
        self,
        num_params: int,
        device: torch.device,
        watch: Watch,
        *,
        is_odd: bool = False,
    ) -> None:
        self.is_odd = is_odd
        self._num_params = num_params
        self._device = device
        self._watch = watch
        self._is_open = False  # launched, and nobody asked for the answer yet
        self._is_known = False  # this rank used every parameter
        self._work: Work | None = None  # perhaps of an answer that nobody needed
        self._counts = self._rows([0] * num_params)  # the sum, or a row of each rank

    def launch(self, used: Collection[int], group: ProcessGroup) -> None:
        """Start summing over ranks, unless it is in flight.

        Args:
            used: this rank's parameter indices.
            group: the ranks.
        """
        if self._is_open:
            return
        self.settle()
        flags = [0] * self._num_params
        for i in used:
            flags[i] = 1
        rows = self._rows(flags)
        self._is_open, self._is_known = True, all(flags)
        with self._watch.over("launching the exchange of the used-map"):
            if self.is_odd:
                others = group_of_forwards(group)
                self._counts, self._work = start_gathering(rows[0], others)
            else:
                self._counts, self._work = rows, all_reduce(rows, group)
            self._watch.note_started(self._work)

    def _rows(self, flags: list[int]) -> torch.Tensor:
        # From pinned memory, or the host would wait for all that the device has to do.
        is_pinned = self._device.type == "cuda"
        rows = torch.tensor([flags], dtype=torch.int32, pin_memory=is_pinned)
        return rows.to(self._device, non_blocking=True)

    def relaunch(self, used: Collection[int], group: ProcessGroup) -> None:
        """Start afresh; what is in flight belongs to a forward without backward."""
        self._is_open = False
        self.launch(used, group)

    def unused_everywhere(self) -> frozenset[int]:
        """Parameters that no rank used; none if nothing was launched.

        Waits only if this rank left one out. Otherwise it knows the answer, and neither
        it nor its device has to stop for the exchange: the next launch sees to that.
        """
        was_open, self._is_open = self._is_open, False
        if not was_open or self._is_known:
            return frozenset()
        return frozenset(torch.nonzero(self.last_counts == 0).flatten().tolist())

    @property
    def last_counts(self) -> torch.Tensor:
        """How many ranks used each parameter in the last backward; waits."""
        self.settle()
        return self._counts.sum(0, dtype=torch.int32)

    def settle(self) -> None:
        """Wait, if it is in flight."""
        if self._work is not None:
            with self._watch.over("waiting for the exchange of the used-map"):
                wait_for(self._work)
            self._work = None

    def drop(self) -> None:
        """Let go of what is in flight, which may still be written to."""
        self._is_open, self._work = False, None
        self._counts = self._rows([0] * self._num_params)
