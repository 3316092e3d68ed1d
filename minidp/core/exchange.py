"""Add up one small tensor over the ranks, in a message of its own beside the buckets.

The map of used parameters and the counts of items travel so. Their sums are started
early and read late, and that of a used-map often by nobody: no rank waits before it
reads, or starts the next one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minidp.comm import (
    Communicator,
    Work,
    all_reduce,
    group_of_forwards,
    start_gathering,
)
from minidp.shared_memory import SharedBuffer


class Exchange:
    """One sum over the ranks, again and again; the constructor starts none.

    ``what`` names it in errors. ``part``: number and dtype of the elements that each
    rank brings. They are added up, or with ``by_rank`` become rows of a table.
    ``uses_forward_group``: it is not started in every backward, so that on the group of
    the buckets Gloo might match it with another collective. In shared memory (`use`)
    exchanges cannot be mixed up.
    """

    def __init__(
        self,
        what: str,
        part: tuple[int, torch.dtype],
        device: torch.device,
        communicator: Communicator,
        *,
        by_rank: bool = False,
        uses_forward_group: bool = False,
    ) -> None:
        self._part, self._by_rank = part, by_rank
        self.uses_forward_group = uses_forward_group
        self.is_open = False  # started, and its owner has not read it yet
        # The sum, or a row of each rank, once settled; None: there has been none.
        self.values: Tensor | None = None
        self._launching, self._waiting = f"launching {what}", f"waiting for {what}"
        self._device = device
        self._communicator = communicator
        self._work: Work | None = None  # may outlast the backward
        self._shared: SharedBuffer | None = None  # through which it goes; None: group

    @property
    def shape(self) -> tuple[int, torch.dtype]:
        """Number of elements that travel, in a group that may be a new one; dtype."""
        (numel, dtype), size = self._part, self._communicator.size
        return (numel * size if self._by_rank else numel), dtype

    def blank(self) -> Tensor:
        """Return zeros to fill in, and then to `start`; first `settle`."""
        self.settle()
        if self._shared is not None:
            return self._shared.values.zero_()
        numel, dtype = self.shape
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def start(self, mine: Tensor) -> None:
        """Collective: start to add up what each rank brings; first `settle`."""
        self.settle()
        self.is_open = True
        group = self._communicator.group
        with self._communicator.watching(self._launching):
            if self._shared is not None:
                self.values = self._shared.values.copy_(mine)
                self._work = self._shared.all_reduce()
            elif self.uses_forward_group:
                self.values, self._work = start_gathering(
                    mine, group_of_forwards(group)
                )
            else:
                self.values, self._work = mine, all_reduce(mine, group)
            self._communicator.note_started(self._work)

    def settle(self) -> None:
        """Wait for the sum in flight, if there is one; CollectiveError if it fails."""
        if self._work is not None:
            with self._communicator.watching(self._waiting):
                self._communicator.wait(self._work)
            self._work = None

    def take(self) -> Tensor:
        """Wait for the sum, and return it; the next one leaves this tensor alone."""
        self.settle()
        assert self.values is not None
        taken, self.values, self.is_open = self.values, None, False
        return taken if self._shared is None else taken.clone()

    def use(self, shared: SharedBuffer | None) -> None:
        """Go through ``shared`` memory of this `shape` from now on; None: the group.

        First `settle`; `values` stay.
        """
        self.settle()
        if self._shared is not None and self.values is not None:
            self.values = self.values.clone()  # lets the old memory go
        self._shared = shared

    def drop(self) -> None:
        """Forget the sum, also one in flight, without waiting."""
        self.is_open, self._work, self.values = False, None, None
