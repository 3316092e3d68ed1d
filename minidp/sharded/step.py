"""Divide optimizer steps among the ranks: the feature itself, an observer of the core.

What happens in a training step, on each rank::

    backward()         each bucket's gradients go to their owners      averaging, bucket
    optimizer.step()   before: do all ranks step, with nothing wrong?  agreement, shares
                       torch's own step: parameters with a .grad
                       after: values go from owners to all ranks       returns

The user's optimizer stays what it is. It holds all parameters, but has gradients, and
so states, of this rank's share only. Large parameters may be divided by rows; then the
step finds the rows of this rank in their place (`parts`).
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from minidp import comm
from minidp.accelerator import is_capturing
from minidp.core import Observer, Phase, Reducer, untraced
from minidp.errors import ShardedStepError, explain
from minidp.guard import is_nested
from minidp.replica import digest_of

from .agreement import Act, Agreement, Intent, Problem
from .bucket import ShardedBucket
from .checkpoint import hook_state, leave_share, mark_copies, refuse_copy
from .known import is_elementwise, is_known
from .norms import Norms
from .overflows import Overflows
from .owners import Owners
from .parts import Exchanged, Parts
from .returns import Returns
from .shares import Shares
from .split_bucket import SplitBucket
from .tree_averaging import averaging_for

# Of each owner so many of its smallest parameters are compared, and their first rows,
# if no step follows a backward.
_SAMPLES, _SAMPLE_ROWS = 2, 64


class ShardedStep(Observer):
    """Optimizers whose steps the ranks of one wrapper divide among them.

    The constructor hooks the optimizers and the reducer, whose buckets must then be
    made anew (`Reducer.adopt`). It communicates nothing.

    Args:
        reducer: The reducer of the wrapper.
        optimizers: The optimizers. Each parameter of the reducer is in one of them.
        owners: Who owns which parameter; ``stepper`` are numbers of ``optimizers``.
        allow_changes: Whether the script may change gradients before a step.
        scales: Whether a ``GradScaler`` unscales gradients, and skips steps.
        awaits_values: Whether new values come while the next forward runs (`awaited`).
    """

    sees_local_grads = True

    def __init__(
        self,
        reducer: Reducer,
        optimizers: Sequence[Optimizer],
        owners: Owners,
        *,
        allow_changes: bool,
        scales: bool,
        awaits_values: bool = False,
    ) -> None:
        self.optimizers, self.owners = tuple(optimizers), owners
        self._reducer: Reducer = weakref.proxy(reducer)  # it holds its observers
        self.allows_changes = allow_changes
        rank, queue = reducer.communicator.rank, reducer.queue
        own = owners.owned_by(rank)
        # By optimizer: its parameters that this rank owns, and those of other ranks.
        self.own_of = [owners.owned_by(rank, k) for k in range(len(optimizers))]
        self._foreign_of = [
            [
                i
                for i, stepper in enumerate(owners.stepper)
                if stepper == k and not owners.has_part(rank, i)
            ]
            for k in range(len(optimizers))
        ]
        # By optimizer: its parameters in whose place it has something else in a step.
        self._parts = [self._make_parts(k, reducer) for k in range(len(optimizers))]
        # By optimizer and group: the parameters that it is known to hold.
        self._held = [_held_by(each) for each in optimizers]
        self.shares = Shares(reducer.params, own)
        self._agreement = Agreement(reducer.communicator)
        self.norms = Norms(reducer, owners)
        on_cpu = reducer.communicator.device.type == "cpu"
        self.awaits_values = awaits_values and on_cpu
        self.returns = Returns(self._reducer, are_awaited=self.awaits_values)
        self.scales = scales
        self._overflows = Overflows(reducer, owners) if scales else None
        self.steps = 0  # that this rank's share has made, by all optimizers
        # Whether the script steps some of them, after the backward (see `early`).
        self.leaves_steps = True
        self.is_reduced = False  # averages have come, and no rank has used them yet
        self._tasks: Collection[int] = ()  # of the last local backward
        self._is_open = False  # all ranks have agreed, and values are not back yet
        # Raises if this rank has not done all of its logical ranks; told what it does.
        self.refuse_in_loop: Callable[[str], None] = _do_nothing
        self._alive = weakref.ref(reducer)
        self.index = {id(param): i for i, param in enumerate(reducer.params)}
        queue.averaging = averaging_for(
            queue.averaging,
            owners,
            reducer.communicator,
            batched=queue.config.batched_grad_copy,
        )
        queue.arrange = owners.arranged
        has_leaves = queue.averaging.leaves is not None

        def make_bucket(*arguments: Any) -> ShardedBucket:
            if owners.is_split(arguments[0].indices[0]):
                return SplitBucket(owners, *arguments)
            return ShardedBucket(owners, *arguments, adds_sums=has_leaves)

        queue.dense_bucket = make_bucket
        queue.exchanges += [self._agreement.exchange, *self.norms.exchanges]
        if self._overflows is not None:
            queue.exchanges += self._overflows.exchanges
        # First, because logical ranks look at what a backward has left.
        queue.observers.append(self, first=has_leaves)
        for number in range(len(optimizers)):
            self._hook_optimizer(number, reducer)

    def _hook_optimizer(self, number: int, reducer: Reducer) -> None:
        optimizer, parts = self.optimizers[number], self._parts[number]
        owners, rank = self.owners, reducer.rank
        _hook(optimizer, self)
        hook_state(optimizer, reducer, owners, number)
        # After a step that has raised, an emergency checkpoint is one of whole
        # parameters, too, and a checkpoint that is loaded finds them.
        optimizer.register_state_dict_pre_hook(parts.leave)
        optimizer.register_load_state_dict_pre_hook(lambda own, _: parts.leave(own))
        mark_copies(optimizer, owners, rank, number, _counter_of(self), parts.leave)
        left = weakref.ref(optimizer), parts.now, owners, rank
        weakref.finalize(self, _leave, *left).atexit = False

    # -- a backward --------------------------------------------------------------------

    def begins(self) -> None:
        """Look for averages of the last backward, to which gradients are added now.

        In shared memory the others may still add up what this rank has brought to the
        last backward, and gradients are about to be written there. If all ranks have
        stepped since, they have ended that. Otherwise this waits for them.
        """
        self.bring_rest()
        self._begin_backward()
        if self.is_reduced:
            self._wait_for_readers()

    def _begin_backward(self) -> None:
        home = self._reducer.home
        for device in home.devices if home.are_several else ():
            home.follow(device)  # this is the thread of one of them
        self.shares.begin_backward()

    def _wait_for_readers(self) -> None:
        """Wait until no rank reads the last gradients of this one in shared memory.

        After a step, on which all have agreed, nobody does.
        """
        communicator = self._reducer.communicator
        for number, bucket in enumerate(self._reducer.queue.buckets):
            if isinstance(bucket, ShardedBucket) and bucket.shared is not None:
                doing = "waiting for ranks that add up the last gradients"
                with communicator.watching(doing, number):
                    communicator.wait(bucket.shared.read_by_all())

    def added_locally(self, index: int, tasks: Collection[int]) -> None:
        """Look for them where a backward inside ``no_sync()`` begins."""
        if self.shares.may_be_mixed and tasks != self._tasks:
            self._tasks = {*tasks}
            self._begin_backward()

    def launching(self) -> None:
        """Tell the other ranks if no step has followed the last backward.

        Raises:
            ShardedStepError: Others have stepped.
        """
        if self._reducer.queue.grad_store.is_external:
            raise ShardedStepError(
                explain(
                    self._reducer.rank,
                    "A backward of distributed autograd ran with sharded_step: it "
                    "keeps gradients in a context, and not in .grad.",
                    remedy="leave out sharded_step, or RPC",
                )
            )
        self._refuse_capture("A backward")
        self._tell_of_no_step()

    def _refuse_capture(self, what: str) -> None:
        """Refuse what a graph would repeat on the device without any host.

        Raises:
            ShardedStepError: A graph is being captured.
        """
        reducer = self._reducer
        devices = {spec.device for spec in reducer.queue.specs}
        if any(each.type != "cpu" and is_capturing(each) for each in devices):
            error = ShardedStepError(
                explain(
                    reducer.rank,
                    f"{what} with sharded_step is captured in a graph, but in each "
                    "step the hosts have to agree on it, and a graph has none.",
                    remedy="capture the forward and the backward of the module inside "
                    "the wrapper, and not those of the wrapper, and step outside of "
                    "the graph",
                )
            )
            reducer.fail(error)
            raise error

    @untraced
    def before_forward(self, *, waits: bool) -> None:
        """Look whether the last step has ended.

        If the forward ``waits`` for all ranks, tell them if no step has come.

        Raises:
            ShardedStepError: The last step has raised, or others step.
        """
        self.refuse_broken_off()
        if waits and self._reducer.phase.now in (Phase.IDLE, Phase.ARMED):
            self._tell_of_no_step()

    def _tell_of_no_step(self) -> None:
        self.refuse_broken_off()
        if self.is_reduced:
            samples = self._samples()
            values = int(digest_of(samples)) if samples else 0
            self.agree(Intent(Act.GO_ON, values, Problem(0)))
            self.is_reduced = False

    def _samples(self) -> list[Tensor]:
        """Return parts of a few parameters, of each owner.

        On a device there are none, because the host would wait for it.
        """
        if self._reducer.communicator.is_on_device:
            return []
        params, sizes = self._reducer.params, self._reducer.queue.specs
        found = []
        for rank in range(self.owners.size):
            own = [i for i in self.owners.owned_by(rank) if params[i].numel()]
            for i in sorted(own, key=lambda i: sizes[i].nbytes)[:_SAMPLES]:
                param = params[i].detach()
                if self.owners.is_split(i):
                    param = param[self.owners.rows_of(rank, i)]
                found.append(param if param.ndim == 0 else param[:_SAMPLE_ROWS])
        return found

    def finishing(self, *, applies_grads: bool) -> None:
        """Look which gradients may take sums in their place."""
        for bucket in self._reducer.queue.buckets:
            if isinstance(bucket, ShardedBucket):
                bucket.settle()

    def finished(self) -> None:
        """Note the averages of this rank's share."""
        if self._overflows is not None:
            self._overflows.share()
        self.shares.note()
        self.leave_zeros_to_owners()
        self.is_reduced, self._tasks = self.leaves_steps, ()

    def leave_zeros_to_owners(self) -> None:
        """Drop zeros that this rank would apply to parameters of others.

        The script has made them, and no rank has used the parameters.
        """
        for i in self._reducer.queue.untouched:
            grad = self._reducer.params[i].grad
            is_foreign = not self.owners.has_part(self._reducer.rank, i)
            if is_foreign and grad is not None and not bool(grad.any()):
                self._reducer.params[i].grad = None

    def abandon(self) -> None:
        """Forget what was reduced, and values that are on their way."""
        self.is_reduced = self._is_open = False
        self._leave_parts()
        self.shares.forget()
        self.returns.drop()
        if self._overflows is not None:
            self._overflows.drop()

    # -- a step ------------------------------------------------------------------------

    def before(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Agree with the other ranks that all of them step.

        Raises:
            ShardedStepError: Not all do, or what they would do is wrong.
            MiniDPError: The last backward has failed.
        """
        self._refuse_unfinished("An optimizer steps")
        self._refuse_capture("A step")
        number = self._number_of(optimizer)
        # When all have agreed, no rank reads older values of this one any more.
        self.returns.finish(number)
        if self._overflows is not None:
            self._overflows.drop(number)
        problems, held = self._problems(number)
        if has_closure:
            problems |= Problem.CLOSURE
        self.agree(Intent(Act.STEP, number, problems), held)
        self.is_reduced, self._is_open = False, True
        self._reducer.communicator.note_step()
        self._parts[number].enter(optimizer)

    def _refuse_unfinished(self, what: str) -> None:
        """Refuse what must follow a backward if that has not ended well."""
        reducer = self._reducer
        self.refuse_in_loop(what)
        reducer.check()
        if reducer.phase.now not in (Phase.IDLE, Phase.ARMED):
            raise ShardedStepError(
                explain(
                    reducer.rank,
                    f"{what} although the last backward has not ended well.",
                    found=f"phase {reducer.phase.now.name}"
                    + (f", after {reducer.failure}" if reducer.failure else ""),
                    remedy="step after a backward that has brought all gradients; call "
                    "reset() on all ranks to go on",
                )
            )
        self.refuse_broken_off()

    def refuse_broken_off(self) -> None:
        """Refuse to go on after a step that has raised, and tell the other ranks.

        They wait for the new values of this rank's share, or have had the same error.

        Raises:
            ShardedStepError: The last step has not ended.
        """
        if self._is_open:
            self._leave_parts()
            reducer = self._reducer
            error = ShardedStepError(
                explain(
                    reducer.rank,
                    "This rank goes on, but its last step raised when all ranks had "
                    "agreed to make it, and the others wait for the values of its "
                    "share.",
                    remedy="do not catch what optimizer.step() raises; or call reset() "
                    "on all ranks, and load a checkpoint of model and optimizer there, "
                    "because some shares may have stepped, and some not",
                )
            )
            reducer.fail(error)
            raise error

    def agree(
        self,
        mine: Intent,
        concerned: Iterable[int] = (),
        agreement: Agreement | None = None,
    ) -> None:
        """Do what all ranks do, or fail on all of them."""
        try:
            names = [self._reducer.names[i] for i in concerned]
            (agreement or self._agreement).reach(mine, names)
        except BaseException as error:
            self._reducer.fail(error)
            raise

    def _leave_parts(self) -> None:
        """Give optimizers their parameters back after a step that has raised."""
        for optimizer, parts in zip(self.optimizers, self._parts, strict=True):
            parts.leave(optimizer)

    def parts_of(self, optimizer: Optimizer) -> Parts:
        """Return the parts of an optimizer's divided parameters."""
        return self._parts[self._number_of(optimizer)]

    def _make_parts(self, number: int, reducer: Reducer) -> Parts:
        split = self.owners.split(reducer.rank, number)
        rows = {reducer.params[i]: own for i, own in split.items()}
        if not is_elementwise(self.optimizers[number], is_told=False):
            return Parts(rows)
        return Parts(rows, [reducer.params[i] for i in self.own_of[number]])

    def _number_of(self, optimizer: Optimizer) -> int:
        return next(k for k, o in enumerate(self.optimizers) if o is optimizer)

    def _with_grads(self, indices: Iterable[int]) -> list[int]:
        params = self._reducer.params
        return [i for i in indices if params[i].grad is not None]

    def _not_averaged(
        self, foreign: Sequence[int], own: Iterable[int]
    ) -> tuple[Problem, Sequence[int]]:
        """Return why gradients are no averages, and of which parameters."""
        mixed = self.shares.mixed(own)
        problems = Problem.FOREIGN if foreign else Problem(0)
        problems |= Problem.MIXED if mixed else Problem(0)
        if not self._reducer.ledger.sync_enabled:
            problems |= Problem.LOCAL
        return problems, foreign or mixed

    def _problems(self, number: int) -> tuple[Problem, Sequence[int]]:
        """Return what is wrong with a step on this rank, and with which parameters."""
        foreign = self._with_grads(self._foreign_of[number])
        problems, concerned = self._not_averaged(foreign, self.own_of[number])
        changed: list[int] = []
        if not self.allows_changes:
            changed = self.shares.changed(self.own_of[number])
        problems |= Problem.CHANGED if changed else Problem(0)
        # A fused step skips itself, on the ranks that have found infinity.
        optimizer = self.optimizers[number]
        is_told = self._overflows is not None
        if getattr(optimizer, "found_inf", None) is not None and not is_told:
            problems |= Problem.SCALER
        moved = self.moved(number)
        problems |= Problem.MOVED if moved else Problem(0)
        return problems, concerned or changed or moved

    def foreign_grads(self, number: int, among: Collection[int]) -> list[int]:
        """Return which of some parameters have a gradient, but are another rank's."""
        return self._with_grads(i for i in self._foreign_of[number] if i in among)

    def moved(self, number: int) -> list[int]:
        """Return the parameters of an optimizer that another one is known to step."""
        groups, known = self.optimizers[number].param_groups, self._held[number]
        if len(groups) == len(known) and all(
            len(group["params"]) == len(params)
            and all(map(is_, group["params"], params))
            for group, params in zip(groups, known, strict=True)
        ):
            return []
        held = _held_by(self.optimizers[number])
        indices = (self.index.get(id(param)) for param in chain.from_iterable(held))
        moved = [
            i for i in indices if i is not None and self.owners.stepper[i] != number
        ]
        if not moved:
            self._held[number] = held  # they are new, or another group has them now
        return moved

    def after(self, optimizer: Optimizer) -> None:
        """Give the new values of this rank's share to the others, and get theirs.

        Raises:
            CollectiveError: Another rank does not send its share. Its parameters are
                the old ones here; its rows of divided ones may be new in part.
        """
        reducer, number = self._reducer, self._number_of(optimizer)
        self._parts[number].leave(optimizer)
        self.steps += 1
        try:
            self.returns.start(number)
            # If values are given up on a device, what is there of them is written, too.
            reducer.communicator.note_step()
            self.returns.settle()
        except BaseException as error:
            reducer.fail(error)
            raise
        self._is_open = False

    def refuse_other(self, optimizer: Optimizer, *, has_stepped: bool) -> None:
        """Refuse the step of an optimizer that is not divided, of gradients that are.

        It would step this rank's share of the parameters, and no rank would get them.
        Classes of torch step what they hold. Others may have called an optimizer that
        is divided, so they are judged when their step is over.

        Raises:
            ShardedStepError: The optimizer holds parameters that have gradients here.
        """
        reducer = self._alive()
        if reducer is None or reducer.communicator.size == 1 or self._is_open:
            return
        if has_stepped and not self.is_reduced:
            return
        if not has_stepped and not is_known(optimizer):
            return
        held = [
            self.index[id(param)]
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None and id(param) in self.index
        ]
        if held:
            error = ShardedStepError(
                explain(
                    reducer.rank,
                    f"{type(optimizer).__name__} steps parameters whose steps are "
                    "divided among the ranks, but was not passed to sharded_step: each "
                    "rank would step its own share, and keep the values.",
                    names=[reducer.names[i] for i in held],
                    found=f"it {'has stepped' if has_stepped else 'has not stepped'}",
                    remedy="pass all optimizers of the module to sharded_step, in one "
                    "call; to change to another optimizer, wrap the module anew. Call "
                    "reset() on all ranks, and zero_grad(), to go on",
                )
            )
            reducer.fail(error)
            raise error

    @untraced
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> Tensor:
        """Clip the gradients of all shares together, and return their total norm.

        All ranks must call it together, and wait for each other.

        Raises:
            ShardedStepError: Some rank does not, or does so with other arguments, or
                has gradients that were not averaged.
            RuntimeError: The norm is not finite, and ``error_if_nonfinite``; or torch
                cannot calculate it.
        """
        self._refuse_unfinished("Gradients are clipped")
        self._refuse_capture("A norm")
        with self._only_real_grads():
            return self._clip(max_norm, norm_type, raises=error_if_nonfinite)

    def _only_real_grads(self) -> AbstractContextManager[None]:
        return nullcontext() if self._overflows is None else self._overflows.hidden()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Let averages move to new buckets inside the block."""
        with self._only_real_grads():
            unchanged = self.shares.unchanged()
            yield
            self.shares.restamp(unchanged)

    def _clip(self, max_norm: float, norm_type: float, *, raises: bool) -> Tensor:
        foreign = self._with_grads(chain.from_iterable(self._foreign_of))
        problems, concerned = self._not_averaged(foreign, chain(*self.own_of))
        arguments = zlib.crc32(repr((max_norm, norm_type, raises)).encode())
        self.agree(Intent(Act.CLIP, arguments, problems), concerned)
        with self.shares.changing():
            return self.norms.clip(max_norm, norm_type, raises=raises)

    def connect(self) -> None:
        """Connect the ranks for messages in both directions, if they share no memory.

        All ranks must call it together, when the buckets are made, and wait for each
        other.
        """
        communicator, buckets = self._reducer.communicator, self._reducer.queue.buckets
        devices = {bucket.plan.device for bucket in buckets}
        if len(devices) == 1 and all(bucket.shared is None for bucket in buckets):
            with communicator.blocking("connecting the ranks for both directions"):
                comm.connect_both_ways(communicator.group, *devices)

    def bring_rest(self) -> None:
        """Wait for values that are still on their way, and write them to parameters."""
        self.returns.finish()

    def bring_all(self) -> None:
        """Give all ranks the values of each parameter that its owner has.

        All ranks must call it together, and wait for each other.
        """
        self.returns.start(None)
        self.returns.finish()


def _do_nothing(_what: str) -> None:
    """Refuse nothing: there are no logical ranks."""


def _held_by(optimizer: Optimizer) -> list[list[Tensor]]:
    """Return the parameters of an optimizer, by group."""
    return [[*group["params"]] for group in optimizer.param_groups]


def _leave(
    reference: weakref.ref[Optimizer], parts: Exchanged, owners: Owners, rank: int
) -> None:
    """Leave an optimizer alone, because its wrapper is gone."""
    if (optimizer := reference()) is not None:
        parts.leave(optimizer)
        leave_share(optimizer, owners, rank)


def _counter_of(step: ShardedStep) -> Callable[[], int]:
    """Return a function that returns how many steps were made; -1 if it is over."""
    reference = weakref.ref(step)

    def steps() -> int:
        alive = reference()
        return -1 if alive is None else alive.steps

    return steps


# For each divided optimizer the object above, and the numbers of its two hooks.
_Hooks = tuple["weakref.ref[ShardedStep]", int, int]
_hooks: weakref.WeakKeyDictionary[Optimizer, _Hooks] = weakref.WeakKeyDictionary()
_has_hooked: list[bool] = []
_steps: weakref.WeakSet[ShardedStep] = weakref.WeakSet()


def is_divided(optimizer: Optimizer) -> bool:
    """Return whether ranks divide the steps of an optimizer."""
    return optimizer in _hooks and _hooks[optimizer][0]() is not None


def hook_anew(optimizer: Optimizer, check: Callable[[Optimizer], None]) -> None:
    """Let ``check`` come right before each step of a divided optimizer.

    It comes in the place of what `ShardedStep` does. Around the step itself the groups
    have the rows of this rank, as ever.
    """
    reference, before, after = _hooks[optimizer]
    optimizer._optimizer_step_pre_hooks.pop(before, None)
    optimizer._optimizer_step_post_hooks.pop(after, None)

    def enter(step: ShardedStep, which: Optimizer, *_: Any) -> None:
        check(which)
        step.parts_of(which).enter(which)

    def leave(step: ShardedStep, which: Optimizer, *_: Any) -> None:
        step.parts_of(which).leave(which)

    pre = optimizer.register_step_pre_hook(_weakly(reference, enter))
    post = optimizer.register_step_post_hook(_weakly(reference, leave))
    _hooks[optimizer] = reference, pre.id, post.id


def _hook(optimizer: Optimizer, step: ShardedStep) -> None:
    """Let `ShardedStep` act around each step of an optimizer."""
    reference = weakref.ref(step)
    before = optimizer.register_step_pre_hook(_weakly(reference, _before))
    after = optimizer.register_step_post_hook(_weakly(reference, _after))
    _hooks[optimizer] = reference, before.id, after.id
    _steps.add(step)
    if not _has_hooked:
        _has_hooked.append(True)
        register_optimizer_step_pre_hook(_put_in_order)
        register_optimizer_step_pre_hook(_before_another)
        register_optimizer_step_post_hook(_after_another)


def _put_in_order(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """Let our hooks be the last one before a step, and the first one after it.

    Hooks of the user may change gradients before the step, and read parameters after
    it.
    """
    if optimizer in _hooks:
        _, before, after = _hooks[optimizer]
        if before in optimizer._optimizer_step_pre_hooks:
            optimizer._optimizer_step_pre_hooks.move_to_end(before)
        if after in optimizer._optimizer_step_post_hooks:
            optimizer._optimizer_step_post_hooks.move_to_end(after, last=False)


@untraced
def _before_another(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not is_divided(optimizer):
        refuse_copy(optimizer)
        for step in [*_steps]:
            step.refuse_other(optimizer, has_stepped=False)


@untraced
def _after_another(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not is_divided(optimizer) and not is_nested(optimizer):
        for step in [*_steps]:
            step.refuse_other(optimizer, has_stepped=True)


def _weakly(
    reference: weakref.ref[ShardedStep], act: Callable[..., None]
) -> Callable[..., None]:
    """Return a hook that does something as long as the wrapper lives."""

    @untraced
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        step = reference()
        if step is not None and not is_nested(optimizer):
            act(step, optimizer, args, kwargs)

    return hook


def _before(step: ShardedStep, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    step.before(optimizer, has_closure=closure is not None)


def _after(step: ShardedStep, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    step.after(optimizer)
