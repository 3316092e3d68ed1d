"""What `_desync` says when replicas differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .errors import MAX_NAMES, explain


class Finding(NamedTuple):
    """Where replicas differ."""

    rank: int  # that speaks
    step: int
    agreed: int  # the last step without a difference; -1: none
    names: Sequence[str]
    odd: Sequence[int]  # ranks where the first of them differs from most others
    rest: Sequence[int]


def drifted_apart(found: Finding) -> str:
    """The error: which parameter, on which ranks, since when."""
    rank, step, agreed, names, odd, rest = found
    if agreed < 0:
        what = (
            f"The replicas differ: at the beginning of step {step}, {names[0]} is not "
            f"the same on all ranks{_more(len(names) - 1)}."
        )
        cause = (
            "look for what changed parameters on some ranks after wrapping: a "
            "checkpoint that was loaded on one rank only (load it on all, or on rank 0 "
            "before wrapping, which broadcasts), other seeds with init_sync=False, "
            "updates by hand; what is to differ belongs to the parameters to ignore "
            "(_set_params_and_buffers_to_ignore_for_model), or pass "
            "check_replicas_every=0"
        )
    else:
        what = (
            f"The replicas have drifted apart: at the beginning of step {step}, "
            f"{names[0]} differs{_more(len(names) - 1)}. They agreed at the beginning "
            f"of step {agreed}."
        )
        cause = (
            "look at what changes parameters on some ranks only (updates by hand, "
            "load_state_dict, random numbers, unsynced='ignore')"
        )
    return explain(
        rank,
        what,
        names=names[:MAX_NAMES],
        expected=f"the bits of rank {_join(rest)}",
        found=f"other ones on rank {_join(odd)}",
        remedy=f"{cause}; load the last checkpoint on all ranks and call reset(), or "
        "wrap the module again",
    )


def local_updates(found: Finding) -> str:
    """The warning: updates inside no_sync(), and nobody averaged parameters since."""
    return explain(
        found.rank,
        "Parameters were updated inside no_sync(), where gradients stay local, and at "
        f"the synchronised backward of step {found.step} the replicas differ: nobody "
        "has averaged them in between.",
        names=found.names[:MAX_NAMES],
        remedy="if the update was to use averaged gradients, take optimizer.step() and "
        "zero_grad() out of the no_sync() block (an indentation too deep); for local "
        "SGD average the parameters before the next forward outside no_sync(); then "
        "load the last checkpoint on all ranks. This is said once",
    )


def rounding(found: Finding) -> str:
    """The warning: last bits differ."""
    rank, step, agreed, names, odd, _ = found
    since = f"after step {agreed}, when they agreed, " if agreed >= 0 else ""
    return explain(
        rank,
        f"The replicas differ a little: {since}{names[0]} has other last bits on rank "
        f"{_join(odd)}{_more(len(names) - 1)} (step {step}). Other hardware, or "
        "kernels that are not deterministic, explain as much.",
        names=names[:MAX_NAMES],
        remedy="nothing, if that is so; else look at what changes parameters on some "
        "ranks only. check_replicas_every=100 makes any difference an error. This is "
        "said once",
    )


def other_steps(rank: int, steps: Sequence[int]) -> str:
    """The error: ranks have finished different numbers of reductions."""
    return explain(
        rank,
        "The ranks are at different steps.",
        expected="equally many synchronised backwards on all ranks",
        found=", ".join(f"{n} on rank {rank}" for rank, n in enumerate(steps)),
        remedy="look for a rank that skipped or repeated a step; load the last "
        "checkpoint on all ranks, or wrap the module again",
    )


def _more(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
