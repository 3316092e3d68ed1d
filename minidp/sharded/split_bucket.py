"""A bucket of one large parameter, of which each rank owns some rows.

After a backward each rank has the averages of its rows in ``.grad``, which has the
shape of the parameter, and zeros in the other rows. So whatever a script does with
gradients acts on them as on any others: it may set them to None or to zeros, unscale
them, add to them inside ``no_sync()``, or clip their values.

New values go from rows to rows. They need no buffer, because the rows of a rank are one
stretch of the parameter's own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minidp import accelerator
from minidp.core import Slots
from minidp.layout import BucketPlan
from minidp.shared_memory import SharedBuffer

from .awaited import is_alone
from .bucket import Room, ShardedBucket, as_real
from .owners import Owners, Stretch


class SplitRoom(Room):
    """The memory through which rows travel: of the parameter, or of all ranks.

    Args:
        plan: The bucket.
        flats: For each rank the memory in which its rows lie, of one dimension.
        rank: This rank.
        is_home: Whether that is the parameter's own memory.
    """

    def __init__(
        self, plan: BucketPlan, flats: Sequence[Tensor], rank: int, *, is_home: bool
    ) -> None:
        super().__init__(plan, flats[rank], ())
        self.is_home = is_home
        self._flats = flats

    def arrived(self, rank: int, stretch: Stretch) -> list[Tensor]:
        """Return the rows of another rank."""
        return [self._flats[rank][stretch.start : stretch.stop]]

    def own(self, stretch: Stretch) -> tuple[list[Tensor], Tensor]:
        """Return where own rows are to be copied to, if anywhere, and them."""
        mine = self._flat[stretch.start : stretch.stop]
        return [] if self.is_home else [mine], as_real(mine)


class SplitBucket(ShardedBucket):
    """The bucket of a divided parameter, which is its only slot.

    Args:
        owners: Who owns which rows.
        plan: The slot.
        more: The other arguments of `DenseBucket`.
    """

    def __init__(self, owners: Owners, plan: BucketPlan, *more: Any) -> None:
        super().__init__(owners, plan, *more)
        self.own, self.foreign = range(1), []

    def _divide(self) -> None:
        """Let the extension copy the whole gradient, as without shares."""

    def values(self, stretch: Stretch) -> list[Tensor]:
        """Return the rows of a stretch, which share the parameter's memory."""
        return [_flat(self.params[0])[stretch.start : stretch.stop]]

    def room(self) -> Room:
        """Return the memory of the parameter."""
        flats = [_flat(self.params[0])] * self.communicator.size
        return SplitRoom(self.plan, flats, self.communicator.rank, is_home=True)

    def given_room(self, shared: SharedBuffer) -> Room:
        """Return the memory in which each rank gives its rows."""
        if self._given is None:
            rank, size = self.communicator.rank, self.communicator.size
            flats = [shared.given(each).view(self.plan.dtype) for each in range(size)]
            self._given = SplitRoom(self.plan, flats, rank, is_home=False)
        return self._given

    def offer_grads(self, shared: SharedBuffer) -> None:
        """Let sums come to the buffer."""
        shared.into = None

    def _write_natively(self, untouched: Slots) -> bool:
        return False

    def _write_in_python(self, untouched: Slots) -> None:
        self._rescale()
        if untouched:
            return
        own = self._stretch
        if self._as_view:
            self._wait_for_readers()
            self._point_at_views([self.params[0].grad], ())
            flat = self._values
        else:
            flat = _flat(self._whole_grad())
            flat[own.start : own.stop].copy_(self._values[own.start : own.stop])
        flat[: own.start].zero_()
        flat[own.stop :].zero_()

    def _wait_for_readers(self) -> None:
        """Wait until no rank reads what this one has brought, before it is changed."""
        if self.shared is not None:
            doing = "waiting for ranks that add up the same gradients"
            with self.communicator.watching(doing, self.plan.number):
                self.communicator.wait(self.shared.read_by_all())

    def _whole_grad(self) -> Tensor:
        """Return the ``.grad`` that is to hold the averages; its values do not matter.

        It is a new one if another tensor may share the memory of what has arrived.
        """
        param = self.params[0]
        grad = param.grad
        if type(grad) is not Tensor or not _is_plain(grad) or not is_alone(grad):
            if self.streams is not None:  # another one may have made it
                accelerator.use_here(grad)
            grad = torch.empty_like(
                param, memory_format=torch.contiguous_format, requires_grad=False
            )
            param.grad = grad
        return grad


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def _is_plain(grad: Tensor) -> bool:
    return grad.is_contiguous() and not grad.is_neg() and not grad.is_conj()
