"""Assign parameters to buckets, and gradients to slots of a bucket, as integers only.

There is no tensor and no process group here, so every rule can be tested alone. A model
of five parameters, 4-byte elements, caps of 1 and 2 KiB, reduced in this order::

    bucket 0  float32 | head.bias 10 | head.weight 640          |   2,600 bytes
              offset  0              10                       650
    bucket 1  float32 | conv.bias 16 | conv.weight 144 | bn.bias 16 |  704 bytes
              offset  0              16               160         176

Slots have no padding, a bucket holds one dtype on one device, and buckets are launched
in index order on every rank. But for delayed parameters the rules are torch's, because
at three and more ranks the last bits of a sum depend on a gradient's place in its
bucket.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch

from minidp.config import UNLIMITED
from minidp.errors import InternalError


@dataclass(frozen=True)
class ParamSpec:
    """What decides on the bucket of a parameter whose gradient is averaged."""

    name: str  # dotted
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False  # expects a sparse gradient
    delayed: bool = False  # in one of the last buckets, see `delayed()`

    @cached_property
    def numel(self) -> int:
        """The number of elements of the parameter."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the parameter, and of its gradient if that is not sparse."""
        return self.numel * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the strides cover memory without holes or overlap.

        A parameter without elements is dense.
        """
        both = zip(self.stride, self.shape, strict=True)
        dims = sorted((step, length) for step, length in both if length > 1)
        ends = [1, *accumulate((length for _, length in dims), int.__mul__)]
        return self.numel == 0 or [step for step, _ in dims] == ends[:-1]

    @property
    def view_stride(self) -> tuple[int, ...]:
        """The strides of its slot, which are its own if it is dense, else row-major."""
        return self.stride if self.is_dense else row_major_stride(self.shape)


def row_major_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides (in elements) of a contiguous tensor of ``shape``."""
    lengths = [max(length, 1) for length in reversed(shape[1:])]
    steps = accumulate(lengths, int.__mul__, initial=1)
    return tuple(steps)[::-1] if shape else ()


@dataclass(frozen=True)
class Slot:
    """Where in the flat buffer of its bucket the gradient of one parameter lies."""

    param_index: int
    offset: int  # elements from the start of the buffer
    numel: int  # elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class BucketPlan:
    """The slots of one bucket, and the dtype and device that they share.

    Raises:
        InternalError: A slot does not start where the one before it ends, there is no
            slot, or a sparse bucket has several.
    """

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False
    number: int = field(default=0, compare=False)  # of the bucket, in its layout

    def __post_init__(self) -> None:
        count, end = len(self.slots), 0
        if not count or (self.sparse and count > 1):
            kind = "sparse bucket" if self.sparse else "bucket"
            raise InternalError(f"A {kind} cannot hold {count} slots.")
        for slot in self.slots:
            if slot.offset != end:
                raise InternalError(
                    f"Slot of parameter {slot.param_index} starts at {slot.offset}, "
                    f"but the slot before it ends at {end}."
                )
            end += slot.numel

    @cached_property
    def numel(self) -> int:
        """The number of elements of all slots, and of the flat buffer."""
        return sum(slot.numel for slot in self.slots)

    @property
    def nbytes(self) -> int:
        """The size of all slots in bytes."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """The parameter indices of the bucket, in slot order."""
        return tuple(slot.param_index for slot in self.slots)


@dataclass(frozen=True)
class Layout:
    """The buckets of a reducer, in the order in which they are launched.

    Raises:
        InternalError: A parameter does not have exactly one slot.
    """

    buckets: tuple[BucketPlan, ...]
    num_params: int

    def __post_init__(self) -> None:
        placed = sorted(i for bucket in self.buckets for i in bucket.indices)
        if placed != list(range(self.num_params)):
            raise InternalError(
                f"{self.num_params} parameters must each have one slot, "
                f"but the slots hold parameters {placed}."
            )

    @cached_property
    def bucket_of(self) -> tuple[int, ...]:
        """The bucket number of each parameter, by parameter index."""
        owner = {i: n for n, b in enumerate(self.buckets) for i in b.indices}
        return tuple(owner[i] for i in range(self.num_params))

    @property
    def assignment(self) -> tuple[tuple[int, ...], ...]:
        """The parameter indices of each bucket, in slot order."""
        return tuple(bucket.indices for bucket in self.buckets)


def fill(
    items: Iterable[tuple[int, Hashable, float]], limits: Sequence[int]
) -> list[list[int]]:
    """Fill buckets by torch's rule.

    Args:
        items: The number of each item, its kind and its bytes. A bucket holds items of
            one kind.
        limits: The bytes at which the first, second, ... bucket of a kind is full. The
            last one is the limit of all that follow.

    Returns:
        The numbers of the items in each bucket. Full buckets come first, in the order
        in which they became full. Those below their limit follow, by when their last
        item came; in torch these are in any order.
    """
    open_bucket: dict[Hashable, list[int]] = {}
    num_closed: Counter[Hashable] = Counter()
    filled: defaultdict[Hashable, float] = defaultdict(float)  # bytes
    closed: list[list[int]] = []
    for i, kind, nbytes in items:
        # Popped and inserted again, which keeps the dict sorted by last use.
        open_bucket[kind] = [*open_bucket.pop(kind, []), i]
        filled[kind] += nbytes
        if filled[kind] >= limits[min(num_closed[kind], len(limits) - 1)]:
            closed.append(open_bucket.pop(kind))
            filled[kind] = 0
            num_closed[kind] += 1
    return closed + list(open_bucket.values())


def assign(
    specs: Sequence[ParamSpec],
    limits: Sequence[int],
    order: Sequence[int] | None = None,
) -> list[list[int]]:
    """Fill buckets with all parameters except the delayed ones, as `fill` does.

    A sparse parameter has a bucket of its own.

    Args:
        specs: All parameters.
        limits: As in `fill`.
        order: Parameter indices in ready order. Without it they are taken by index, and
            the buckets are sorted by the smallest index in them.

    Returns:
        The parameter indices of each bucket.
    """
    numbers = range(len(specs)) if order is None else order
    items: list[tuple[int, Hashable, float]] = [
        (i, i, math.inf) if spec.sparse else (i, (spec.dtype, spec.device), spec.nbytes)
        for i, spec in ((i, specs[i]) for i in numbers)
        if not spec.delayed
    ]
    buckets = fill(items, limits)
    return sorted(buckets, key=min) if order is None else buckets


def delayed(specs: Sequence[ParamSpec]) -> list[list[int]]:
    """Return the buckets of delayed parameters, as lists of parameter indices.

    There is one of any size for each dtype and device. A sparse parameter has a bucket
    of its own.
    """
    together: dict[tuple[object, ...], list[int]] = {}
    for i, spec in enumerate(specs):
        if spec.delayed:
            alone = i if spec.sparse else None
            together.setdefault((spec.dtype, spec.device, alone), []).append(i)
    return list(together.values())


def initial_layout(specs: Sequence[ParamSpec], limits: Sequence[int]) -> Layout:
    """Return the layout to use as long as the ready order is not known.

    Buckets are filled in registration order, with these ``limits`` (`fill`), and
    launched in reverse, because a backward begins with the last layer. Those of delayed
    parameters follow.
    """
    return build_layout(specs, assign(specs, limits)[::-1] + delayed(specs))


def rebuilt_layout(
    specs: Sequence[ParamSpec],
    limits: Sequence[int],
    order: Sequence[int],
    *,
    from_the_end: bool = False,
) -> Layout:
    """Return the layout for the order in which the gradients became ready.

    Delayed parameters follow in buckets of their own.

    Args:
        specs: All parameters.
        limits: The limits of the buckets in bytes, as in `fill`.
        order: The parameter indices in ready order. It may lack delayed ones.
        from_the_end: Whether to fill buckets from the last gradient on, so that the
            last bucket gets the first limit.
    """
    step = -1 if from_the_end else 1
    assignment = assign(specs, limits, order[::step])[::step]
    return build_layout(specs, assignment + delayed(specs))


def build_layout(
    specs: Sequence[ParamSpec], assignment: Sequence[Sequence[int]]
) -> Layout:
    """Return the layout whose buckets have these parameters.

    A bucket gets the dtype and device of its first parameter. Whether the others have
    them is not checked.

    Args:
        specs: All parameters.
        assignment: The parameter indices of each bucket, in slot order.

    Raises:
        InternalError: Some parameter is not in exactly one bucket.
    """
    plans = []
    for number, members in enumerate(assignment):
        slots, offset = [], 0
        for i in members:
            spec = specs[i]
            slots.append(Slot(i, offset, spec.numel, spec.shape, spec.view_stride))
            offset += spec.numel
        head = specs[members[0]]
        kind = head.dtype, head.device, head.sparse
        plans.append(BucketPlan(tuple(slots), *kind, number=number))
    return Layout(tuple(plans), len(specs))


def chunks_by_bytes(sizes: Sequence[int], limit: int = UNLIMITED) -> list[list[int]]:
    """Return the positions 0, 1, ... of ``sizes`` cut into chunks, in order.

    A chunk ends with the size by which it reaches ``limit`` bytes, or exceeds it.
    """
    chunks: list[list[int]] = []
    filled = limit
    for i, nbytes in enumerate(sizes):
        if filled >= limit:
            chunks.append([])
            filled = 0
        chunks[-1].append(i)
        filled += nbytes
    return chunks
