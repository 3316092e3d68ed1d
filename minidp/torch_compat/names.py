"""Private names of torch's class, which third parties use, for `minidp.DataParallel`.

They are written here as the body of a class, `TorchNames`, and `with_torchs_names` puts
them on the wrapper. `TorchNames` is no base of it: code that derives from torch's class
calls ``super(DistributedDataParallel, self)`` and expects to reach `torch.nn.Module`.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from minidp import comm_hooks
from minidp.comm import broadcast_coalesced
from minidp.console import warn
from minidp.core import EveryParameter, Observer, Reducer, mode_for
from minidp.guard import Guard, refuse_forward
from minidp.replica import parameters

from . import manual_finalization as manual
from .fixed import fix_options
from .logging_data import LoggingData

T = TypeVar("T")
_Builtin: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]
BUILTIN_HOOKS = {
    _Builtin.ALLREDUCE: comm_hooks.all_reduce_hook,
    _Builtin.FP16_COMPRESS: comm_hooks.fp16_compress_hook,
}


class _PlantedOptimizers(Observer):
    """Step the optimizers that torch's ``_apply_optimizer_in_backward`` has planted.

    Each of them steps as soon as the bucket of its parameter is reduced. At the end of
    the backward the ``.grad`` of these parameters become None, as with torch.
    """

    uses_grads = True

    def __init__(self, guard: Guard) -> None:
        self._guard: Guard = weakref.proxy(guard)  # no cycle through the reducer
        self._stepped: list[nn.Parameter] = []

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """Step the optimizers of the parameters of a reduced bucket."""
        for param in params:
            for optimizer in getattr(param, "_in_backward_optimizers", ()):
                with self._guard.allow(optimizer):
                    optimizer.step()
                self._stepped.append(param)

    def finished(self) -> None:
        """Set ``.grad`` to None where an optimizer stepped, at the backward's end."""
        for param in self._stepped:
            param.grad = None
        self._stepped.clear()


def adopt_planted_optimizers(
    params: Sequence[nn.Parameter], guard: Guard
) -> Observer | None:
    """Take over the optimizers of torch's ``_apply_optimizer_in_backward``.

    Torch's own grad hooks would step on local gradients, before the average, so they
    are removed. The result is an observer that steps these optimizers on the averages,
    or None if no parameter has one.
    """
    if not any(hasattr(p, "_in_backward_optimizers") for p in params):
        return None
    planted = importlib.import_module(
        "torch.distributed.optim.apply_optimizer_in_backward"
    )
    for param in params:
        for handle in planted.param_to_optim_hook_handle_map.get(param, []):
            handle.remove()
    return _PlantedOptimizers(guard)


class TorchNames:
    """The body of these names. Their ``self`` is always a `minidp.DataParallel`."""

    # What the methods here read of a `minidp.DataParallel`.
    module: nn.Module
    process_group: dist.ProcessGroup
    parameters_to_ignore: set[str]
    static_graph: bool
    logger: LoggingData
    named_module_buffers: dict[str, torch.Tensor]
    modules_buffers: list[torch.Tensor]
    register_comm_hook: Callable[[object, Any], None]
    step_in_backward: Callable[[Any], None]
    _given: SimpleNamespace
    _delayed: Callable[[], dict[str, nn.Parameter]]
    _reducer: Reducer
    _guard: Guard
    _replication: Any

    # minidp has nothing of this kind.
    use_side_stream_for_tensor_copies = False
    _use_python_reducer = False
    _lazy_init_ran = False  # until the first forward
    _ddp_sink_clone = True  # False: outputs are never copied (`Mode.copies_outputs`)

    # -- hooks and optimizers ----------------------------------------------------------

    def _register_builtin_comm_hook(self, kind: Any) -> None:
        """Register minidp's comm hook that does what torch's built-in ``kind`` does.

        As with torch, an unknown kind is only warned of.
        """
        if kind not in BUILTIN_HOOKS:
            warn(
                f"Unknown builtin comm hook {kind!r}: ignored, so gradients are "
                "averaged as without a hook. What to do: pass a torch.distributed."
                "BuiltinCommHookType, or call register_comm_hook()."
            )
            return
        self.register_comm_hook(None, BUILTIN_HOOKS[kind])
        self.logger.comm_hook = str(kind)

    def _register_fused_optim(
        self, optim: Any, *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        """Make an optimizer of class ``optim`` that steps inside backwards.

        Its parameters are ``optim_params``, or all that are averaged. As with torch, a
        comm hook that averages is registered, too.
        """
        params = self._reducer.params if optim_params is None else optim_params
        self.register_comm_hook(None, comm_hooks.all_reduce_hook)
        self.step_in_backward(optim(list(params), *args, **kwargs))

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[..., Any],
        comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let a hook synchronise module buffers, instead of the broadcast.

        It is called as ``hook(state, {name: module buffer})``, in each forward that
        would broadcast buffers, after the module (the default) or before. If it returns
        futures, the next synchronised backward waits for them at its end.
        """
        if not callable(hook):
            raise AssertionError(f"A buffer comm hook must be callable, got {hook!r}.")
        queue = self._reducer.queue

        def run(buffers: dict[str, torch.Tensor]) -> None:
            futures = hook(state, buffers)
            if futures is not None:
                queue.buffer_hook_futures.extend(futures)

        is_late = comm_hook_location is _BufferCommHookLocation.POST_FORWARD
        self._replication.late_buffer_hook = run if is_late else None
        self._replication.buffer_hook = (lambda _: None) if is_late else run

    def _default_broadcast_coalesced(
        self, bufs: Any = None, bucket_size: Any = None, authoritative_rank: int = 0
    ) -> None:
        """Copy buffers of the authoritative rank to all ranks.

        All ranks must call this together. By default these are the module buffers. The
        ``bucket_size`` has no effect.
        """
        tensors = list(self.modules_buffers if bufs is None else bufs)
        broadcast_coalesced(tensors, self.process_group, authoritative_rank)

    _set_ddp_sink_clone = DistributedDataParallel._set_ddp_sink_clone
    _get_active_ddp_module = DistributedDataParallel._get_active_ddp_module

    # -- manual finalization -----------------------------------------------------------

    require_manual_backward_finalization = property(manual.is_required, manual.require)
    if manual.IS_OFFERED:
        should_finalize_after_backward = property(manual.should_finalize_after_backward)
        finalize_backward = manual.finalize_backward

    # -- changes after wrapping --------------------------------------------------------

    def _set_static_graph(self) -> None:
        """Switch to ``static_graph`` and to its first buckets.

        All ranks must do so, before the first forward, but they do not wait for each
        other.
        """
        if self._reducer.queue.config.static_graph:
            warn("The graph has been set to be static already.")
            return
        if self._reducer.ledger.armed:
            error = RuntimeError(
                "set_static_graph() should be called before training loop starts and "
                "after DistributedDataParallel is constructed."
            )
            self.logger.note_error(error)
            raise error
        self._given.static_graph = vars(self)["static_graph"] = True
        reducer = self._reducer
        config = replace(reducer.queue.config, static_graph=True)
        reducer.mode = mode_for(len(reducer.params), config)
        reducer.adopt(reducer.queue.configure(config))

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Move to another group, and forget a failure and gradients under way.

        It waits for no rank. Afterwards the buckets are rebuilt once more. The next
        synchronised step compares the replicas if all ranks of the group want to. From
        then on steps are counted anew, because ranks that are new have made fewer.

        If the new group is no ProcessGroup, it is torch's mark of a rank outside the
        group. Then the present group stays.
        """
        old = self.process_group
        if isinstance(new_process_group, dist.ProcessGroup):
            vars(self)["process_group"] = new_process_group
        is_other = self.process_group is not old
        if is_other:
            self._replication.leave()  # before `reset` forgets what was started
        self._reducer.reset(self.process_group)
        if is_other:
            self._replication.move()
        self._reducer.rebuild_policy.reset(rebuilds_again=True)
        self._replication.compare_on(self.process_group, new=True, alone=True)
        if self._replication.check is not None:
            self._guard.replica_check = self._replication.check

    def _remove_autograd_hooks(self) -> None:
        """Remove the grad hooks for good, so that later backwards average nothing.

        Nothing reports that gradients stay local: the checks for mistakes, and the
        comparison of replicas, end for good, too.
        """
        reducer = self._reducer
        reducer.hooks.remove()
        reducer.mode = EveryParameter(len(reducer.params))  # searches no graphs
        self._guard.policy = "ignore"
        self._guard.retire()
        self._replication.stop_comparing()

    def _check_reducer_finalized(self) -> None:
        """Raise what a forward would raise if the last backward has not finished.

        Other ranks, which may wait for this one, get the error, too.
        """
        refuse_forward(self._reducer)

    # -- what there is -----------------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return what `LoggingData.to_dict` returns: facts, but no times."""
        return self.logger.to_dict()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Check the rate as torch does. It has no effect: no iteration is sampled."""
        if sample_rate < 1:
            raise ValueError(
                "DDP runtime logging sample rate should be equal or greater than 1, "
                f"but got {sample_rate}."
            )

    _bucket_config = property(attrgetter("_reducer.queue.config.caps"))
    _has_rebuilt_buckets = property(attrgetter("_reducer.rebuild_policy.has_rebuilt"))

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        named, ignored = self.module.named_parameters(), self.parameters_to_ignore
        return [param for name, param in named if name not in ignored]

    @property
    def _delay_all_reduce_params(self) -> list[nn.Parameter]:
        return list(self._delayed().values())

    @property
    def _comm_hooks(self) -> list[tuple[Any, Any]]:
        hook = self._reducer.queue.averaging.comm_hook
        return [] if hook is None else [(hook.hook, hook.state)]

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        replica = parameters.examine(self.module, self._delayed())
        return replica.params, [name in replica.sparse for name in replica.managed]

    def _build_debug_param_to_name_mapping(
        self, parameters: Sequence[nn.Parameter]
    ) -> dict[int, str]:
        names = {id(p): n for n, p in self.module.named_parameters()}
        known = {id(p) for p in self._build_params_for_reducer()[0]}
        if len(parameters) > len(known):
            raise ValueError(
                f"Expected param to name mapping of {len(known)} parameters, but got "
                f"{len(parameters)}."
            )
        found = {id(p) for p in parameters}
        if found != known:
            odd = ", ".join(names.get(i, "?") for i in found ^ known)
            raise ValueError(f"Param with name {odd} is missing, or not reduced here.")
        return {i: names[id(p)] for i, p in enumerate(parameters)}

    @staticmethod
    def _get_data_parallel_params(
        module: nn.Module,
        named_params: bool = False,  # noqa: FBT001, FBT002 -- torch's
    ) -> Iterator[Any]:
        """Yield the parameters that are not ignored, with their names if wanted."""
        for name, param in module.named_parameters():
            if not hasattr(param, "_ddp_ignored"):
                yield (name, param) if named_params else param

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Set the module's ignore list, the names of what is not synchronised.

        Call this before the module is wrapped. The constructor warns of unknown names.
        """
        listed = {name.removeprefix(".") for name in params_and_buffers_to_ignore}
        setattr(module, parameters.IGNORE_ATTRIBUTE, params_and_buffers_to_ignore)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in listed:
                vars(tensor)["_ddp_ignored"] = True


_OF_EVERY_CLASS = {"__module__", "__doc__", "__dict__", "__weakref__"} | {
    "__annotations__",
    "__annotate_func__",
    "__annotations_cache__",
    "__static_attributes__",
    "__firstlineno__",
}


def with_torchs_names(wrapper: type[T]) -> type[T]:
    """Put the names of `TorchNames` on the class of the wrapper, and return it."""
    for name, value in vars(TorchNames).items():
        if name not in _OF_EVERY_CLASS:
            setattr(wrapper, name, value)
    fix_options(wrapper)
    return wrapper
