"""`DataParallel`: the ``nn.Module`` face. It checks, wires and delegates."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from . import _arguments, _replicas
from ._comm_hook import CommHook, Hook
from ._copies import Copies
from ._generic import M_co, OfModule
from ._guard import Guard, refuse_forward
from ._inputs import move_inputs
from ._join import Heading, UnevenInputs
from ._labels import label
from ._mixed_precision import MixedPrecision, reduce_in_low_precision
from ._on_demand import average_now, failing_with_the_group
from ._overlap import StepInBackward
from ._recovery import agree_and_recover
from ._reducer import Reducer
from ._untraced import untraced, untraced_itself
from ._watch import Watch
from ._watchdog import watchdog
from .config import AUTO, Unsynced
from .trace import Recorder, StepPhase

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.optimizer import Optimizer


class DataParallel(Copies, nn.Module, UnevenInputs, OfModule[M_co]):
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
            "auto": the first backwards try other layouts, too, and the fastest one
            stays, the same on all ranks (from three ranks on, last bits may then differ
            from torch's, and from run to run; see ``bucket_layout``).
        find_unused_parameters: parameters may get no gradient in some iterations.
        check_reduction: deprecated and ignored, as in torch.
        gradient_as_bucket_view: ``.grad`` are views of the buckets (saves memory).
        static_graph: every iteration uses the same parameters equally often.
        delay_all_reduce_named_params: pairs (name, parameter) whose gradients travel
            after all others, in one message for each dtype.
        param_to_hook_all_reduce: required with it, and of no effect: those gradients
            travel when they and all others are there.
        mixed_precision: torch's private ``_MixedPrecision``: the module computes with
            parameters cast to ``param_dtype``, gradients travel in ``reduce_dtype``.
        device_mesh: a 1-D mesh, instead of ``process_group``.
        skip_all_reduce_unused_params: with ``find_unused_parameters``: buckets that no
            rank uses do not travel. Costs a small all-reduce in each forward.
        bucket_cap_mb_list: MiB per bucket, the last one repeats.
        batched_grad_copy: divide a whole bucket at once, not each of its gradients.
        forward_sync_buffers: broadcast module buffers from rank 0 before forwards.
        unsynced: what to do when an optimizer is about to apply gradients that differ
            between ranks: "raise" (default), "warn" or "ignore".
        hang_timeout: seconds that a collective may wait for other ranks before an error
            says who is missing; None leaves it to the process group's own limit.
            "auto": after 5 minutes it is an error, unless a rank that is missing runs
            and waits for nobody (it evaluates, or writes a checkpoint): then a warning
            says so, and the process group's own limit holds.
        check_replicas_every: every so many synchronised steps a checksum of all
            parameters and module buffers is compared between ranks; 0 is never. "auto":
            of parameters in steps 0, 1, 100 and every 1000; an error if they differ
            by more than rounding, without a reason such as a comm hook of your own.
        check_finite_grads: raise, naming the parameter, when a gradient that is about
            to be averaged holds NaN or infinity.
        bucket_layout: what the property of this name gave, or a file that ``minidp
            tune`` wrote, for a run that goes on from a checkpoint: it starts with these
            buckets, and does not rebuild them if they were rebuilt. The same on all
            ranks.

    Raises:
        ValueError, TypeError, RuntimeError: bad arguments, as in torch.
        ReplicaMismatchError: the replicas differ, or another rank raised.
    """

    module: M_co  # type: ignore[mutable-override] # `SharedState` only reads it

    def __init__(
        self,
        module: M_co,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | Literal["auto"] | None = None,
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
        hang_timeout: float | Literal["auto"] | None = AUTO,
        check_replicas_every: int | Literal["auto"] = AUTO,
        check_finite_grads: bool = False,
        bucket_layout: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        UnevenInputs.__init__(self)
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
            batched_grad_copy=batched_grad_copy,
            forward_sync_buffers=forward_sync_buffers,
            safety={
                "unsynced": unsynced,
                "hang_timeout": hang_timeout,
                "check_replicas_every": check_replicas_every,
                "check_finite_grads": check_finite_grads,
            },
            delayed=_arguments.as_list(delay_all_reduce_named_params),
            delayed_until=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            bucket_layout=bucket_layout,
        )
        self.process_group = _arguments.choose_group(process_group, device_mesh)
        self._prepare(module, device_mesh)
        try:
            self._given = _arguments.replaced(self._given)
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
        self._wire(checked, _replicas.WRAPPED if init_sync else "unsynced")
        watch = self._reducer.pipeline.watch
        with watch.whole("comparing the replicas"):
            buffers, group = self.named_module_buffers, self.process_group
            if init_sync:
                self._key = _replicas.start_equal(checked, buffers, group)
                self._connect()
            else:  # as torch does: a rank may come here alone
                _replicas.take_delayed(checked.replica, group)
        watch.lookout.move_to(group, self._key)
        if self._precision is not None:
            self._precision.cast_module_buffers(self.named_module_buffers)

    # -- wiring ------------------------------------------------------------------------

    def _prepare(self, module: nn.Module, device_mesh: DeviceMesh | None) -> None:
        """Before anything is checked."""
        if device_mesh is not None:
            self.device_mesh = device_mesh

    def _wire(self, checked: _arguments.Checked, kind: str) -> None:
        """Create everything that is not part of the module's state."""
        config, devices, replica = checked.config, checked.devices, checked.replica
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
        self.parameters_to_ignore = set(replica.ignored)
        self._collect_module_buffers()
        self._num_resets = 0
        self._key = _replicas.next_key(self.process_group, kind)
        safety = checked.safety
        is_patient = safety.hang_timeout == AUTO
        watch = Watch(self.process_group, safety.hang_limit, is_patient=is_patient)
        self._reducer = Reducer(replica.params, replica.specs, config, watch)
        if kind != "copy":  # ranks may copy as they like: no name is equal on all
            watchdog.open_post(self._reducer, self._key)
        self._guard = Guard(self._reducer, checked.safety.unsynced, replica)
        is_verified = kind == _replicas.WRAPPED
        self._watch_values(safety.check_replicas_every, is_verified=is_verified)
        self._guard.replica_check = self._replica_check
        self._reducer.pipeline.checks_finite = checked.safety.check_finite_grads
        self._precision = None
        if checked.precision is not None:
            how = (checked.precision, self.process_group.rank())
            self._precision = MixedPrecision(self.module, replica, *how)
            self.register_comm_hook(checked.precision, reduce_in_low_precision)

    # -- forward -----------------------------------------------------------------------

    @untraced_itself
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; afterwards the next backward averages gradients.

        Collective when module buffers are broadcast (`will_sync_module_buffers`), and
        once after the first synchronised backward, when buckets are rebuilt.

        Raises:
            UnfinishedReductionError: the last backward left gradients missing.
            ReducerFailedError, UnsyncedGradientsError: see `Guard.check_forward`.
        """
        inputs, kwargs = self._before_module(inputs, kwargs)
        with label("forward"):
            output = self._run_module(inputs, kwargs)
        self._after_module(output)
        return output

    @untraced
    def _before_module(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with_grad = torch.is_grad_enabled()
        if with_grad:
            self._reducer.pipeline.tracer.enter(StepPhase.FORWARD_BEGIN)
            self._guard.check_forward(self.module)
        heading = Heading(
            is_active=True,
            rebuilds=with_grad and self._reducer.ready_order.is_due,
            broadcasts=self.will_sync_module_buffers(),
            reduces=with_grad and self.require_backward_grad_sync,
        )
        with failing_with_the_group(self._reducer):
            root = self._announce(heading)
            if heading.rebuilds:
                self._reducer.rebuild_if_due()
            if heading.broadcasts:
                self._sync_module_buffers(root)
            if heading.reduces:
                self._compare_if_due(with_module_buffers=heading.broadcasts)
        if self.device_ids:
            inputs = move_inputs(inputs, self.device)
            kwargs = move_inputs(kwargs, self.device)
        return inputs, kwargs

    @untraced_itself
    def _run_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._what_runs()(*inputs, **kwargs)

    def _what_runs(self) -> Any:
        return self.module if self._precision is None else self._precision.run

    @untraced
    def _after_module(self, output: Any) -> None:
        with_grad = torch.is_grad_enabled()
        will_reduce = with_grad and self.require_backward_grad_sync
        self.require_forward_param_sync = will_reduce
        if will_reduce:
            self._reducer.arm(output)
        if with_grad:
            self._reducer.ledger.note_forward(synchronising=will_reduce)
            self._reducer.local_backwards.forward_ended(output, will_reduce=will_reduce)

    # -- synchronisation ---------------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether forwards announce a synchronised backward; settable."""
        return self._reducer.ledger.sync_enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        self._reducer.ledger.enable_sync(enabled, self._reducer.params)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards of forwards that run inside stay local.

        As in torch, what counts is where the *forward* runs. Gradients accumulate
        locally until the first synchronised backward averages all of them.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let ``hook`` reduce the buckets, instead of an all-reduce that averages.

        Args:
            state: passed to the hook on every call. If it is the process group, a fresh
                group takes its place when `reset` makes one.
            hook: ``hook(state, bucket) -> torch.futures.Future[torch.Tensor]``, see
                `GradBucket`. The gradients in the bucket are not divided; what the
                future brings are the values that the gradients get.

        Raises:
            TypeError, ValueError: not a comm hook.
            RuntimeError: one is registered already.
        """
        averaging = self._reducer.pipeline.averaging
        if averaging.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called "
                f"once, and {averaging.comm_hook.name} is registered."
            )
        averaging.comm_hook = CommHook(state, hook)

    def step_in_backward(
        self, optimizer: Optimizer, *, clip_grad_norm: float | None = None
    ) -> None:
        """From now on ``optimizer`` steps inside synchronised backwards by itself.

        The step of a bucket's parameters runs as soon as the bucket is reduced, while
        others are still in flight. Do not call ``optimizer.step()``; do call
        ``zero_grad()``. Backwards of ``no_sync()`` do not step, so gradients accumulate
        as ever; `sync_gradients` does. Not with ``GradScaler``. Step hooks run once per
        bucket. If a backward fails, some buckets may have stepped: reload.

        Args:
            optimizer: keeps its state per parameter (all of torch's, but LBFGS).
            clip_grad_norm: clip the gradients of the optimizer's parameters to this
                norm. Then everything steps at the end of the backward.

        Raises:
            TypeError: an optimizer that cannot step on a part of its parameters.
            ValueError: it steps in a backward already, or holds none of the parameters.
        """
        step = StepInBackward(optimizer, self._guard.excuses, clip_grad_norm)
        self._guard.expect_in_backward(optimizer)
        self._reducer.pipeline.observers.append(step)
        if self._replica_check is not None:
            self._replica_check.awaits_step = False

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
        if self._replica_check is not None:
            self._replica_check.postpone()
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
        key = f"reset/{self._key}/{self._num_resets}"
        self._num_resets += 1
        self.process_group = agree_and_recover(self._reducer, key)
        self.require_forward_param_sync = True  # ranks may differ in their last forward
        self._connect()
        self._stop_joining()

    def set_recorder(self, recorder: Recorder | None) -> None:
        """Let ``recorder`` receive the moments of every backward; None stops it."""
        self._reducer.pipeline.tracer.recorder = recorder
