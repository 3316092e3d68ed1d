"""Compiled autograd: a backward that is a compiled function, not a graph task.

It runs our hooks as they are (`untraced`), each between two graphs of its own. Final
callbacks it accepts and never runs: so the hook that completes the reduction finishes
it there and then, and modes that must see the end of a backward cannot be had.
"""

from __future__ import annotations

import sys
from typing import Any

from ._warn import warn
from .errors import GradientError, explain


def is_compiled_backward() -> bool:
    """Whether compiled autograd runs the backward that called us."""
    compiled_autograd: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and bool(
        compiled_autograd.in_compiled_autograd_region
    )


def accept(rank: int, *, needs_end: bool) -> None:
    """A compiled backward starts.

    Raises:
        GradientError: the reduction could never be completed.
    """
    if needs_end:
        raise GradientError(
            explain(
                rank,
                "Compiled autograd does not say when a backward ends, which "
                "find_unused_parameters=True and the first backward of "
                "static_graph=True need.",
                remedy="run this backward with torch._dynamo.config."
                "compiled_autograd = False, or wrap with neither option; call reset() "
                "on all ranks to go on",
            )
        )
    warn(
        "Compiled autograd compiles one graph per parameter, because gradients are "
        "averaged between its graphs; that takes seconds for each of them. Gradients "
        "are right. torch.compile without compiled autograd compiles backwards, too.",
    )
