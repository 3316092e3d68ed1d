"""Steps inside the backward: each bucket's as soon as its owners have the averages.

Without that, a rank waits for all buckets, then steps its share, and then sends the new
values. On a link that has nothing to carry meanwhile. Here the owners step a bucket
while later ones are still on their way, and new values follow the last gradients at
once::

    link       gradients 0 | gradients 1 | gradients 2 | values 0 | values 1 | values 2
    this rank             '- step 0     '- step 1     '- step 2       '- waits ---'

No gradient is computed any more by then, as with `step_in_backward` without shares:
buckets are waited for when the backward has computed all of them. So nothing reads a
parameter that is about to change, except a graph that the script keeps (for which torch
raises an error, as after any step).

A step needs all ranks, so they agree before the first bucket steps, when all of their
backwards are over. That no script comes between the averages and the step makes it
easier than outside of the backward. What remains is a rank that fails between two
buckets. Then some of its share has stepped, which `is_half` remembers for `reset()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from minidp.core import Observer, Reducer
from minidp.errors import DoubleStepError, ShardedStepError, explain
from minidp.guard import Guard, step_on

from .agreement import Act, Agreement, Intent, Problem
from .step import ShardedStep, hook_anew

ORDER = 2.0  # of the norm by which gradients are clipped


class EarlySteps(Observer):
    """Divided optimizers that step inside the backward, as soon as they can.

    All ranks must make it together, because it connects their hosts. The buckets must
    then be made anew (`Reducer.adopt`).

    Args:
        step: What divides the steps.
        reducer: The reducer of the wrapper.
        guard: Its guard, which words errors of an optimizer.
    """

    uses_grads = True

    def __init__(self, step: ShardedStep, reducer: Reducer, guard: Guard) -> None:
        self._step = step
        # Whether values are sent after the last bucket's step, those first that the
        # next forward needs first. Otherwise each bucket's are sent at once.
        self._holds_back = step.awaits_values
        self._reducer: Reducer = weakref.proxy(reducer)  # it holds its observers
        self._guard: Guard = weakref.proxy(guard)
        self._max_norms: dict[int, float | None] = {}  # of optimizers, by number
        self.agreement = Agreement(reducer.communicator, amid_buckets=True)
        self._next = 0  # the bucket that is reduced next; from 1 on all have agreed
        # The optimizer that steps, and the gradients that it applies.
        self._stepping: Optimizer | None = None
        self._grads: list[tuple[nn.Parameter, Tensor, int]] = []
        # Whether only a part of this rank's share has made the step that began last.
        self.is_half = False
        reducer.queue.exchanges.append(self.agreement.exchange)
        # The first one, so that others find all values in place when a backward ends.
        reducer.queue.observers.append(self, first=True)

    def add(self, number: int, max_norm: float | None) -> None:
        """Let a divided optimizer step in the backward from now on.

        Args:
            number: Its number among the divided optimizers.
            max_norm: Clip the norm of its gradients to this. Then it steps once, after
                the last bucket.
        """
        self._max_norms[number] = max_norm
        step = self._step
        step.leaves_steps = len(self._max_norms) < len(step.optimizers)
        itself = weakref.ref(self)

        def before(optimizer: Optimizer) -> None:
            if (alive := itself()) is not None:
                alive.check(optimizer)

        hook_anew(step.optimizers[number], before)

    def has(self, number: int) -> bool:
        """Return whether the optimizer of this number steps in the backward."""
        return number in self._max_norms

    # -- a backward --------------------------------------------------------------------

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """Step this rank's share of a bucket, and start to send its new values.

        Raises:
            ShardedStepError: The ranks have not agreed to step. None has.
            MiniDPError: An optimizer has raised an error.
        """
        if not self._next:
            self._agree()
        for number, max_norm in self._max_norms.items():
            if max_norm is None:
                self._apply(number, params)
                if not self._holds_back:
                    self._step.returns.start_bucket(self._next, number)
        self._next += 1

    def finished(self) -> None:
        """Clip, and make the steps that are left; then wait for the values of others.

        With `awaited` parameters, these wait instead.

        Raises:
            CollectiveError: Another rank does not send its share.
            MiniDPError: An optimizer has raised an error.
        """
        step, communicator = self._step, self._reducer.communicator
        for number, max_norm in self._max_norms.items():
            optimizer = step.optimizers[number]
            if max_norm is None:
                self._apply(number, self._outside(optimizer))
            else:
                self._clip(optimizer, max_norm)
                self._apply(number, None)
            if self._holds_back or max_norm is not None:
                step.returns.start(number)
        step.steps += len(self._max_norms)
        self.is_half, self._next = False, 0
        # If values are given up on a device, what is there of them is written, too.
        communicator.note_step()
        step.returns.settle()

    def abandon(self) -> None:
        """Forget the reduction that runs, but not which steps it has begun."""
        self._next = 0

    def _agree(self) -> None:
        """Agree with the other ranks that all of them step, now that nobody has."""
        step = self._step
        step.is_reduced = True
        step.leave_zeros_to_owners()
        untouched = self._reducer.queue.untouched
        problems, concerned = Problem(0), list[int]()
        for number, max_norm in self._max_norms.items():
            optimizer = step.optimizers[number]
            found = {
                Problem.MIXED: step.shares.mixed(step.own_of[number]),
                Problem.MOVED: step.moved(number),
                Problem.FOREIGN: step.foreign_grads(number, untouched),
            }
            for problem, indices in found.items():
                problems |= problem if indices else Problem(0)
                concerned += indices
            outside = self._outside(optimizer) if max_norm is not None else ()
            if any(param.grad is not None for param in outside):
                problems |= Problem.OUTSIDE
        step.agree(Intent(Act.STEP, 0, problems), concerned, self.agreement)
        self._reducer.communicator.note_step()

    def _outside(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the parameters of an optimizer that are in no bucket."""
        index = self._step.index
        return [p for p in _held_by(optimizer) if id(p) not in index]

    def _clip(self, optimizer: Optimizer, max_norm: float) -> None:
        index = self._step.index
        held = [index[id(p)] for p in _held_by(optimizer) if id(p) in index]
        self._step.norms.clip(max_norm, ORDER, raises=False, among=held)

    def _apply(self, number: int, params: Sequence[nn.Parameter] | None) -> None:
        """Step an optimizer on those of the parameters that have a gradient here.

        With None it steps on all that it holds.
        """
        self.is_half = True
        self._stepping = optimizer = self._step.optimizers[number]
        applied = _held_by(optimizer) if params is None else params
        self._grads = [
            (p, p.grad, p.grad._version) for p in applied if p.grad is not None
        ]
        try:
            with self._guard.allow(optimizer):
                if params is None:
                    optimizer.step()
                else:
                    step_on(optimizer, params)
        finally:
            self._step.parts_of(optimizer).leave(optimizer)  # if it has raised
            self._stepping = None
            self._grads.clear()

    def check(self, optimizer: Optimizer) -> None:
        """Check a step that is about to run, after the hooks of the user.

        Raises:
            DoubleStepError: The script has called it.
            ShardedStepError: A hook of the script has changed gradients.
        """
        rank = self._reducer.rank
        if self._stepping is not optimizer:
            raise DoubleStepError(
                explain(
                    rank,
                    f"This {type(optimizer).__name__} steps in the backward "
                    "(step_in_backward); another step would apply its gradients twice.",
                    remedy="remove the call of optimizer.step()",
                )
            )
        changed = [
            p
            for p, grad, version in self._grads
            if p.grad is not grad or grad._version != version
        ]
        if changed and not self._step.allows_changes:
            index, names = self._step.index, self._reducer.names
            raise ShardedStepError(
                explain(
                    rank,
                    "A hook of an optimizer has changed gradients before a step inside "
                    "the backward, where each rank has those of its own share of one "
                    "bucket only.",
                    names=[names[index[id(p)]] for p in changed if id(p) in index],
                    remedy="to clip by a norm, call step_in_backward(optimizer, "
                    "clip_grad_norm=...); what treats each parameter by itself needs "
                    "sharded_step(optimizer, allow_changes=True)",
                )
            )


def _held_by(optimizer: Optimizer) -> list[nn.Parameter]:
    groups = (group["params"] for group in optimizer.param_groups)
    return [*chain.from_iterable(groups)]


def steps_in_backward(reducer: Reducer) -> EarlySteps | None:
    """Return what steps divided optimizers in the backward, if anything does."""
    found = (o for o in reducer.queue.observers.everybody if isinstance(o, EarlySteps))
    return next(found, None)
