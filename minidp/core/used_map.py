"""Exchange the used-map: which parameters any rank used (find_unused_parameters)."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from minidp.comm import Communicator

from .exchange import Exchange


class UsedMap:
    """Sum over ranks, for each parameter, whether a rank used it; wait only if needed.

    One backward: `launch`, then `unused_everywhere`. ``uses_forward_group``: see
    `Exchange`.
    """

    def __init__(
        self,
        num_params: int,
        device: torch.device,
        communicator: Communicator,
        *,
        uses_forward_group: bool = False,
    ) -> None:
        self.exchange = Exchange(
            "the exchange of the used-map",
            (num_params, torch.int32),
            device,
            communicator,
            uses_forward_group=uses_forward_group,
        )
        self._num_params = num_params
        self._device = device
        self._is_known = False  # this rank used every parameter

    def launch(self, used: Collection[int]) -> None:
        """Collective: start to exchange ``used``, indices that this rank used.

        First waits for the previous exchange, if it still runs. No-op if
        `unused_everywhere` has not been called since the last `launch`.
        """
        if not self.exchange.is_open:
            self.relaunch(used)

    def relaunch(self, used: Collection[int]) -> None:
        """Collective: start to exchange ``used``, like `launch`, but never a no-op."""
        self._is_known = len(set(used)) == self._num_params
        self.exchange.start(self._flags(used))

    def _flags(self, used: Collection[int]) -> Tensor:
        """Return a flag per parameter on the device: int32, 1 for ``used``, else 0."""
        flags = [0] * self._num_params
        for i in used:
            flags[i] = 1
        # From pinned memory: otherwise the host waits for the device's queue.
        is_pinned = self._device.type == "cuda"
        mine = torch.tensor(
            flags, dtype=torch.int32, device="cpu", pin_memory=is_pinned
        )
        return mine.to(self._device, non_blocking=True)

    def unused_everywhere(self) -> frozenset[int]:
        """Return the indices that no rank used; at most once after each `launch`.

        Empty if called again, or before. Waits only if this rank itself left a
        parameter out. If not, no index can be unused: returns at once, and the next
        launch waits for the exchange.
        """
        was_open, self.exchange.is_open = self.exchange.is_open, False
        if not was_open or self._is_known:
            return frozenset()
        return frozenset(torch.nonzero(self.last_counts == 0).flatten().tolist())

    @property
    def last_counts(self) -> Tensor:
        """How many ranks used each parameter, at the last exchange (int32).

        Waits for it if it still runs. Zeros before the first one, and after a reset.
        """
        self.exchange.settle()
        if self.exchange.values is None:
            return self._flags(())
        return self.exchange.values.view(-1, self._num_params).sum(0, dtype=torch.int32)
