"""Let torch.compile split graphs where our buckets end, so that buckets leave early.

Dynamo splits graphs during the forward of a DDP object, which a private attribute of
torch's class names, and reads its ``bucket_bytes_cap``.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.nn.parallel import DistributedDataParallel

from minidp.console import warn
from minidp.core import untraced, untraced_itself

# Size of dynamo's first graph; it fails if others are to be smaller.
_FIRST_GRAPH_BYTES = 1024 * 1024


@untraced_itself
def run_splitting(ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Run ``ddp``'s module, and return its output; ``ddp`` is torch's active DDP then.

    If torch.compile compiles meanwhile, it splits graphs as for torch's DDP, into parts
    of ``ddp.bucket_bytes_cap``, at least 1 MiB. Warn if ``optimize_ddp`` prevents that.
    """
    is_compiling = callable(get_eval_frame_callback())
    _tell_if_graphs_stay_whole(ddp.module, is_compiling=is_compiling)
    active = ddp
    if ddp.bucket_bytes_cap < _FIRST_GRAPH_BYTES:
        active = SimpleNamespace(bucket_bytes_cap=_FIRST_GRAPH_BYTES)
    before = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = active
    try:
        return _call(ddp.module, inputs, kwargs)
    finally:
        DistributedDataParallel._active_ddp_module = before


def _call(module: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the module. Dynamo may compile this function, but not its caller."""
    return module(*inputs, **kwargs)


def _optimize_ddp() -> object:
    """Return dynamo's setting; None if it is not imported, or not to its end yet.

    Another thread may be importing it. Whoever has set something has imported it.
    """
    settings = sys.modules.get("torch._dynamo.config")
    is_imported = hasattr(sys.modules.get("torch._dynamo"), "OptimizedModule")
    return getattr(settings, "optimize_ddp", None) if is_imported else None


def refuse_python_reducer() -> None:
    """Raise ValueError if dynamo is set to torch's reducer for compiled autograd."""
    if _optimize_ddp() == "python_reducer":
        raise ValueError(
            'torch._dynamo.config.optimize_ddp is "python_reducer", which is torch\'s '
            "own reducer for compiled autograd; minidp has none. What to do: set it to "
            "True, and leave torch._dynamo.config.compiled_autograd at False. "
            "torch.compile then compiles forward and backward in one graph per bucket."
        )


@untraced
def _tell_if_graphs_stay_whole(module: Any, *, is_compiling: bool) -> None:
    """Warn if dynamo's ``optimize_ddp`` is off: a compiled module is then one graph.

    Only if ``module`` is a compiled one, or compiled code runs it (``is_compiling``).
    """
    setting = _optimize_ddp()
    if setting in (None, True, "ddp_optimizer"):
        return
    dynamo: Any = sys.modules["torch._dynamo"]
    if is_compiling or isinstance(module, dynamo.OptimizedModule):
        warn(
            f"torch._dynamo.config.optimize_ddp={setting!r}: the module is compiled as "
            "one graph, so communication does not overlap with its backward. Gradients "
            "are right. Set it to True to get a graph per bucket.",
        )
