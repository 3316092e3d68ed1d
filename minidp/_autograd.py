"""Everything that touches the autograd engine: grad hooks, probes, the graph.

[Note: hook position] A grad hook sits on the parameter's AccumulateGrad *node*, where
torch's reducer has its own: user tensor hooks and all post-accumulate hooks, registered
before or after wrapping, have then run. The node must be kept referenced, else it and
its hooks go away. All Python hooks of a node share one ordered dict; if the user adds
one behind ours, it must not change what we read, so the gradient is then copied at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge

from ._countdown import Countdown, Mark
from ._streams import raw_stream

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

GradHook = Callable[[Any, Any], None]
NO_TASK = -1


def current_task() -> int:
    """Id of the graph task that runs on this thread, or NO_TASK."""
    return int(torch._C._current_graph_task_id())


def queue_final_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the current graph task ends (also from such a callback).

    Under reentrant checkpointing that is the innermost task. An exception in it reaches
    the caller of ``backward()``; if the backward raises, it never runs.
    """
    Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


class GradHooks:
    """The hooks of all managed parameters; `remove` takes them away again.

    Args:
        params: managed parameters, in parameter-index order.
        countdown: what the hooks write to.
        at_once: per parameter, whether its gradient is copied by the hook.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        countdown: Countdown,
        at_once: Sequence[bool],
    ) -> None:
        self.nodes: list[Node] = []
        self._handles: list[RemovableHandle] = []
        for i, param in enumerate(params):
            with torch.enable_grad():
                node = get_gradient_edge(param).node
            # The dict of the node's hooks is only known once a hook is registered.
            first = node.register_hook(lambda _inputs, _outputs: None)
            hooks = first.hooks_dict_ref()
            make = _make_cuda_hook if param.is_cuda else _make_hook
            hook = make(i, param, countdown, hooks, at_once=at_once[i])
            self._handles.append(node.register_hook(hook))
            self.nodes.append(node)
            first.remove()

    def remove(self) -> None:
        """Take the hooks off the parameters; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.nodes.clear()


def _make_hook(
    i: int,
    param: torch.nn.Parameter,
    countdown: Countdown,
    hooks: Sized,
    *,
    at_once: bool,
) -> GradHook:
    """The hot path: once per parameter and backward (see `Countdown`).

    `Countdown.arrive` says the same in a readable way; here it is spelled out, with
    everything bound beforehand, because each call and attribute counts.
    """
    entries, ready = countdown.entries, countdown.ready
    pending, bucket_of = countdown.pending, countdown.bucket_of
    unset = Mark.UNSET

    def grad_hook(_grad_inputs: Any, _grad_outputs: Any) -> None:
        if entries[i] is not unset:
            countdown.on_unusual(i)
            return
        grad = param.grad
        if at_once or len(hooks) > 1:
            countdown.arrive(i, param, at_once=True)
            return
        entries[i] = grad
        ready.append(i)
        bucket = bucket_of[i]
        pending[bucket] -= 1
        if not pending[bucket]:
            countdown.on_full(bucket)

    return grad_hook


def _make_cuda_hook(
    i: int,
    param: torch.nn.Parameter,
    countdown: Countdown,
    hooks: Sized,
    *,
    at_once: bool,
) -> GradHook:
    """As on the CPU, and note the stream that wrote the gradient."""
    plain = _make_hook(i, param, countdown, hooks, at_once=at_once)
    written_on, bucket_of = countdown.written_on, countdown.bucket_of
    device_index = param.device.index

    def grad_hook(grad_inputs: Any, grad_outputs: Any) -> None:
        written_on[bucket_of[i]].add(raw_stream(device_index))
        plain(grad_inputs, grad_outputs)

    return grad_hook


def find_tensors(output: object) -> list[torch.Tensor]:
    """Tensors in a forward's return value: lists, tuples, dict values, dataclasses."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, list | tuple):
        return [t for item in output for t in find_tensors(item)]
    if isinstance(output, dict):
        return [t for item in output.values() for t in find_tensors(item)]
    if is_dataclass(output) and not isinstance(output, type):
        return [
            t for f in fields(output) for t in find_tensors(getattr(output, f.name))
        ]
    return []


def probe_outputs(output: object, probe: Callable[[], None]) -> None:
    """Call ``probe`` as soon as a backward reaches one of the outputs."""
    for tensor in find_tensors(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda _grads: probe())


def reachable_nodes(output: object) -> set[Node]:
    """All nodes of the graph below the outputs."""
    seen: set[Node] = set()
    stack = [t.grad_fn for t in find_tensors(output) if t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        stack.extend(n for n, _ in node.next_functions if n is not None)
    return seen


def unreachable(output: object, nodes: Sequence[Node], among: Iterable[int]) -> set[int]:
    """Which of the parameters ``among`` have no gradient path from the outputs."""
    reached = reachable_nodes(output)
    return {i for i in among if nodes[i] not in reached}
