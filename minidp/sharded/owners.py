"""Decide which rank owns which parameter, and sort the slots of buckets by owner.

A parameter has one owner, which keeps it for good, because the optimizer's state lies
there. So the choice does not depend on buckets, which are rebuilt. In a bucket the
slots of one owner are neighbours, and among them those of one optimizer::

    bucket 3 | rank 0: a, c (SGD)  e (Muon) | rank 1: b (SGD)  d, f (Muon) |

So what a rank gets of a bucket is one stretch of memory, and so is what it gives back
after the step of one optimizer.

A large parameter may belong to all ranks: each of them owns some of its rows. Such a
parameter has a bucket of its own, in which the rows of a rank are its stretch::

    bucket 4 | rank 0: rows 0 to 4 of g | rank 1: rows 5 to 9 of g |

Rows are divided as ``torch.chunk`` and ``DTensor`` do it, so that a checkpoint can tell
torch which ones a rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from minidp.errors import InternalError
from minidp.layout import BucketPlan, Layout, ParamSpec, Slot, row_major_stride

ALL = -1  # in place of the owner of a parameter whose rows are divided

# Torch's kernels for 16 bits, and those of fused optimizers, round the last elements of
# a tensor otherwise than those before them, which they take up to so many at a time.
# So there a cut lies at a multiple of that.
_HALF, _AT_A_TIME = (torch.float16, torch.bfloat16), 64


class Stretch(NamedTuple):
    """Neighbouring slots of a bucket."""

    slots: range  # their numbers
    start: int  # their first element in the bucket
    stop: int  # the element after the last one

    @property
    def numel(self) -> int:
        """How many elements there are."""
        return self.stop - self.start

    def chunks(self, plan: BucketPlan, limit: int) -> list[Stretch]:
        """Divide the stretch between slots; the last slots come first.

        Args:
            plan: The bucket.
            limit: A chunk ends when it has so many elements, or more.
        """
        found, stop, last = [], self.stop, self.slots.stop
        for k in reversed(self.slots):
            start = plan.slots[k].offset
            if stop - start >= limit or k == self.slots.start:
                found.append(Stretch(range(k, last), start, stop))
                stop, last = start, k
        return found


@dataclass(frozen=True)
class Owners:
    """Who steps which parameter.

    Args:
        size: The number of ranks.
        of: The owner of each parameter, or `ALL`, by parameter index.
        stepper: The number of the optimizer that steps it, by parameter index.
        rows: For each parameter of `ALL` how many rows are divided, else 0.

    Raises:
        InternalError: The lists do not fit, or an owner is no rank.
    """

    size: int
    of: tuple[int, ...]
    stepper: tuple[int, ...]
    rows: tuple[int, ...] = field(repr=False)

    def __post_init__(self) -> None:
        are_ranks = all(
            0 <= rank < self.size or (rank == ALL and rows > 0)
            for rank, rows in zip(self.of, self.rows, strict=True)
        )
        if len(self.of) != len(self.stepper) or not are_ranks:
            raise InternalError(f"no owners of parameters: {self}")

    def is_split(self, i: int) -> bool:
        """Return whether each rank owns some rows of a parameter."""
        return self.of[i] == ALL

    def has_part(self, rank: int, i: int) -> bool:
        """Return whether a rank owns a parameter, or some of its rows."""
        return self.of[i] in (rank, ALL)

    def rows_of(self, rank: int, i: int) -> slice:
        """Return which rows of a divided parameter a rank owns."""
        rows = self.rows[i]
        each = _rows_each(rows, self.size)
        return slice(min(rank * each, rows), min(rank * each + each, rows))

    def split(self, rank: int, stepper: int | None = None) -> dict[int, slice]:
        """Return the rows that a rank owns of divided parameters, by index.

        With the number of an optimizer, only of those that it steps.
        """
        own = self.owned_by(rank, stepper)
        return {i: self.rows_of(rank, i) for i in own if self.is_split(i)}

    def owned_by(self, rank: int, stepper: int | None = None) -> list[int]:
        """Return the indices of the parameters of which a rank owns all or some rows.

        With the number of an optimizer, only those that it steps.
        """
        pairs = enumerate(self.stepper)
        return [i for i, s in pairs if self.has_part(rank, i) and stepper in (None, s)]

    def arranged(self, layout: Layout) -> Layout:
        """Return the layout with the slots of each bucket sorted by owner.

        A divided parameter gets a bucket of its own, before the rest of its bucket,
        so that it need not wait for that.
        """
        plans = [part for plan in layout.buckets for part in self._apart(plan)]
        numbered = [replace(plan, number=n) for n, plan in enumerate(plans)]
        return Layout(tuple(numbered), layout.num_params)

    def _apart(self, plan: BucketPlan) -> list[BucketPlan]:
        split = [s for s in plan.slots if self.is_split(s.param_index)]
        whole = [s for s in plan.slots if not self.is_split(s.param_index)]
        found = [replace(plan, slots=(replace(slot, offset=0),)) for slot in split]
        return [*found, self._arranged(plan, whole)] if whole else found

    def _arranged(self, plan: BucketPlan, slots: Sequence[Slot]) -> BucketPlan:
        def place(slot: Slot) -> tuple[int, int]:
            return self.of[slot.param_index], self.stepper[slot.param_index]

        slots = sorted(slots, key=place)
        offsets = accumulate((slot.numel for slot in slots), initial=0)
        moved = [
            replace(slot, offset=offset)
            for slot, offset in zip(slots, offsets, strict=False)
        ]
        return replace(plan, slots=tuple(moved))

    def stretches(self, plan: BucketPlan, stepper: int | None = None) -> list[Stretch]:
        """Return for each rank what it owns of an arranged bucket.

        Args:
            plan: The bucket.
            stepper: Leave out what other optimizers step than that of this number.
        """
        if self.is_split(plan.indices[0]):
            return self._stretches_of_rows(plan, stepper)
        found, start = [], 0
        for rank in range(self.size):
            own = [
                k
                for k, i in enumerate(plan.indices)
                if self.of[i] == rank and stepper in (None, self.stepper[i])
            ]
            if own:
                first, last = plan.slots[own[0]], plan.slots[own[-1]]
                stop = last.offset + last.numel
                found.append(Stretch(range(own[0], own[-1] + 1), first.offset, stop))
                start = stop
            else:
                found.append(Stretch(range(0), start, start))
        return found

    def _stretches_of_rows(
        self, plan: BucketPlan, stepper: int | None
    ) -> list[Stretch]:
        (i,) = plan.indices
        if stepper not in (None, self.stepper[i]):
            return [Stretch(range(0), 0, 0)] * self.size
        width = plan.numel // self.rows[i]
        rows = [self.rows_of(rank, i) for rank in range(self.size)]
        return [Stretch(range(1), r.start * width, r.stop * width) for r in rows]


def _rows_each(rows: int, ranks: int) -> int:
    return -(-rows // ranks)


def rows_to_divide(spec: ParamSpec, ranks: int, *, is_fused: bool = False) -> int:
    """Return how many rows of a parameter can be divided among ranks, or 0.

    It must lie in memory row by row, and each rank must get a row. A parameter of
    ``float16`` or ``bfloat16``, or of a fused optimizer, is divided only if that
    changes no bits.
    """
    rows = spec.shape[0] if spec.shape else 0
    each = _rows_each(rows, ranks)
    is_row_major = spec.stride == row_major_stride(spec.shape)
    if ranks == 1 or not spec.numel or not is_row_major or each * (ranks - 1) >= rows:
        return 0
    cut = each * (spec.numel // rows)
    needs_multiple = is_fused or spec.dtype in _HALF
    return 0 if needs_multiple and cut % _AT_A_TIME else rows


def balanced(
    sizes: Sequence[int],
    steppers: Sequence[int],
    ranks: int,
    rows: Sequence[int] = (),
) -> Owners:
    """Give each parameter an owner, so that ranks have about equally many bytes.

    The largest ones are given away first, each to the rank that has least so far. That
    is done for one optimizer after the other, because their states differ in size.
    Among parameters of one size the last registered ones come first, as in the buckets,
    so that neighbours of one size are taken in turn.

    Args:
        sizes: The bytes of each parameter.
        steppers: The number of the optimizer that steps it.
        ranks: How many ranks there are.
        rows: How many rows of each parameter are divided among all ranks, or 0. Without
            it no parameter is divided.
    """
    rows = tuple(rows) or (0,) * len(sizes)
    owners, total = [ALL if each else 0 for each in rows], [0] * ranks
    for stepper in sorted(set(steppers)):
        loads = [0] * ranks
        mine = [i for i, s in enumerate(steppers) if s == stepper and not rows[i]]
        for i in sorted(mine, key=lambda i: (-sizes[i], -i)):
            rank = min(range(ranks), key=lambda r: (loads[r], total[r], r))
            owners[i] = rank
            loads[rank] += sizes[i]
            total[rank] += sizes[i]
    return Owners(ranks, tuple(owners), tuple(steppers), rows)
