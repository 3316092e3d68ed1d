"""`DataParallel`: the ``nn.Module`` that averages the gradients of its ``.module``."""

from __future__ import annotations

import copy
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Generic, Literal

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import TypeVar

from minidp import torch_compat
from minidp.comm import (
    MESSAGE_BYTES,
    ProcessGroup,
    default_group,
    lifetime_of_default_group,
)
from minidp.config import AUTO, AverageOver, Unsynced, replacements
from minidp.console import warn
from minidp.core import (
    Recording,
    is_captured,
    outside,
    untraced,
    untraced_itself,
)
from minidp.guard import refuse_forward
from minidp.hooks import CommHook, Hook
from minidp.replica import verify
from minidp.trace import Recorder, StepEvent, label_forward

from . import arguments, items, parts
from .inputs import moved
from .join import Shadow, announce, joining, stop_joining
from .recovery import check_root, settle_after_reset
from .reset import agree_and_recover
from .step_in_backward import StepInBackward
from .sync_gradients import average_now, failing

# Covariant, with a default: functions that take a `DataParallel` take any of them.
M_co = TypeVar("M_co", bound=nn.Module, covariant=True, default=nn.Module)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.optimizer import Optimizer

    class OfModule(Generic[M_co]):
        """Make a class generic in ``M_co``, its module's type; for type checkers."""
else:

    class OfModule:
        """Allow ``X[Net]`` at run time; a subclass may also have the base `Generic`."""

        __class_getitem__ = classmethod(types.GenericAlias)


# Next in its ``__mro__`` is nn.Module, as with torch's class: code derived from that
# calls ``super(DistributedDataParallel, self).__init__()`` to reach it. In `swapping` a
# class with another name gets the same body: use no ``super()`` without arguments.
@torch_compat.with_torchs_names
class DataParallel(nn.Module, Joinable, OfModule[M_co]):
    """Drop-in for ``torch.nn.parallel.DistributedDataParallel``.

    Wrap the same module on every rank; gradients are then averaged over the ranks while
    the backward runs, with the same bits as torch's DDP. Training then calls the
    wrapper, ``backward()`` and an optimizer, as with torch's class. Beyond that:

    - `no_sync`: accumulate gradients without communication.
    - `join`: ranks may run out of data at different times.
    - `count_items`, `weigh_loss`: average over items; ranks may have unequally many.
    - `register_comm_hook`: compress gradients, or average in another way.
    - `sync_gradients`: average what local backwards have left in ``.grad``.
    - `step_in_backward`: step each parameter as soon as its average is there.
    - `reset`: go on on all ranks after an error.
    - `minidp.record`, `minidp.watch_speed`: what a step waits for.

    The other methods are those of ``nn.Module``, and names of torch's class that code
    written for it may look for.

    Args:
        module: the module to replicate; available as ``.module``.
        device_ids: None, or one accelerator: inputs are moved there.
        output_device, dim: kept for compatibility; outputs are never moved.
        broadcast_buffers: deprecated by torch; ``forward_sync_buffers`` replaces it.
        init_sync: verify replicas and broadcast rank 0's state at construction.
        process_group: ranks to reduce over; None is the default group.
        bucket_cap_mb: bucket limit in MiB; None is 25 with a first bucket of 1 MiB.
            "auto": try other layouts in the first backwards, and keep the fastest one
            (last bits may then differ between runs, from three ranks on).
        find_unused_parameters: parameters may get no gradient in some iterations.
        check_reduction: deprecated and ignored, as in torch.
        gradient_as_bucket_view: ``.grad`` are views of the buckets (saves memory).
        static_graph: every iteration uses the same parameters equally often.
        delay_all_reduce_named_params: pairs (name, parameter) whose gradients travel
            after all others, in one message for each dtype.
        param_to_hook_all_reduce: required with it; it has no effect.
        mixed_precision: None. Torch's private ``_MixedPrecision`` is refused; the error
            says what to use instead.
        device_mesh: a 1-D mesh, instead of ``process_group``.
        skip_all_reduce_unused_params: with ``find_unused_parameters``: buckets that no
            rank uses do not travel. Costs a small all-reduce in each forward.
        bucket_cap_mb_list: MiB per bucket, the last one repeats.
        batched_grad_copy: divide a whole bucket at once, not each of its gradients.
        forward_sync_buffers: broadcast module buffers from rank 0 before forwards.
        lazy_bucket_allocation: a bucket takes memory only from its first gradient
            until its averages are written: less memory, a little slower, and ranks of
            one host send messages, because shared memory cannot come and go.
        unsynced: what to do when an optimizer is about to apply gradients that differ
            between ranks: "raise" (default), "warn" or "ignore".
        hang_timeout: seconds until a collective fails, naming missing ranks; None: the
            process group's own limit. "auto": 5 minutes, or the group's limit while
            a missing rank is busy (it evaluates, or writes a checkpoint).
        check_replicas_every: compare a checksum of parameters and module buffers every
            so many synchronised steps; 0 is never. "auto": of parameters, in steps 0,
            1, 100 and every 1000; rounding and comm hooks of your own are no error.
        check_finite_grads: raise, naming the parameter, before NaN or infinity travels.
        bucket_layout: start with these buckets: the property of this name, or a file
            that ``minidp tune`` wrote; the same on all ranks.
        average_over: "items": the mean over all items (tokens, samples ...) that ranks
            count by `count_items` or `weigh_loss`. "ranks": the mean of ranks' means.

    Raises:
        ValueError, TypeError, RuntimeError: bad arguments, as in torch.
        ReplicaMismatchError: the replicas differ, or another rank raised.
    """

    __module__ = "minidp"

    module: M_co
    logger: torch_compat.LoggingData
    _divide_by_initial_world_size = True  # of join()
    _authoritative_rank = 0  # the rank whose state was copied at the end of join()
    _has_begun_join = False  # a join() has begun, once
    _not_copied: tuple[str, ...] = (  # a copy makes its own
        *("process_group", "device_mesh", "_given", "_join_config"),
        *("_reducer", "_guard", "_replication", "logger"),
    )

    @arguments.suggesting
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
        lazy_bucket_allocation: bool = False,
        *,
        unsynced: Unsynced = "raise",
        hang_timeout: float | Literal["auto"] | None = AUTO,
        check_replicas_every: int | Literal["auto"] = AUTO,
        check_finite_grads: bool = False,
        bucket_layout: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        average_over: AverageOver = "ranks",
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self._given = arguments.keep(locals())
        self.process_group = arguments.choose_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
            arguments.expose_local_tensors(module, device_mesh)
        self.module, self.dim = module, dim
        # As in torch, a forward broadcasts buffers if the one before it was to reduce.
        self.require_forward_param_sync = True
        with outside(keeps_inference=True):  # the module's tensors are written
            self._begin(init_sync=init_sync)

    def _begin(self, *, init_sync: bool) -> None:
        try:
            vars(self._given).update(replacements())
            checked = arguments.check(self.module, self._given)
        except Exception as error:
            if init_sync:  # the other ranks wait for us: tell them why we leave
                device = arguments.some_device(self.module)
                verify.verify(error, self.process_group, device)
            raise
        self.forward_sync_buffers = checked.forward_sync
        self._wire(checked, verify.WRAPPED if init_sync else "unsynced")
        self._replication.start(checked, verifies=init_sync)
        self._guard.expect_death(lifetime_of_default_group())

    def _wire(self, checked: arguments.Arguments, kind: str) -> None:
        """Build the parts (`parts.build`); store them, and options by torch's names."""
        torch_compat.note_version()
        config, devices = checked.config, checked.devices
        self.device_ids, self.output_device = devices.device_ids, devices.output_device
        self.device, self.device_type = devices.device, devices.device.type
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
        self.mixed_precision = None  # torch's attribute
        self._lazy_init_ran = False
        self._accum_grad_hooks: list[Any] = []  # torch's own class keeps hooks there
        self.parameters_to_ignore = ignored = set(checked.replica.ignored)
        with outside():
            built = parts.build(checked, self.process_group, ignored, kind)
        self._reducer, self._guard, self._replication = built
        self.logger = torch_compat.LoggingData(self)
        is_unused_found = config.find_unused_parameters
        if torch_compat.logs_unused(find_unused_parameters=is_unused_found):
            observer = torch_compat.LogsUnused(self._reducer)
            self._reducer.queue.observers.append(observer)

    # -- forward -----------------------------------------------------------------------

    @untraced_itself
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; let the next backward average (not in no_sync(), no_grad()).

        Collective in join(), to skip unused parameters, rebuild, or broadcast buffers.
        ``torch.export`` and ``torch.jit.trace`` get the module alone.

        Raises:
            UnfinishedReductionError: the last backward left gradients missing.
            ReducerFailedError: an earlier backward failed: call `reset`.
            UnsyncedGradientsError: parameters were added, cast, or updated by hand.
            ItemCountError: the last counts of items give no mean.
        """
        if is_captured():
            return self._run_ddp_forward(*inputs, **kwargs)
        with label_forward():
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            output = self._run_ddp_forward(*inputs, **kwargs)
            return self._post_forward(output)

    @untraced
    def _pre_forward(
        self, *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return inputs, moved if ``device_ids``, after what precedes a forward.

        Check the last backward, rebuild buckets (both in grad mode); broadcast buffers.
        """
        if not self._lazy_init_ran:
            self._lazy_init_ran = True
            self._adopt_planted_optimizers()
        try:
            with outside(keeps_inference=True):  # the module's buffers are written
                self._before_module()
            if self.device_ids:
                inputs, kwargs = moved((inputs, kwargs), self.device)
        except Exception as error:
            self.logger.note_error(error)
            raise
        if torch.is_grad_enabled():
            self._reducer.queue.observers.enter(StepEvent.MODULE_BEGIN)
        return inputs, kwargs

    def _before_module(self) -> None:
        with_grad = torch.is_grad_enabled()
        if with_grad:
            self._reducer.queue.observers.enter(StepEvent.FORWARD_BEGIN)
            self._guard.check_forward(self.module)
        rebuilds = with_grad and self._reducer.rebuild_policy.is_due
        broadcasts = self.will_sync_module_buffers()
        reduces = with_grad and self.require_backward_grad_sync
        root = 0  # the rank whose module buffers are broadcast
        with failing(self._reducer, only_with_group=True):
            if self._join_config.enable:
                root = announce(
                    self, rebuilds=rebuilds, broadcasts=broadcasts, reduces=reduces
                )
            if rebuilds:
                self._reducer.rebuild_if_due()
            if broadcasts:
                self._replication.broadcast_buffers(self.module, root)
            if reduces and not self._join_config.enable:
                self._replication.compare_if_due(self.module, with_buffers=broadcasts)

    def _adopt_planted_optimizers(self) -> None:
        named, ignored = self.module.named_parameters(), self.parameters_to_ignore
        params = [p for n, p in named if p.requires_grad and n not in ignored]
        stepper = torch_compat.adopt_planted_optimizers(params, self._guard)
        if stepper is not None:
            self._replication.add_stepper(stepper)

    _run_ddp_forward = torch_compat.run_splitting

    @untraced
    def _post_forward(self, output: Any) -> Any:
        """Let the backward reduce (not in no_sync(), no_grad()); return ``output``."""
        if self._replication.late_buffer_hook and self.will_sync_module_buffers():
            self._replication.call_late_buffer_hook(self.module)
        with_grad = torch.is_grad_enabled()
        will_reduce = with_grad and self.require_backward_grad_sync
        vars(self)["require_forward_param_sync"] = will_reduce  # Module's setattr: slow
        if will_reduce:
            self._reducer.arm(output)
        if with_grad:
            items.watch(self._reducer, output, will_reduce=will_reduce)
            self._reducer.ledger.note_forward(synchronising=will_reduce)
            self._reducer.local_backwards.forward_ended(output, will_reduce=will_reduce)
        return output

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next forward will broadcast module buffers."""
        is_due = self.require_forward_param_sync and self.forward_sync_buffers
        return is_due and bool(self._replication.buffers)

    # -- synchronisation ---------------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backwards of later forwards average gradients; settable."""
        return self._reducer.ledger.sync_enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        ledger = self._reducer.ledger
        if ledger.sync_enabled != bool(enabled):
            self._guard.acts.switch_sync(enabled=enabled)
            ledger.sync_enabled = bool(enabled)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local in backwards of forwards that run inside the block.

        Gradients accumulate until a synchronised backward averages all of them.
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
            state: passed on every call. A process group is replaced if `reset` does so.
            hook: ``hook(state, bucket: GradBucket) -> Future[Tensor]``: undivided
                gradients in, their average out.

        Raises:
            TypeError, ValueError, RuntimeError: no comm hook, a second one, over items.
        """
        averaging = self._reducer.queue.averaging
        try:
            averaging.register(CommHook(state, hook))
        except Exception as error:
            self.logger.note_error(error)
            raise
        if self._reducer.phase.is_idle and not averaging.no_shared_memory:
            self._reducer.adopt(self._reducer.queue.layout)  # a hook may resize buckets

    count_items, weigh_loss = items.count_items, items.weigh_loss
    item_totals = property(items.item_totals)

    if not TYPE_CHECKING:  # a checker that saw it would believe in any name

        def __getattr__(self, name: str) -> Any:
            # Python asks here once more for a property that raised an AttributeError.
            # nn.Module's own error would not say why there is no value.
            if name == "item_totals":
                return items.item_totals(self)
            return nn.Module.__getattr__(self, name)

    def step_in_backward(
        self, optimizer: Optimizer, *, clip_grad_norm: float | None = None
    ) -> None:
        """Let ``optimizer`` step by itself, inside synchronised backwards.

        Each bucket's parameters step once it is reduced. Do not call
        ``optimizer.step()``, but still ``optimizer.zero_grad()``. Backwards inside
        ``no_sync()`` do not step. If a backward fails, some buckets may have stepped:
        reload a checkpoint.

        Args:
            optimizer: any that keeps its state per parameter (LBFGS does not).
            clip_grad_norm: clip the optimizer's gradients to this norm; all parameters
                then step at the end of the backward.

        Raises:
            TypeError: the optimizer cannot step on a part of its parameters.
            ValueError: it steps in a backward already, or holds none of the parameters.
        """
        step = StepInBackward(optimizer, self._guard, clip_grad_norm)
        self._guard.expect_in_backward(optimizer)
        self._replication.add_stepper(step)

    @untraced
    def sync_gradients(self) -> None:
        """Collective: average over ranks what the parameters' ``.grad`` hold now.

        Calls no comm hook; steps optimizers of `step_in_backward`. A ``.grad`` that is
        None counts as zeros, unless None on all ranks. After a failure `reset` first.
        """
        refuse_forward(self._reducer)
        self._replication.postpone_comparison()
        with outside(keeps_inference=True):
            average_now(self._reducer)

    @untraced
    def reset(self, *, copy_from: int | None = None) -> None:
        """Collective: recover from a failed, aborted or unfinished backward.

        If a launched collective cannot complete, a new group replaces `process_group`.
        Call ``optimizer.zero_grad()`` next: ``.grad`` stays.

        A rank that raised has perhaps missed a step that others have made. So the
        replicas are compared; a warning says what differs on which ranks. If parameters
        still differ in the next synchronised step, it raises ReplicaMismatchError.

        Args:
            copy_from: a rank of the process group, the same on all ranks: give all
                ranks its parameters, module buffers, and state and settings of
                optimizers of ``torch.optim``. A warning says what cannot be copied.
                None: copy nothing, for example because a checkpoint is loaded.

        Raises:
            CollectiveError: names the ranks that do not call this in time.
            ReplicaMismatchError: the ranks passed different ``copy_from``.
            TypeError, ValueError: ``copy_from`` is no rank of the group.
        """
        check_root(copy_from, self.process_group.size())
        key = self._replication.next_reset()
        self.process_group = agree_and_recover(self._reducer, key)
        self.require_forward_param_sync = True  # ranks may differ in their last forward
        self._guard.reset()
        self._replication.connect()
        stop_joining(self)
        settle_after_reset(self, copy_from)

    def set_recorder(self, recorder: Recorder | None) -> None:
        """Record the events (`Moment`) of every backward; None stops recording."""
        observers = self._reducer.queue.observers
        for each in observers:
            if isinstance(each, Recording):
                observers.remove(each)
        if recorder is not None:
            observers.append(Recording(recorder, observers))

    # -- uneven inputs -----------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Train on numbers of inputs that differ between ranks.

        A rank without inputs joins the collectives of the others until all have run
        out; then every rank gets the state of one that trained longest.

        Args:
            divide_by_initial_world_size: average over all; False: those with inputs.
            enable: False announces nothing, for ranks that are known to be even.
            throw_on_early_termination: raise on every rank as soon as one runs out.

        Raises:
            RuntimeError: a rank ran out, with ``throw_on_early_termination``.
            CollectiveError: a rank raised or died; call `reset` on all ranks.
        """
        return joining(
            self,
            divide_by_initial_world_size=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return a new `Shadow`, which stores over which ranks ``join()`` averages."""
        return Shadow(self, **kwargs)

    @property
    def join_device(self) -> torch.device:
        """The device of the tensors that ``Join`` sends."""
        return self.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The process group over which ``Join`` counts ranks that still have inputs."""
        return self.process_group

    @property
    def bucket_layout(self) -> dict[str, Any]:
        """The buckets of the next backward, as plain data to put in checkpoints.

        Save rank 0's, after two backwards if ``static_graph``. With gradients as views
        that are zeroed in place, create zeros before wrapping: else last bits differ.
        """
        queue, order = self._reducer.queue, self._reducer.rebuild_policy
        return order.plain_layout(queue.layout, queue.specs, queue.config)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Load as torch does; say in its error how the names of a checkpoint differ."""
        try:
            return nn.Module.load_state_dict(self, state_dict, *args, **kwargs)
        except RuntimeError as error:
            problem = parts.explain_other_names(self.module, state_dict, "")
            if not problem:
                raise
            raise RuntimeError(f"{error}\n\t{problem}") from None

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        # Torch does not say whether it is strict: otherwise this is the only hint.
        if problem := parts.explain_other_names(self.module, state_dict, prefix):
            warn(problem)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *others)

    # -- more of torch's names; `torch_compat` has those that it calls private --------

    scatter = DistributedDataParallel.scatter
    to_kwargs = DistributedDataParallel.to_kwargs
    gather = DistributedDataParallel.gather

    @property
    def reducer(self) -> torch_compat.ReducerNames:
        """The reducer by the method names of torch's; made at each access."""
        return torch_compat.ReducerNames(self)

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """Module buffers by name, without those on the ignore list."""
        return self._replication.buffers

    @named_module_buffers.setter
    def named_module_buffers(self, named: Mapping[str, torch.Tensor]) -> None:
        # What the next forward broadcasts: none if it is empty.
        self._replication.buffers = dict(named)

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """Module buffers, without those on the ignore list."""
        return list(self.named_module_buffers.values())

    @modules_buffers.setter
    def modules_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        self.named_module_buffers = {str(n): b for n, b in enumerate(buffers)}

    @property
    def broadcast_buffers(self) -> bool:
        """Deprecated by torch: `forward_sync_buffers` under its old name."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, enabled: bool) -> None:
        self.forward_sync_buffers = enabled

    def _delayed(self) -> dict[str, nn.Parameter]:
        return arguments.delayed_parameters(self._given)

    # -- copies ------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not default_group():
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the "
                "default process group. Save module.state_dict() instead."
            )
        return parts.portable_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        parts.restore(self, state, default_group())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self)] = type(self).__new__(type(self))
        state = copy.deepcopy(parts.portable_state(self), memo)
        parts.restore(twin, state, self.process_group)
        return twin


DistributedDataParallel.register(DataParallel)
