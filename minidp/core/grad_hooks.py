"""Receive each gradient from the autograd engine, and time the hooks that do so.

[Note: hook position] A grad hook sits on the parameter's AccumulateGrad *node*, as that
of torch's reducer: it runs after user tensor hooks and all post-accumulate hooks. The
node must be referenced, or it is freed with its hooks. Its Python hooks share one
ordered dict; a native hook runs before them. Other hooks on the node must not change
what we read: such a gradient is copied at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from .autograd import untraced
from .kernels import raw_stream
from .pending import GradState, PendingGrads, is_copied_at_once

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

GradHook = Callable[[int, Any, Any], None]  # index, grad_inputs, grad_outputs


def _small_hook(params: Sequence[Tensor], pending: PendingGrads) -> GradHook:
    """Return the hook that records a small gradient without a copy: the hot path.

    The hook calls `on_unusual` instead if the entry is not UNSET, and `on_full` after
    the bucket's last gradient. Names are bound beforehand, because attributes cost. All
    parameters share one function, bound to their index: closures miss the CPU cache.
    """
    entries, bucket_of, counts = pending.entries, pending.bucket_of, pending.num_pending
    note_ready, reducer = pending.ready.append, pending.reducer
    on_unusual = pending.on_unusual
    unset = GradState.UNSET

    @untraced
    def grad_hook(i: int, _grad_inputs: Any, _grad_outputs: Any) -> None:
        if entries[i] is not unset:
            on_unusual(i)
            return
        entries[i] = params[i].grad
        note_ready(i)
        bucket = bucket_of[i]
        counts[bucket] = left = counts[bucket] - 1
        if not left:
            reducer.on_full(bucket)

    return grad_hook


def _large_hook(params: Sequence[Tensor], pending: PendingGrads) -> GradHook:
    """Return the hook that copies a large gradient now; `on_unusual` if not UNSET."""
    entries = pending.entries

    @untraced
    def grad_hook(i: int, _grad_inputs: Any, _grad_outputs: Any) -> None:
        if entries[i] is not GradState.UNSET:
            pending.on_unusual(i)
        else:
            pending.arrive(i, params[i].grad)

    return grad_hook


def _noting_stream(
    params: Sequence[Tensor], pending: PendingGrads, hook: GradHook
) -> GradHook:
    """Return a hook that records the gradient's CUDA stream, then calls ``hook``."""
    written_on, bucket_of = pending.written_on, pending.bucket_of
    devices = [param.device.index for param in params]

    @untraced
    def grad_hook(i: int, grad_inputs: Any, grad_outputs: Any) -> None:
        written_on[bucket_of[i]].add(raw_stream(devices[i]))
        hook(i, grad_inputs, grad_outputs)

    return grad_hook


class GradHooks:
    """Attach to each parameter's AccumulateGrad a hook that records in ``pending``."""

    def __init__(
        self, params: Sequence[torch.nn.Parameter], pending: PendingGrads
    ) -> None:
        self._params = params = tuple(params)
        with torch.enable_grad():
            self.nodes = [get_gradient_edge(param).node for param in params]
        small, large = _small_hook(params, pending), _large_hook(params, pending)
        self._hooks = [large if is_copied_at_once(p) else small for p in params]
        for i, param in enumerate(params):
            if param.is_cuda:
                self._hooks[i] = _noting_stream(params, pending, self._hooks[i])
        self._handles: list[RemovableHandle] = []
        self._dicts: list[dict[int, Any]] = []  # all Python hooks of each node
        self.table = pending.native
        if self.table is not None:
            self._native = self.table.attach(WeakMethod(self.python_hook))
            return
        for i, node in enumerate(self.nodes):
            handle = node.register_hook(self.python_hook(i))
            self._handles.append(handle)
            self._dicts.append(cast("dict[int, Any]", handle.hooks_dict_ref()))

    def python_hook(self, i: int) -> Callable[[Any, Any], None]:
        """Return the Python hook of parameter ``i``, which compiled graphs call too."""
        return MethodType(self._hooks[i], i)

    def timed_by(self, clock: Callable[[], Any]) -> HookTiming:
        """Return a timer for these hooks, switched off; it reads ``clock`` per hook."""
        return HookTiming(self, clock)

    @property
    def places(self) -> list[tuple[dict[int, Any], int, GradHook]]:
        """Per Python hook: all hooks of its node, its key there, the unbound hook."""
        keys = [handle.id for handle in self._handles]
        return [*zip(self._dicts, keys, self._hooks, strict=False)]

    def shared(self) -> list[int]:
        """Return indices of parameters whose node has other hooks besides ours."""
        if self.table is not None:
            return list(self._native.shared())
        if sum(map(len, self._dicts)) == len(self._dicts):
            return []
        return [i for i, on_node in enumerate(self._dicts) if len(on_node) > 1]

    def lost(self, among: Iterable[int]) -> list[int]:
        """Return indices in ``among`` whose AccumulateGrad node has been replaced.

        Casting or moving a parameter replaces it silently. Frozen ones are left out.
        """
        needed = [i for i in among if self._params[i].requires_grad]
        with torch.enable_grad():
            now = {i: get_gradient_edge(self._params[i]).node for i in needed}
        return [i for i, node in now.items() if node is not self.nodes[i]]

    def remove(self) -> None:
        """Remove the hooks from all nodes, and free the nodes; idempotent."""
        if self.table is not None:
            self._native.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._dicts.clear()
        self.nodes.clear()


# -- timing ----------------------------------------------------------------------------


class HookTiming:
    """Record when each grad hook of ``hooks`` runs, while switched on.

    `switch` swaps Python hooks on the nodes for ones that read ``clock`` first, and
    back. C++ hooks read ``time.perf_counter_ns`` themselves, and call other clocks.
    """

    def __init__(self, hooks: GradHooks, clock: Callable[[], Any]) -> None:
        self._hooks = hooks
        self._clock = clock
        self._is_in_cpp = hooks.table is not None and clock is time.perf_counter_ns
        self._stamps: list[Any] = [None] * len(hooks.nodes)
        plain = {hook for _, _, hook in hooks.places}
        self._timed = {hook: _timed(hook, clock, self._stamps) for hook in plain}

    def switch(self, *, on: bool) -> None:
        """Start or stop recording hook times; do not call during a backward."""
        table = self._hooks.table
        if table is not None:
            table.stamp_by(self._stamp if on and not self._is_in_cpp else None)
            table.is_timed = on
        for i, (on_node, key, hook) in enumerate(self._hooks.places):
            on_node[key] = MethodType(self._timed[hook] if on else hook, i)

    def _stamp(self, i: int) -> None:
        self._stamps[i] = self._clock()

    def take(self) -> list[Any]:
        """Return and clear each parameter's last time; None if its hook did not run."""
        if self._is_in_cpp:
            stamps = cast("Any", self._hooks.table).take_stamps()
            return [stamp or None for stamp in stamps]
        taken, self._stamps[:] = list(self._stamps), [None] * len(self._stamps)
        return taken


def _timed(hook: GradHook, clock: Callable[[], Any], stamps: list[Any]) -> GradHook:
    @untraced
    def grad_hook(i: int, grad_inputs: Any, grad_outputs: Any) -> None:
        stamps[i] = clock()
        hook(i, grad_inputs, grad_outputs)

    return grad_hook
