"""What dense and sparse buckets share: identity, lifecycle, launch and wait.

entries --flatten--> payload --launch--> all ranks --complete--> payload
                                              .grad <--unflatten--'
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from ._arrivals import Entry
from ._collectives import Work, all_reduce
from ._layout import BucketPlan
from ._streams import streams_for
from .errors import GradientError, InternalError, explain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
        self._work: Work | None = None

    def advance(self, state: BucketState) -> None:
        """Move to the next state; any other move is a mistake of ours."""
        if _NEXT[self.state] is not state:
            raise InternalError(
                f"[rank {self._rank}] bucket of {self.names[0]}: "
                f"{self.state.name} -> {state.name} is not allowed."
            )
        self.state = state

    def launch(self, group: ProcessGroup) -> Work:
        """Start the all-reduce; `complete` waits for it."""
        self.advance(BucketState.IN_FLIGHT)
        with self.streams.launching():
            self._work = all_reduce(self._payload(), group)
        return self._work

    def complete(self) -> None:
        """Wait for the collective (on CUDA: order the current stream after it)."""
        if self._work is None:
            raise InternalError(f"[rank {self._rank}] nothing to wait for.")
        self._work.wait()
        self._work = None
        self.advance(BucketState.FILLING)

    @abstractmethod
    def copy_now(self, k: int, grad: torch.Tensor, divisor: int) -> Entry:
        """Fill slot ``k`` before the bucket is full; returns the entry to keep."""

    @abstractmethod
    def flatten(
        self, entries: Sequence[Entry], divisor: int, undecided: Collection[int] = ()
    ) -> None:
        """Bring every slot into the payload, divided; the bucket is then FULL.

        Args:
            entries: per slot a gradient, None (contributes zeros) or COPIED.
            divisor: number of ranks that contribute.
            undecided: slots whose parameter may turn out to be unused on all ranks:
                what would be lost of their ``.grad`` is saved for `unflatten`.
        """

    @abstractmethod
    def unflatten(self, kept: Collection[int] = ()) -> None:
        """Put the reduced values into ``.grad``, except for the slots in ``kept``."""

    @abstractmethod
    def tie_grads(self) -> None:
        """Make every gradient that exists already a view of this new bucket.

        Also those that were no views: torch does so at wrapping and at the rebuild, and
        a view is divided where a fresh gradient is multiplied.
        """

    @abstractmethod
    def _payload(self) -> torch.Tensor:
        """What travels."""

    def _misfit(self, name: str, expected: str, found: str) -> GradientError:
        return GradientError(
            explain(
                self._rank,
                "A gradient does not fit its bucket.",
                names=[name],
                expected=expected,
                found=found,
                remedy="do not change dtype, shape or layout of a parameter or of its "
                ".grad after wrapping; wrap the module again instead",
            )
        )
