"""Add up one small tensor over the ranks, in a message of its own beside the buckets.

The map of used parameters and the counts of items travel in this way. Their sums are
started early and read late, and the sum of a used-map is often read by nobody. So no
rank waits before it reads a sum, or starts the next one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minidp.accelerator import use_here
from minidp.comm import (
    Communicator,
    HostWork,
    NoWork,
    ProcessGroup,
    Work,
    all_reduce,
    group_of_forwards,
    is_python_group,
    start_gathering,
    way_of_hosts,
)
from minidp.shared_memory import SharedBuffer


class Exchange:
    """One sum over the ranks, to be started again and again.

    The constructor starts nothing.

    Args:
        what: Names the sum in errors, as in "waiting for WHAT".
        part: Number and dtype of the elements that each rank brings.
        device: Where the elements lie. On the CPU, if the communicator is of another
            device, the hosts alone exchange them, and wait for no device: see
            `way_of_hosts`.
        communicator: The communicator of the ranks.
        by_rank: Whether the sum has room for a row of each rank. A rank writes to its
            own row, and leaves zeros in the others, so that nothing is mixed.
        uses_forward_group: Whether to use the group for collectives in forwards. A sum
            that is not started in every backward needs it, because on the group of the
            buckets Gloo might match it with another collective. In shared memory
            (`use`) exchanges cannot be mixed up.
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
        # Maps the communicator's group to the one through which the sum travels; None:
        # that is the communicator's.
        self.way: Callable[[ProcessGroup], ProcessGroup] | None = None
        self.uses_forward_group = uses_forward_group
        self.is_open = False  # started, and its owner has not read it yet
        # The sum, or a row for each rank, valid after `settle`; None before the first.
        self.values: Tensor | None = None
        self._launching, self._waiting = f"launching {what}", f"waiting for {what}"
        self.device, self._is_on_cpu = device, device.type == "cpu"
        self._communicator = communicator
        self._is_of_hosts = self._is_on_cpu and communicator.device.type != "cpu"
        self._work: Work | None = None  # may outlast the backward
        self._mine: Tensor | None = None  # what this rank brings to it
        # The memory through which the sum travels; None if it does so as a message.
        self._shared: SharedBuffer | None = None

    @property
    def shape(self) -> tuple[int, torch.dtype]:
        """Number and dtype of the elements that travel, in the present group."""
        (numel, dtype), size = self._part, self._communicator.size
        return (numel * size if self._by_rank else numel), dtype

    def blank(self) -> Tensor:
        """Return zeros to write this rank's part to, and then to pass to `start`.

        If an earlier sum is still in flight, this waits for it first.
        """
        self.settle()
        if self._shared is not None:
            return self._shared.values.zero_()
        numel, dtype = self.shape
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def start(self, mine: Tensor) -> None:
        """Start to add up what each rank brings, without waiting for it.

        All ranks must call it together. It waits only for an earlier sum that is still
        in flight.

        Args:
            mine: What this rank brings, of this `shape`; the sum may be written to it.
        """
        self.settle()
        self.is_open = True
        group = self._communicator.group
        with self._communicator.watching(self._launching):
            self._communicator.refuse_in_vain()
            if self._shared is not None:
                self.values = self._shared.values.copy_(mine)
                self._work = self._shared.all_reduce()
            elif self._is_of_hosts:
                self.values, self._work = mine, self._start_of_hosts(mine)
            elif self.uses_forward_group:
                self.values, self._work = start_gathering(
                    mine, group_of_forwards(group)
                )
            else:
                way = group if self.way is None else self.way(group)
                self.values, self._work = mine, all_reduce(mine, way)
            self._mine = mine
            self._communicator.note_started(self._work, self.device)

    def _start_of_hosts(self, mine: Tensor) -> Work:
        group, _ = way_of_hosts(self._communicator.group, self._communicator.device)
        work = all_reduce(mine, group)
        # The host waits for it as on the CPU, and not as for what runs on the device.
        is_plain = not isinstance(work, NoWork) and not is_python_group(group)
        return HostWork(work) if is_plain else work

    def settle(self) -> None:
        """Wait for the sum that is in flight, if there is one.

        Raises:
            CollectiveError: It has failed, or is late.
        """
        if self._work is not None:
            with self._communicator.watching(self._waiting):
                self._communicator.wait(self._work)
            if not self._is_on_cpu:
                # They are of the stream that has started it, and this one reads them.
                use_here(self.values, self._mine)
            self._work = self._mine = None

    def take(self) -> Tensor:
        """Wait for the sum, and return it in a tensor that the next sum leaves alone.

        It must have been started, and can be taken only once.
        """
        self.settle()
        assert self.values is not None
        taken, self.values, self.is_open = self.values, None, False
        return taken if self._shared is None else taken.clone()

    def use(self, shared: SharedBuffer | None) -> None:
        """Travel through ``shared`` memory of this `shape`, or with None as a message.

        If a sum is in flight, this waits for it first. Its `values` stay.
        """
        self.settle()
        if self._shared is not None and self.values is not None:
            self.values = self.values.clone()  # lets the old memory go
        self._shared = shared

    def drop(self) -> None:
        """Forget the sum without waiting, even if it is in flight."""
        self.is_open = False
        self._work = self._mine = self.values = None
