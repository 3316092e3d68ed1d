"""What has arrived in this backward: the state that the grad hooks touch.

One entry per parameter, one counter per bucket. The grad hook (`_autograd`) does no
more than this per parameter::

    entries[i] is UNSET ?  no -> on_unusual(i)      anything but the everyday case
    entries[i] = param.grad                         large ones are copied at once
    ready.append(i)
    pending[bucket_of[i]] -= 1   0 -> on_full(bucket)

A bucket lives on one device and a device has one autograd thread, so a bucket's counter
needs no lock. The lists are never replaced, only refilled: hooks hold on to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import itemgetter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ._bucket import Bucket


# From this size on a gradient is copied by its own hook, while it is still in cache.
# Smaller ones wait for their bucket: a kernel call would cost more than the copy.
COPY_AT_ONCE_BYTES = 64 * 1024


def is_copied_at_once(param: torch.Tensor) -> bool:
    """Whether the gradient of a parameter is copied by its own hook."""
    return param.nbytes >= COPY_AT_ONCE_BYTES


class Mark(Enum):
    """What ``entries[i]`` holds when it is not a gradient (a tensor or None)."""

    CLOSED = "closed"  # no reduction is open: the hook asks the reducer
    UNSET = "unset"  # open, this gradient has not arrived: the everyday case
    TRACED = "traced"  # as UNSET, but the reducer takes it: records, copies at once
    COPIED = "copied"  # arrived, and already in its slot
    COUNTING = "counting"  # static graph's first backward: hooks are only counted
    REPEATS = "repeats"  # static graph: arrives more than once, not complete yet


Entry = Mark | torch.Tensor | None


def has_arrived(entry: Entry) -> bool:
    """Whether an entry of an open (or paused) backward is ready."""
    return not isinstance(entry, Mark) or entry is Mark.COPIED


class Countdown:
    """Entries, ready order and pending counts of one backward.

    Args:
        num_params: managed parameters.
        on_full: called with a bucket index when its last gradient arrived.
        on_unusual: called with a parameter index whose entry was not UNSET.
        copy_now: called with a parameter index and its gradient, when the gradient
            must be read at once; returns what to keep as the entry.
    """

    __slots__ = (
        "_gather",
        "_paused",
        "bucket_of",
        "copy_now",
        "entries",
        "filled",
        "num_slots",
        "on_full",
        "on_unusual",
        "pending",
        "ready",
        "written_on",
    )

    def __init__(
        self,
        num_params: int,
        on_full: Callable[[int], None],
        on_unusual: Callable[[int], None],
        copy_now: Callable[[int, torch.Tensor], Entry],
    ) -> None:
        self.on_full = on_full
        self.on_unusual = on_unusual
        self.copy_now = copy_now
        self.entries: list[Entry] = [Mark.CLOSED] * num_params
        self.ready: list[int] = []  # parameter indices, in order of arrival
        self.filled: set[int] = set()  # parameter indices that did not arrive
        self.bucket_of: list[int] = [0] * num_params
        self.pending: list[int] = []  # per bucket
        self.written_on: list[set[int]] = []  # CUDA streams, per bucket
        self._paused: list[Entry] = []  # entries while a reduction is pending

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Follow new buckets."""
        for number, bucket in enumerate(buckets):
            for i in bucket.plan.indices:
                self.bucket_of[i] = number
        self.num_slots = [len(bucket.plan.slots) for bucket in buckets]
        self._gather = [itemgetter(*bucket.plan.indices) for bucket in buckets]
        self.pending[:] = self.num_slots
        self.written_on[:] = [bucket.streams.written_on for bucket in buckets]

    def open(self, entries: Iterable[Entry]) -> None:
        """Start a backward."""
        self.pending[:] = self.num_slots
        self.ready.clear()
        self.filled.clear()
        self.entries[:] = entries

    def close(self) -> None:
        """End a backward: hooks ask the reducer again, gradients are let go."""
        self._paused.clear()
        self.entries[:] = [Mark.CLOSED] * len(self.entries)

    def pause(self) -> None:
        """A backward ended early: the next hook asks the reducer.

        What has arrived is read now: until another backward goes on, the gradients are
        the user's to change or to zero.
        """
        for i, entry in enumerate(self.entries):
            if isinstance(entry, torch.Tensor):
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
        return self.pending[bucket] == self.num_slots[bucket]

    def missing(self) -> list[int]:
        """Parameter indices whose slots are still pending."""
        return [i for i, entry in enumerate(self.entries) if not has_arrived(entry)]

    def used(self) -> set[int]:
        """Parameter indices that arrived with a gradient."""
        return {i for i in self.ready if self.entries[i] is not None}

    def of_bucket(self, number: int) -> tuple[Entry, ...]:
        """A bucket's entries, in slot order."""
        entries = self._gather[number](self.entries)
        # itemgetter of one index returns the item itself
        return entries if self.num_slots[number] > 1 else (entries,)

    def arrive(
        self, i: int, grad: torch.Tensor | None, *, at_once: bool = True
    ) -> None:
        """A gradient arrived; copy it now if it must be read at once."""
        self.ready.append(i)
        entry: Entry = grad
        if at_once and grad is not None:
            entry = self.copy_now(i, grad)
        self.fill(i, entry)

    def arrive_after_all(self, i: int, grad: torch.Tensor | None) -> None:
        """A gradient arrived whose slot was filled, but is not reduced yet."""
        self.filled.discard(i)
        self.entries[i] = grad
        self.ready.append(i)

    def fill_missing(self, i: int, grad: torch.Tensor | None) -> None:
        """A parameter that does not arrive contributes its present ``.grad``."""
        self.filled.add(i)
        self.fill(i, grad)

    def fill(self, i: int, entry: Entry) -> None:
        """The slot of parameter ``i`` is no longer pending."""
        self.entries[i] = entry
        bucket = self.bucket_of[i]
        self.pending[bucket] -= 1
        if not self.pending[bucket]:
            self.on_full(bucket)
