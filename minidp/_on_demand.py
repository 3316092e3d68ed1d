"""``sync_gradients()``: average what ``.grad`` holds now, outside any backward."""

from __future__ import annotations

import torch

from ._phase import Phase
from ._reducer import Reducer


def average_now(reducer: Reducer) -> None:
    """Collective: average the present ``.grad`` of every parameter over the ranks.

    Averaging a mixture of reduced and local parts is right for both: the reduced part
    is equal on all ranks and stays what it is.
    """
    armed, forwards = reducer.phase.now is Phase.ARMED, reducer.ledger.forwards
    try:
        _reduce(reducer)
    except BaseException:
        reducer.fail()
        raise
    if armed:  # a forward still waits for its backward
        reducer.phase.enter(Phase.ARMED)
        reducer.ledger.forwards = forwards


def _reduce(reducer: Reducer) -> None:
    pipeline = reducer.pipeline
    reducer.phase.enter(Phase.REDUCING)
    pipeline.start()
    grads = [param.grad for param in reducer.params]
    used = {i for i, grad in enumerate(grads) if grad is not None}
    with torch.no_grad():
        for bucket in pipeline.buckets:
            entries = [grads[i] for i in bucket.plan.indices]
            bucket.flatten(entries, pipeline.divisor)
        pipeline.launch_due()
        pipeline.launch_used_map(used)
        reducer.phase.enter(Phase.FINALIZING)
        unused = pipeline.unused_everywhere()
        pipeline.finish(unused)
    reducer.ledger.settle(unused)
    reducer.phase.enter(Phase.IDLE)
