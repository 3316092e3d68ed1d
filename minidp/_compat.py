"""What third parties look for in torch's DDP, on top of `data_parallel`.

Nothing here is needed to understand how gradients are averaged: these are the private
names of torch's class and of its ``reducer`` that pipeline stages, dynamo, trainers and
torch's own tests reach for.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel, scatter_gather
from torch.nn.parallel.distributed import _BufferCommHookLocation

from . import _arguments, _managed, _replicas, comm_hooks, data_parallel
from ._compat_reducer import ReducerNames
from ._compiling import run_splitting
from ._expectation import EveryParameter, expectation_for
from ._generic import M_co
from ._guard import refuse_forward, retire
from ._inputs import move_inputs
from ._logging_data import LoggingData
from ._untraced import untraced
from ._warn import warn

logger = logging.getLogger("minidp")
_Builtin: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]
BUILTIN_HOOKS = {
    _Builtin.ALLREDUCE: comm_hooks.all_reduce_hook,
    _Builtin.FP16_COMPRESS: comm_hooks.fp16_compress_hook,
}


class _OwnOptimizers:
    """Steps parameters that carry ``_in_backward_optimizers``."""

    uses_grads = True

    def __init__(self, ddp: data_parallel.DataParallel) -> None:
        self._excuses = ddp._guard.excuses
        self._stepped: list[nn.Parameter] = []

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """Step those of a bucket."""
        for param in params:
            for optimizer in getattr(param, "_in_backward_optimizers", ()):
                with self._excuses.excused(optimizer):
                    optimizer.step()
                self._stepped.append(param)

    def finished(self) -> None:
        """Their gradients are used up."""
        for param in self._stepped:
            param.grad = None
        self._stepped.clear()


class _LogsUnused:
    """Logs which parameters no rank used, for TORCH_DISTRIBUTED_DEBUG=INFO."""

    uses_grads = False

    def __init__(self, ddp: data_parallel.DataParallel) -> None:
        self._pipeline = ddp._reducer.pipeline
        self._names = ddp._reducer.names

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """Not known before the end."""

    def finished(self) -> None:
        """Log."""
        counts = self._pipeline.used_map.last_counts.tolist()
        unused = [name for name, n in zip(self._names, counts, strict=True) if not n]
        if unused:
            names = ", ".join(unused)
            logger.info("[rank %d] unused parameters: %s", self._pipeline.rank, names)


class _Legacy:
    """Public helpers of torch's class from the days of one process for several GPUs."""

    dim: int
    device_type: str

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Split inputs over devices."""
        return scatter_gather.scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: Any) -> Any:
        """Move inputs to one device, given by its index."""
        device = torch.device(self.device_type, device_id)
        return (move_inputs(inputs, device),), (move_inputs(kwargs, device),)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join outputs of several devices."""
        return scatter_gather.gather(outputs, output_device, dim=self.dim)


class _Attributes:
    """Attributes of torch's object that follow from ours: name -> how."""

    TABLE: Mapping[str, Callable[[Any], Any]] = {
        "reducer": lambda ddp: ReducerNames(ddp),
        "logger": lambda ddp: ddp._logging,
        "bucket_bytes_cap_list": lambda ddp: list(ddp._caps.list_bytes),
        "bucket_bytes_cap_default": lambda ddp: ddp._caps.has_small_first,
        "_bucket_config": lambda ddp: ddp._caps,
        "mixed_precision": lambda ddp: ddp._given.mixed_precision,
        "batched_grad_copy": lambda ddp: bool(ddp._given.batched_grad_copy),
        "skip_all_reduce_unused_params": lambda ddp: bool(
            ddp._given.skip_all_reduce_unused_params
        ),
        "_module_parameters": lambda ddp: [
            p
            for n, p in ddp.module.named_parameters()
            if n not in ddp.parameters_to_ignore
        ],
        "_delay_all_reduce_params": lambda ddp: [*ddp._given.delayed_by_name.values()],
        "_has_rebuilt_buckets": lambda ddp: ddp._reducer.ready_order.has_rebuilt,
        "_comm_hooks": lambda ddp: [
            (hook.hook, hook.state)
            for hook in [ddp._reducer.pipeline.averaging.comm_hook]
            if hook is not None
        ],
        "_use_python_reducer": lambda _: False,
        "_accum_grad_hooks": lambda _: [],
        "_ddp_sink_clone": lambda _: False,
        "use_side_stream_for_tensor_copies": lambda _: False,
    }


class DataParallel(_Legacy, data_parallel.DataParallel[M_co]):
    __doc__ = data_parallel.DataParallel.__doc__
    __module__ = "minidp"
    _not_portable = (
        *data_parallel.DataParallel._not_portable,
        "_logging",
        "_module_buffer_hook",
    )

    def _prepare(self, module: nn.Module, device_mesh: Any) -> None:
        """Tensor parallel inside: DTensors become plain parameters between forwards."""
        super()._prepare(module, device_mesh)
        if device_mesh is not None and device_mesh._get_root_mesh() != device_mesh:
            name = "torch.distributed.tensor.parallel.ddp"
            importlib.import_module(name)._pre_dp_module_transform(module)

    def _wire(self, checked: _arguments.Checked, kind: str) -> None:
        self._logging = LoggingData(self)
        super()._wire(checked, kind)
        self._logging.describe()
        self._caps = checked.config.caps
        level = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
        is_debugged = level.upper() in ("INFO", "DETAIL")
        if is_debugged and self.find_unused_parameters:
            self._reducer.pipeline.observers.append(_LogsUnused(self))
        self._module_buffer_hook: tuple[Any, Callable[..., Any], Any] | None = None
        self._lazy_init_ran = False

    def __getattr__(self, name: str) -> Any:
        if name in _Attributes.TABLE:
            return _Attributes.TABLE[name](self)
        return super().__getattr__(name)

    # -- forward -----------------------------------------------------------------------

    @untraced
    def _before_module(self, inputs: Any, kwargs: Any) -> Any:
        if not self._lazy_init_ran:
            self._lazy_init_ran = True
            self._adopt_own_optimizers()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._logging.forward_begins()
        with self._logging.noting_errors():
            return super()._before_module(inputs, kwargs)

    _run_module = run_splitting

    @untraced
    def _after_module(self, output: Any) -> None:
        if self._module_buffer_hook is not None and self.will_sync_module_buffers():
            self._run_buffer_hook(_BufferCommHookLocation.POST_FORWARD)
        super()._after_module(output)
        if self.require_forward_param_sync:  # this forward is synchronised
            self._logging.forward_ends()

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._before_module(inputs, kwargs)

    def _post_forward(self, output: Any) -> Any:
        self._after_module(output)
        return output

    # -- hooks and optimizers ----------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Any) -> None:
        with self._logging.noting_errors():
            super().register_comm_hook(state, hook)

    register_comm_hook.__doc__ = data_parallel.DataParallel.register_comm_hook.__doc__

    def _register_builtin_comm_hook(self, kind: Any) -> None:
        """Register the hook of ours that does what torch's built-in one does."""
        if kind not in BUILTIN_HOOKS:
            warn(f"Unknown builtin comm hook {kind!r}: ignored.")
            return
        self.register_comm_hook(None, BUILTIN_HOOKS[kind])
        self._logging.comm_hook = str(kind)

    def _register_fused_optim(
        self, optim: Any, *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        """Reduce with torch's arithmetic of a hook, and step in the backward."""
        params = self._reducer.params if optim_params is None else optim_params
        self.register_comm_hook(None, comm_hooks.all_reduce_hook)
        self.step_in_backward(optim(list(params), *args, **kwargs))

    def _adopt_own_optimizers(self) -> None:
        """Step parameters that have optimizers of their own; they no longer do."""
        params = [p for p in self._module_parameters if p.requires_grad]
        if not any(hasattr(p, "_in_backward_optimizers") for p in params):
            return
        # Whoever planted those has imported this.
        planted = importlib.import_module(
            "torch.distributed.optim.apply_optimizer_in_backward"
        )
        for param in params:
            for handle in planted.param_to_optim_hook_handle_map.get(param, []):
                handle.remove()
        self._reducer.pipeline.observers.append(_OwnOptimizers(self))
        if self._replica_check is not None:
            self._replica_check.awaits_step = False

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[..., Any],
        comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """``hook(state, {name: module buffer})`` synchronises module buffers."""
        if not callable(hook):
            raise AssertionError(f"A buffer comm hook must be callable, got {hook!r}.")
        self._module_buffer_hook = (state, hook, comm_hook_location)

    def _sync_module_buffers(self, root: int = 0) -> None:
        """Collective: take the module buffers of a rank, or let a hook do that."""
        if self._module_buffer_hook is None:
            super()._sync_module_buffers(root)
        else:
            self._run_buffer_hook(_BufferCommHookLocation.PRE_FORWARD)

    def join_hook(self, **kwargs: Any) -> Any:
        """See `data_parallel.DataParallel`; a module-buffer hook has no shadow."""
        if self._module_buffer_hook is not None:
            raise RuntimeError(
                "join() does not go together with _register_buffer_comm_hook: ranks "
                "that ran out of inputs could not take part in the hook's collectives."
            )
        return super().join_hook(**kwargs)

    def _run_buffer_hook(self, location: _BufferCommHookLocation) -> None:
        assert self._module_buffer_hook is not None
        state, hook, wanted = self._module_buffer_hook
        if location is not wanted:
            return
        self._collect_module_buffers()
        futures = hook(state, self.named_module_buffers)
        if futures is not None:
            self.reducer._install_post_backward_futures(futures)

    def _default_broadcast_coalesced(
        self, bufs: Any = None, bucket_size: Any = None, authoritative_rank: int = 0
    ) -> None:
        """Collective: what synchronises module buffers without a hook."""
        tensors = self.modules_buffers if bufs is None else list(bufs)
        _replicas.broadcast_state(tensors, self.process_group, authoritative_rank)

    # -- changes after wrapping --------------------------------------------------------

    def _set_static_graph(self) -> None:
        """Promise a static graph before training starts.

        Raises:
            RuntimeError: it has started.
        """
        if self.static_graph:
            warn("The graph has been set to be static already.")
            return
        if self._reducer.ledger.armed:
            with self._logging.noting_errors():
                raise RuntimeError(
                    "set_static_graph() should be called before training loop starts "
                    "and after DistributedDataParallel is constructed."
                )
        self._given = replace(self._given, static_graph=True)
        self.static_graph = True
        reducer = self._reducer
        config = reducer.pipeline.replan(static_graph=True)
        reducer.expected = expectation_for(len(reducer.params), config)
        reducer.countdown.adopt(reducer.pipeline.buckets)

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Reduce over other ranks from now on; all of the new group call it.

        A rank that is not in the new group keeps the old one.
        """
        if isinstance(new_process_group, dist.ProcessGroup):
            self.process_group = new_process_group
        self._reducer.restart(self.process_group)
        self._reducer.ready_order.allow_again()
        self._stop_comparing()  # who joins has made fewer steps
        self._guard.excuses.rank = self._reducer.rank

    def _remove_autograd_hooks(self) -> None:
        """From now on gradients stay local, and nobody complains."""
        reducer = self._reducer
        reducer.hooks.remove()
        reducer.expected = EveryParameter(len(reducer.params))  # searches no graphs
        self._guard.policy = "ignore"
        retire(self._guard)
        self._stop_comparing()

    def _check_reducer_finalized(self) -> None:
        refuse_forward(self._reducer)

    def _set_ddp_sink_clone(self, val: bool) -> None:  # noqa: FBT001 -- torch's
        """Outputs are never cloned here."""

    # -- what there is -----------------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Facts and times of this object, under torch's keys (see `_logging_data`)."""
        return self._logging.to_dict()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._logging.set_rate(sample_rate)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        replica = _managed.examine(self.module, self._given.delayed_by_name)
        managed = replica.managed
        return list(managed.values()), [name in replica.sparse for name in managed]

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
        """Parameters that are not on an ignore list."""
        for name, param in module.named_parameters():
            if not hasattr(param, "_ddp_ignored"):
                yield (name, param) if named_params else param

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Leave parameters and module buffers out, by name, before wrapping."""
        listed = {name.removeprefix(".") for name in params_and_buffers_to_ignore}
        setattr(module, _managed.IGNORE_ATTRIBUTE, params_and_buffers_to_ignore)
        everything: list[Any] = [*module.named_parameters(), *module.named_buffers()]
        for name, tensor in everything:
            if name in listed:
                tensor._ddp_ignored = True


DistributedDataParallel.register(DataParallel)
