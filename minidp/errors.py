"""Every exception that minidp raises while it runs, and the texts of errors.

Bad arguments raise ``TypeError`` or ``ValueError`` (or what torch raises for them).
Everything that goes wrong later is a `MiniDPError`, which is a ``RuntimeError`` because
that is what torch's DDP raises in the same places.

Logs of many ranks are often merged, and whoever reads an error has not read this code.
So each text is built by `explain`, and says which rank speaks, what was expected, what
was found, which parameters are concerned, and what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_NAMES = 10  # how many parameters a message names, where it might name thousands


class MiniDPError(RuntimeError):
    """The base class of all errors that minidp raises while it runs."""


class ReplicaMismatchError(MiniDPError):
    """The replicas differ.

    They are compared at construction, and later as ``check_replicas_every`` says.
    """


class UnfinishedReductionError(MiniDPError):
    """A backward ended before every gradient of the reduction had arrived."""


class MarkedTwiceError(MiniDPError):
    """A parameter's gradient arrived a second time in one reduction."""


class GraphChangedError(MiniDPError):
    """A backward differs from the first one, although the graph should be static."""


class GradientError(MiniDPError):
    """A gradient does not fit its slot (by dtype or shape), or cannot be averaged."""


class NonFiniteGradientError(GradientError):
    """A gradient holds NaN or infinity, which ``check_finite_grads=True`` forbids."""


class ItemCountError(MiniDPError):
    """The ranks' counts of items give no mean, or nothing averages over items."""


class UnsyncedGradientsError(MiniDPError):
    """Gradients that differ between ranks are about to be applied, or were applied."""


class LogicalRankError(MiniDPError):
    """A step does not go through all logical ranks, or not in the way it must.

    Or an audit has found that ranks have computed different bits.
    """


class DoubleStepError(MiniDPError):
    """An optimizer that already steps in the backward was told to step once more."""


class ShardedStepError(MiniDPError):
    """A step that is divided among the ranks cannot be made, or not by all of them."""


class CollectiveError(MiniDPError):
    """A collective failed, lacks a rank, or did not finish within its time limit."""


class CommHookError(MiniDPError):
    """A comm hook raised, or what it returned is not one tensor that fits."""


class ReducerFailedError(MiniDPError):
    """An earlier backward failed, and `DataParallel.reset` was not called since."""


class UnavailableError(MiniDPError, AttributeError):
    """An attribute has no value, or not yet. The text says why.

    It is an AttributeError, too, so that ``hasattr`` is false. Tools that look at all
    attributes (``torch.jit.trace``, debuggers) expect one, and would stop at any other
    error.
    """


class NativeError(MiniDPError):
    """The extension, or shared memory, is required but not available here.

    ``MINIDP_NATIVE=1`` and ``MINIDP_SHARED_MEMORY=1`` require them.
    """


class InternalError(AssertionError):
    """A mistake in minidp itself. Please report it with the traceback."""


def incomplete_averages(rank: int, ranks: Iterable[int] = ()) -> str:
    """Explain that parameters are wrong after a collective was given up on a device.

    Args:
        rank: The rank that speaks.
        ranks: Whose parameters are wrong; by default those of the rank that speaks.
    """
    whose = f"rank {listed(ranks)}" if ranks else "this rank"
    return explain(
        rank,
        f"The parameters of {whose} hold an incomplete average: an optimizer step was "
        "queued on a device behind a collective that was given up before reset(), and "
        "nobody has loaded the parameters since.",
        remedy="load a checkpoint of model and optimizers on all ranks "
        "(load_state_dict), before or after reset(); or call reset(copy_from=...) with "
        "a rank that has not made this step, such as the one that raised or was late",
    )


def misfit(
    rank: int, name: str, expected: str, found: str, remedy: str = ""
) -> GradientError:
    """Return the error for a gradient that does not fit its bucket.

    Args:
        rank: The rank on which it happened.
        name: The parameter's name.
        expected: What the bucket has room for.
        found: What came.
        remedy: Replaces the usual one, not to change parameters after wrapping.
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
    """Build the text of an error, without the parts that are empty.

    The result is "[rank r] WHAT Expected: ... Found: ... Parameters: ... What to do:
    ...". The argument ``what`` is a whole sentence. The other parts get their full stop
    here. All ``names`` are listed; for thousands of them pass ``[shortened(names)]``.
    """
    parts = {"Expected": expected, "Found": found, "Parameters": ", ".join(names)}
    parts["What to do"] = remedy
    tail = [f"{head}: {text}." for head, text in parts.items() if text]
    return " ".join([f"[rank {rank}] {what}", *tail]).replace("\n ", "\n")


def shortened(items: Sequence[object], limit: int = MAX_NAMES) -> str:
    """Join the first items by commas, and say how many more there are."""
    more = len(items) - limit
    text = ", ".join(map(str, items[:limit]))
    return f"{text} and {more} more" if more > 0 else text


def listed(ranks: Iterable[int]) -> str:
    """Return the numbers of ranks as they stand in a text: "1, 3"."""
    return ", ".join(map(str, sorted(ranks)))
