"""How a wrong use ended, judged from the records of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from tests.fault.play import Record
from tests.support.fresh import RankError

Ranks = frozenset[int]
REMEDY = "What to do: "


class Outcome(Enum):
    """From best to worst."""

    RIGHT = "right"
    NAMED = "named error"
    WARNED = "named warning"  # where the same may be meant: local SGD, say
    ERROR = "error"  # in time, but without rank, parameters or remedy
    LATE = "late error"  # replicas had drifted, or gradients were wrong, before it
    SILENT = "SILENT"
    HANG = "hang"  # until the group's timeout, which names nobody
    CRASH = "crash"


GOOD = {Outcome.RIGHT, Outcome.NAMED, Outcome.WARNED}


@dataclass(frozen=True)
class Verdict:
    """An outcome and what it rests on."""

    outcome: Outcome
    details: str
    recovery: str = ""  # why training did not go on after reset(); minidp only
    warned: tuple[str, ...] = ()


def judge(
    records: Sequence[Any], culprits: Ranks, names: Sequence[str], timeout: float
) -> Verdict:
    """How a pattern ended, and what came after it."""
    verdict = _judge(records, culprits, names, timeout)
    heard = tuple(text for record in records for text in getattr(record, "warned", ()))
    return replace(verdict, recovery=_recovery(records), warned=heard)


def _recovery(records: Sequence[Any]) -> str:
    for rank, record in enumerate(records):
        if isinstance(record, RankError):
            return "a rank is gone"
        if record.recovery:
            return f"rank {rank}: {record.recovery}"
    after = [record.after for record in records]
    if all(after) and _has_drifted(after):
        return "wrong gradients, or replicas differ"
    return ""


def _judge(
    records: Sequence[Any], culprits: Ranks, names: Sequence[str], timeout: float
) -> Verdict:
    """How a pattern ended.

    Args:
        records: a `Record` or a `RankError` for each rank.
        culprits: the ranks that did wrong.
        names: at least one of them must be in the culprit's error, if there are any.
        timeout: of the process group; an error that took as long is a hang.
    """
    lost = [record for record in records if isinstance(record, RankError)]
    details = " | ".join(map(str, map(_describe, records)))
    if lost:
        is_hang = all(error.kind == "Hang" for error in lost)
        return Verdict(Outcome.HANG if is_hang else Outcome.CRASH, details)
    has_drifted = _has_drifted(records)
    raised = {rank for rank, record in enumerate(records) if record.error}
    if not raised:
        warned = [
            any(_is_named(r, w, names) for w in records[r].warned) for r in culprits
        ]
        drifted = Outcome.WARNED if all(warned) else Outcome.SILENT
        return Verdict(drifted if has_drifted else Outcome.RIGHT, details)
    timed_out = [
        rank
        for rank in raised
        if records[rank].seconds > 0.8 * timeout and not records[rank].is_named
    ]
    if timed_out:
        return Verdict(Outcome.HANG, details)
    if has_drifted:
        return Verdict(Outcome.LATE, details)
    is_named = all(
        records[rank].is_argument  # a plain TypeError or ValueError, as torch raises
        or _is_named(rank, records[rank].error, names if rank in culprits else ())
        for rank in raised
    )
    return Verdict(Outcome.NAMED if is_named else Outcome.ERROR, details)


def _is_named(rank: int, error: str, names: Sequence[str]) -> bool:
    """Whether an error says who speaks, about which parameters, and what to do."""
    knows_names = not names or any(name in error for name in names)
    return f"[rank {rank}]" in error and REMEDY in error and knows_names


def _has_drifted(records: Sequence[Record]) -> bool:
    """Whether replicas differed after a step, or a step used wrong gradients."""
    if not all(right for record in records for right in record.is_right):
        return True
    for states in zip(*(record.steps for record in records), strict=False):
        first = states[0]
        for other in states[1:]:
            if other.keys() != first.keys():
                return True
            if not all(_same_bits(first[n], other[n]) for n in first):
                return True
    return False


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        torch.nan_to_num(a, nan=12345.0), torch.nan_to_num(b, nan=12345.0)
    )


def _describe(record: Any) -> str:
    if isinstance(record, RankError):
        return f"{record.kind} {record.exit_code or ''}"
    text = record.error.replace("\n", " ")[:400] or "no error"
    return f"{len(record.steps)} steps, {record.seconds:.1f} s, {text}"
