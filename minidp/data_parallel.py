"""`DataParallel`: the ``nn.Module`` face. It checks, wires and delegates."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import _arguments, _replicas
from ._collectives import default_group
from ._guard import Guard, refuse_forward
from ._on_demand import average_now
from ._recovery import agree_and_recover
from ._reducer import Reducer
from ._untraced import untraced, untraced_itself
from .config import Unsynced
from .trace import Recorder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_NOT_PORTABLE = ("process_group", "_reducer", "_guard", "device_mesh")


class DataParallel(nn.Module):
    """Drop-in for ``torch.nn.parallel.DistributedDataParallel``.

    Wrap the same module on every rank; gradients are then averaged over the ranks while
    the backward runs, with the same bits as torch's DDP.

    Args:
        module: the module to replicate; available as ``.module``.
        device_ids: None, or one device for a module on that single accelerator:
            inputs are then moved there.
        output_device: kept for compatibility; outputs are never moved.
        dim: kept for compatibility.
        broadcast_buffers: deprecated by torch, see ``forward_sync_buffers``.
        init_sync: verify replicas and broadcast rank 0's state at construction.
        process_group: ranks to reduce over; None is the default group.
        bucket_cap_mb: bucket limit in MiB; None is 25 with a first bucket of 1 MiB.
        find_unused_parameters: parameters may get no gradient in some iterations.
        check_reduction: deprecated and ignored, as in torch.
        gradient_as_bucket_view: ``.grad`` are views of the buckets (saves memory).
        static_graph: every iteration uses the same parameters equally often.
        delay_all_reduce_named_params: not supported yet.
        param_to_hook_all_reduce: not supported yet.
        mixed_precision: not supported yet.
        device_mesh: a 1-D mesh, instead of ``process_group``.
        skip_all_reduce_unused_params: not supported yet.
        bucket_cap_mb_list: MiB per bucket, the last one repeats.
        batched_grad_copy: not supported yet.
        forward_sync_buffers: broadcast module buffers from rank 0 before forwards.
        unsynced: what to do when an optimizer is about to apply gradients that differ
            between ranks: "raise" (default), "warn" or "ignore".

    Raises:
        ValueError, TypeError, RuntimeError: bad arguments, as in torch.
        NotImplementedError: an argument that is not supported yet is used.
        ReplicaMismatchError: the replicas differ, or another rank raised.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        unsynced: Unsynced = "raise",
    ) -> None:
        super().__init__()
        self._given = _arguments.Given(
            device_ids=device_ids,
            output_device=output_device,
            broadcast_buffers=broadcast_buffers,
            init_sync=init_sync,
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            forward_sync_buffers=forward_sync_buffers,
            unsynced=unsynced,
            unsupported={
                "delay_all_reduce_named_params": delay_all_reduce_named_params,
                "param_to_hook_all_reduce": param_to_hook_all_reduce,
                "mixed_precision": mixed_precision,
                "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
                "batched_grad_copy": batched_grad_copy,
            },
        )
        self.process_group = _arguments.choose_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        try:
            checked = _arguments.check(module, self._given)
        except Exception as error:
            if init_sync:  # the other ranks wait for us: tell them why we leave
                device = _arguments.some_device(module)
                _replicas.verify(error, self.process_group, device)
            raise
        self.module = module
        self.dim = dim
        self.require_forward_param_sync = True
        self.forward_sync_buffers = checked.forward_sync
        self._wire(checked)
        if init_sync:
            self._key = _replicas.start_equal(
                checked, self.named_module_buffers, self.process_group
            )
        else:
            self._key = _replicas.next_key(self.process_group, "unsynced")

    # -- wiring ------------------------------------------------------------------------

    def _wire(self, checked: _arguments.Checked) -> None:
        """Create everything that is not part of the module's state."""
        config, devices = checked.config, checked.devices
        self.device_ids = devices.device_ids
        self.output_device = devices.output_device
        self.device = devices.device
        self.device_type = devices.device.type
        self.is_multi_device_module = devices.is_multi_device
        self.find_unused_parameters = config.find_unused_parameters
        self.gradient_as_bucket_view = config.gradient_as_bucket_view
        self.static_graph = config.static_graph
        self.bucket_bytes_cap = config.caps.rest_bytes
        self.broadcast_bucket_size = _replicas.MESSAGE_BYTES
        self.parameters_to_ignore = set(checked.replica.ignored)
        self._collect_module_buffers()
        self._num_resets = 0
        replica = checked.replica
        self._reducer = Reducer(
            list(replica.managed.values()), replica.specs, config, self.process_group
        )
        self._guard = Guard(self._reducer, checked.unsynced)

    def _collect_module_buffers(self) -> None:
        self.named_module_buffers = _arguments.module_buffers(
            self.module, frozenset(self.parameters_to_ignore)
        )
        self.modules_buffers = list(self.named_module_buffers.values())

    # -- forward -----------------------------------------------------------------------

    @untraced_itself
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; afterwards the next backward averages gradients.

        Collective when module buffers are broadcast (`will_sync_module_buffers`), and
        once after the first synchronised backward, when buckets are rebuilt.

        Raises:
            UnfinishedReductionError: the last backward left gradients missing.
            ReducerFailedError: an earlier backward failed; call `reset`.
        """
        inputs, kwargs = _before_module(self, inputs, kwargs)
        output = self._run_module(inputs, kwargs)
        _after_module(self, output)
        return output

    @untraced_itself
    def _run_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.module(*inputs, **kwargs)

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward broadcasts module buffers (a collective)."""
        return bool(
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and self.modules_buffers
        )

    # -- synchronisation ---------------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether forwards announce a synchronised backward; settable."""
        return self._reducer.ledger.sync_enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        self._reducer.ledger.sync_enabled = bool(enabled)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside do not announce a synchronised backward.

        As in torch, what counts is where the *forward* runs. Gradients accumulate
        locally until the first synchronised backward averages all of them.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @untraced
    def sync_gradients(self) -> None:
        """Collective: average over ranks what the parameters' ``.grad`` hold now.

        The remedy for gradients of local backwards. Parameters whose ``.grad`` is None
        count as zeros, unless it is None on all ranks.

        Raises:
            UnfinishedReductionError: a reduction is pending; call `reset`.
            ReducerFailedError: an earlier backward failed; call `reset`.
        """
        refuse_forward(self._reducer)
        average_now(self._reducer)

    @untraced
    def reset(self) -> None:
        """Collective: recover from a failed, aborted or unfinished backward.

        All ranks of the group call it. Work in flight is dropped; the group is kept if
        every launched collective can complete, else a fresh one over the same ranks
        replaces ``process_group``. ``.grad`` is left as it is: call ``zero_grad()``.

        Raises:
            CollectiveError: naming the ranks that did not call it in time.
        """
        self.process_group = agree_and_recover(
            self._reducer, f"reset/{self._key}/{self._num_resets}"
        )
        self._num_resets += 1

    @property
    def broadcast_buffers(self) -> bool:
        """Deprecated alias of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, enabled: bool) -> None:
        self.forward_sync_buffers = enabled

    def set_recorder(self, recorder: Recorder | None) -> None:
        """Let ``recorder`` receive the moments of every backward; None stops it."""
        self._reducer.pipeline.tracer.recorder = recorder

    # -- copies ------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, which cannot carry a process group: only the default one.

        Raises:
            RuntimeError: the object uses another group.
        """
        if self.process_group is not default_group():
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the "
                "default process group. Save module.state_dict() instead."
            )
        return portable_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore(self, state, default_group())

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """A copy in this process shares the group, whichever it is."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        restore(twin, copy.deepcopy(portable_state(self), memo), self.process_group)
        return twin


@untraced
def _before_module(
    ddp: DataParallel, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if torch.is_grad_enabled():
        refuse_forward(ddp._reducer)
        ddp._reducer.rebuild_if_due()
    if ddp.will_sync_module_buffers():
        ddp._collect_module_buffers()  # some may have been re-assigned or added
        with ddp._reducer.pipeline.watch.over("broadcasting module buffers"):
            _replicas.broadcast_module_buffers(ddp.modules_buffers, ddp.process_group)
    if not ddp.device_ids:
        return inputs, kwargs
    return (
        _arguments.move_inputs(inputs, ddp.device),
        _arguments.move_inputs(kwargs, ddp.device),
    )


@untraced
def _after_module(ddp: DataParallel, output: Any) -> None:
    reducer, with_grad = ddp._reducer, torch.is_grad_enabled()
    # Torch's schedule is one forward late: whether the *next* forward broadcasts
    # module buffers depends on whether this one will be synchronised.
    ddp.require_forward_param_sync = with_grad and reducer.ledger.sync_enabled
    if ddp.require_forward_param_sync:
        reducer.arm(output)
    if with_grad:
        reducer.ledger.note_forward(synchronising=ddp.require_forward_param_sync)


def portable_state(ddp: DataParallel) -> dict[str, Any]:
    """What a copy is made from: all but the group and what is wired to it."""
    state = {k: v for k, v in ddp.__dict__.items() if k not in _NOT_PORTABLE}
    return state | {"sync_enabled": ddp.require_backward_grad_sync}


def restore(ddp: DataParallel, state: dict[str, Any], group: ProcessGroup) -> None:
    """Turn an empty object into a copy, on ``group``, without any collective."""
    state = dict(state)
    sync_enabled = state.pop("sync_enabled")
    nn.Module.__setstate__(ddp, state)
    ddp.process_group = group
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said when the original was built
        checked = _arguments.check(ddp.module, ddp._given)
    ddp._wire(checked)
    ddp._key = _replicas.next_key(group, "copy")
    ddp.require_backward_grad_sync = sync_enabled
