"""What has arrived in this backward: the state that the grad hooks touch.

One entry per parameter, one counter per bucket. The grad hook (`_autograd`) does no more
than this per parameter::

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

import torch

from ._layout import Layout


class Mark(Enum):
    """What ``entries[i]`` holds when it is not a gradient (a tensor or None)."""

    CLOSED = "closed"  # no reduction is open: the hook asks the reducer
    UNSET = "unset"  # open, this gradient has not arrived: the everyday case
    TRACED = "traced"  # as UNSET, but the reducer records the time
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
        layout: the buckets of the first backward.
        on_full: called with a bucket index when its last gradient arrived.
        on_unusual: called with a parameter index whose entry was not UNSET.
        copy_now: called with a parameter index and its gradient, when the gradient
            must be read at once; returns what to keep as the entry.
    """

    __slots__ = (
        "bucket_of",
        "copy_now",
        "entries",
        "on_full",
        "on_unusual",
        "pending",
        "ready",
        "written_on",
    )

    def __init__(
        self,
        layout: Layout,
        on_full: Callable[[int], None],
        on_unusual: Callable[[int], None],
        copy_now: Callable[[int, torch.Tensor], Entry],
    ) -> None:
        self.on_full = on_full
        self.on_unusual = on_unusual
        self.copy_now = copy_now
        self.entries: list[Entry] = [Mark.CLOSED] * layout.num_params
        self.ready: list[int] = []  # parameter indices, in order of arrival
        self.bucket_of: list[int] = []
        self.pending: list[int] = []
        self.written_on: list[set[int]] = []  # CUDA streams, per bucket
        self.adopt(layout, [set() for _ in layout.buckets])

    def adopt(self, layout: Layout, written_on: Sequence[set[int]]) -> None:
        """Follow a new layout."""
        self.bucket_of[:] = layout.bucket_of
        self.pending[:] = [len(bucket.slots) for bucket in layout.buckets]
        self.written_on[:] = written_on

    def open(self, layout: Layout, entries: Iterable[Entry]) -> None:
        """Start a backward: every gradient is expected."""
        self.pending[:] = [len(bucket.slots) for bucket in layout.buckets]
        self.ready.clear()
        self.entries[:] = entries

    def close(self) -> None:
        """End a backward: hooks ask the reducer again, gradients are let go."""
        self.entries[:] = [Mark.CLOSED] * len(self.entries)

    def pause(self) -> None:
        """A backward ended early: the next hook asks the reducer."""
        self.entries[:] = [
            entry if has_arrived(entry) else Mark.CLOSED for entry in self.entries
        ]

    def resume(self, mark: Mark) -> None:
        """Another backward goes on where the last one ended."""
        self.entries[:] = [
            mark if entry is Mark.CLOSED else entry for entry in self.entries
        ]

    def missing(self) -> list[int]:
        """Parameter indices that have not arrived."""
        return [i for i, entry in enumerate(self.entries) if not has_arrived(entry)]

    def arrive(self, i: int, param: torch.Tensor, *, at_once: bool) -> None:
        """What the grad hook does on the everyday path."""
        grad = param.grad
        entry: Entry = grad
        if at_once and grad is not None:
            entry = self.copy_now(i, grad)
        self.entries[i] = entry
        self.ready.append(i)
        self.count(i)

    def count(self, i: int) -> None:
        """Note that the slot of parameter ``i`` is no longer pending."""
        bucket = self.bucket_of[i]
        self.pending[bucket] -= 1
        if not self.pending[bucket]:
            self.on_full(bucket)
