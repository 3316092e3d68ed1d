"""What the guard says: which mistake it was, and what to do about that one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ._ledger import Origin
from ._overrides import passing
from ._phase import Phase
from ._reducer import Reducer
from .errors import explain

_ON_ALL_RANKS = "call sync_gradients() on all ranks before the update"
_MEANT = (
    "if replicas are meant to differ for a while (local SGD), update inside no_sync(), "
    "too"
)
# What happened, and what to do instead.
_CAUSES = {
    Origin.QUIET: (
        "every backward since the last averaged one belongs to a forward inside "
        "no_sync()",
        "run the last forward and backward before the update outside no_sync(), or "
        f"{_ON_ALL_RANKS}; {_MEANT}",
    ),
    Origin.AGAIN: (
        "a backward through outputs of the wrapper came after the one that averaged "
        "(two forwards, then two backwards; or one graph twice)",
        f"run one backward over the sum of the losses, or {_ON_ALL_RANKS}",
    ),
    Origin.NESTED: (
        "a layer runs several times under checkpoint(..., use_reentrant=True)",
        "pass use_reentrant=False",
    ),
}
_GO_ON = "call reset() on all ranks, then zero_grad(); the next batch may follow"
_ALONE = (
    "the module ran without its wrapper (model.module(x), another method, a part; "
    "after attach() model.forward(x), or inside alone())"
)
_INSTEAD = (
    f"{_ALONE} instead of model(x)",
    "call the wrapper, model(x); other methods can be called from forward()",
)
_BESIDES = (
    f"{_ALONE}, or a loss was made of its parameters alone, besides model(x)",
    "add that loss to the one of model(x), for one backward over the sum, or "
    f"{_ON_ALL_RANKS}; run a penalty that is equal on all ranks inside no_sync()",
)


def why_local(origins: Iterable[Origin], *, model_ran: bool) -> tuple[str, str]:
    """How gradients became local, and what to do about it.

    Args:
        origins: of the gradients.
        model_ran: the wrapper was called since the last update.
    """
    found = set(origins)
    parts = [_CAUSES[origin] for origin in Origin if origin in found & _CAUSES.keys()]
    if Origin.OUTSIDE in found:
        parts.append(_BESIDES if model_ran else _INSTEAD)
    remedy = "; ".join(do for _, do in parts)
    if Origin.QUIET in found:  # the first of them
        meant = f"{_MEANT} (or {passing(unsynced='ignore')})"
        remedy = remedy.replace(_MEANT, meant)
    return "; and ".join(what for what, _ in parts), remedy


def local_gradients(reducer: Reducer, local: Sequence[int], *, model_ran: bool) -> str:
    """An optimizer is about to apply gradients that stayed local."""
    origins = (reducer.ledger.origins[i] for i in local)
    what, remedy = why_local(origins, model_ran=model_ran)
    return explain(
        reducer.rank,
        f"Gradients were never averaged over ranks: {what}.",
        names=[reducer.names[i] for i in local],
        remedy=remedy,
    )


def skipped_alone(reducer: Reducer, names: Sequence[str], who: str) -> str:
    """This rank left out a backward, and steps with zeros; others do not."""
    return explain(
        reducer.rank,
        "A forward announced a synchronised backward that never came on this rank, and "
        f"an optimizer is about to step with gradients of zeros. {who}",
        names=names,
        expected="a backward that all ranks leave out, or none",
        remedy="decide on all ranks alike, for example by an all_reduce of the "
        "condition; or run backward() on a loss multiplied by zero",
    )


def unfinished_at_step(reducer: Reducer) -> str:
    """An optimizer is about to step; gradients of the last backward are missing."""
    names = [reducer.names[i] for i in reducer.countdown.missing()]
    if reducer.phase.now is Phase.REDUCING:
        return explain(
            reducer.rank,
            "The last backward did not finish its reduction: it raised, or was "
            "interrupted, before it brought all gradients.",
            names=names,
            remedy=_GO_ON,
        )
    return explain(
        reducer.rank,
        "The last backward did not finish its reduction.",
        names=names,
        expected="a gradient for every parameter before optimizer.step()",
        found="no gradient for the parameters below",
        remedy=f"{passing(find_unused_parameters=True)} if they are unused on purpose, "
        "freeze them before wrapping, or run the backward that brings them; call "
        "reset() on all ranks to go on",
    )


def unfinished_at_forward(reducer: Reducer) -> str:
    """Which gradients are missing, with the phrases that scripts look for."""
    rank, missing = reducer.rank, reducer.countdown.missing()
    names = [reducer.names[i] for i in missing]
    head = (
        "Expected to have finished reduction in the prior iteration before starting a "
        "new one."
    )
    if reducer.phase.now is Phase.REDUCING:
        return explain(
            rank,
            f"{head} The last backward raised, or was interrupted, before it brought "
            "all gradients.",
            names=names,
            remedy=_GO_ON,
        )
    expected, indices = reducer.expected, " ".join(map(str, missing))
    return explain(
        rank,
        f"{head} This error indicates that {expected.cause_of_missing}.\n"
        f"Parameter indices which did not receive grad for rank {rank}: {indices}\n"
        f"Parameters which did not receive grad for rank {rank}: {', '.join(names)}.\n",
        remedy=f"{expected.remedy_for_missing}; then call reset() on all ranks, and "
        "zero_grad(). To log the unused parameters of every backward, set the "
        "environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL",
    )


def failed_before(reducer: Reducer, so: str) -> str:
    """An earlier backward failed, and nobody called reset()."""
    is_ctrl_c = reducer.failure.startswith(KeyboardInterrupt.__name__)
    return f"An earlier backward {'was interrupted' if is_ctrl_c else 'failed'}; {so}."


def double_step(rank: int) -> str:
    """An optimizer that steps in the backward is told to step once more."""
    return explain(
        rank,
        "This optimizer steps in the backward (step_in_backward); another step would "
        "apply its gradients twice.",
        remedy="remove the call of optimizer.step(); if a GradScaler called it, the "
        "two do not go together, and the parameters have taken a step of scaled "
        "gradients: reload them",
    )


def step_inside(rank: int, names: Sequence[str]) -> str:
    """An optimizer steps in a backward, without having said so."""
    return explain(
        rank,
        "An optimizer steps inside the backward, before its gradients are averaged "
        "over ranks.",
        names=names,
        remedy="step after backward() returned",
    )


def step_after_failure(reducer: Reducer, names: Sequence[str]) -> str:
    """An optimizer steps although the last backward failed."""
    return explain(
        reducer.rank,
        failed_before(reducer, "gradients are not averaged over ranks"),
        names=names,
        remedy="call reset() on all ranks, then zero_grad()",
    )


def never_came(rank: int, names: Sequence[str]) -> str:
    """A forward was announced, but its backward missed our hooks, or was left out."""
    return explain(
        rank,
        "A forward announced a synchronised backward that never came, so the "
        "gradients present are not those of this step.",
        names=names,
        remedy="call backward() on what the forward returned (not "
        "torch.autograd.grad), and do not cast or replace parameters after wrapping",
    )


def cast_after_wrapping(rank: int, names: Sequence[str]) -> str:
    """Parameters have another dtype than when they were wrapped."""
    return explain(
        rank,
        "Parameters were cast after wrapping; on other ranks they may not be.",
        names=names,
        remedy="wrap the module again after a cast (.double(), .half(), .to())",
    )


def joined_after_wrapping(rank: int, names: Sequence[str]) -> str:
    """The module has parameters that no live object averages."""
    return explain(
        rank,
        "Parameters joined the module after it was wrapped (added, replaced, unfrozen, "
        "or given by functional_call), so nobody averages their gradients over ranks.",
        names=names,
        remedy="wrap the module again after such a change, with everything trainable "
        "that will be; or wrap it with these on its ignore list, if they are meant to "
        "differ between ranks",
    )
