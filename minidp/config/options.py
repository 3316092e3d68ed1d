"""Validate the options of a `DataParallel` once, and freeze them."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

MIB = 2**20
DEFAULT_CAP_MB = 25
UNLIMITED = sys.maxsize
AUTO: Literal["auto"] = "auto"
HANG_SECONDS = 300.0  # a sixth of Gloo's limit, half of NCCL's
Unsynced = Literal["raise", "warn", "ignore"]
AverageOver = Literal["ranks", "items"]


@dataclass(frozen=True)
class BucketCaps:
    """Upper limits of bucket sizes in bytes, by torch's rules.

    The gradient that reaches a bucket's limit still belongs to the bucket. In the
    tuples that methods return, the last limit holds for all further buckets.
    """

    first_bytes: int
    rest_bytes: int
    list_bytes: tuple[int, ...] = ()  # of bucket_cap_mb_list; (): none given

    @property
    def has_small_first(self) -> bool:
        """Return whether the first cap is smaller than the rest; False for a list."""
        return self.first_bytes < self.rest_bytes

    def initial_limits(self, *, one_bucket: bool) -> tuple[int, ...]:
        """Return the limits (bytes) of the buckets before any rebuild.

        ``one_bucket``: put all into one bucket without limit, unless there is a list.
        """
        if one_bucket and not self.list_bytes:
            return (UNLIMITED,)
        return self.rebuilt_limits()

    def rebuilt_limits(self) -> tuple[int, ...]:
        """Return the limits (bytes) for buckets that are rebuilt in ready order.

        The list, if given; else the first cap, if it is smaller, and the rest's.
        """
        if self.list_bytes:
            return self.list_bytes
        both = (self.first_bytes, self.rest_bytes)
        return both if self.has_small_first else both[1:]


def bucket_caps(
    first_bytes: int,
    *,
    bucket_cap_mb: float | str | None = None,
    bucket_cap_mb_list: Sequence[float] | None = None,
) -> BucketCaps:
    """Convert the constructor's bucket caps from MiB to bytes.

    A list replaces ``bucket_cap_mb`` unless it is empty. A number is for all buckets;
    None and "auto" are 25 MiB, after a first bucket of ``first_bytes``. TypeError or
    ValueError for a bad cap, or a list beside "auto".
    """
    if bucket_cap_mb_list is not None and len(bucket_cap_mb_list) > 0:
        if bucket_cap_mb == AUTO:
            raise ValueError(
                'bucket_cap_mb="auto" looks for the best layout by itself, but '
                f"bucket_cap_mb_list gives one: {list(bucket_cap_mb_list)}. Leave one "
                "out."
            )
        limits = tuple(_to_bytes("bucket_cap_mb_list", mb) for mb in bucket_cap_mb_list)
        return BucketCaps(max(limits), max(limits), limits)
    if bucket_cap_mb is None or bucket_cap_mb == AUTO:
        return BucketCaps(first_bytes, DEFAULT_CAP_MB * MIB)
    cap = _to_bytes("bucket_cap_mb", bucket_cap_mb)
    return BucketCaps(cap, cap)


def _to_bytes(argument: str, mb: Any) -> int:
    """Return ``mb`` MiB in bytes; ValueError if negative or not finite.

    TypeError if it is no number. Errors name ``argument``.
    """
    if not 0 <= _as_number(argument, mb, "of MiB") * MIB < math.inf:
        raise ValueError(
            f"{argument} must be finite and not negative (MiB), but got {mb!r}; "
            "0 gives every parameter its own bucket."
        )
    return int(mb * MIB)


def _as_number(argument: str, value: object, unit: str) -> float:
    """Return an int or float as float, infinity for a huge int; else raise TypeError.

    Also for a bool. ``argument`` and ``unit`` are for the error's text.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        other = "" if argument == "bucket_cap_mb_list" else f', or "{AUTO}"'
        raise TypeError(
            f"{argument} must be a number {unit} (int or float){other}, but got "
            f"{value!r} ({type(value).__name__})."
        )
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_choice(argument: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of the argument's ``choices``."""
    if value not in choices:
        raise ValueError(
            f"{argument} must be one of {', '.join(map(repr, choices))}, but got "
            f"{value!r}."
        )


@dataclass(frozen=True)
class OwnOptions:
    """Hold arguments that torch's DDP lacks; ValueError or TypeError for a bad one."""

    unsynced: Unsynced = "raise"  # at a step with gradients that differ between ranks
    hang_timeout: float | Literal["auto"] | None = AUTO  # s; None: the group's limit
    check_replicas_every: int | Literal["auto"] = AUTO  # steps; 0: never
    check_finite_grads: bool = False
    average_over: AverageOver = "ranks"

    def __post_init__(self) -> None:
        _check_choice("unsynced", self.unsynced, get_args(Unsynced))
        _check_choice("average_over", self.average_over, get_args(AverageOver))
        seconds = self.hang_timeout
        if seconds is not None and seconds != AUTO:
            number = _as_number("hang_timeout", seconds, "of seconds, or None")
            if not 0 < number < math.inf:
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
        # bool() raises here, not in a backward, if the value is neither true nor false.
        object.__setattr__(self, "check_finite_grads", bool(self.check_finite_grads))

    @property
    def hang_limit(self) -> float | None:
        """Seconds a collective may wait for other ranks ("auto": 300).

        None: only the process group's own limit applies.
        """
        return HANG_SECONDS if self.hang_timeout == AUTO else self.hang_timeout


@dataclass(frozen=True)
class SavedLayout:
    """Hold the bucket layout of an earlier run, by parameter names, to start with.

    Buckets are rebuilt once after that, unless ``rebuilt``. Checks nothing: whether it
    fits a module, see `resumed_layout`.
    """

    buckets: tuple[tuple[str, ...], ...]  # parameter names of each bucket
    rebuilt: bool  # True: follows the ready order already, so it is not rebuilt
    elements: tuple[tuple[int, ...], ...] = ()  # of each parameter; (): unknown
    source: str = ""  # " in FILE", for error messages

    def __str__(self) -> str:
        """Return bucket sizes and a hash of the names: ranks compare this text."""
        digest = hashlib.sha256(repr(self.buckets).encode()).hexdigest()[:12]
        sizes = ", ".join(str(len(names)) for names in self.buckets)
        state = "rebuilt" if self.rebuilt else "not rebuilt"
        return f"buckets of {sizes} parameters ({state}, sha256 {digest}...)"


@dataclass(frozen=True)
class ReducerConfig:
    """Hold the constructor's arguments that the reducer uses; checks nothing itself.

    Made of validated values by `data_parallel.arguments.check`.
    """

    caps: BucketCaps
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    skip_all_reduce_unused_params: bool = False
    batched_grad_copy: bool = False  # divide whole buckets, not single gradients
    lazy_bucket_allocation: bool = False  # buffers live from first copy to write-back
    last_is_small: bool = False  # after the rebuild the last bucket, not the first
    saved_layout: SavedLayout | None = None  # the initial layout
    tunes: bool = False  # bucket_cap_mb="auto"
    averages_items: bool = False  # average_over="items": over what ranks counted

    @property
    def follows_ready_order(self) -> bool:
        """Return whether the mode lets buckets be rebuilt, once, in ready order.

        False with ``find_unused_parameters`` unless the graph is static. A
        ``saved_layout`` is not looked at.
        """
        return self.static_graph or not self.find_unused_parameters
