"""Hold by what gradients are divided, the comm hook, and the counts of items.

=====================  =================  =================  =======================
mode                   each gradient      whole buffer       after the all-reduce
=====================  =================  =================  =======================
default                / ranks            -                  -
``batched_grad_copy``  -                  / ranks            -
over items             / ranks, or as     as the row above   x ranks / items of all
                       the row above
comm hook              -                  -                  what the hook does
=====================  =================  =================  =======================

Over items, gradients travel divided by the ranks, so that 16 bits do not overflow; the
other factor, ranks / items, is known when the counts have come (`item_counts`). No comm
hook can be registered then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from minidp import comm
from minidp.hooks import CommHook, Turn
from minidp.layout import Layout
from minidp.shared_memory import SharedBuffer, share

from .exchange import Exchange
from .item_counts import ItemCounts


class DivideFactors(NamedTuple):
    """A bucket's divisors: one of `pre` (per gradient), `post` (full buffer) is 1."""

    pre: int = 1  # of each gradient, while it is copied
    post: int = 1  # of the whole buffer, when it is full

    @property
    def product(self) -> int:
        """The number by which each gradient is divided before the all-reduce."""
        return self.pre * self.post


class Averaging:
    """Hold one reducer's divisors, comm hook and item counts; find shared memory.

    ``batched``: divide full buffers, not gradients.
    """

    def __init__(
        self, communicator: comm.Communicator, device: torch.device, *, batched: bool
    ) -> None:
        self._communicator = communicator
        self._is_batched = batched
        self.device = device  # of the gradients
        self.items: ItemCounts | None = None  # with average_over="items"
        self.num_contributors: int | None = None  # ranks to average over; None: all
        self.comm_hook: CommHook | None = None
        self.active_comm_hook: CommHook | None = None  # `comm_hook` at `begin`
        self.factors = DivideFactors()  # of this backward
        self.wait_description = ""  # completed by " of bucket 3"
        self.no_shared_memory = ""  # why buckets use the group; empty: shared

    @property
    def divisor(self) -> int:
        """The number of ranks to average over: `num_contributors`, or group size."""
        return self.num_contributors or self._communicator.size

    @property
    def scale(self) -> float | torch.Tensor:
        """What reduced gradients are multiplied by: a tensor if on a device."""
        return 1.0 if self.items is None else self.items.scale

    @property
    def seat(self) -> tuple[int, int]:
        """(Index of this rank, number of ranks) among those that average; here all."""
        return self._communicator.rank, self._communicator.size

    def begin(self) -> None:
        """As a backward begins, set its comm hook and divisors (1: a hook divides)."""
        hook = self.active_comm_hook = self.comm_hook
        self.factors = self.factors_of(self.divisor if hook is None else 1)
        if self.items is not None:
            self.items.divisor = self.factors.product
        self.wait_description = "waiting for the all-reduce"
        if hook is not None:
            self.wait_description = f"waiting for the comm hook {hook.name}, call"

    def turn(self, number: int, *, is_last: bool) -> Turn:
        """Return bucket ``number``'s `Turn`, for a comm hook."""
        return Turn(number, is_last, self.divisor, self._communicator.group)

    def factors_of(self, divisor: int) -> DivideFactors:
        """Return factors with ``divisor`` as `post` if ``batched``, else as `pre`."""
        return DivideFactors(1, divisor) if self._is_batched else DivideFactors(divisor)

    def register(self, hook: CommHook) -> None:
        """Set the comm hook; RuntimeError if one is set, or averages are over items."""
        if self.comm_hook is not None:
            text = "register_comm_hook or register_builtin_comm_hook can only be called"
            name = self.comm_hook.name
            raise RuntimeError(f"{text} once, and {name} is registered.")
        if self.items is not None:
            raise RuntimeError(
                f'The comm hook {hook.name} cannot be registered: average_over="items" '
                "multiplies what the buckets bring, whatever a hook made of it. What "
                "to do: average over ranks, or use no hook."
            )
        self.comm_hook = hook

    def share(
        self, layout: Layout, exchanges: Sequence[Exchange], *, asks: bool
    ) -> list[SharedBuffer]:
        """Return a shared buffer for each dense bucket, or [] if a rank cannot share.

        ``exchanges`` get theirs, not returned. [] at once if not ``asks``, with a comm
        hook, or if group or device exclude sharing; else collective. Sets
        `no_shared_memory` to the reason, or "". NativeError if MINIDP_SHARED_MEMORY=1
        and it fails.
        """
        dense = [plan for plan in layout.buckets if not plan.sparse]
        found: list[SharedBuffer] | str = "ranks have not looked for it yet"
        if self.comm_hook is not None:
            found = "a comm hook is registered"
        elif asks:
            shapes = [(plan.numel, plan.dtype) for plan in dense]
            shapes += [each.shape for each in exchanges]
            device = layout.buckets[0].device
            found = share(shapes, self._communicator, device)
        if isinstance(found, str):
            self.no_shared_memory = found
            return []
        self.no_shared_memory = ""
        for each, shared in zip(exchanges, found[len(dense) :], strict=True):
            each.use(shared)
        return found[: len(dense)]

    @contextmanager
    def without_comm_hook(self) -> Iterator[None]:
        """Return a context in which `comm_hook` is None; restore the hook after."""
        hook, self.comm_hook = self.comm_hook, None
        try:
            yield
        finally:
            self.comm_hook = hook
