"""Ask the autograd engine about tasks and graphs; keep dynamo out of our own code.

Traced by dynamo, our bookkeeping would be recompiled for every parameter, or fail at a
collective. `torch.compiler.disable` imports dynamo (seconds) and wraps functions (time
per gradient). So `untraced` sets its marks directly: on the code, for frames of its
own, and on the function, for calls from a traced graph.

Compiled autograd runs a backward as a compiled function, not as a graph task. It calls
our hooks between two of its graphs, and never runs final callbacks. So the hook of the
last bucket also finishes the reduction; modes that must see the end are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import _C, Tensor
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch.autograd import Variable
from torch.autograd.graph import Node

from minidp.comm import is_own_rref
from minidp.console import warn
from minidp.errors import GradientError, explain

Function = TypeVar("Function", bound=Callable[..., Any])
NO_TASK = -1


# Return the id of the backward (graph task) on this thread, or NO_TASK.
current_task: Callable[[], int] = _C._current_graph_task_id
# Make autograd call a function when the current, innermost graph task ends. Exceptions
# reach the caller of ``backward()``. Not called if the backward raises.
queue_final_callback: Callable[[Callable[[], None]], None]
queue_final_callback = Variable._execution_engine.queue_callback


# -- graphs ----------------------------------------------------------------------------


def find_tensors(output: object) -> list[Tensor]:
    """Return tensors nested in lists, tuples, dict values, dataclasses, local RRefs.

    A tensor gives itself, any other object [].
    """
    if isinstance(output, Tensor):
        return [output]
    parts: Iterable[object] = ()
    if isinstance(output, list | tuple):
        parts = output
    elif isinstance(output, dict):
        parts = output.values()
    elif is_dataclass(output) and not isinstance(output, type):
        parts = [getattr(output, each.name) for each in fields(output)]
    elif is_own_rref(output):
        parts = [output.local_value()]
    return [tensor for part in parts for tensor in find_tensors(part)]


def probe_outputs(output: object, probe: Callable[[Any], None]) -> None:
    """Register ``probe(grads)`` as prehook of each output tensor's grad_fn, if any."""
    for tensor in find_tensors(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(probe)


def reachable_nodes(output: object) -> set[Node]:
    """Return all graph nodes that a backward from ``output`` can reach."""
    seen: set[Node] = set()
    stack = [t.grad_fn for t in find_tensors(output) if t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(n for n, _ in node.next_functions if n is not None)
    return seen


def unreachable(
    output: object, nodes: Sequence[Node], among: Iterable[int]
) -> set[int]:
    """Return indices of ``among`` that no backward of ``output`` reaches.

    Empty if no tensor in ``output`` has a graph. ``nodes``: AccumulateGrad by index.
    """
    reached = reachable_nodes(output)
    return {i for i in among if nodes[i] not in reached} if reached else set()


# -- compiled forwards and backwards ---------------------------------------------------


def untraced(function: Function) -> Function:
    """Mark and return ``function``: dynamo runs it and its callees as plain Python."""
    return _mark(function, _FrameAction.SKIP)


def untraced_itself(function: Function) -> Function:
    """Mark and return ``function``: dynamo skips it, but compiles what it calls."""
    return _mark(function, _FrameAction.DEFAULT)


def is_captured() -> bool:
    """Return whether ``torch.export`` or ``torch.jit.trace`` runs this thread's code.

    What they capture is a program without ranks: nothing is to be synchronised, and no
    parameter of it is one of the model's.
    """
    return torch.compiler.is_exporting() or _C._get_tracing_state() is not None


def _mark(function: Function, callees: _FrameAction) -> Function:
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = (
        "minidp synchronises here: compile without fullgraph=True, export .module"
    )
    strategy = _FrameExecStrategy(_FrameAction.SKIP, callees)
    set_code_exec_strategy(marked.__code__, strategy)
    return function


def accept_compiled(rank: int, *, needs_end: bool) -> None:
    """Raise GradientError if ``needs_end``, else warn: compiled autograd is slow."""
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
        "are right. torch.compile without compiled autograd compiles backwards, too."
    )
