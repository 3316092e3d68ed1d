"""Every exception that minidp raises while it runs, and how their text is built.

Bad arguments raise ``TypeError`` or ``ValueError`` (or what torch raises for them);
everything that goes wrong later is a `MiniDPError`, which is a ``RuntimeError`` because
that is what torch's DDP raises in the same places.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMES = 10  # of parameters, where a message may grow without limit


class MiniDPError(RuntimeError):
    """Base of the run-time errors below."""


class ReplicaMismatchError(MiniDPError):
    """The replicas differ: at construction, or later (``check_replicas_every``)."""


class UnfinishedReductionError(MiniDPError):
    """A backward ended before every gradient of the reduction had arrived."""


class MarkedTwiceError(MiniDPError):
    """A parameter's gradient arrived a second time in one reduction."""


class GraphChangedError(MiniDPError):
    """``static_graph=True`` was promised, but the graph is not the first one."""


class GradientError(MiniDPError):
    """A gradient does not fit its slot (dtype, layout, shape)."""


class NonFiniteGradientError(GradientError):
    """A gradient holds NaN or infinity (``check_finite_grads=True``)."""


class UnsyncedGradientsError(MiniDPError):
    """An optimizer is about to apply gradients that differ between ranks."""


class DoubleStepError(MiniDPError):
    """An optimizer that steps in the backward is told to step once more."""


class CollectiveError(MiniDPError):
    """A collective failed or did not finish within its group's timeout."""


class CommHookError(MiniDPError):
    """A comm hook raised, or what it returned is not one tensor that fits."""


class ReducerFailedError(MiniDPError):
    """An earlier backward failed and `DataParallel.reset` has not been called."""


class NativeError(MiniDPError):
    """The native kernels are required, but cannot be built or loaded."""


class InternalError(AssertionError):
    """A mistake in minidp itself; please report it with the traceback."""


def lost_hooks(rank: int, names: Sequence[str]) -> str:
    """The text for parameters whose grad hooks are gone."""
    return explain(
        rank,
        "Parameters lost their grad hooks, so their gradients cannot be averaged.",
        names=names,
        remedy="do not cast or move a module after wrapping it (.double(), .half(), "
        ".to()); wrap it again instead",
    )


def frozen_here(rank: int, names: Sequence[str]) -> str:
    """The text for parameters that are frozen on one rank only."""
    return explain(
        rank,
        "Parameters are frozen on this rank, but other ranks have gradients of them.",
        names=names,
        remedy="freeze and unfreeze on all ranks alike, best before wrapping; call "
        "reset() on all ranks to go on",
    )


def explain(
    rank: int,
    what: str,
    *,
    names: Sequence[str] = (),
    expected: str = "",
    found: str = "",
    remedy: str = "",
) -> str:
    """The text of an error, always in the same order.

    Args:
        rank: group rank of the process that speaks.
        what: one sentence, without rank.
        names: dotted names of all parameters concerned.
        expected: what should have been there.
        found: what was there instead.
        remedy: what the reader can do next.
    """
    parts = [f"[rank {rank}] {what}"]
    if expected:
        parts.append(f"Expected: {expected}.")
    if found:
        parts.append(f"Found: {found}.")
    if names:
        parts.append(f"Parameters: {', '.join(names)}.")
    if remedy:
        parts.append(f"What to do: {remedy}.")
    return " ".join(parts).replace("\n ", "\n")  # `what` may end a line
