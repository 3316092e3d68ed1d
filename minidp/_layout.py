"""Which parameter lives where: parameters -> buckets -> slots, as integers only.

No tensor and no process group appears here, so every rule can be tested alone. A model
of five parameters, 4-byte elements, caps of 1 and 2 KiB, reduced in this order::

    bucket 0  float32 | head.bias 10 | head.weight 640          |   2,600 bytes
              offset  0              10                       650
    bucket 1  float32 | conv.bias 16 | conv.weight 144 | bn.bias 16 |  704 bytes
              offset  0              16               160         176

Slots touch each other (no padding), a bucket holds one dtype on one device, and buckets
are launched in index order on every rank. The rules are torch's, because at three and
more ranks a different composition gives different last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .config import UNLIMITED
from .errors import InternalError


@dataclass(frozen=True)
class ParamSpec:
    """What the layout needs to know of one managed parameter."""

    name: str  # dotted, as users see it
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False  # its gradient is announced to be sparse
    delayed: bool = False  # travels after all others, in one message

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the dense gradient."""
        return self.numel * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the strides cover a block of memory without holes or overlap."""
        if self.numel == 0:
            return True
        expected = 1
        dims = [(st, n) for st, n in zip(self.stride, self.shape, strict=True) if n > 1]
        for step, length in sorted(dims):
            if step != expected:
                return False
            expected *= length
        return True

    @property
    def view_stride(self) -> tuple[int, ...]:
        """Strides of the slot's view: the parameter's when dense, else row-major."""
        return self.stride if self.is_dense else row_major_stride(self.shape)


def row_major_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    steps: list[int] = []
    step = 1
    for length in reversed(shape):
        steps.append(step)
        step *= max(length, 1)
    return tuple(reversed(steps))


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket; offset and numel in elements."""

    param_index: int
    offset: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: slots that tile a flat buffer of one dtype on one device."""

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False

    def __post_init__(self) -> None:
        if not self.slots:
            raise InternalError("A bucket must hold at least one slot.")
        if self.sparse and len(self.slots) != 1:
            raise InternalError(
                f"A sparse bucket holds one slot, but got {len(self.slots)}."
            )
        end = 0
        for slot in self.slots:
            if slot.offset != end:
                raise InternalError(
                    f"Slot of parameter {slot.param_index} starts at {slot.offset}, "
                    f"but the slot before it ends at {end}."
                )
            end += slot.numel

    @cached_property
    def numel(self) -> int:
        """Elements of the flat buffer."""
        return sum(slot.numel for slot in self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """Parameter indices in slot order."""
        return tuple(slot.param_index for slot in self.slots)


@dataclass(frozen=True)
class Layout:
    """All buckets in launch order; every parameter has exactly one slot."""

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
        """Bucket index of each parameter index."""
        owner = [0] * self.num_params
        for number, bucket in enumerate(self.buckets):
            for i in bucket.indices:
                owner[i] = number
        return tuple(owner)

    @property
    def assignment(self) -> tuple[tuple[int, ...], ...]:
        """Parameter indices per bucket: what ranks must agree on."""
        return tuple(bucket.indices for bucket in self.buckets)


def assign(
    specs: Sequence[ParamSpec],
    limits: Sequence[int],
    order: Sequence[int] | None = None,
) -> list[list[int]]:
    """Distribute parameters over buckets by torch's rules.

    Args:
        specs: all managed parameters.
        limits: bytes; each (dtype, device) walks through them on its own.
        order: parameter indices in ready order. None means index order, and the
            result is then sorted by the smallest index of each bucket.

    Returns:
        Parameter indices per bucket, without delayed ones. Buckets that never reached
        their limit come after the full ones, in the order in which their last parameter
        came (torch leaves that to a hash map).
    """
    open_bucket: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    open_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    cursor: dict[tuple[torch.dtype, torch.device], int] = {}
    closed: list[list[int]] = []
    for i in range(len(specs)) if order is None else order:
        spec = specs[i]
        if spec.delayed:
            continue
        if spec.sparse:
            closed.append([i])
            continue
        key = (spec.dtype, spec.device)
        # Re-inserting keeps the dict sorted by last use.
        members = open_bucket.pop(key, [])
        members.append(i)
        filled = open_bytes.get(key, 0) + spec.nbytes
        step = cursor.get(key, 0)
        if filled >= limits[step]:
            closed.append(members)
            open_bytes[key] = 0
            cursor[key] = min(step + 1, len(limits) - 1)
        else:
            open_bucket[key] = members
            open_bytes[key] = filled
    buckets = closed + list(open_bucket.values())
    return sorted(buckets, key=min) if order is None else buckets


def delayed(specs: Sequence[ParamSpec]) -> list[list[int]]:
    """Buckets of delayed parameters: one per dtype and device, of any size."""
    together: dict[tuple[object, ...], list[int]] = {}
    for i, spec in enumerate(specs):
        if spec.delayed:
            alone = i if spec.sparse else None
            together.setdefault((spec.dtype, spec.device, alone), []).append(i)
    return list(together.values())


def initial_layout(specs: Sequence[ParamSpec], limits: Sequence[int]) -> Layout:
    """The layout before any backward: registration order, last bucket launched first.

    Later layers tend to get their gradients first, so the list of buckets (not their
    inside) is reversed.
    """
    return build_layout(specs, assign(specs, limits)[::-1] + delayed(specs))


def rebuilt_layout(
    specs: Sequence[ParamSpec],
    limits: Sequence[int],
    order: Sequence[int],
    *,
    from_the_end: bool = False,
) -> Layout:
    """The layout that follows the order in which gradients became ready.

    Args:
        specs: all managed parameters.
        limits: bytes.
        order: parameter indices.
        from_the_end: the last bucket gets the first limit. Parameters then stand in
            their buckets against the order (as in torch).
    """
    if from_the_end:
        assignment = assign(specs, limits, order[::-1])[::-1]
    else:
        assignment = assign(specs, limits, order)
    return build_layout(specs, assignment + delayed(specs))


def build_layout(
    specs: Sequence[ParamSpec], assignment: Sequence[Sequence[int]]
) -> Layout:
    """Turn lists of parameter indices into slots with offsets."""
    plans = []
    for members in assignment:
        slots = []
        offset = 0
        for i in members:
            spec = specs[i]
            slots.append(Slot(i, offset, spec.numel, spec.shape, spec.view_stride))
            offset += spec.numel
        head = specs[members[0]]
        plans.append(BucketPlan(tuple(slots), head.dtype, head.device, head.sparse))
    return Layout(tuple(plans), len(specs))


def chunks_by_bytes(sizes: Sequence[int], limit: int = UNLIMITED) -> list[list[int]]:
    """Group neighbours until a group reaches ``limit`` bytes (coalesced messages)."""
    groups: list[list[int]] = [[]]
    filled = 0
    for i, nbytes in enumerate(sizes):
        groups[-1].append(i)
        filled += nbytes
        if filled >= limit:
            groups.append([])
            filled = 0
    return [group for group in groups if group]
