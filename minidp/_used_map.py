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
        self.last_counts = torch.zeros(num_params, dtype=torch.int32, device=device)
        self._num_params = num_params
        self._device = device
        self._watch = watch
        self._counts: torch.Tensor | None = None  # 2D int32: the sum, or a row each
        self._work: Work | None = None

    def launch(self, used: Collection[int], group: ProcessGroup) -> None:
        """Start summing over ranks, unless it is in flight.

        Args:
            used: this rank's parameter indices.
            group: the ranks.
        """
        if self._work is not None:
            return
        flags = [0] * self._num_params
        for i in used:
            flags[i] = 1
        mine = torch.tensor(flags, dtype=torch.int32, device=self._device)
        with self._watch.over("launching the exchange of the used-map"):
            if self.is_odd:
                others = group_of_forwards(group)
                self._counts, self._work = start_gathering(mine, others)
            else:
                self._counts, self._work = mine.unsqueeze(0), all_reduce(mine, group)
            self._watch.note_started(self._work)

    def relaunch(self, used: Collection[int], group: ProcessGroup) -> None:
        """Start afresh; what is in flight belongs to a forward without backward."""
        self.unused_everywhere()
        self.launch(used, group)

    def unused_everywhere(self) -> frozenset[int]:
        """Wait, if launched: parameters that no rank used."""
        if self._work is None or self._counts is None:
            return frozenset()
        with self._watch.over("waiting for the exchange of the used-map"):
            wait_for(self._work)
        self.last_counts = self._counts.sum(0, dtype=torch.int32)
        unused = torch.nonzero(self.last_counts == 0).flatten().tolist()
        self.drop()
        return frozenset(unused)

    def drop(self) -> None:
        """Let go of what was in flight."""
        self._counts = self._work = None
