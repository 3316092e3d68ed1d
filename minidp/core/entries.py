"""What is recorded of each gradient in a backward: one `Entry` per parameter.

A grad hook is called for every gradient, so it must decide at once. One look at the
entry tells it whether it may record the gradient by itself (`GradState`).
"""

from __future__ import annotations

from enum import Enum

from torch import Tensor

# From this size on a Python hook copies its gradient at once, while that is still in
# cache. Smaller ones wait for their bucket: a kernel call would cost more than the
# copy. The extension's hooks copy all, on CPU.
COPY_AT_ONCE_BYTES = 64 * 1024


def is_copied_at_once(param: Tensor, *, as_view: bool) -> bool:
    """Return whether the Python hook of a parameter copies its gradient at once.

    It does for a parameter of at least `COPY_AT_ONCE_BYTES`. On a device, where what
    counts is the number of launches, it does only to save memory: if ``.grad`` becomes
    a view of the bucket (``as_view``), a gradient's own memory is free after its copy,
    and the large ones of a whole backward would be as much as the buckets.
    """
    return param.nbytes >= COPY_AT_ONCE_BYTES and (param.is_cpu or as_view)


class GradState(Enum):
    """What an entry says while it holds no gradient, above all who shall record one."""

    CLOSED = "closed"  # no reduction is open: the hook asks the reducer
    UNSET = "unset"  # not arrived: the hook will record it, the usual case
    VIA_REDUCER = "via reducer"  # not arrived: the reducer will record and copy it
    COPIED = "copied"  # arrived, and already in its bucket
    COUNTED = "counted"  # static graph: the mode counts the arrivals


# A gradient that arrived and is not copied yet; None if it arrived without one; or a
# state.
Entry = GradState | Tensor | None


def has_arrived(entry: Entry) -> bool:
    """Return whether nothing more is to come: it arrived, maybe without a gradient.

    A missing gradient that was filled in counts as arrived, too.
    """
    return not isinstance(entry, GradState) or entry is GradState.COPIED
