"""`minidp.DataParallel`: `data_parallel.DataParallel`, plus torch's private names."""

from __future__ import annotations

import importlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from minidp import comm_hooks, data_parallel
from minidp.comm import MESSAGE_BYTES, broadcast_coalesced
from minidp.console import warn
from minidp.core import EveryParameter, Observer, Reducer, expectation_for, untraced
from minidp.data_parallel import M_co, arguments
from minidp.guard import refuse_forward
from minidp.replica import parameters

from . import manual_finalization as manual
from .dynamo_split import run_splitting
from .fixed import Fixed, fix_options
from .logging_data import LoggingData
from .reducer import ReducerNames
from .versions import note_version

logger = logging.getLogger("minidp")
_Builtin: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]
BUILTIN_HOOKS = {
    _Builtin.ALLREDUCE: comm_hooks.all_reduce_hook,
    _Builtin.FP16_COMPRESS: comm_hooks.fp16_compress_hook,
}


class _PlantedOptimizers(Observer):
    """Step optimizers that torch's ``_apply_optimizer_in_backward`` put on parameters.

    An observer that the first forward registers, if there are any. Each steps as soon
    as its parameter's bucket is reduced; at the backward's end these ``.grad`` become
    None.
    """

    uses_grads = True

    def __init__(self, ddp: data_parallel.DataParallel) -> None:
        self._guard = weakref.proxy(ddp._guard)  # no cycle through the reducer
        self._stepped: list[nn.Parameter] = []

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """Step the ``_in_backward_optimizers`` of a reduced bucket's ``params``."""
        for param in params:
            for optimizer in getattr(param, "_in_backward_optimizers", ()):
                with self._guard.allow(optimizer):
                    optimizer.step()
                self._stepped.append(param)

    def finished(self) -> None:
        """At the backward's end, set ``.grad`` to None where an optimizer stepped."""
        for param in self._stepped:
            param.grad = None
        self._stepped.clear()


class _LogsUnused(Observer):
    """Log unused parameters at the end of each synchronised backward.

    An observer, made only for ``find_unused_parameters`` together with
    TORCH_DISTRIBUTED_DEBUG=INFO or DETAIL.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._queue, self._names = reducer.queue, reducer.names

    def finished(self) -> None:
        """Log names of parameters that no rank used, if any; wait for the used-map."""
        counts = self._queue.used_map.last_counts.tolist()
        unused = [name for name, n in zip(self._names, counts, strict=True) if not n]
        if unused:
            names = ", ".join(unused)
            logger.info(
                "[rank %d] unused parameters: %s", self._queue.communicator.rank, names
            )


@fix_options
class DataParallel(data_parallel.DataParallel[M_co]):  # noqa: D101
    __doc__ = data_parallel.DataParallel.__doc__
    __module__ = "minidp"
    _not_copied = (
        *data_parallel.DataParallel._not_copied,
        "logger",
        "_late_buffer_hook",
    )
    # Nothing of the kind exists here.
    use_side_stream_for_tensor_copies = False
    _use_python_reducer = False
    _ddp_sink_clone = False
    # Nobody reads these after construction: an assignment warns.
    find_unused_parameters = Fixed()
    gradient_as_bucket_view = Fixed()
    static_graph = Fixed()
    batched_grad_copy = Fixed()
    lazy_bucket_allocation = Fixed()
    skip_all_reduce_unused_params = Fixed()
    bucket_bytes_cap = Fixed()
    bucket_bytes_cap_list = Fixed()
    bucket_bytes_cap_default = Fixed()
    mixed_precision = Fixed()
    average_over = Fixed()
    parameters_to_ignore = Fixed()
    process_group = Fixed()

    def _wire(self, checked: arguments.Arguments, kind: str) -> None:
        note_version()
        config, devices = checked.config, checked.devices
        self.output_device = devices.output_device
        self.device_type = devices.device.type
        self.is_multi_device_module = devices.is_multi_device
        self.find_unused_parameters = config.find_unused_parameters
        self.gradient_as_bucket_view = config.gradient_as_bucket_view
        self.static_graph = config.static_graph
        self.batched_grad_copy = config.batched_grad_copy
        self.lazy_bucket_allocation = config.lazy_bucket_allocation
        self.average_over = self._given.average_over
        self.skip_all_reduce_unused_params = config.skip_all_reduce_unused_params
        self.bucket_bytes_cap = config.caps.rest_bytes
        self.bucket_bytes_cap_list = list(config.caps.list_bytes)
        self.bucket_bytes_cap_default = config.caps.has_small_first
        self.broadcast_bucket_size = MESSAGE_BYTES
        self.mixed_precision = self._given.mixed_precision
        super()._wire(checked, kind)
        self.logger = LoggingData(self)
        level = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
        if level.upper() in ("INFO", "DETAIL") and self.find_unused_parameters:
            self._reducer.queue.observers.append(_LogsUnused(self._reducer))
        self._late_buffer_hook: Callable[[dict[str, torch.Tensor]], None] | None = None
        self._lazy_init_ran = False
        self._accum_grad_hooks: list[Any] = []

    # -- forward -----------------------------------------------------------------------

    @untraced
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._lazy_init_ran:
            self._lazy_init_ran = True
            self._adopt_planted_optimizers()
        try:
            is_synced = torch.is_grad_enabled() and self.require_backward_grad_sync
            if is_synced and not self._reducer.failure:  # its maps may never come
                self.logger.forward_begins()
            return super()._pre_forward(*inputs, **kwargs)
        except Exception as error:
            self.logger.note_error(error)
            raise

    _run_ddp_forward = run_splitting

    @untraced
    def _post_forward(self, output: Any) -> Any:
        if self._late_buffer_hook is not None and self.will_sync_module_buffers():
            self._replication.collect(self.module)
            self._late_buffer_hook(self.named_module_buffers)
        super()._post_forward(output)
        if self.require_forward_param_sync:  # this forward is synchronised
            self.logger.forward_ends()
        return output

    # -- hooks and optimizers ----------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Any) -> None:  # noqa: D102
        try:
            super().register_comm_hook(state, hook)
        except Exception as error:
            self.logger.note_error(error)
            raise

    def _register_builtin_comm_hook(self, kind: Any) -> None:
        """Register minidp's comm hook that does what torch's built-in ``kind`` does.

        Raises, and replaces buckets, as `register_comm_hook`; unknown kind: only warns.
        """
        if kind not in BUILTIN_HOOKS:
            warn(f"Unknown builtin comm hook {kind!r}: ignored.")
            return
        self.register_comm_hook(None, BUILTIN_HOOKS[kind])
        self.logger.comm_hook = str(kind)

    def _register_fused_optim(
        self, optim: Any, *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        """Create an optimizer ``optim(params, ...)`` that steps inside backwards.

        ``optim``: its class. ``optim_params``: its parameters; None: all that are
        averaged. Also register `all_reduce_hook`; raise as `register_comm_hook`,
        `step_in_backward`.
        """
        params = self._reducer.params if optim_params is None else optim_params
        self.register_comm_hook(None, comm_hooks.all_reduce_hook)
        self.step_in_backward(optim(list(params), *args, **kwargs))

    def _adopt_planted_optimizers(self) -> None:
        """Register `_PlantedOptimizers`, and remove the grad hooks of these optimizers.

        Those would step on local gradients, before the average. A no-op if no trainable
        parameter has ``_in_backward_optimizers``.
        """
        params = [p for p in self._module_parameters if p.requires_grad]
        if not any(hasattr(p, "_in_backward_optimizers") for p in params):
            return
        planted = importlib.import_module(
            "torch.distributed.optim.apply_optimizer_in_backward"
        )
        for param in params:
            for handle in planted.param_to_optim_hook_handle_map.get(param, []):
                handle.remove()
        self._replication.add_stepper(_PlantedOptimizers(self))

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[..., Any],
        comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let later forwards call ``hook(state, {name: module buffer})``; no broadcast.

        After the module (default) or before, in forwards that would broadcast buffers.
        The next synchronised backward waits, at its end, for the futures that it
        returned (or None). Replaces an earlier hook. AssertionError if ``hook`` is not
        callable.
        """
        if not callable(hook):
            raise AssertionError(f"A buffer comm hook must be callable, got {hook!r}.")
        queue = self._reducer.queue

        def run(buffers: dict[str, torch.Tensor]) -> None:
            futures = hook(state, buffers)
            if futures is not None:
                queue.owed.extend(futures)

        is_late = comm_hook_location is _BufferCommHookLocation.POST_FORWARD
        self._late_buffer_hook = run if is_late else None
        self._replication.buffer_hook = (lambda _: None) if is_late else run

    def _default_broadcast_coalesced(
        self, bufs: Any = None, bucket_size: Any = None, authoritative_rank: int = 0
    ) -> None:
        """Collective: copy one rank's ``bufs`` (None: module buffers) to all ranks.

        That rank is ``authoritative_rank``. ``bucket_size`` is ignored.
        """
        tensors = list(self.modules_buffers if bufs is None else bufs)
        broadcast_coalesced(tensors, self.process_group, authoritative_rank)

    # -- torch's own methods, which need no more than our attributes -------------------

    scatter = DistributedDataParallel.scatter
    to_kwargs = DistributedDataParallel.to_kwargs
    gather = DistributedDataParallel.gather
    _set_ddp_sink_clone = DistributedDataParallel._set_ddp_sink_clone
    _get_active_ddp_module = DistributedDataParallel._get_active_ddp_module

    # -- manual finalization -----------------------------------------------------------

    require_manual_backward_finalization = property(manual.is_required, manual.require)
    if manual.IS_OFFERED:
        should_finalize_after_backward = property(manual.should_finalize_after_backward)
        finalize_backward = manual.finalize_backward

    # -- changes after wrapping --------------------------------------------------------

    def _set_static_graph(self) -> None:
        """Switch to ``static_graph`` and its first buckets; if it is set, only warn.

        Not a collective, but all ranks must call it. RuntimeError, kept in the logging
        data, if a synchronised forward has run.
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
        reducer.expected = expectation_for(len(reducer.params), config)
        reducer.adopt(reducer.queue.configure(config))

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Move to another group, no collective; forget a failure and local gradients.

        If it is no ProcessGroup (torch's mark of a non-member), reset on the present
        one. Buckets will be rebuilt once more (not by "auto" with a tuned layout); a
        static graph's counts stay. Replicas are never compared again.
        """
        if isinstance(new_process_group, dist.ProcessGroup):
            vars(self)["process_group"] = new_process_group
        self._reducer.reset(self.process_group)
        self._reducer.rebuild_policy.reset(rebuilds_again=True)
        self._replication.stop_comparing()  # new ranks have made fewer steps

    def _remove_autograd_hooks(self) -> None:
        """Remove the grad hooks for good: later backwards average no gradients.

        Also ends, for good, the checks of forwards and optimizer steps for mistakes,
        and the comparison of replicas: nothing reports that gradients stay local.
        """
        reducer = self._reducer
        reducer.hooks.remove()
        reducer.expected = EveryParameter(len(reducer.params))  # searches no graphs
        self._guard.policy = "ignore"
        self._guard.retire()
        self._replication.stop_comparing()

    def _check_reducer_finalized(self) -> None:
        """Raise, as a forward does, if the last backward failed or did not finish.

        In the latter case other ranks, which may wait for this one, get the error, too.
        """
        refuse_forward(self._reducer)

    # -- what there is -----------------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return facts, times and flags by torch's keys: `LoggingData.to_dict`."""
        return self.logger.to_dict()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.logger.set_rate(sample_rate)

    named_module_buffers = property(  # what a forward broadcasts: none if it is empty
        attrgetter("_replication.buffers"),
        lambda self, named: setattr(self._replication, "buffers", dict(named)),
    )
    _bucket_config = property(attrgetter("_reducer.queue.config.caps"))
    _has_rebuilt_buckets = property(attrgetter("_reducer.rebuild_policy.has_rebuilt"))
    reducer = property(ReducerNames)  # made at each access

    modules_buffers = property(
        lambda self: list(self.named_module_buffers.values()),
        lambda self, buffers: setattr(
            self, "named_module_buffers", {str(n): b for n, b in enumerate(buffers)}
        ),
    )
    broadcast_buffers = property(  # deprecated
        attrgetter("forward_sync_buffers"),
        lambda self, enabled: setattr(self, "forward_sync_buffers", enabled),
    )

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        named, ignored = self.module.named_parameters(), self.parameters_to_ignore
        return [param for name, param in named if name not in ignored]

    @property
    def _delay_all_reduce_params(self) -> list[nn.Parameter]:
        return list(arguments.delayed_parameters(self._given).values())

    @property
    def _comm_hooks(self) -> list[tuple[Any, Any]]:
        hook = self._reducer.queue.averaging.comm_hook
        return [] if hook is None else [(hook.hook, hook.state)]

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        delayed = arguments.delayed_parameters(self._given)
        replica = parameters.examine(self.module, delayed)
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
        """Yield parameters that are not marked ``_ddp_ignored``.

        ``named_params``: yield (name, parameter).
        """
        for name, param in module.named_parameters():
            if not hasattr(param, "_ddp_ignored"):
                yield (name, param) if named_params else param

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Set the module's ignore list: names of what a later constructor leaves out.

        Also mark those tensors ``_ddp_ignored``. Unknown names are no error here.
        """
        listed = {name.removeprefix(".") for name in params_and_buffers_to_ignore}
        setattr(module, parameters.IGNORE_ATTRIBUTE, params_and_buffers_to_ignore)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in listed:
                vars(tensor)["_ddp_ignored"] = True


DistributedDataParallel.register(DataParallel)
