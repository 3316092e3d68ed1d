"""One backward, counted down: what has arrived, what is missing, which bucket is full.

The grad hooks write to an `Arrivals`; here is everything else that happens to it, each
of which is rare: opening and closing a backward, arrivals that are not everyday, a
backward that is paused and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from ._arrivals import (
    Callbacks,
    Entry,
    Mark,
    arrivals_for,
    has_arrived,
)

if TYPE_CHECKING:
    from ._bucket import Bucket


class Countdown:
    """Entries, ready order and pending counts of one backward.

    Args:
        params: managed parameters, in parameter-index order.
        callbacks: what the grad hooks call.
        copy_now: called with a parameter index and its gradient, when the gradient
            must be read at once; returns what to keep as the entry.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        callbacks: Callbacks,
        copy_now: Callable[[int, torch.Tensor], Entry],
    ) -> None:
        self.callbacks = callbacks
        self.copy_now = copy_now
        self.arrivals = arrivals_for(params, callbacks)
        # The storage, bound once.
        self.entries = self.arrivals.entries
        self.ready = self.arrivals.ready
        self.bucket_of = self.arrivals.bucket_of
        self.pending = self.arrivals.pending
        self.filled: set[int] = set()  # parameter indices that did not arrive
        self.written_on: list[set[int]] = []  # CUDA streams, per bucket
        self._paused: list[Entry] = []  # entries while a reduction is pending
        self._num_slots: list[int] = []  # per bucket

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Follow new buckets."""
        self._num_slots = [len(bucket.plan.slots) for bucket in buckets]
        self.arrivals.adopt([bucket.plan.indices for bucket in buckets])
        for bucket in buckets:
            for k in bucket.large:
                self.arrivals.copy_at_once(bucket.plan.indices[k], bucket.slots, k)
        self.written_on[:] = [bucket.streams.written_on for bucket in buckets]

    def open(self, entries: Iterable[Entry], divisor: int) -> None:
        """Start a backward whose gradients are divided by ``divisor`` when copied."""
        self.arrivals.scale = 1.0 / divisor
        self.arrivals.refill()
        self.filled.clear()
        self.entries[:] = entries

    def close(self) -> None:
        """End a backward: hooks ask the reducer again, gradients are let go."""
        self._paused.clear()
        self.entries[:] = [Mark.CLOSED] * len(self.entries)

    def pause(self) -> None:
        """A backward ended early: the next hook asks the reducer.

        What has arrived is read now: until another backward goes on, the gradients are
        the user's to change or to zero. Full buckets were read, and may be in flight.
        """
        for i, entry in enumerate(self.entries):
            is_full = not self.pending[self.bucket_of[i]]
            if isinstance(entry, torch.Tensor) and not is_full:
                self.entries[i] = self.copy_now(i, entry)
        self._paused = list(self.entries)
        self.entries[:] = [
            entry if has_arrived(entry) else Mark.CLOSED for entry in self.entries
        ]

    def resume(self) -> None:
        """Another backward goes on where the last one ended."""
        self.entries[:] = [
            Mark.TRACED if entry is Mark.UNSET else entry for entry in self._paused
        ]

    def is_first(self, i: int) -> bool:
        """Whether the bucket of parameter ``i`` has no gradient yet."""
        bucket = self.bucket_of[i]
        return self.pending[bucket] == self._num_slots[bucket]

    def missing(self) -> list[int]:
        """Parameter indices whose slots are still pending."""
        return [i for i, entry in enumerate(self.entries) if not has_arrived(entry)]

    def used(self) -> set[int]:
        """Parameter indices that arrived with a gradient."""
        return set(self.arrivals.used())

    def of_bucket(self, number: int) -> Sequence[Entry]:
        """A bucket's entries, in slot order."""
        self.written_on[number].update(self.arrivals.take_streams(number))
        return self.arrivals.gather(number)

    def arrive(
        self, i: int, grad: torch.Tensor | None, *, at_once: bool = True
    ) -> None:
        """A gradient arrived; copy it now if it must be read at once."""
        self.arrivals.note_ready(i)
        entry: Entry = grad
        if at_once and grad is not None:
            entry = self.copy_now(i, grad)
        self.fill(i, entry)

    def arrive_after_all(self, i: int, grad: torch.Tensor | None) -> None:
        """A gradient arrived whose slot was filled, but is not reduced yet."""
        self.filled.discard(i)
        self.entries[i] = grad
        self.arrivals.note_ready(i)

    def fill_missing(
        self, i: int, grad: torch.Tensor | None, *, travels: bool = True
    ) -> None:
        """A parameter that does not arrive contributes its present ``.grad``.

        Args:
            i: parameter index.
            grad: what it contributes.
            travels: False: its bucket is skipped, and contributes nothing.
        """
        self.filled.add(i)
        if travels:
            self.fill(i, grad)
        else:
            self.entries[i] = None

    def fill(self, i: int, entry: Entry) -> None:
        """The slot of parameter ``i`` is no longer pending."""
        self.entries[i] = entry
        if not self.arrivals.count_down(i):
            self.callbacks.on_full(self.bucket_of[i])
