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

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import _C, Tensor
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch.autograd import Variable
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

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
    return _nodes_behind(
        [t.grad_fn for t in find_tensors(output) if t.grad_fn is not None]
    )


def _nodes_behind(stack: list[Node]) -> set[Node]:
    """Return the nodes in ``stack``, which is used up, and all that they lead to."""
    seen: set[Node] = set()
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


def captured(nodes: Sequence[Node]) -> list[int]:
    """Return indices of ``nodes`` whose gradients this backward returns to its caller.

    ``nodes``: AccumulateGrad nodes. Only `torch.autograd.grad` returns gradients. Call
    this inside the backward, or in its final callback; elsewhere it returns [].
    """
    found: list[int] = []
    if current_task() == NO_TASK:
        return found
    for i, node in enumerate(nodes):
        try:
            _C._will_engine_execute_node(node)
        except RuntimeError:  # it refuses to tell about leaves that are captured
            found.append(i)
    return found


def any_reached(leaves: Iterable[Tensor]) -> bool:
    """Return whether the running backward computes a gradient of any of ``leaves``."""
    with torch.enable_grad():
        nodes = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]
    return bool(captured(nodes)) or (
        current_task() != NO_TASK and any(map(_C._will_engine_execute_node, nodes))
    )


# Reentrant checkpoints, as autograd calls them: their backward runs another forward and
# backward, and the parameters of these are in no graph before that.
_CHECKPOINT = "CheckpointFunctionBackward"


class _Zeros(torch.autograd.Function):
    """Stand for a loss without its graph: give zeros to its leaves, see `zeros_for`."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, plan: _ZerosPlan, *_leaves: Tensor) -> Tensor:
        ctx.plan = plan
        return torch.zeros_like(like)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_grads: Tensor) -> Any:
        if ctx.plan.checkpoints:
            torch.autograd.backward(
                list(ctx.plan.checkpoints),
                [_zeros_at(edge) for edge in ctx.plan.checkpoints],
                retain_graph=True,  # as long as the loss lives
            )
        needed = ctx.needs_input_grad[2:]
        pairs = zip(ctx.plan.leaves, needed, strict=True)
        return None, None, *(ctx.plan.zeros(p) if does else None for p, does in pairs)


class _ZerosPlan(NamedTuple):
    leaves: Sequence[Tensor]
    checkpoints: Collection[GradientEdge]
    zeros: Callable[[Tensor], Tensor]


def zeros_for(loss: Tensor, zeros: Callable[[Tensor], Tensor]) -> Tensor:
    """Return 0 in the place of ``loss``, with gradients of zeros for the same leaves.

    The graph of ``loss`` is left out: multiplied by 0, an infinite derivative in it
    would give NaN. Each leaf gets ``zeros(leaf)`` instead, and its hooks run as usual.
    Only reentrant checkpoints, and what lies behind them, do run their backward, with
    zeros: nobody else knows their parameters.
    """
    value = loss.detach()
    if not loss.requires_grad:
        return torch.zeros_like(value)
    leaves: dict[Node, Tensor] = {}
    checkpoints: list[GradientEdge] = []
    seen: set[tuple[Node, int]] = set()
    first = get_gradient_edge(loss)
    stack = [(first.node, first.output_nr)]
    while stack:
        node, number = stack.pop()
        is_checkpoint = node.name() == _CHECKPOINT
        key = node, number if is_checkpoint else -1
        if key in seen:
            continue
        seen.add(key)
        if is_checkpoint:
            checkpoints.append(GradientEdge(node, number))
        elif (leaf := getattr(node, "variable", None)) is not None:
            leaves[node] = leaf
        else:
            stack.extend((n, k) for n, k in node.next_functions if n is not None)
    for node in _nodes_behind([edge.node for edge in checkpoints]):
        leaves.pop(node, None)  # it gets its zeros there, and no second ones
    plan = _ZerosPlan([*leaves.values()], checkpoints, zeros)
    with torch.enable_grad():
        if not leaves:  # a function without inputs would have no graph
            plan = plan._replace(leaves=[torch.zeros_like(value, requires_grad=True)])
        result: Tensor = _Zeros.apply(value, plan, *plan.leaves)  # type: ignore[no-untyped-call]
    return result


def _zeros_at(edge: GradientEdge) -> Tensor:
    found: Any = edge.node
    metadata = found._input_metadata[edge.output_nr]
    return torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)


# -- compiled forwards and backwards ---------------------------------------------------


def untraced(function: Function) -> Function:
    """Mark and return ``function``: dynamo runs it and its callees as plain Python."""
    return _mark(function, _FrameAction.SKIP)


def untraced_itself(function: Function) -> Function:
    """Mark and return ``function``: dynamo skips it, but compiles what it calls."""
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
