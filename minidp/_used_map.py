"""Which parameters were used, here and on any rank (``find_unused_parameters``)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from ._collectives import Work, all_reduce

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class UsedMap:
    """One int32 per parameter, summed over the ranks, awaited only when it matters.

    Args:
        num_params: managed parameters.
        device: where they live.
    """

    def __init__(self, num_params: int, device: torch.device) -> None:
        self._num_params = num_params
        self._device = device
        self._counts: torch.Tensor | None = None  # 1D int32
        self._work: Work | None = None

    @property
    def is_launched(self) -> bool:
        """Whether the sum is in flight."""
        return self._work is not None

    def launch(self, used: Collection[int], group: ProcessGroup) -> None:
        """Start summing over ranks; ``used`` are this rank's parameter indices."""
        flags = [0] * self._num_params
        for i in used:
            flags[i] = 1
        self._counts = torch.tensor(flags, dtype=torch.int32, device=self._device)
        self._work = all_reduce(self._counts, group)

    def unused_everywhere(self) -> frozenset[int]:
        """Wait, and return the parameters that no rank used."""
        if self._work is None or self._counts is None:
            return frozenset()
        self._work.wait()
        unused = torch.nonzero(self._counts == 0).flatten().tolist()
        self.drop()
        return frozenset(unused)

    def drop(self) -> None:
        """Forget what is in flight."""
        self._counts = self._work = None
