"""Divide optimizer steps among the ranks: the feature itself, an observer of the core.

What happens in a training step, on each rank::

    backward()         each bucket's gradients go to their owners      averaging, bucket
    optimizer.step()   before: do all ranks step, with nothing wrong?  agreement, shares
                       torch's own step: parameters with a .grad
                       after: values go from owners to all ranks       returns

The user's optimizer stays what it is. It holds all parameters, but has gradients, and
so states, of this rank's share only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from minidp.core import Observer, Phase, Reducer, untraced
from minidp.errors import ShardedStepError, explain
from minidp.guard import is_nested

from .agreement import Act, Agreement, Intent, Problem
from .averaging import ShardedAveraging
from .bucket import ShardedBucket
from .checkpoint import hook_state
from .known import is_known
from .norms import Norms
from .overflows import Overflows
from .owners import Owners
from .returns import Returns
from .shares import Shares


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
        self._allows_changes = allow_changes
        rank, queue = reducer.communicator.rank, reducer.queue
        own = owners.owned_by(rank)
        # By optimizer: its parameters that this rank owns, and those of other ranks.
        self._own_of = [owners.owned_by(rank, k) for k in range(len(optimizers))]
        self._foreign_of = [
            [i for i, s in enumerate(owners.stepper) if s == k and owners.of[i] != rank]
            for k in range(len(optimizers))
        ]
        self.shares = Shares(reducer.params, own)
        self._agreement = Agreement(reducer.communicator)
        self._norms = Norms(reducer, own)
        self._returns = Returns(self._reducer, are_awaited=awaits_values)
        self._overflows = Overflows(reducer, owners) if scales else None
        self.steps = 0  # that this rank's share has made, by all optimizers
        self._is_reduced = False  # averages have come, and no rank has used them yet
        self._is_looked_at = False  # no left-over averages are there
        self._is_open = False  # all ranks have agreed, and values are not back yet
        self._alive = weakref.ref(reducer)
        self._ids = {id(param): i for i, param in enumerate(reducer.params)}
        queue.averaging = ShardedAveraging(
            queue.averaging,
            owners,
            reducer.communicator,
            batched=queue.config.batched_grad_copy,
        )
        queue.arrange = owners.arranged

        def make_bucket(*arguments: Any) -> ShardedBucket:
            return ShardedBucket(owners, *arguments)

        queue.dense_bucket = make_bucket
        queue.exchanges += [self._agreement.exchange, self._norms.exchange]
        if self._overflows is not None:
            queue.exchanges.append(self._overflows.exchange)
        queue.observers.append(self)
        for number, optimizer in enumerate(self.optimizers):
            _hook(optimizer, self)
            hook_state(optimizer, reducer, owners, number)

    # -- a backward --------------------------------------------------------------------

    def begins(self) -> None:
        """Look for averages of the last backward, to which gradients are added now.

        In shared memory the others may still add up what this rank has brought to the
        last backward, and gradients are about to be written there. If all ranks have
        stepped since, they have ended that. Otherwise this waits for them.

        Raises:
            ShardedStepError: There are some.
        """
        self.bring_rest()
        self._refuse_left_over()
        if self._is_reduced:
            self._wait_for_readers()

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
        if not self._is_looked_at:
            try:
                self._refuse_left_over()
            except ShardedStepError as error:
                self._reducer.fail(error)
                raise

    def _refuse_left_over(self) -> None:
        if self._is_looked_at:
            return
        if left := self.shares.left_over():
            raise ShardedStepError(
                explain(
                    self._reducer.rank,
                    "A backward added gradients to averages that are still in .grad, "
                    "but only the owner of a parameter has its average: the sum is no "
                    "mean over the ranks.",
                    names=[self._reducer.names[i] for i in left],
                    expected="zero_grad() between two synchronised backwards",
                    remedy="call optimizer.zero_grad() after each step; to accumulate "
                    "gradients, run all backwards but the last inside no_sync(). Call "
                    "reset() on all ranks to go on",
                )
            )
        self._is_looked_at = True

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
        self._tell_of_no_step()

    @untraced
    def goes_on(self) -> None:
        """Do the same, where a forward is about to wait for all ranks."""
        try:
            self._tell_of_no_step()
        except BaseException as error:
            self._reducer.fail(error)
            raise

    def _tell_of_no_step(self) -> None:
        if self._is_open:
            self._agreement.reach(Intent(Act.GO_ON, 0, Problem.BROKEN_OFF))
        if self._is_reduced:
            self._agreement.reach(Intent(Act.GO_ON, 0, Problem(0)))
            self._is_reduced = False

    def finishing(self, *, applies_grads: bool) -> None:
        """Look which gradients may take sums in their place."""
        for bucket in self._reducer.queue.buckets:
            if isinstance(bucket, ShardedBucket):
                bucket.settle()

    def finished(self) -> None:
        """Note the averages of this rank's share."""
        if self._overflows is not None:
            self._overflows.share()
        self.shares.note(self._reducer.queue.untouched)
        self._is_reduced, self._is_looked_at = True, False

    def abandon(self) -> None:
        """Forget what was reduced, and values that are on their way."""
        self._is_reduced = self._is_open = False
        self._is_looked_at = False
        self.shares.forget()
        self._returns.drop()

    # -- a step ------------------------------------------------------------------------

    def before(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Agree with the other ranks that all of them step.

        Raises:
            ShardedStepError: Not all do, or what they would do is wrong.
            MiniDPError: The last backward has failed.
        """
        reducer = self._reducer
        reducer.check()
        if reducer.phase.now not in (Phase.IDLE, Phase.ARMED):
            raise ShardedStepError(
                explain(
                    reducer.rank,
                    "An optimizer steps although the last backward has not ended well.",
                    found=f"phase {reducer.phase.now.name}"
                    + (f", after {reducer.failure}" if reducer.failure else ""),
                    remedy="step after a backward that has brought all gradients; call "
                    "reset() on all ranks to go on",
                )
            )
        number = self._number_of(optimizer)
        # When all have agreed, no rank reads older values of this one any more.
        self._returns.finish(number)
        problems, names = self._problems(number)
        if has_closure:
            problems |= Problem.CLOSURE
        intent = Intent(Act.STEP, number, problems)
        try:
            self._agreement.reach(intent, names)
        except BaseException as error:
            reducer.fail(error)
            raise
        self._is_reduced, self._is_open = False, True

    def _number_of(self, optimizer: Optimizer) -> int:
        return next(k for k, o in enumerate(self.optimizers) if o is optimizer)

    def _problems(self, number: int) -> tuple[Problem, list[str]]:
        """Return what is wrong with a step on this rank, and with which parameters."""
        reducer = self._reducer
        foreign = [
            i for i in self._foreign_of[number] if reducer.params[i].grad is not None
        ]
        changed: list[int] = []
        if not self._allows_changes:
            changed = self.shares.changed(self._own_of[number])
        problems = Problem(0)
        problems |= Problem.FOREIGN if foreign else Problem(0)
        problems |= Problem.CHANGED if changed else Problem(0)
        problems |= Problem(0) if reducer.ledger.sync_enabled else Problem.LOCAL
        # A fused step skips itself, on the ranks that have found infinity.
        optimizer = self.optimizers[number]
        is_told = self._overflows is not None
        if getattr(optimizer, "found_inf", None) is not None and not is_told:
            problems |= Problem.SCALER
        problems |= Problem.BROKEN_OFF if self._is_open else Problem(0)
        return problems, [reducer.names[i] for i in foreign or changed]

    def after(self, optimizer: Optimizer) -> None:
        """Give the new values of this rank's share to the others, and get theirs.

        Raises:
            CollectiveError: Another rank does not send its share. Its parameters are
                the old ones here.
        """
        reducer = self._reducer
        self.steps += 1
        try:
            self._returns.start(self._number_of(optimizer))
            self._returns.settle()
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
        if has_stepped and not self._is_reduced:
            return
        if not has_stepped and not is_known(optimizer):
            return
        held = [
            self._ids[id(param)]
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None and id(param) in self._ids
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

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> Tensor:
        """Clip the gradients of all shares together, and return their total norm.

        All ranks must call it together, and wait for each other.

        Raises:
            RuntimeError: The norm is not finite, and ``error_if_nonfinite``.
        """
        with self.shares.changing():
            return self._norms.clip(max_norm, norm_type, raises=error_if_nonfinite)

    def bring_rest(self) -> None:
        """Wait for values that are still on their way, and write them to parameters."""
        self._returns.finish()

    def bring_all(self) -> None:
        """Give all ranks the values of each parameter that its owner has.

        All ranks must call it together, and wait for each other.
        """
        self._returns.start(None)
        self._returns.finish()


# For each divided optimizer the object above, and the numbers of its two hooks.
_Hooks = tuple["weakref.ref[ShardedStep]", int, int]
_hooks: weakref.WeakKeyDictionary[Optimizer, _Hooks] = weakref.WeakKeyDictionary()
_has_hooked: list[bool] = []
_steps: weakref.WeakSet[ShardedStep] = weakref.WeakSet()


def is_divided(optimizer: Optimizer) -> bool:
    """Return whether ranks divide the steps of an optimizer."""
    return optimizer in _hooks and _hooks[optimizer][0]() is not None


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
