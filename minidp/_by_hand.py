"""Updates that no optimizer made: seen by the next forward, from version counters.

Torch counts the in-place changes of every tensor. Where a gradient stayed local, or a
backward went through our outputs without touching a grad hook, the count is noted; who
changed the parameter since, and was no optimizer that may, applied something that is
not averaged. (A change by way of ``param.data`` is not counted.)

Who changes parameters and puts them back (averaged weights are swapped in to evaluate,
while gradients of half a window are kept) applied nothing: forwards inside no_sync()
keep a corner of two parameters, to recognise that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from ._guard_words import why_local
from ._ledger import Ledger
from ._local_steps import corner_of
from ._reducer import Reducer
from .errors import explain

_TO_GO_ON = (
    "to go on, load the same parameters on all ranks, then call reset() and zero_grad()"
    ". If the change was no update (a checkpoint was loaded, models were averaged), "
    "make it inside no_sync()"
)


class Corner(NamedTuple):
    """A few values of a parameter, as they were before a local backward."""

    i: int
    version: int
    values: torch.Tensor


def renewed(corners: list[Corner], params: Sequence[torch.Tensor]) -> list[Corner]:
    """Corners of the first and the last parameter; copied if these have changed."""
    if corners and all(params[i]._version == version for i, version, _ in corners):
        return corners
    return [
        Corner(i, params[i]._version, corner_of(params[i]).clone())
        for i in sorted({0, len(params) - 1})
    ]


def _were_put_back(
    corners: Sequence[Corner], reducer: Reducer, changed: Collection[int]
) -> bool:
    """Whether parameters have the values that they had before a local backward.

    Only where a gradient in a corner is not zero: else an update would not show there.
    """
    versions, params = reducer.ledger.versions, reducer.params
    have_moved = (_has_gradient_in_corner(params[i]) for i, _, _ in corners)
    return any(have_moved) and all(
        i in changed and version == versions[i] and corner_of(params[i]).equal(old)
        for i, version, old in corners
    )


def _has_gradient_in_corner(param: torch.Tensor) -> bool:
    grad = param.grad
    if grad is None or grad.layout is not torch.strided:
        return False
    return is_nonzero(corner_of(grad))


def updated_by_hand(reducer: Reducer, corners: Sequence[Corner] = ()) -> str:
    """What was done to parameters since the last forward; empty if nothing was.

    Args:
        reducer: of the parameters.
        corners: that a forward inside no_sync() has kept.
    """
    ledger, params = reducer.ledger, reducer.params
    if not ledger.versions and ledger.bypassed is None:
        return ""
    for i in [i for i in ledger.meant if _is_dropped(ledger, i, params[i])]:
        ledger.drop(i)
    changed = sorted(i for i, n in ledger.versions.items() if params[i]._version != n)
    if changed and _were_put_back(corners, reducer, changed):
        ledger.versions.update((i, params[i]._version) for i in changed)
    elif changed:
        origins = [ledger.origins[i] for i in changed]
        what, remedy = why_local(origins, model_ran=ledger.armed > 0)
        return explain(
            reducer.rank,
            "Parameters changed after a local backward, whose gradients were never "
            f"averaged over ranks: {what}. Replicas may differ now.",
            names=[reducer.names[i] for i in changed],
            remedy=f"{remedy}; {_TO_GO_ON}",
        )
    before = ledger.bypassed or ()
    changed = [i for i, n in enumerate(before) if params[i]._version != n]
    if changed:
        return explain(
            reducer.rank,
            "Parameters changed after a backward that went through the outputs of a "
            "forward, but averaged nothing: torch.autograd.grad, or parameters that "
            "were cast after wrapping. Replicas may differ now.",
            names=[reducer.names[i] for i in changed],
            remedy="use backward(), and wrap a module after it is cast or moved; "
            + _TO_GO_ON,
        )
    return ""


def _is_dropped(ledger: Ledger, i: int, param: torch.Tensor) -> bool:
    """A gradient that was local on purpose is gone: nobody applies it any more.

    Zeros are looked at only where the parameter has changed: that takes time. (Weights
    go up to the worst case nearby with local gradients, and down again.)
    """
    if param.grad is None:
        return True
    return param._version != ledger.versions.get(i) and not is_nonzero(param.grad)


def is_nonzero(grad: torch.Tensor | None) -> bool:
    """Whether a gradient holds anything but zeros; NaN does."""
    if grad is None:
        return False
    values = grad._values() if grad.layout is torch.sparse_coo else grad
    return bool(values.any())
