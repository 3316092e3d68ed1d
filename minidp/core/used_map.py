"""Exchange the used-map: which parameters any rank used (find_unused_parameters)."""

from __future__ import annotations

from collections.abc import Collection

import torch

from minidp.comm import (
    Communicator,
    Work,
    all_reduce,
    group_of_forwards,
    start_gathering,
    wait_for,
)
from minidp.shared_memory import SharedBuffer


class UsedMap:
    """Sum over ranks, for each parameter, whether a rank used it; wait only if needed.

    The constructor starts no exchange. One backward: `launch`, then
    `unused_everywhere`. ``uses_forward_group``: for an exchange that only some
    backwards launch. On the buckets' group Gloo would match it with another
    collective. Shared memory (`use`) cannot mix exchanges up.
    """

    def __init__(
        self,
        num_params: int,
        device: torch.device,
        communicator: Communicator,
        *,
        uses_forward_group: bool = False,
    ) -> None:
        self.uses_forward_group = uses_forward_group
        self.num_params = num_params
        self._device = device
        self._communicator = communicator
        self._is_open = False  # launched, and `unused_everywhere` not called yet
        self._is_known = False  # this rank used every parameter
        self._work: Work | None = None  # may outlast the backward
        self._shared: SharedBuffer | None = None  # through which it goes; None: group
        self._counts = self._rows(())  # the sum, or a row of each rank

    def launch(self, used: Collection[int]) -> None:
        """Collective: start to exchange ``used``, indices that this rank used.

        First waits for the previous exchange, if it still runs. No-op if
        `unused_everywhere` has not been called since the last `launch`.
        """
        if self._is_open:
            return
        self.settle()
        group = self._communicator.group
        rows = self._rows(used)
        self._is_open, self._is_known = True, len(set(used)) == self.num_params
        with self._communicator.watching("launching the exchange of the used-map"):
            if self._shared is not None:
                self._counts = self._shared.values.view(1, -1).copy_(rows)
                self._work = self._shared.all_reduce()
            elif self.uses_forward_group:
                others = group_of_forwards(group)
                self._counts, self._work = start_gathering(rows[0], others)
            else:
                self._counts, self._work = rows, all_reduce(rows, group)
            self._communicator.note_started(self._work)

    @property
    def shape(self) -> tuple[int, torch.dtype]:
        """Number of elements of what ranks exchange, and their dtype."""
        return self.num_params, torch.int32

    def use(self, shared: SharedBuffer | None) -> None:
        """Exchange through ``shared`` from now on; None: through the process group.

        ``shared``: int32, an element per parameter. First waits for an exchange in
        flight; `last_counts` stay.
        """
        self.settle()
        if self._shared is not None:
            self._counts = self._counts.clone()  # lets the old memory go
        self._shared = shared

    def _rows(self, used: Collection[int]) -> torch.Tensor:
        """Return (1, parameters) flags on the device: int32, 1 for ``used``, else 0."""
        flags = [0] * self.num_params
        for i in used:
            flags[i] = 1
        # From pinned memory: otherwise the host waits for the device's queue.
        is_pinned = self._device.type == "cuda"
        rows = torch.tensor(
            [flags], dtype=torch.int32, device="cpu", pin_memory=is_pinned
        )
        return rows.to(self._device, non_blocking=True)

    def relaunch(self, used: Collection[int]) -> None:
        """Collective: start to exchange ``used``, like `launch`, but never a no-op.

        First waits for an exchange that still runs.
        """
        self._is_open = False
        self.launch(used)

    def unused_everywhere(self) -> frozenset[int]:
        """Return the indices that no rank used; at most once after each `launch`.

        Empty if called again, or before. Waits only if this rank itself left a
        parameter out. If not, no index can be unused: returns at once, and the next
        launch waits for the exchange.
        """
        was_open, self._is_open = self._is_open, False
        if not was_open or self._is_known:
            return frozenset()
        return frozenset(torch.nonzero(self.last_counts == 0).flatten().tolist())

    @property
    def last_counts(self) -> torch.Tensor:
        """How many ranks used each parameter, at the last exchange (int32).

        Waits for it if it still runs. Zeros before the first one, and after `drop`.
        """
        self.settle()
        return self._counts.sum(0, dtype=torch.int32)

    def settle(self) -> None:
        """Wait for the exchange in flight, if any; CollectiveError if it fails."""
        if self._work is not None:
            doing = "waiting for the exchange of the used-map"
            with self._communicator.watching(doing):
                wait_for(self._work)
            self._work = None

    def drop(self) -> None:
        """Abandon the exchange in flight without waiting; `last_counts` become 0."""
        self._is_open, self._work = False, None
        self._counts = self._rows(())
