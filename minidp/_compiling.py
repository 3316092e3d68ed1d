"""torch.compile: its graphs end where our buckets do, so that buckets leave early.

Gradients come out of a compiled graph all at once. Torch's compiler splits the graphs
it makes during the forward of a DDP, if it finds one: it looks in a private attribute
of torch's class, and reads ``bucket_bytes_cap`` from what is there.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.nn.parallel import DistributedDataParallel

from ._untraced import untraced, untraced_itself
from ._warn import warn

# Dynamo's first graph takes this much, and it fails if others are to be smaller.
_FIRST_GRAPH_BYTES = 1024 * 1024


class Caps(NamedTuple):
    """All that dynamo reads of a DDP; for buckets smaller than its first graph."""

    bucket_bytes_cap: int


@untraced_itself
def run_splitting(ddp: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the module of ``ddp``; dynamo splits meanwhile what it compiles, for it."""
    is_compiling = callable(get_eval_frame_callback())
    _tell_if_graphs_stay_whole(ddp.module, is_compiling=is_compiling)
    is_fine = ddp.bucket_bytes_cap >= _FIRST_GRAPH_BYTES
    before = DistributedDataParallel._active_ddp_module
    active: Any = ddp if is_fine else Caps(_FIRST_GRAPH_BYTES)
    DistributedDataParallel._active_ddp_module = active
    try:
        return _call(ddp._what_runs(), inputs, kwargs)
    finally:
        DistributedDataParallel._active_ddp_module = before


def _call(run: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where dynamo starts: it would not in a class of torch.nn, such as Sequential."""
    return run(*inputs, **kwargs)


@untraced
def _tell_if_graphs_stay_whole(module: nn.Module, *, is_compiling: bool) -> None:
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None or dynamo.config.optimize_ddp in (True, "ddp_optimizer"):
        return
    if is_compiling or isinstance(module, dynamo.OptimizedModule):
        warn(
            "torch._dynamo.config.optimize_ddp="
            f"{dynamo.config.optimize_ddp!r}: the module is compiled as one graph, so "
            "communication does not overlap with its backward. Gradients are right. "
            "Set it to True to get a graph per bucket.",
        )
