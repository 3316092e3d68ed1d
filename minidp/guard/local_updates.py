"""Detect updates with local gradients that the check of optimizer steps cannot see.

No optimizer made such an update. A parameter's ``_version`` (it counts changes in
place, but not those of ``param.data``) is stored when its gradient becomes local, or
goes to the caller of `torch.autograd.grad`. If it changes afterwards, and not in an
optimizer step, this may be an update with a gradient that is not averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

from minidp.core import Reducer

from .local_acts import LocalActs
from .mistakes import Suspicion, explain_origins

_TO_GO_ON = (
    "to go on, load the same parameters on all ranks, then call reset() and zero_grad()"
    ". If replicas are meant to differ for a while, change them inside no_sync()"
)


@dataclass(frozen=True)
class Change:
    """Parameters that changed although their gradients were not averaged.

    That is wrong if it was an update. It is right if all ranks changed them alike, or
    change them back before the next step (other weights for one evaluation, or
    sharpness-aware training). So it is judged later, by a comparison of the ranks.
    """

    indices: frozenset[int]
    finalized: int  # number of averaged backwards before the change was seen
    is_for_good: bool  # nobody averages any more, so waiting for it is no use
    suspicion: Suspicion
    # Ranks differed in a backward, so that all of them compare after the next step.
    is_known_to_all: bool = False


def find_change(reducer: Reducer, acts: LocalActs) -> Change | None:
    """Return what has changed since gradients became local, except by optimizer steps.

    What is returned is not found again, because the present versions count from now on.
    """
    ledger, params = reducer.ledger, reducer.params
    changed = {i for i, n in acts.versions.items() if params[i]._version != n}
    passed = acts.bypassed or {}
    bypassed = {i for i, n in passed.items() if params[i]._version != n}
    if changed:
        origins = [acts.origins[i] for i in changed]
        what, remedy = explain_origins(origins, model_ran=ledger.armed > 0)
        what = f"local backward, whose gradients were never averaged over ranks: {what}"
    elif bypassed:
        what = (
            "backward that went through the outputs of a forward, but averaged "
            "nothing: torch.autograd.grad, a functional_call, or parameters that were "
            "cast after wrapping"
        )
        remedy = "use backward(), and wrap a module after it is cast or moved"
    else:
        return None
    is_for_good = acts.has_lost_hooks
    for i in changed:
        acts.versions[i] = params[i]._version
    for i in bypassed:
        passed[i] = params[i]._version
    suspicion = Suspicion(
        f"Parameters changed after a {what}. Replicas differ now.",
        names=tuple(reducer.names[i] for i in sorted(changed | bypassed)),
        expected="the same parameters on all ranks",
        remedy=f"{remedy}; {_TO_GO_ON}",
    )
    found = frozenset(changed | bypassed)
    return Change(found, ledger.finalized, is_for_good, suspicion)
