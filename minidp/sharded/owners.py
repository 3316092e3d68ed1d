"""Decide which rank owns which parameter, and sort the slots of buckets by owner.

A parameter has one owner, which keeps it for good, because the optimizer's state lies
there. So the choice does not depend on buckets, which are rebuilt. In a bucket the
slots of one owner are neighbours, and among them those of one optimizer::

    bucket 3 | rank 0: a, c (SGD)  e (Muon) | rank 1: b (SGD)  d, f (Muon) |

So what a rank gets of a bucket is one stretch of memory, and so is what it gives back
after the step of one optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from minidp.errors import InternalError
from minidp.layout import BucketPlan, Layout


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
        of: The owner of each parameter, by parameter index.
        stepper: The number of the optimizer that steps it, by parameter index.

    Raises:
        InternalError: The two lists do not fit, or an owner is no rank.
    """

    size: int
    of: tuple[int, ...]
    stepper: tuple[int, ...]

    def __post_init__(self) -> None:
        are_ranks = all(0 <= rank < self.size for rank in self.of)
        if len(self.of) != len(self.stepper) or not are_ranks:
            raise InternalError(f"no owners of parameters: {self}")

    def owned_by(self, rank: int, stepper: int | None = None) -> list[int]:
        """Return the indices of the parameters that a rank owns, of all optimizers.

        With the number of an optimizer, only those that it steps.
        """
        pairs = enumerate(zip(self.of, self.stepper, strict=True))
        return [i for i, (owner, s) in pairs if owner == rank and stepper in (None, s)]

    def arranged(self, layout: Layout) -> Layout:
        """Return the layout with the slots of each bucket sorted by owner."""
        return Layout(tuple(map(self._arranged, layout.buckets)), layout.num_params)

    def _arranged(self, plan: BucketPlan) -> BucketPlan:
        def place(k: int) -> tuple[int, int]:
            i = plan.slots[k].param_index
            return self.of[i], self.stepper[i]

        slots = [plan.slots[k] for k in sorted(range(len(plan.slots)), key=place)]
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


def balanced(sizes: Sequence[int], steppers: Sequence[int], ranks: int) -> Owners:
    """Give each parameter an owner, so that ranks have about equally many bytes.

    The largest ones are given away first, each to the rank that has least so far. That
    is done for one optimizer after the other, because their states differ in size.
    Among parameters of one size the last registered ones come first, as in the buckets,
    so that neighbours of one size are taken in turn.

    Args:
        sizes: The bytes of each parameter.
        steppers: The number of the optimizer that steps it.
        ranks: How many ranks there are.
    """
    owners, total = [0] * len(sizes), [0] * ranks
    for stepper in sorted(set(steppers)):
        loads = [0] * ranks
        mine = [i for i, each in enumerate(steppers) if each == stepper]
        for i in sorted(mine, key=lambda i: (-sizes[i], -i)):
            rank = min(range(ranks), key=lambda r: (loads[r], total[r], r))
            owners[i] = rank
            loads[rank] += sizes[i]
            total[rank] += sizes[i]
    return Owners(ranks, tuple(owners), tuple(steppers))
