"""The options of a `DataParallel`, validated once and then frozen.

The constructor validates what it is given before it sends or allocates anything, so
that a bad argument is an error of the constructor and never of a later backward.
Frozen, because all ranks compare their options at construction: an option that could
change later on one rank would make the ranks' collectives differ.
"""

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
AuditAction = Literal["raise", "warn"]
AUDIT_STEPS = 500  # audit_every="auto": an audited step may cost five others


@dataclass(frozen=True)
class BucketCaps:
    """The sizes, in bytes, at which buckets count as full, by torch's rules.

    The gradient with which a bucket reaches its limit still belongs to it, so a bucket
    may be larger than its limit. In the tuples that the methods return, the last limit
    holds for all further buckets.
    """

    first_bytes: int
    rest_bytes: int
    list_bytes: tuple[int, ...] = ()  # of bucket_cap_mb_list; (): none given

    @property
    def has_small_first(self) -> bool:
        """Whether the first bucket has a smaller limit than the rest.

        It is False for a list of limits, because that says itself what comes first.
        """
        return self.first_bytes < self.rest_bytes

    def initial_limits(self, *, one_bucket: bool) -> tuple[int, ...]:
        """Return the limits of the buckets before any rebuild, in bytes.

        Args:
            one_bucket: Whether all gradients go into one bucket without a limit, unless
                the user gave a list of limits.
        """
        if one_bucket and not self.list_bytes:
            return (UNLIMITED,)
        return self.rebuilt_limits()

    def rebuilt_limits(self) -> tuple[int, ...]:
        """Return the limits of buckets that are rebuilt in ready order, in bytes.

        They are the user's list if there is one; else that of the first bucket, if it
        is smaller, and that of the rest.
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

    Args:
        first_bytes: The limit of the first bucket where the user leaves it to us.
        bucket_cap_mb: A number holds for all buckets; None and "auto" stand for 25 MiB
            after a first bucket of ``first_bytes``.
        bucket_cap_mb_list: Replaces ``bucket_cap_mb`` unless it is empty.

    Raises:
        TypeError: A cap is not a number.
        ValueError: A cap is negative or not finite, or there is a list beside "auto".
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
    """Convert MiB to bytes.

    Raises:
        TypeError: ``mb`` is no number. The text names the ``argument``.
        ValueError: It is negative or not finite. The text names the ``argument``.
    """
    if not 0 <= _as_number(argument, mb, "of MiB") * MIB < math.inf:
        raise ValueError(
            f"{argument} must be finite and not negative (MiB), but got {mb!r}; "
            "0 gives every parameter its own bucket."
        )
    return int(mb * MIB)


def _as_number(argument: str, value: object, unit: str) -> float:
    """Return an int or float as a float. An int that is too large becomes infinity.

    Raises:
        TypeError: It is anything else. A bool is refused, too, which Python takes for
            an int, because nobody means one MiB by True. The text names ``argument``
            and ``unit``.
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
    if value not in choices:
        raise ValueError(
            f"{argument} must be one of {', '.join(map(repr, choices))}, but got "
            f"{value!r}."
        )


def _check_steps(argument: str, given: object) -> None:
    steps = 0 if given == AUTO else given
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(
            f'{argument} must be a number of steps (int), or "auto", but got {steps!r} '
            f"({type(steps).__name__})."
        )
    if steps < 0:
        raise ValueError(
            f"{argument} must not be negative, but got {steps!r}; 0 means never."
        )


@dataclass(frozen=True)
class OwnOptions:
    """The constructor's arguments that torch's DDP does not have.

    Raises:
        ValueError, TypeError: An argument is bad; the text names it.
    """

    unsynced: Unsynced = "raise"  # what to do at a step with unequal gradients
    hang_timeout: float | Literal["auto"] | None = AUTO  # s; None: the group's limit
    check_replicas_every: int | Literal["auto"] = AUTO  # in steps; 0 is never
    check_finite_grads: bool = False
    average_over: AverageOver = "ranks"
    audit_every: int | Literal["auto"] = 0  # in steps; 0 is never
    audit_action: AuditAction = "raise"  # if ranks have computed different bits

    def __post_init__(self) -> None:
        _check_choice("unsynced", self.unsynced, get_args(Unsynced))
        _check_choice("average_over", self.average_over, get_args(AverageOver))
        _check_choice("audit_action", self.audit_action, get_args(AuditAction))
        seconds = self.hang_timeout
        if seconds is not None and seconds != AUTO:
            number = _as_number("hang_timeout", seconds, "of seconds, or None")
            if not 0 < number < math.inf:
                raise ValueError(
                    "hang_timeout must be a finite, positive number of seconds, or "
                    f"None for the process group's own limit, but got {seconds!r}."
                )
        _check_steps("check_replicas_every", self.check_replicas_every)
        _check_steps("audit_every", self.audit_every)
        # bool() raises here, not in a backward, if the value is neither true nor false.
        object.__setattr__(self, "check_finite_grads", bool(self.check_finite_grads))

    @property
    def audit_steps(self) -> int:
        """Of how many steps one is audited; 0 if none is."""
        return AUDIT_STEPS if self.audit_every == AUTO else self.audit_every

    @property
    def hang_limit(self) -> float | None:
        """How many seconds a collective may wait for other ranks, 300 with "auto".

        If it is None, only the process group's own limit applies.
        """
        return HANG_SECONDS if self.hang_timeout == AUTO else self.hang_timeout


@dataclass(frozen=True)
class SavedLayout:
    """The bucket layout of an earlier run, by the parameters' names.

    A run that starts with it has the same buckets, and so the same bits, as one that
    was never stopped. Whether it fits a module is checked by
    `minidp.layout.resumed_layout`.
    """

    buckets: tuple[tuple[str, ...], ...]  # the parameter names of each bucket
    rebuilt: bool  # it follows the ready order already, and must not be rebuilt
    elements: tuple[tuple[int, ...], ...] = ()  # of each parameter; (): unknown
    source: str = ""  # " in FILE", for error messages

    def __str__(self) -> str:
        """Describe the layout in one line, by which ranks compare theirs."""
        digest = hashlib.sha256(repr(self.buckets).encode()).hexdigest()[:12]
        sizes = ", ".join(str(len(names)) for names in self.buckets)
        state = "rebuilt" if self.rebuilt else "not rebuilt"
        return f"buckets of {sizes} parameters ({state}, sha256 {digest}...)"


@dataclass(frozen=True)
class ReducerConfig:
    """The constructor's arguments that the reducer uses.

    `minidp.data_parallel.arguments.check` makes it of values that are validated
    already; it checks nothing itself.
    """

    caps: BucketCaps
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    skip_all_reduce_unused_params: bool = False
    batched_grad_copy: bool = False  # divide whole buckets, not single gradients
    lazy_bucket_allocation: bool = False  # buffers live from first copy to write-back
    # The rebuild makes the last bucket small, not the first.
    last_is_small: bool = False
    saved_layout: SavedLayout | None = None  # the buckets to start with
    tunes: bool = False  # bucket_cap_mb="auto"
    averages_items: bool = False  # average_over="items"

    @property
    def follows_ready_order(self) -> bool:
        """Whether this mode rebuilds buckets, once, in the order of ready gradients.

        If ``find_unused_parameters`` is set, that order may differ from step to step,
        so that buckets stay as they are unless the graph is static. A ``saved_layout``
        is not looked at here.
        """
        return self.static_graph or not self.find_unused_parameters
