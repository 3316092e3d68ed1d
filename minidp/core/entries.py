"""Say what is recorded of each gradient in a backward: an entry per parameter."""

from __future__ import annotations

from enum import Enum

from torch import Tensor

# From this size on a Python hook copies its gradient while that is still in cache.
# Smaller ones wait for their bucket: a kernel call would cost more than the copy. The
# extension's hooks copy all, on CPU.
COPY_AT_ONCE_BYTES = 64 * 1024


def is_copied_at_once(param: Tensor) -> bool:
    """Return whether ``param`` has 64 KiB or more: its Python hook copies at once."""
    return param.nbytes >= COPY_AT_ONCE_BYTES


class GradState(Enum):
    """State of an entry without a gradient in it: who shall record one, or COPIED."""

    CLOSED = "closed"  # no reduction is open: the hook asks the reducer
    UNSET = "unset"  # not arrived: the hook will record it, the usual case
    VIA_REDUCER = "via reducer"  # not arrived: the reducer will record and copy it
    COPIED = "copied"  # arrived, and already in its bucket
    COUNTED = "counted"  # static graph: the mode counts the arrivals


Entry = GradState | Tensor | None


def has_arrived(entry: Entry) -> bool:
    """Return whether an entry is COPIED, a gradient, or None (arrived without one)."""
    return not isinstance(entry, GradState) or entry is GradState.COPIED
