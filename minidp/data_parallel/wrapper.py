"""`DataParallel`: the ``nn.Module`` that averages the gradients of its ``.module``."""

from __future__ import annotations

import copy
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    exchange_device,
    lifetime_of_default_group,
)
from minidp.config import AUTO, AuditAction, AverageOver, Unsynced, replacements
from minidp.console import warn
from minidp.core import (
    RecorderObserver,
    copied_outputs,
    is_exporting,
    untraced,
    untraced_itself,
    without_user_modes,
)
from minidp.guard import refuse_forward
from minidp.hooks import CommHook, Hook
from minidp.replica import verify
from minidp.sharded import ShardedStep
from minidp.trace import Recorder, StepEvent, label_forward

from . import arguments, items, logical_ranks, parts, sharded_step
from .agree_on_group import agree_and_reset
from .copy_state import check_root, compare_or_copy
from .inputs import moved
from .join import Shadow, announce, joining, stop_joining
from .step_in_backward import StepInBackward
from .sync_gradients import average_now, failing

# Covariant, with a default: functions that take a `DataParallel` take any of them.
M_co = TypeVar("M_co", bound=nn.Module, covariant=True, default=nn.Module)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.optimizer import Optimizer

    class OfModule(Generic[M_co]):
        """Make a class generic in ``M_co``, its module's type, for type checkers."""
else:

    class OfModule:
        """Allow ``X[Net]`` at run time, also in subclasses with the base `Generic`."""

        __class_getitem__ = classmethod(types.GenericAlias)


# Properties that raise an UnavailableError, which says why there is no value.
_MAY_HAVE_NO_VALUE: Mapping[str, Callable[[Any], Any]] = {
    "item_totals": items.item_totals,
    "logical_block": logical_ranks.logical_block,
    "logical_state": logical_ranks.logical_state,
}


# Next in its ``__mro__`` is nn.Module, as with torch's class: code derived from that
# calls ``super(DistributedDataParallel, self).__init__()`` to reach it. In `swapping` a
# class with another name gets the same body: use no ``super()`` without arguments.
@torch_compat.with_torchs_names
class DataParallel(nn.Module, Joinable, OfModule[M_co]):
    """Drop-in for ``torch.nn.parallel.DistributedDataParallel``.

    All ranks wrap the same module. Its gradients are then averaged over the ranks while
    the backward runs, with the same bits as by torch's DDP. Training calls the wrapper,
    ``backward()`` and an optimizer, as with torch's class. Beyond that:

    - `no_sync`: accumulate gradients without communication.
    - `join`: ranks may run out of data at different times.
    - `each_logical_rank`: the same bits on any number of ranks.
    - `count_items`, `weigh_loss`: average over items; ranks may have unequally many.
    - `register_comm_hook`: compress gradients, or average in another way.
    - `sync_gradients`: average what local backwards have left in ``.grad``.
    - `step_in_backward`: step each parameter as soon as its average is there.
    - `sharded_step`: each rank steps its share, and keeps that share of the state.
    - `reset`: go on, on all ranks, after an error.
    - `minidp.record`, `minidp.watch_speed`: see what a step waits for.

    The other methods are those of ``nn.Module``, and names of torch's class that code
    written for it may look for.

    Args:
        module: The module to replicate, afterwards available as ``.module``.
        device_ids: None, or a list of one accelerator, to which inputs are moved.
        output_device, dim: Kept for compatibility. Outputs are never moved.
        broadcast_buffers: Deprecated by torch; ``forward_sync_buffers`` replaces it.
        init_sync: Compare the replicas at construction, and give all ranks the
            parameters and module buffers of rank 0.
        process_group: The ranks over which to average. None is the default group.
        bucket_cap_mb: The size in MiB at which a bucket is full. None is 25, after a
            first bucket of 1 MiB. "auto" tries other layouts in the first backwards and
            keeps the fastest one; from three ranks on, the last bits of gradients may
            then differ between two runs.
        find_unused_parameters: Allow parameters that get no gradient in some steps. As
            in torch, the outputs are then copies of the module's, made on the caller's
            stream.
        check_reduction: Deprecated and ignored, as in torch.
        gradient_as_bucket_view: Make each ``.grad`` a view of its bucket, which saves
            memory.
        static_graph: Promise that every step uses the same parameters equally often.
        delay_all_reduce_named_params: Pairs (name, parameter) whose gradients travel
            after all others, in one message for each dtype.
        param_to_hook_all_reduce: Required beside ``delay_all_reduce_named_params``, as
            in torch. It has no effect.
        mixed_precision: None. Torch's private ``_MixedPrecision`` is refused by an
            error that says what to use instead.
        device_mesh: A mesh of one dimension, in place of ``process_group``.
        skip_all_reduce_unused_params: Do not reduce a bucket in a step in which no rank
            uses its parameters. This needs ``find_unused_parameters``, and costs a
            small all-reduce in each forward.
        bucket_cap_mb_list: A size in MiB for each bucket; the last one holds for all
            further buckets.
        batched_grad_copy: Divide a whole bucket at once instead of each of its
            gradients.
        forward_sync_buffers: Broadcast the module buffers of rank 0 before forwards.
        lazy_bucket_allocation: Let a bucket take memory only from its first gradient
            until its averages are written. That needs less memory and is a little
            slower. Ranks of one host then send messages, because memory that they share
            cannot come and go.
        unsynced: What to do when an optimizer is about to apply gradients that differ
            between ranks: "raise" an error, "warn", or "ignore" it.
        hang_timeout: How many seconds a collective waits for other ranks, until it
            fails and names those that are missing. "auto" is 300, but up to the limit
            of the process group while a missing rank is busy (it evaluates, or writes a
            checkpoint). With None only the limit of the process group counts.
        check_replicas_every: Compare a checksum of parameters and module buffers every
            so many synchronised steps; 0 is never. "auto" compares parameters in steps
            0, 1, 100 and every 1000, and accepts differences by rounding and by comm
            hooks of your own.
        check_finite_grads: Raise an error that names the parameter before a gradient
            with NaN or infinity travels.
        bucket_layout: The buckets to start with, the same on all ranks: the value of
            the property of this name, or a file that ``minidp tune`` has written.
        average_over: "ranks" takes the mean of the ranks' gradients. "items" takes the
            mean over all items (tokens, samples ...) that the ranks count by
            `count_items` or `weigh_loss`.
        logical_ranks: Into how many logical ranks a step is divided, whatever the
            number of ranks, or `logical_state` of an earlier run. The training then has
            the same bits on any number of ranks: see `each_logical_rank`.
        audit_every: In one of so many steps, let other ranks compute again a part of
            what each rank has computed, and find a rank whose hardware or settings
            change bits; 0 is never, "auto" is 500. It needs ``logical_ranks``, and a
            loop that trains on whatever logical rank comes: see `each_logical_rank`. It
            does not go with `sharded_step`.
        audit_action: Whether an audit that finds a difference shall "raise" an error on
            all ranks, before the optimizer steps, or "warn". Both name rank and host.

    Raises:
        ValueError, TypeError, RuntimeError: An argument is bad, as in torch.
        ReplicaMismatchError: The replicas differ, or another rank raised.
    """

    __module__ = "minidp"

    module: M_co
    logger: torch_compat.LoggingData
    _divide_by_initial_world_size = True  # of join()
    _authoritative_rank = 0  # the rank whose state was copied at the end of join()
    _has_begun_join = False  # a join() has begun, once
    _not_copied: tuple[str, ...] = (  # a copy makes its own
        *("process_group", "device_mesh", "_given", "_join_config"),
        *("_reducer", "_guard", "_replication", "_logical", "logger"),
        "_sharded",
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
        logical_ranks: int | Mapping[str, Any] | None = None,
        audit_every: int | Literal["auto"] = 0,
        audit_action: AuditAction = "raise",
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
        # The module's tensors are written, which may be inference tensors.
        with without_user_modes(keeps_inference=True):
            self._begin(init_sync=init_sync)

    def _begin(self, *, init_sync: bool) -> None:
        try:
            vars(self._given).update(replacements())
            checked = arguments.check(self.module, self._given)
            logical_ranks.check(self, checked)
        except Exception as error:
            if init_sync:  # the other ranks wait for us: tell them why we leave
                device = arguments.some_device(self.module)
                verify.verify(error, self.process_group, device)
            raise
        self.forward_sync_buffers = checked.forward_sync
        self._wire(checked, verify.WRAPPED if init_sync else "unsynced")
        self._replication.start(checked, verifies=init_sync)
        if init_sync:
            logical_ranks.connect(self)
        self._guard.expect_death(lifetime_of_default_group())

    def _wire(self, checked: arguments.Arguments, kind: str) -> None:
        """Build the parts, and store them, and the options under torch's names."""
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
        with without_user_modes():
            built = parts.build(checked, self.process_group, ignored, kind)
        self._reducer, self._guard, self._replication = built
        self._logical = logical_ranks.build(self, checked)
        self._sharded: ShardedStep | None = None
        self.logger = torch_compat.LoggingData(self)
        is_unused_found = config.find_unused_parameters
        if torch_compat.logs_unused(find_unused_parameters=is_unused_found):
            observer = torch_compat.LogsUnused(self._reducer)
            self._reducer.queue.observers.append(observer)

    # -- forward -----------------------------------------------------------------------

    @untraced_itself
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and let the next backward average its gradients.

        It does not average after a forward inside ``no_sync()`` or ``no_grad()``. Some
        forwards communicate, so that all ranks must run them together: those inside
        ``join()``, those that broadcast module buffers or rebuild the buckets, and all
        with ``skip_all_reduce_unused_params``. ``torch.export`` and ``torch.jit.trace``
        get the module alone.

        Raises:
            UnfinishedReductionError: The last backward left gradients missing.
            ReducerFailedError: An earlier backward has failed; call `reset`.
            UnsyncedGradientsError: Parameters were added, cast, or updated by hand.
            ItemCountError: The last counts of items give no mean.
        """
        if is_exporting():
            return self._run_ddp_forward(*inputs, **kwargs)
        with label_forward():
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            output = self._run_ddp_forward(*inputs, **kwargs)
            return self._post_forward(output)

    @untraced
    def _pre_forward(
        self, *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Do what precedes a forward, and return its inputs, moved to `device_ids`.

        In grad mode this checks the last backward, and may rebuild the buckets. Module
        buffers are broadcast in any mode, if they are due.
        """
        if not self._lazy_init_ran:
            self._lazy_init_ran = True
            self._adopt_planted_optimizers()
        try:
            # The module's buffers are written, which may be inference tensors.
            with without_user_modes(keeps_inference=True):
                self._before_module()
            if self.device_ids:
                inputs, kwargs = moved((inputs, kwargs), self.device)
        except Exception as error:
            self.logger.note_error(error)
            raise
        if torch.is_grad_enabled():
            self._reducer.queue.observers.on_step_event(StepEvent.MODULE_BEGIN)
        return inputs, kwargs

    def _before_module(self) -> None:
        with_grad = torch.is_grad_enabled()
        module: nn.Module = vars(self)["_modules"]["module"]  # Module's getattr: slow
        if with_grad:
            self._reducer.queue.observers.on_step_event(StepEvent.FORWARD_BEGIN)
            self._guard.check_forward(module)
            if self._logical is not None:
                self._logical.refuse_forward()
        rebuilds = with_grad and self._reducer.rebuild_policy.is_due
        broadcasts = self.will_sync_module_buffers()
        if self._logical is not None:
            broadcasts = False  # the loop does it, so that anybody may evaluate alone
            # In the turn that reduces, because no rank waits for others in an earlier
            # one: of two models a rank may reduce one that is not done elsewhere.
            rebuilds = rebuilds and self.require_backward_grad_sync
            rebuilds = rebuilds and not self._logical.has_reduced  # see `begins`
        reduces = with_grad and self.require_backward_grad_sync
        joins = self._join_config.enable
        compares = reduces and not joins and self._replication.may_compare
        root = 0  # the rank whose module buffers are broadcast
        if not (joins or rebuilds or broadcasts or compares):
            return
        with failing(self._reducer, only_with_group=True):
            if joins:
                root = announce(
                    self, rebuilds=rebuilds, broadcasts=broadcasts, reduces=reduces
                )
            if rebuilds:
                self._reducer.rebuild_if_due()
            if broadcasts:
                self._replication.broadcast_buffers(module, root)
            if compares:
                self._replication.compare_if_due(module, with_buffers=broadcasts)

    def _adopt_planted_optimizers(self) -> None:
        named, ignored = self.module.named_parameters(), self.parameters_to_ignore
        params = [p for n, p in named if p.requires_grad and n not in ignored]
        stepper = torch_compat.adopt_planted_optimizers(params, self._guard)
        if stepper is not None:
            sharded_step.refuse(self, "_apply_optimizer_in_backward")
            self._replication.add_stepper(stepper)

    _run_ddp_forward = torch_compat.run_splitting

    @untraced
    def _post_forward(self, output: Any) -> Any:
        """Prepare the backward of a forward that has ended, and return its output."""
        if self._replication.late_buffer_hook and self.will_sync_module_buffers():
            self._replication.call_late_buffer_hook(self.module)
        with_grad = torch.is_grad_enabled()
        if with_grad and self._guard.open_step is not None:
            self._guard.check_after_forward()
        will_reduce = with_grad and self.require_backward_grad_sync
        vars(self)["require_forward_param_sync"] = will_reduce  # Module's setattr: slow
        if will_reduce:
            self._reducer.arm(output)
        if with_grad:
            items.watch(self._reducer, output, will_reduce=will_reduce)
            self._reducer.ledger.note_forward(synchronising=will_reduce)
            self._reducer.local_backwards.forward_ended(output, will_reduce=will_reduce)
        if self._reducer.mode.copies_outputs and self._ddp_sink_clone:
            return copied_outputs(output)
        return output

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next forward will broadcast module buffers."""
        is_due = self.require_forward_param_sync and self.forward_sync_buffers
        return is_due and bool(self._replication.buffers)

    # -- synchronisation ---------------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backwards of later forwards average gradients. You may set it."""
        return self._reducer.ledger.sync_enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        ledger = self._reducer.ledger
        if ledger.sync_enabled != bool(enabled):
            self._guard.switch_sync(enabled=enabled)
            ledger.sync_enabled = bool(enabled)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local in the backwards of forwards that run inside the block.

        They accumulate in ``.grad`` until a synchronised backward averages the sums.
        """
        ledger, before = self._reducer.ledger, self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        ledger.open_no_syncs += 1
        try:
            yield
        finally:
            ledger.open_no_syncs -= 1
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let a hook reduce the buckets, in place of the all-reduce that averages.

        Args:
            state: The first argument of each call of the hook. If it is the process
                group, and `reset` replaces that, the state is replaced, too.
            hook: ``hook(state, bucket: GradBucket) -> Future[Tensor]``. The gradients
                in the bucket are not divided yet. The future's value is their average,
                a flat tensor of as many elements.

        Raises:
            TypeError, ValueError: This is no comm hook.
            RuntimeError: There is a hook already, or gradients are averaged over items.
        """
        averaging = self._reducer.queue.averaging
        try:
            averaging.register(CommHook(state, hook))
        except Exception as error:
            self.logger.note_error(error)
            raise
        if self._reducer.phase.is_idle and not averaging.no_shared_memory:
            self._reducer.adopt(self._reducer.queue.layout)  # a hook may resize buckets

    each_logical_rank = logical_ranks.each_logical_rank
    logical_block = property(logical_ranks.logical_block)
    logical_state = property(logical_ranks.logical_state)
    clip_grad_norm_ = sharded_step.clip_grad_norm_
    whole_optimizer_state = sharded_step.whole_optimizer_state
    sharded_optimizer_state = sharded_step.sharded_optimizer_state
    sharded_step = sharded_step.sharded_step
    count_items, weigh_loss = items.count_items, items.weigh_loss
    item_totals = property(items.item_totals)

    if not TYPE_CHECKING:  # a checker that saw it would believe in any name

        def __getattr__(self, name: str) -> Any:
            # Python asks here once more for a property that raised an AttributeError.
            # nn.Module's own error would not say why there is no value.
            if name in _MAY_HAVE_NO_VALUE:
                return _MAY_HAVE_NO_VALUE[name](self)
            return nn.Module.__getattr__(self, name)

    def step_in_backward(
        self, optimizer: Optimizer, *, clip_grad_norm: float | None = None
    ) -> None:
        """Let an optimizer step by itself, inside synchronised backwards.

        The parameters of a bucket step as soon as it is reduced, while other buckets
        are still on their way. Do not call ``optimizer.step()`` any more, but still
        ``optimizer.zero_grad()``. Backwards inside ``no_sync()`` do not step. If a
        backward fails, some buckets may have stepped already: reload a checkpoint.

        After `sharded_step` each rank steps its share of a bucket, and sends the new
        values at once. All ranks then call this together, and no rank steps before the
        backwards of all are over.

        Args:
            optimizer: Any optimizer that keeps its state per parameter; LBFGS does not.
            clip_grad_norm: Clip the optimizer's gradients to this norm. All parameters
                then step at the end of the backward.

        Raises:
            TypeError: The optimizer cannot step on a part of its parameters.
            ValueError: It steps in a backward already, or holds none of the parameters;
                or after `sharded_step` it was not passed there, or something does not
                go with it.
            ReplicaMismatchError: After `sharded_step` other ranks pass something else.
        """
        if self._sharded is not None:
            sharded_step.step_in_backward(self, optimizer, clip_grad_norm)
            return
        step = StepInBackward(optimizer, self._guard, clip_grad_norm)
        self._guard.expect_in_backward(optimizer)
        self._replication.add_stepper(step)

    @untraced
    def sync_gradients(self) -> None:
        """Average over the ranks what ``.grad`` holds now, for all parameters.

        All ranks of the process group must call it together. It is for gradients of
        local backwards. A ``.grad`` that is None counts as zeros, unless it is None on
        all ranks. No comm hook is called. Optimizers of `step_in_backward` step.

        Raises:
            ReducerFailedError: An earlier backward has failed; call `reset` first.
            CollectiveError: Other ranks do not call this in time.
        """
        refuse_forward(self._reducer)
        logical_ranks.refuse(self, "sync_gradients()")
        sharded_step.refuse(self, "sync_gradients()")
        self._replication.postpone_comparison()
        with without_user_modes(keeps_inference=True):
            average_now(self._reducer)

    @untraced
    def reset(self, *, copy_from: int | None = None) -> None:
        """Recover from a failed, aborted or unfinished backward.

        All ranks of the process group must call it together. If a collective was
        launched that can never complete, a new group replaces `process_group`. Call
        ``optimizer.zero_grad()`` next, because ``.grad`` stays as it is. Later forwards
        announce averages again, because an error may have come between the lines that
        set ``require_backward_grad_sync`` to False and back. Inside a block of
        `no_sync` gradients stay local until it ends.

        A rank that raised may have missed a step that others have made. So the replicas
        are compared, and a warning says what differs on which ranks. If parameters
        still differ in the next synchronised step, that step raises a
        ReplicaMismatchError. On a device an optimizer may have applied an incomplete
        average. Then a warning names the ranks, and the next forward there raises a
        CollectiveError unless their parameters are loaded or copied.

        Args:
            copy_from: A rank of the process group, the same on all ranks. All ranks get
                its parameters, its module buffers, the state and settings of its
                optimizers of ``torch.optim``, their learning rate schedulers, and the
                scale of its GradScaler. A warning says what cannot be copied. With None
                nothing is copied, for example because a checkpoint is loaded.

        Raises:
            CollectiveError: Ranks, which the error names, do not call this in time.
            ReplicaMismatchError: The ranks passed different ``copy_from``.
            TypeError, ValueError: ``copy_from`` is no rank of the group.
        """
        check_root(copy_from, self.process_group.size())
        key = self._replication.next_reset()
        sharing = self._guard.sharing_group()
        self.process_group, wrong = agree_and_reset(
            self._reducer, key, sharing, self._guard.beside()
        )
        self.require_forward_param_sync = True  # ranks may differ in their last forward
        if not self._reducer.ledger.open_no_syncs:
            self.require_backward_grad_sync = True
        self._guard.reset()
        self._replication.connect(self.module)
        logical_ranks.connect(self, copy_from)
        stop_joining(self)
        wrong = sharded_step.repair(self, wrong)
        compare_or_copy(self, copy_from, wrong)

    def set_recorder(self, recorder: Recorder | None) -> None:
        """Let a recorder note the events of every backward, or stop that with None.

        `minidp.record` is the tool for people. This is for code that wants each event
        of each gradient, as a `minidp.Moment` with its time.
        """
        observers = self._reducer.queue.observers
        for each in observers.everybody:
            if isinstance(each, RecorderObserver):
                observers.remove(each)
        if recorder is not None:
            device = self._reducer.queue.specs[0].device
            ledger = self._reducer.ledger
            observers.append(RecorderObserver(recorder, ledger, device))

    # -- uneven inputs -----------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Train inside a block on numbers of inputs that differ between ranks.

        All ranks enter the block. A rank that has run out of inputs takes part in the
        collectives of the others until all have run out. At the end every rank gets the
        state of one that trained longest.

        Args:
            divide_by_initial_world_size: Whether to average over all ranks. With False
                it is only over those that still have inputs.
            enable: With False nothing is announced to other ranks, for ranks that are
                known to have equally many inputs.
            throw_on_early_termination: Raise on every rank as soon as one runs out.

        Raises:
            RuntimeError: A rank ran out, with ``throw_on_early_termination``.
            CollectiveError: A rank raised or died; call `reset` on all ranks.
        """
        logical_ranks.refuse(self, "join()")
        sharded_step.refuse(self, "join()")
        return joining(
            self,
            divide_by_initial_world_size=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what ``Join`` calls on this rank once it has run out of inputs."""
        logical_ranks.refuse(self, "join()")
        sharded_step.refuse(self, "join()")
        return Shadow(self, **kwargs)

    @property
    def join_device(self) -> torch.device:
        """The device of the tensors that ``Join`` sends: the CPU if the group can.

        There the host waits for the hosts of other ranks, and for no device.
        """
        return exchange_device(self.process_group, self.device)

    @property
    def join_process_group(self) -> ProcessGroup:
        """The process group over which ``Join`` counts ranks that still have inputs."""
        return self.process_group

    @property
    def bucket_layout(self) -> dict[str, Any]:
        """The buckets of the next backward, as plain data for a checkpoint.

        A run that starts with them has the bits of a run that was never stopped. Save
        those of rank 0; with ``static_graph``, after the second backward or later. With
        ``gradient_as_bucket_view``, and gradients that are zeroed in place, create
        gradients of zeros before you wrap again, or the last bits may differ.
        """
        queue, order = self._reducer.queue, self._reducer.rebuild_policy
        return order.plain_layout(queue.layout, queue.specs, queue.config)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Load as torch does, and say in an error how the checkpoint's names differ."""
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
        """The reducer, under the method names of torch's."""
        return torch_compat.ReducerNames(self)

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The module buffers by name, without those on the ignore list."""
        return self._replication.buffers

    @named_module_buffers.setter
    def named_module_buffers(self, named: Mapping[str, torch.Tensor]) -> None:
        # What the next forward broadcasts: none if it is empty.
        self._replication.buffers = dict(named)

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The module buffers, without those on the ignore list."""
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
