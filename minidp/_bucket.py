"""What dense and sparse buckets share: identity, lifecycle, launch and wait.

entries --flatten--> payload --launch--> all ranks --complete--> payload
                                              .grad <--unflatten--'
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from ._arrivals import Entry
from ._layout import BucketPlan
from ._streams import streams_for
from ._waiting import Work, wait_for
from .errors import GradientError, InternalError, explain

_REMEDY = (
    "do not change dtype, shape or layout of a parameter or of its .grad after "
    "wrapping; wrap the module again instead"
)


class Division(NamedTuple):
    """What gradients are divided by before they travel, and when.

    On CPU the two places differ in the last bit, unless the number is a power of two.
    """

    at_copy: int = 1  # each gradient, on its way to its slot
    of_buffer: int = 1  # the whole buffer, once it is full

    @property
    def total(self) -> int:
        """Both together; 1 if somebody else divides (a comm hook)."""
        return self.at_copy * self.of_buffer


class BucketState(Enum):
    """Lifecycle: FILLING -> FULL -> IN_FLIGHT -> FILLING."""

    FILLING = "filling"  # slots are pending
    FULL = "full"  # flattened; waits for its turn to be launched
    IN_FLIGHT = "in flight"  # the collective is enqueued, nobody has waited for it


_NEXT = {
    BucketState.FILLING: BucketState.FULL,
    BucketState.FULL: BucketState.IN_FLIGHT,
    BucketState.IN_FLIGHT: BucketState.FILLING,
}


class Bucket(ABC):
    """Gradients that are reduced by one collective.

    Args:
        plan: the slots.
        params: all managed parameters, by parameter index.
        names: their dotted names.
        rank: group rank, for errors.
    """

    def __init__(
        self,
        plan: BucketPlan,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        rank: int,
    ) -> None:
        self.plan = plan
        self.params = tuple(params[i] for i in plan.indices)
        self.names = tuple(names[i] for i in plan.indices)
        self.position = {i: k for k, i in enumerate(plan.indices)}
        self.views: list[torch.Tensor] = []  # one per slot; none if sparse
        self.slots: Any | None = None  # native kernels for the everyday case
        self.large: list[int] = []  # slots that a native hook fills at once
        self.state = BucketState.FILLING
        self.streams = streams_for(plan.device)
        self._rank = rank
        self.work: Work | None = None  # in flight
        self._is_alone = False  # launched, but nothing changes the payload

    def advance(self, state: BucketState) -> None:
        """Move to the next state; any other move is a mistake of ours."""
        if _NEXT[self.state] is not state:
            raise InternalError(
                f"[rank {self._rank}] bucket of {self.names[0]}: "
                f"{self.state.name} -> {state.name} is not allowed."
            )
        self.state = state

    def launch(
        self, start: Callable[[torch.Tensor], Work], *, is_alone: bool = False
    ) -> Work:
        """Start what reduces the payload; `complete` waits for it.

        Args:
            start: begins the collective. If waiting for the work gives a tensor, that
                replaces the payload's values.
            is_alone: promises that the values stay what they are.
        """
        self.advance(BucketState.IN_FLIGHT)
        self._is_alone = is_alone
        with self.streams.launching():
            self.work = start(self.payload)
        return self.work

    def complete(self) -> None:
        """Wait for the collective (on CUDA: order the current stream after it)."""
        if self.work is None:
            raise InternalError(f"[rank {self._rank}] nothing to wait for.")
        result = wait_for(self.work)
        if isinstance(result, torch.Tensor) and result is not self.payload:
            with torch.no_grad():
                self.payload.copy_(result)
        self.work = None
        self.advance(BucketState.FILLING)

    @abstractmethod
    def copy_now(self, k: int, grad: torch.Tensor, division: Division) -> Entry:
        """Fill slot ``k`` before the bucket is full; returns the entry to keep."""

    @abstractmethod
    def flatten(
        self,
        entries: Sequence[Entry],
        division: Division,
        undecided: Collection[int] = (),
    ) -> None:
        """Bring every slot into the payload, divided; the bucket is then FULL.

        Args:
            entries: per slot a gradient, None (contributes zeros) or COPIED.
            division: by what, and when.
            undecided: slots whose parameter may turn out to be unused on all ranks:
                what would be lost of their ``.grad`` is saved for `unflatten`.
        """

    @abstractmethod
    def unflatten(
        self,
        kept: Collection[int] = (),
        into: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Put the reduced values into ``.grad``, except for the slots in ``kept``.

        Args:
            kept: slots that are not written.
            into: one tensor per slot to write into instead; None for a slot is left out
                (after ``set_apart(apart=True)``).
        """

    @abstractmethod
    def set_apart(self, *, apart: bool) -> None:
        """Say whether the gradients of this backward live elsewhere than in ``.grad``.

        If so, ``.grad`` is neither read nor made a view, and what it holds stays.
        """

    @abstractmethod
    def tie_grads(self) -> None:
        """Make every gradient that exists already a view of this new bucket.

        Also those that were no views: torch does so at wrapping and at the rebuild, and
        a view is divided where a fresh gradient is multiplied.
        """

    @property
    @abstractmethod
    def payload(self) -> torch.Tensor:
        """What travels: the flat buffer, or the sparse gradient."""

    def _misfit(
        self, name: str, expected: str, found: str, remedy: str = _REMEDY
    ) -> GradientError:
        return GradientError(
            explain(
                self._rank,
                "A gradient does not fit its bucket.",
                names=[name],
                expected=expected,
                found=found,
                remedy=remedy,
            )
        )
