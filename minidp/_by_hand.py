"""Updates that no optimizer made: seen by the next forward, from version counters.

Torch counts the in-place changes of every tensor. Where a gradient stayed local, or a
backward went through our outputs without touching a grad hook, the count is noted; who
changed the parameter since, and was no optimizer that may, applied something that is
not averaged. (A change by way of ``param.data`` is not counted.)
"""

from __future__ import annotations

from ._reducer import Reducer
from .errors import explain

_TO_GO_ON = (
    "to go on, load the same parameters on all ranks, then call reset() and zero_grad()"
    ". If the change was no update (a checkpoint was loaded, models were averaged), "
    "make it inside no_sync()"
)


def updated_by_hand(reducer: Reducer) -> str:
    """What was done to parameters since the last forward; empty if nothing was."""
    ledger, params = reducer.ledger, reducer.params
    if not ledger.versions and ledger.bypassed is None:
        return ""
    dropped = [i for i in ledger.meant if params[i].grad is None]
    for i in dropped:  # local on purpose, and then thrown away
        ledger.versions.pop(i, None)
        ledger.meant.discard(i)
    changed = [i for i, n in ledger.versions.items() if params[i]._version != n]
    if changed:
        return explain(
            reducer.rank,
            "Parameters changed after a local backward, whose gradients were never "
            "averaged over ranks: a second backward of one or two forwards, a retained "
            "graph, a method of .module, or no_sync() without a synchronised backward "
            "after it. Replicas may differ now.",
            names=[reducer.names[i] for i in sorted(changed)],
            remedy="before the update run one backward over the sum of the losses, or "
            f"call sync_gradients() on all ranks; {_TO_GO_ON}",
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
