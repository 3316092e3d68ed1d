"""Ask the autograd engine about tasks and graphs, and keep dynamo out of our code.

Traced by dynamo, our bookkeeping would be recompiled for every parameter, or fail at a
collective. `torch.compiler.disable` imports dynamo (seconds) and wraps functions (time
per gradient). So `untraced` sets its marks directly: on the code, for frames of its
own, and on the function, for calls from a traced graph.

Compiled autograd runs a backward as a compiled function, not as a graph task: it would
have to leave that function for each of our hooks, and never says when a backward ends.
So `compiled_backward` refuses it, where the first of our hooks is captured or called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from torch.utils._pytree import tree_map_only

from minidp.accelerator import NO_CONTEXT
from minidp.errors import GradientError, explain

Function = TypeVar("Function", bound=Callable[..., Any])
NO_TASK = -1


# Return the id of the backward (graph task) on this thread, or NO_TASK.
current_task: Callable[[], int] = _C._current_graph_task_id


def queue_final_callback(function: Callable[[], None]) -> None:
    """Make autograd call a function when the current, innermost graph task ends.

    Exceptions reach the caller of ``backward()``. It is not called if the backward
    raises. Autograd may drop the callback a moment after ``backward()`` has returned,
    on the thread of a device. What the function holds is free before: else the memory
    of a wrapper could outlive the wrapper.
    """
    waiting = [function]
    Variable._execution_engine.queue_callback(lambda: waiting.pop()())


# -- contexts of the user --------------------------------------------------------------

_NO_TRANSFORM = _C._ExcludeDispatchKeyGuard
_TRANSFORMS = _C.DispatchKeySet(_C.DispatchKey.FuncTorchDynamicLayerFrontMode)
_TRANSFORMS |= _C.DispatchKeySet(_C.DispatchKey.FuncTorchDynamicLayerBackMode)


def without_user_modes(
    *, keeps_inference: bool = False
) -> AbstractContextManager[None]:
    """Suspend the user's modes in a block, so that tensors made there are ordinary.

    Inside a default device, a function or dispatch mode (`FakeTensorMode`), a transform
    of `torch.func`, or inference mode a new tensor belongs to that context: a bucket
    that a rebuild allocates there would be of no use, or an error, in the next
    backward. With ``keeps_inference`` inference mode goes on, as it must where tensors
    of the user are written that are made in there. If the user has entered nothing of
    this, the block costs next to nothing.
    """
    if (
        _C._len_torch_function_stack()
        or _C._len_torch_dispatch_stack()
        or _C._functorch.peek_interpreter_stack() is not None
        or (_C.is_inference_mode_enabled() and not keeps_inference)
    ):
        return _without_user_modes(keeps_inference=keeps_inference)
    return NO_CONTEXT


@contextmanager
def _without_user_modes(*, keeps_inference: bool) -> Iterator[None]:
    with (
        _C.DisableTorchFunction(),
        _C._DisableTorchDispatch(),
        _NO_TRANSFORM(_TRANSFORMS),
        NO_CONTEXT if keeps_inference else torch.inference_mode(False),  # noqa: FBT003
    ):
        yield


# -- remote procedure calls ------------------------------------------------------------

_rpc: Any = getattr(torch._C, "_distributed_rpc", None)  # not on all platforms


def is_rpc_up() -> bool:
    """Return whether RPC runs here: after ``init_rpc()``, before ``shutdown()``."""
    return _rpc is not None and bool(_rpc._is_current_rpc_agent_set())


# -- graphs ----------------------------------------------------------------------------


def find_tensors(output: object) -> list[Tensor]:
    """Return the tensors in an output of a module, which may be any object.

    They are found in lists, tuples, values of dicts, fields of dataclasses and RRefs
    that this process owns, however deeply these are nested. An output that is a tensor
    is the only one found; in any other object none is.
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
    elif is_rpc_up() and isinstance(output, _rpc.PyRRef) and output.is_owner():
        parts = [output.local_value()]
    return [tensor for part in parts for tensor in find_tensors(part)]


def copied_outputs(output: Any) -> Any:
    """Return an output of a module with copies of its tensors that have a graph.

    Whoever gets the copies may change them in place. The module may have kept the
    tensors themselves, as its next state or for its backward. Copied are those that
    ``torch.utils._pytree`` finds, in containers that are new, too.
    """
    if isinstance(output, Tensor):
        return output if output.grad_fn is None else output.clone()
    return tree_map_only(Tensor, copied_outputs, output)


def probe_outputs(output: object, probe: Callable[[Any], None]) -> None:
    """Let ``probe(grads)`` be called when a backward comes through these outputs.

    It becomes a prehook of the ``grad_fn`` of each tensor that has one, so it is called
    once for each of them, before the gradients of the module are computed.
    """
    for tensor in find_tensors(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(probe)


def reachable_nodes(output: object) -> set[Node]:
    """Return all nodes of the graph that a backward of ``output`` can reach."""
    return _nodes_behind(
        [t.grad_fn for t in find_tensors(output) if t.grad_fn is not None]
    )


def _nodes_behind(stack: list[Node]) -> set[Node]:
    """Return the nodes in ``stack``, and all that they lead to; empty the stack."""
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
    """Return the parameters to which no backward of ``output`` brings a gradient.

    Args:
        output: What a forward has returned. If none of its tensors has a graph, no
            backward can come, and the result is empty.
        nodes: The AccumulateGrad node of each parameter, by index.
        among: The indices of the parameters to look for.
    """
    reached = reachable_nodes(output)
    return {i for i in among if nodes[i] not in reached} if reached else set()


def returned_to_caller(nodes: Sequence[Node]) -> list[int]:
    """Return the indices of parameters whose gradients go to the caller.

    `torch.autograd.grad` returns ("captures") gradients and leaves ``.grad`` alone, so
    no hook of these parameters is called. This must be asked inside the backward or in
    its final callback; elsewhere nothing is found.

    Args:
        nodes: The AccumulateGrad node of each parameter, by index.
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
    """Return whether the running backward computes a gradient of any of ``leaves``.

    It returns True also where nobody can tell: leaves of a `torch.func.grad` have no
    graph outside of it.
    """
    nodes: list[Node] = []
    for leaf in leaves:
        with torch.enable_grad():
            view = leaf.view_as(leaf)
        if view.grad_fn is None:
            return True
        node = view.grad_fn.next_functions[0][0]
        assert node is not None
        nodes.append(node)
    return bool(returned_to_caller(nodes)) or (
        current_task() != NO_TASK and any(map(_C._will_engine_execute_node, nodes))
    )


# Reentrant checkpoints, as autograd calls them: their backward runs another forward and
# backward, and the parameters of these are in no graph before that.
_CHECKPOINT = "CheckpointFunctionBackward"


class _Zeros(torch.autograd.Function):
    """The function that `zeros_for` puts in the place of a graph."""

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
    """Let dynamo run a function, and all that it calls, as plain Python; return it."""
    return _mark(function, _FrameAction.SKIP)


def untraced_itself(function: Function) -> Function:
    """Let dynamo leave out a function, but compile what it calls; return it."""
    return _mark(function, _FrameAction.DEFAULT)


def is_exporting() -> bool:
    """Return whether ``torch.export`` or ``torch.jit.trace`` runs this thread's code.

    What they capture is a program without ranks, in which nothing may be synchronised.
    The parameters in it are not those of the model.
    """
    return torch.compiler.is_exporting() or _C._get_tracing_state() is not None


def _mark(function: Function, callees: _FrameAction) -> Function:
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = (
        "minidp synchronises here: compile without fullgraph=True and without compiled "
        "autograd, export .module"
    )
    strategy = _FrameExecStrategy(_FrameAction.SKIP, callees)
    set_code_exec_strategy(marked.__code__, strategy)
    return function


def is_compiled_backward() -> bool:
    """Return whether compiled autograd captures or runs the present backward.

    The hooks of a backward ask this: those in C++ are called while the backward is
    captured, those in Python while it runs.
    """
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and (
        compiled.in_compiled_autograd_region or compiled.compiled_autograd_enabled
    )


def compiled_backward(rank: int) -> GradientError:
    """Return the error that refuses a backward for which `is_compiled_backward`."""
    return GradientError(
        explain(
            rank,
            "This backward runs under compiled autograd, where gradients cannot be "
            "averaged while it computes.",
            remedy="leave torch._dynamo.config.compiled_autograd at False (without "
            "it torch.compile compiles the module's backward, too), then call "
            "reset() on all ranks to go on",
        )
    )
