"""Everything that touches the autograd engine: grad hooks, probes, the graph.

[Note: hook position] A grad hook sits on the parameter's AccumulateGrad *node*, where
torch's reducer has its own: user tensor hooks and all post-accumulate hooks, registered
before or after wrapping, have then run. The node must be kept referenced, else it and
its hooks go away. All Python hooks of a node share one ordered dict; a native hook has
a place of its own, as torch's. If there are others on the node (of the user, or of a
second wrapper), they must not change what we read: such a gradient is copied at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import fields, is_dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge

from ._arrivals import Mark, is_copied_at_once
from ._countdown import Countdown
from ._dist_autograd import is_own_rref
from ._streams import raw_stream
from ._timing import HookTiming, NativeTiming, SharedHook, Timing
from ._untraced import untraced

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

NO_TASK = -1


def current_task() -> int:
    """Id of the graph task that runs on this thread, or NO_TASK."""
    return int(torch._C._current_graph_task_id())


def queue_final_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the current graph task ends (also from such a callback).

    Under reentrant checkpointing that is the innermost task. An exception in it reaches
    the caller of ``backward()``; if the backward raises, it never runs.
    """
    Variable._execution_engine.queue_callback(callback)


class GradHooks:
    """The hooks of all managed parameters; `remove` takes them away again.

    Args:
        params: managed parameters, in parameter-index order.
        countdown: what the hooks write to.
    """

    def __init__(
        self, params: Sequence[torch.nn.Parameter], countdown: Countdown
    ) -> None:
        self._params = params = tuple(params)
        with torch.enable_grad():
            self.nodes = [get_gradient_edge(param).node for param in params]
        self._handles: list[RemovableHandle] = []
        self._dicts: list[Sized] = []  # all Python hooks of each node
        small, large = _small_hook(params, countdown), _large_hook(params, countdown)
        self._shared_hooks = [large if is_copied_at_once(p) else small for p in params]
        for i, param in enumerate(params):
            if param.is_cuda:
                hook = self._shared_hooks[i]
                self._shared_hooks[i] = _noting_stream(params, countdown, hook)
        self._arrivals = countdown.arrivals
        self._native = self._arrivals.attach(WeakMethod(self.python_hook))
        if self._native is None:
            self._attach()

    def _attach(self) -> None:
        for i, node in enumerate(self.nodes):
            handle = node.register_hook(self.python_hook(i))
            self._handles.append(handle)
            hooks = handle.hooks_dict_ref()
            self._dicts.append(() if hooks is None else hooks)

    def python_hook(self, i: int) -> Callable[[Any, Any], None]:
        """The hook of parameter ``i``, also for a compiled graph."""
        return MethodType(self._shared_hooks[i], i)

    def timed_by(self, clock: Callable[[], Any]) -> Timing:
        """Lets the hooks note when they are called, while it is switched on."""
        if self._native is not None:
            return NativeTiming(self._arrivals, clock)
        places = [(handle.hooks_dict_ref(), handle.id) for handle in self._handles]
        return HookTiming(places, self._shared_hooks, clock)

    def shared(self) -> list[int]:
        """Parameters on whose node other hooks may run behind ours."""
        if self._native is not None:
            return list(self._native.shared())
        if sum(map(len, self._dicts)) == len(self._dicts):
            return []
        return [i for i, hooks in enumerate(self._dicts) if len(hooks) > 1]

    def lost(self, among: Iterable[int]) -> list[int]:
        """Parameters whose AccumulateGrad node is not the one with our hook any more.

        Casting or moving a parameter makes a new node, without a word.
        """
        with torch.enable_grad():
            return [
                i
                for i in among
                if self._params[i].requires_grad
                and get_gradient_edge(self._params[i]).node is not self.nodes[i]
            ]

    def remove(self) -> None:
        """Take the hooks off the parameters; idempotent."""
        if self._native is not None:
            self._native.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._dicts.clear()
        self.nodes.clear()


def _small_hook(params: Sequence[torch.Tensor], countdown: Countdown) -> SharedHook:
    """The hot path, once per parameter and backward.

    It does what `Countdown.fill` does, spelled out and with everything bound
    beforehand, because here each call and each attribute counts. One function serves
    all parameters (bound to the index as a method is to its object): a closure per
    parameter would miss the cache at every gradient.
    """
    entries, pending = countdown.entries, countdown.pending
    bucket_of, note_ready = countdown.bucket_of, countdown.ready.append
    on_full, on_unusual = countdown.callbacks
    unset = Mark.UNSET

    @untraced
    def grad_hook(i: int, _grad_inputs: Any, _grad_outputs: Any) -> None:
        if entries[i] is not unset:
            on_unusual(i)
            return
        entries[i] = params[i].grad
        note_ready(i)
        bucket = bucket_of[i]
        pending[bucket] = left = pending[bucket] - 1
        if not left:
            on_full(bucket)

    return grad_hook


def _large_hook(params: Sequence[torch.Tensor], countdown: Countdown) -> SharedHook:
    """For gradients that are copied while they are still in cache."""
    entries = countdown.entries

    @untraced
    def grad_hook(i: int, _grad_inputs: Any, _grad_outputs: Any) -> None:
        if entries[i] is not Mark.UNSET:
            countdown.callbacks.on_unusual(i)
        else:
            countdown.arrive(i, params[i].grad)

    return grad_hook


def _noting_stream(
    params: Sequence[torch.Tensor], countdown: Countdown, hook: SharedHook
) -> SharedHook:
    """On CUDA: also note the stream that wrote the gradient."""
    written_on, bucket_of = countdown.written_on, countdown.bucket_of
    devices = [param.device.index for param in params]

    @untraced
    def grad_hook(i: int, grad_inputs: Any, grad_outputs: Any) -> None:
        written_on[bucket_of[i]].add(raw_stream(devices[i]))
        hook(i, grad_inputs, grad_outputs)

    return grad_hook


def find_tensors(output: object) -> list[torch.Tensor]:
    """Tensors in a forward's return value: lists, tuples, dict values, dataclasses.

    And what an RRef of this process refers to.
    """
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
    if is_own_rref(output):
        return find_tensors(output.local_value())
    return []


def probe_outputs(output: object, probe: Callable[[Any], None]) -> None:
    """Call ``probe(grads)`` as soon as a backward reaches one of the outputs."""
    for tensor in find_tensors(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(probe)


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


def unreachable(
    output: object, nodes: Sequence[Node], among: Iterable[int]
) -> set[int]:
    """Which of the parameters ``among`` have no gradient path from the outputs.

    None of them if no output can be seen: then nothing is known.
    """
    reached = reachable_nodes(output)
    return {i for i in among if nodes[i] not in reached} if reached else set()
