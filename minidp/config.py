"""The options of a `DataParallel`, validated once and frozen."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

MIB = 2**20
DEFAULT_CAP_MB = 25
UNLIMITED = sys.maxsize
AUTO: Literal["auto"] = "auto"  # bucket_cap_mb: layouts are tried out
_MAY_BE_AUTO = ("bucket_cap_mb", "hang_timeout", "check_replicas_every")
HANG_SECONDS = 300.0  # a sixth of Gloo's limit, half of NCCL's
Unsynced = Literal["raise", "warn", "ignore"]


@dataclass(frozen=True)
class BucketCaps:
    """Upper limits of bucket sizes, in bytes (torch's rules).

    A bucket is closed by the gradient that reaches its limit, so it may exceed the
    limit by that gradient. The last limit repeats.
    """

    first_bytes: int
    rest_bytes: int
    list_bytes: tuple[int, ...] = ()

    @property
    def has_small_first(self) -> bool:
        """Whether the first bucket is smaller than the others."""
        return self.first_bytes < self.rest_bytes

    def initial_limits(self, *, one_bucket: bool) -> tuple[int, ...]:
        """Limits before the ready order is known."""
        if self.list_bytes:
            return self.list_bytes
        return (UNLIMITED,) if one_bucket else self.rebuilt_limits()

    def rebuilt_limits(self) -> tuple[int, ...]:
        """Limits once buckets follow the ready order."""
        if self.list_bytes:
            return self.list_bytes
        if self.has_small_first:
            return (self.first_bytes, self.rest_bytes)
        return (self.rest_bytes,)


def bucket_caps(
    cap_mb: float | str | None, cap_mb_list: Sequence[float] | None, first_bytes: int
) -> BucketCaps:
    """Caps from the constructor's arguments.

    Args:
        cap_mb: MiB; None means 25 MiB with a small first bucket, and "auto" starts with
            them.
        cap_mb_list: MiB per bucket, wins over ``cap_mb`` unless None or empty.
        first_bytes: size of that small first bucket, in bytes.

    Raises:
        TypeError: a cap is not a number.
        ValueError: a cap is negative or not finite, or there is a list and "auto".
    """
    if cap_mb_list is not None and len(cap_mb_list) > 0:
        if is_auto(cap_mb):
            raise ValueError(
                'bucket_cap_mb="auto" looks for the best layout by itself, but '
                f"bucket_cap_mb_list gives one: {list(cap_mb_list)}. Leave one out."
            )
        limits = tuple(_to_bytes("bucket_cap_mb_list", mb) for mb in cap_mb_list)
        return BucketCaps(max(limits), max(limits), limits)
    if cap_mb is None or is_auto(cap_mb):
        return BucketCaps(first_bytes, DEFAULT_CAP_MB * MIB)
    cap = _to_bytes("bucket_cap_mb", cap_mb)
    return BucketCaps(cap, cap)


def is_auto(cap_mb: object) -> bool:
    """Whether layouts are to be tried out."""
    return isinstance(cap_mb, str) and cap_mb == AUTO


def _to_bytes(argument: str, mb: object) -> int:
    _check_number(argument, mb, "of MiB")
    assert isinstance(mb, int | float)
    if not math.isfinite(_as_float(mb) * MIB) or mb < 0:
        raise ValueError(
            f"{argument} must be finite and not negative (MiB), but got {mb!r}; "
            "0 gives every parameter its own bucket."
        )
    return int(mb * MIB)


def _as_float(value: float) -> float:
    """Infinity for an int that no float can hold, where Python would raise."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_number(argument: str, value: object, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        other = f', or "{AUTO}"' if argument in _MAY_BE_AUTO else ""
        raise TypeError(
            f"{argument} must be a number {unit} (int or float){other}, but got "
            f"{value!r} ({type(value).__name__})."
        )


def unsynced_policy(value: object) -> Unsynced:
    """Check the option ``unsynced``.

    Raises:
        ValueError: not one of "raise", "warn", "ignore".
    """
    if value not in get_args(Unsynced):
        raise ValueError(
            f"unsynced must be one of {', '.join(map(repr, get_args(Unsynced)))}, "
            f"but got {value!r}."
        )
    return cast("Unsynced", value)


@dataclass(frozen=True)
class Safety:
    """What is watched, and what to do about it; constructor arguments, checked.

    Raises:
        ValueError, TypeError: a value that makes no sense.
    """

    unsynced: Unsynced = "raise"
    hang_timeout: float | Literal["auto"] | None = AUTO  # None: the group's own limit
    check_replicas_every: int | Literal["auto"] = AUTO  # steps; 0: never
    check_finite_grads: bool = False

    def __post_init__(self) -> None:
        unsynced_policy(self.unsynced)
        seconds = self.hang_timeout
        if seconds is not None and seconds != AUTO:
            _check_number("hang_timeout", seconds, "of seconds, or None")
            if not math.isfinite(_as_float(seconds)) or seconds <= 0:
                raise ValueError(
                    "hang_timeout must be a finite, positive number of seconds, or "
                    f"None for the process group's own limit, but got {seconds!r}."
                )
        steps = 0 if self.check_replicas_every == AUTO else self.check_replicas_every
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise TypeError(
                'check_replicas_every must be a number of steps (int), or "auto", but '
                f"got {steps!r} ({type(steps).__name__})."
            )
        if steps < 0:
            raise ValueError(
                f"check_replicas_every must not be negative, but got {steps!r}; 0 "
                "means never."
            )
        # Here, not in the middle of a backward, if it is neither true nor false.
        object.__setattr__(self, "check_finite_grads", bool(self.check_finite_grads))

    @property
    def hang_limit(self) -> float | None:
        """Seconds until it is asked who is missing; None: never."""
        return HANG_SECONDS if self.hang_timeout == AUTO else self.hang_timeout


@dataclass(frozen=True)
class SavedLayout:
    """Buckets of an earlier run, in launch order; constructor argument, well-formed."""

    buckets: tuple[tuple[str, ...], ...]  # parameter names
    rebuilt: bool  # in the ready order: they stay as they are
    elements: tuple[tuple[int, ...], ...] = ()  # of the same; (): nobody knows
    source: str = ""  # " in FILE"

    def __str__(self) -> str:
        """Short, yet different for different layouts: what ranks compare."""
        digest = hashlib.sha256(repr(self.buckets).encode()).hexdigest()[:12]
        sizes = ", ".join(str(len(names)) for names in self.buckets)
        state = "rebuilt" if self.rebuilt else "not rebuilt"
        return f"buckets of {sizes} parameters ({state}, sha256 {digest}...)"


@dataclass(frozen=True)
class ReducerConfig:
    """What the reducer needs to know of the constructor's arguments."""

    caps: BucketCaps
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    skip_all_reduce_unused_params: bool = False
    batched_grad_copy: bool = False  # divide whole buffers, not single gradients
    last_is_small: bool = False  # after the rebuild: the last bucket, not the first
    saved_layout: SavedLayout | None = None  # to start with
    tunes: bool = False  # bucket_cap_mb="auto"

    @property
    def follows_ready_order(self) -> bool:
        """Whether torch would rebuild buckets once, in the ready order."""
        return self.static_graph or not self.find_unused_parameters

    @property
    def starts_with_one_bucket(self) -> bool:
        """Whether the first iteration uses one bucket per dtype and device.

        That layout then lives for one backward only; its ready order gives the real
        one.
        """
        return self.follows_ready_order
