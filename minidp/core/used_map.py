"""Exchange which parameters each rank used.

A parameter that no rank used must keep its ``.grad``, as in torch. One that some other
rank used gets the average of all ranks, so each rank has to know what the others used.
"Used" has three meanings, each with a map of its own: the backward has brought a
gradient (``find_unused_parameters``), the forward leads to the parameter
(``skip_all_reduce_unused_params``), or `sync_gradients()` finds a ``.grad``.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from minidp.accelerator import to_host, upload
from minidp.comm import Communicator

from .exchange import Exchange


class UsedMap:
    """For each parameter, how many ranks used it.

    A backward calls `launch`, and then `unused_everywhere`, which waits for the other
    ranks only if it must.

    Args:
        what: Names the map in errors.
        num_params: The number of parameters.
        device: The device on which the map travels.
        communicator: The communicator of the ranks.
        uses_forward_group: As in `Exchange`.
    """

    def __init__(
        self,
        what: str,
        num_params: int,
        device: torch.device,
        communicator: Communicator,
        *,
        uses_forward_group: bool = False,
    ) -> None:
        self.exchange = Exchange(
            f"the exchange of {what}",
            (num_params, torch.int32),
            device,
            communicator,
            uses_forward_group=uses_forward_group,
        )
        self._num_params = num_params
        self._device = device
        self._used_all = False  # this rank used every parameter

    def launch(self, used: Collection[int]) -> None:
        """Start to tell the other ranks which parameters this rank used, by index.

        All ranks must call it together. It waits only for the exchange before, if that
        still runs. A second call before `unused_everywhere` does nothing.
        """
        if not self.exchange.is_open:
            self.relaunch(used)

    def relaunch(self, used: Collection[int]) -> None:
        """Start an exchange like `launch`, even if nobody has read the one before.

        All ranks must call it together.
        """
        self._used_all = len(set(used)) == self._num_params
        self.exchange.start(self._flags(used))

    def _flags(self, used: Collection[int]) -> Tensor:
        """Return an int32 tensor on the device: 1 for each parameter used, else 0."""
        flags = [0] * self._num_params
        for i in used:
            flags[i] = 1
        return upload(flags, torch.int32, self._device)

    def unused_everywhere(self) -> frozenset[int]:
        """Return the indices of the parameters that no rank used.

        After each `launch` only the first call tells; any other returns none.

        It waits for the other ranks only if this rank itself left a parameter out.
        Otherwise there can be none that nobody used, so it returns at once, and the
        next launch waits for the exchange.
        """
        was_open, self.exchange.is_open = self.exchange.is_open, False
        if not was_open or self._used_all:
            return frozenset()
        # One wait for the device, and no kernel there. On the CPU it copies nothing.
        counts = to_host(self._parts).sum(0)
        return frozenset(torch.nonzero(counts == 0).flatten().tolist())

    @property
    def last_counts(self) -> Tensor:
        """How many ranks used each parameter: an int32 tensor of shape (parameters,).

        It comes from the last exchange, for which this waits. Before the first one, and
        after a reset, it is all zeros.
        """
        return self._parts.sum(0, dtype=torch.int32)

    @property
    def _parts(self) -> Tensor:
        """The last exchange: one row with the sums, or a row for each rank."""
        self.exchange.settle()
        values = self.exchange.values
        mine = self._flags(()) if values is None else values
        return mine.view(-1, self._num_params)
