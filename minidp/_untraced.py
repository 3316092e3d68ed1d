"""What dynamo must run as it is: our bookkeeping, wherever torch or a user calls it.

Traced, it would be recompiled for every parameter, or fail at the first collective.
`torch.compiler.disable` says the same; but it imports dynamo, which takes seconds that
only scripts that compile should pay, and wraps, which grad hooks would pay for at every
gradient. So the marks it leaves are set directly. Code is marked for frames of its own,
the function for calls from a graph that is being traced, which ends there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Dynamo runs ``function``, and whatever it calls, as plain Python."""
    return _mark(function, _FrameAction.SKIP)


def untraced_itself(function: Function) -> Function:
    """Dynamo runs ``function`` as plain Python, but may compile what it calls."""
    return _mark(function, _FrameAction.DEFAULT)


def _mark(function: Function, callees: _FrameAction) -> Function:
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = (
        "minidp synchronises here: compile without fullgraph=True"
    )
    strategy = _FrameExecStrategy(_FrameAction.SKIP, callees)
    set_code_exec_strategy(marked.__code__, strategy)
    return function
