"""Define every exception that minidp raises while it runs, and build error texts.

Bad arguments raise ``TypeError`` or ``ValueError`` (or what torch raises for them);
everything that goes wrong later is a `MiniDPError`, which is a ``RuntimeError`` because
that is what torch's DDP raises in the same places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_NAMES = 10  # of parameters, where a message may grow without limit


class MiniDPError(RuntimeError):
    """Base class of all errors that minidp raises while it runs."""


class ReplicaMismatchError(MiniDPError):
    """The replicas differ: at construction, or later (``check_replicas_every``)."""


class UnfinishedReductionError(MiniDPError):
    """A backward ended before every gradient of the reduction had arrived."""


class MarkedTwiceError(MiniDPError):
    """A parameter's gradient arrived a second time in one reduction."""


class GraphChangedError(MiniDPError):
    """``static_graph=True`` was promised, but the graph is not the first one."""


class GradientError(MiniDPError):
    """A gradient does not fit its slot (dtype, shape ...), or cannot be averaged."""


class NonFiniteGradientError(GradientError):
    """A gradient holds NaN or infinity (``check_finite_grads=True``)."""


class ItemCountError(MiniDPError):
    """Ranks' item counts give no mean (``average_over="items"``)."""


class UnsyncedGradientsError(MiniDPError):
    """Gradients that differ between ranks are about to be applied, or were, by hand."""


class DoubleStepError(MiniDPError):
    """An optimizer that steps in the backward is told to step once more."""


class CollectiveError(MiniDPError):
    """A collective failed, lacks a rank, or did not finish within its time limit."""


class CommHookError(MiniDPError):
    """A comm hook raised, or what it returned is not one tensor that fits."""


class ReducerFailedError(MiniDPError):
    """An earlier backward failed and `DataParallel.reset` has not been called."""


class UnavailableError(MiniDPError, AttributeError):
    """An attribute has no value now, or never, and this says why; hasattr() is False.

    Tools look at all attributes (``torch.jit.trace``, debuggers): they expect an
    AttributeError of those without a value, and would stop at any other error.
    """


class NativeError(MiniDPError):
    """The native kernels, or shared memory, are required, but not available here."""


class InternalError(AssertionError):
    """A mistake in minidp itself; please report it with the traceback."""


def lost_hooks(rank: int, names: Sequence[str]) -> str:
    """Return the error text for parameters whose grad hooks do not run any more."""
    return explain(
        rank,
        "Parameters lost their grad hooks, so their gradients cannot be averaged.",
        names=names,
        remedy="do not cast or move a module after wrapping it (.double(), .half(), "
        ".to()); wrap it again instead",
    )


def views_of_both(rank: int, names: Sequence[str]) -> str:
    """Return the error text for views of parameters that two wrappers average."""
    return explain(
        rank,
        "Two wrappers averaged the same parameters in one backward, and at least one "
        "has gradient_as_bucket_view=True: its bucket is the .grad that the other one "
        "reads and writes, and travels meanwhile.",
        names=names,
        remedy="leave that option out of both wrappers, or run a backward for each of "
        "the losses; call reset() on all ranks, and zero_grad(), to go on",
    )


def unreached(rank: int, name: str) -> str:
    """Return the error text for a gradient of a bucket that no rank reduces."""
    return explain(
        rank,
        "A gradient arrived, but no rank's forward reached its parameter: its bucket "
        "is not reduced (skip_all_reduce_unused_params=True).",
        names=[name],
        remedy="make the loss of what forward() returns alone, or leave that option "
        "out; call reset() on all ranks to go on",
    )


def frozen_here(rank: int, names: Sequence[str]) -> str:
    """Return the error text for parameters frozen on this rank but not on others."""
    return explain(
        rank,
        "Parameters are frozen on this rank, but other ranks have gradients of them.",
        names=names,
        remedy="freeze and unfreeze on all ranks alike, best before wrapping; call "
        "reset() on all ranks to go on",
    )


def misfit(
    rank: int, name: str, expected: str, found: str, remedy: str = ""
) -> GradientError:
    """Return the error for a gradient of ``name`` that does not fit its bucket.

    ``remedy`` replaces the usual one: not to change parameters after wrapping.
    """
    usual = (
        "do not change dtype, shape or layout of a parameter or of its .grad after "
        "wrapping; wrap the module again instead"
    )
    text = explain(
        rank,
        "A gradient does not fit its bucket.",
        names=[name],
        expected=expected,
        found=found,
        remedy=remedy or usual,
    )
    return GradientError(text)


def explain(
    rank: int,
    what: str,
    *,
    names: Sequence[str] = (),
    expected: str = "",
    found: str = "",
    remedy: str = "",
) -> str:
    """Return "[rank r] what Expected: ... Found: ... Parameters: ... What to do: ...".

    Empty parts are left out. ``what`` is a sentence; a full stop follows other parts.
    """
    parts = {"Expected": expected, "Found": found, "Parameters": ", ".join(names)}
    parts["What to do"] = remedy
    tail = [f"{head}: {text}." for head, text in parts.items() if text]
    return " ".join([f"[rank {rank}] {what}", *tail]).replace("\n ", "\n")


def listed(ranks: Iterable[int]) -> str:
    """Return "1, 3": numbers of ranks for a text."""
    return ", ".join(map(str, sorted(ranks)))
