"""Where the grad hooks write down what has arrived; in Python, or its native twin.

One entry per parameter, one counter per bucket. All that a hook does in the everyday
case::

    entries[i] is UNSET ?  no -> on_unusual(i)      anything but the everyday case
    entries[i] = param.grad                         large ones are copied at once
    ready.append(i)
    pending[bucket_of[i]] -= 1   0 -> on_full(bucket)

The GIL keeps hooks on several threads apart; the native twin has a lock. The lists are
never replaced, only refilled: hooks hold on to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch

from ._ops import kernels_for

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


class Callbacks(NamedTuple):
    """Who the hooks call, which hold no reference that keeps the reducer alive."""

    on_full: Callable[[int], None]  # bucket: its last gradient arrived
    on_unusual: Callable[[int], None]  # parameter: its entry was not UNSET


class Arrivals:
    """Entries, ready order, pending counts.

    The specification of the class of the same name in ``csrc/grad_hook.h``, which has
    the same face.

    Args:
        num_params: managed parameters.
    """

    def __init__(self, num_params: int) -> None:
        self.entries: list[Entry] = [Mark.CLOSED] * num_params
        self.ready: list[int] = []  # parameter indices, in order of arrival
        self.pending: list[int] = []  # per bucket
        self.bucket_of: list[int] = [0] * num_params
        self.scale = 1.0  # of what a native hook copies at once
        self._members: Sequence[Sequence[int]] = ()

    def adopt(self, members: Sequence[Sequence[int]]) -> None:
        """Follow new buckets: parameter indices of each, in slot order."""
        self._members = members
        for bucket, indices in enumerate(members):
            for i in indices:
                self.bucket_of[i] = bucket
        self.refill()

    def note_ready(self, i: int) -> None:
        """Parameter ``i`` arrived; native hooks do this on several threads."""
        self.ready.append(i)

    def count_down(self, i: int) -> int:
        """The slot of parameter ``i`` is settled; returns how many its bucket lacks."""
        self.pending[self.bucket_of[i]] -= 1
        return self.pending[self.bucket_of[i]]

    def refill(self) -> None:
        """A backward starts: every bucket waits for all of its gradients."""
        self.ready.clear()
        self.pending[:] = map(len, self._members)

    def gather(self, bucket: int) -> Sequence[Entry]:
        """The entries of a bucket as they are now, in slot order."""
        indices = self._members[bucket]
        found = itemgetter(*indices)(self.entries)
        return found if len(indices) > 1 else (found,)

    def used(self) -> Iterable[int]:
        """Parameters that arrived with a gradient."""
        return [i for i in self.ready if self.entries[i] is not None]

    def copy_at_once(self, i: int, slots: Any, k: int) -> None:
        """Copy gradient ``i`` to slot ``k``; here a hook of its own does that."""

    def take_streams(self, bucket: int) -> Iterable[int]:
        """CUDA streams that native hooks noted; hooks in Python need no help."""
        return ()

    def forget_slots(self) -> None:
        """Let go of the slots that `copy_at_once` named."""

    # The twin has also `is_timed`, `stamp_by` and `take_stamps`, for `NativeTiming`.

    def attach(self, python_hook: WeakMethod[Callable[[int], Any]]) -> Any | None:
        """Native hooks for all parameters; None: hooks in Python are needed.

        Args:
            python_hook: gives the hook of a parameter that a compiled graph calls.
        """
        return None


def arrivals_for(params: Sequence[torch.Tensor], callbacks: Callbacks) -> Arrivals:
    """Storage for the hooks of ``params``, native if that is possible."""
    library = kernels_for(params)
    if library is None:
        return Arrivals(len(params))
    marks = tuple(Mark)
    twin: Arrivals = library.Arrivals(
        params, marks, Mark.UNSET, Mark.COPIED, tuple(callbacks)
    )
    twin.entries[:] = [Mark.CLOSED] * len(params)
    return twin
