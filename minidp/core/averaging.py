"""Hold the divisor and the comm hook; take shared memory for the buckets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minidp import comm
from minidp.layout import Layout


class Averaging:
    """Hold the divisor and the comm hook of a reducer, and why memory is not shared."""

    def __init__(self, communicator: comm.Communicator) -> None:
        self._communicator = communicator
        self.num_contributors: int | None = None  # ranks to average over; None: all
        self.comm_hook: comm.CommHook | None = None
        self.active_comm_hook: comm.CommHook | None = None  # `comm_hook` at `begin`
        self.copy_divisor = 1  # of this backward's gradients; 1 with a comm hook
        self.wait_description = ""
        # Why buckets travel through the group; empty: they lie in shared memory.
        self.no_shared_memory = ""

    @property
    def divisor(self) -> int:
        """The number of ranks to average over: `num_contributors`, or group size."""
        return self.num_contributors or self._communicator.size

    def begin(self) -> None:
        """Fix this backward's comm hook, `copy_divisor` (1 with a hook), wait text."""
        hook = self.active_comm_hook = self.comm_hook
        self.copy_divisor = self.divisor if hook is None else 1
        self.wait_description = "waiting for the all-reduce"
        if hook is not None:
            self.wait_description = f"waiting for the comm hook {hook.name}, call"

    def share(self, layout: Layout, *, asks: bool) -> list[comm.SharedBuffer]:
        """Return buffers for the dense buckets; [] if `no_shared_memory` says why not.

        A collective if ``asks``; else there are none.
        """
        dense = [plan for plan in layout.buckets if not plan.sparse]
        found: list[comm.SharedBuffer] | str = "ranks have not looked for it yet"
        if self.comm_hook is not None:
            found = "a comm hook is registered"
        elif asks:
            shapes = [(plan.numel, plan.dtype) for plan in dense]
            device = layout.buckets[0].device
            found = comm.share(shapes, self._communicator, device)
        self.no_shared_memory = found if isinstance(found, str) else ""
        return [] if isinstance(found, str) else found

    @contextmanager
    def without_comm_hook(self) -> Iterator[None]:
        """Return a context in which no comm hook is registered; restore it after."""
        hook, self.comm_hook = self.comm_hook, None
        try:
            yield
        finally:
            self.comm_hook = hook
