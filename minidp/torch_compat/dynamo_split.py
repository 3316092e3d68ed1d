"""Let torch.compile split graphs where our buckets end, so that buckets leave early.

A compiled backward hands out all its gradients at its end, so one graph for the whole
module would hide no communication. Dynamo therefore splits the graphs that it compiles
during the forward of a DDP object. It knows that object by a private attribute of
torch's class, and reads its ``bucket_bytes_cap``.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.nn.parallel import DistributedDataParallel

from minidp.console import warn
from minidp.core import untraced, untraced_itself

# The size of dynamo's first graph. Dynamo fails if the others are to be smaller.
_FIRST_GRAPH_BYTES = 1024 * 1024


@untraced_itself
def run_splitting(ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Run the module of ``ddp`` as torch's active DDP, and return its output.

    If torch.compile compiles meanwhile, it splits graphs as for torch's DDP, into parts
    of ``ddp.bucket_bytes_cap``, but not less than 1 MiB. If dynamo's ``optimize_ddp``
    prevents that, there is a warning.
    """
    module = ddp._modules["module"]  # Module's getattr: slow
    setting = _optimize_ddp()
    if setting not in (None, True, "ddp_optimizer"):
        is_compiling = callable(get_eval_frame_callback())
        _tell_that_graphs_stay_whole(module, setting, is_compiling=is_compiling)
    active = ddp
    if ddp.bucket_bytes_cap < _FIRST_GRAPH_BYTES:
        active = SimpleNamespace(bucket_bytes_cap=_FIRST_GRAPH_BYTES)
    before = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = active
    try:
        return _call(module, inputs, kwargs)
    finally:
        DistributedDataParallel._active_ddp_module = before


def _call(module: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Dynamo may compile this function, but not its caller.
    return module(*inputs, **kwargs)


def _optimize_ddp() -> object:
    """Return dynamo's setting ``optimize_ddp``, or None if dynamo is not imported.

    Whoever has changed the setting has imported dynamo. Another thread may be about to
    do so, and then it is not looked at.
    """
    settings = sys.modules.get("torch._dynamo.config")
    is_imported = hasattr(sys.modules.get("torch._dynamo"), "OptimizedModule")
    return getattr(settings, "optimize_ddp", None) if is_imported else None


def refuse_python_reducer() -> None:
    """Refuse a setting of dynamo that asks for torch's own reducer.

    Raises:
        ValueError: ``optimize_ddp`` is "python_reducer".
    """
    if _optimize_ddp() == "python_reducer":
        raise ValueError(
            'torch._dynamo.config.optimize_ddp is "python_reducer", which is torch\'s '
            "own reducer for compiled autograd; minidp has none. What to do: set it to "
            "True, and leave torch._dynamo.config.compiled_autograd at False. "
            "torch.compile then compiles forward and backward in one graph per bucket."
        )


@untraced
def _tell_that_graphs_stay_whole(
    module: Any, setting: object, *, is_compiling: bool
) -> None:
    dynamo: Any = sys.modules["torch._dynamo"]
    if is_compiling or isinstance(module, dynamo.OptimizedModule):
        warn(
            f"torch._dynamo.config.optimize_ddp={setting!r}: the module is compiled as "
            "one graph, so communication does not overlap with its backward. Gradients "
            "are right. What to do: set it to True to get a graph for each bucket.",
        )
