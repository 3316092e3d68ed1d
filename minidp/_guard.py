"""The optimizer guard: no optimizer applies gradients that differ between ranks.

One process-wide pre-hook on ``torch.optim.Optimizer.step`` looks at every live reducer.
In the everyday case it compares a few numbers. It is silent inside ``no_sync()`` (local
SGD steps there on purpose), and cannot see hand-written updates or optimizers that do
not derive from ``torch.optim.Optimizer``: there the next forward reports.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import _guard_words as words
from ._autograd import NO_TASK, current_task
from ._by_hand import Corner, is_nonzero, renewed, updated_by_hand
from ._desync import ReplicaCheck
from ._ledger import Ledger
from ._local_steps import LocalSteps
from ._managed import Replica
from ._newcomers import Newcomers
from ._overlap import Excuses
from ._phase import Phase
from ._reducer import Reducer
from ._registry import Registry
from ._skip import ask_who_skips
from ._untraced import untraced, untraced_itself
from ._warn import warn
from .config import Unsynced
from .errors import (
    DoubleStepError,
    ReducerFailedError,
    UnfinishedReductionError,
    UnsyncedGradientsError,
    explain,
)


@dataclass(frozen=True)
class Seen:
    """What a reducer had counted when an optimizer last stepped."""

    armed: int = 0
    finalized: int = 0


class Holding(NamedTuple):
    """What an optimizer held when it was looked at."""

    num_params: int
    is_ours: bool  # at least one of them
    strangers: list[tuple[str, nn.Parameter]]  # in the module, unknown to the reducer


class Guard:
    """Watches the optimizers of one reducer, and its forwards.

    Args:
        reducer: whose gradients are watched.
        policy: what to do about a problem.
        replica: what takes part, and in which module.
    """

    def __init__(self, reducer: Reducer, policy: Unsynced, replica: Replica) -> None:
        self._reducer = reducer
        self.policy = policy
        self.replica_check: ReplicaCheck | None = None
        self._local_steps = LocalSteps(reducer)
        self._corners: list[Corner] = []
        self._newcomers = Newcomers(replica)
        self._known: weakref.WeakKeyDictionary[Optimizer, Holding] = (
            weakref.WeakKeyDictionary()
        )
        self._last = Seen()  # when any optimizer stepped
        self.excuses = Excuses(reducer.rank)
        self._in_backward: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._index = {id(param): i for i, param in enumerate(reducer.params)}
        # A cast of a whole module changes all of them: two are a sample.
        self._sample = [(i, reducer.params[i].dtype) for i in (0, -1)]
        self._seen: weakref.WeakKeyDictionary[Optimizer, Seen] = (
            weakref.WeakKeyDictionary()
        )
        _watch(self)

    @untraced
    def check(self, optimizer: Optimizer) -> None:
        """Complain about a step of ``optimizer``, or note that it went ahead.

        Raises:
            UnsyncedGradientsError: it would apply gradients that differ by rank.
            DoubleStepError: it steps by itself, in the backward.
            ReplicaMismatchError: so did the parameters before.
        """
        if optimizer in self.excuses:
            return
        if optimizer in self._in_backward:
            raise DoubleStepError(words.double_step(self._reducer.rank))
        ledger, holding = self._reducer.ledger, self._holding(optimizer)
        if ledger.sync_enabled:
            ledger.steps += holding.is_ours
            self._complain(self._find_problem(optimizer, holding))
            if holding.is_ours and self.replica_check is not None:
                self.replica_check.confirm()
        elif holding.is_ours and ledger.unsynced:
            ledger.was_local = True
        if ledger.versions or ledger.bypassed is not None:
            self._excuse(optimizer)
        self._seen[optimizer] = self._last = Seen(ledger.armed, ledger.finalized)

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        ledger = self._reducer.ledger
        is_local = not ledger.sync_enabled and bool(ledger.unsynced)
        if is_local and self.policy != "ignore" and self._holding(optimizer).is_ours:
            self._local_steps.note(ledger.finalized)

    def check_forward(self, module: nn.Module) -> None:
        """Complain about what only a forward can see, before it runs.

        Raises:
            UnsyncedGradientsError: replicas differ already, or are about to.
            ReducerFailedError, UnfinishedReductionError: see `refuse_forward`.
        """
        refuse_forward(self._reducer)
        self._local_steps.look()
        if self.policy == "ignore":
            return
        if not self._reducer.ledger.sync_enabled:
            self._corners = renewed(self._corners, self._reducer.params)
            return
        compares_all = self._reducer.expected.may_guess_wrong
        names = self._newcomers.find(module, compares_all=compares_all)
        if names:
            self._complain(words.joined_after_wrapping(self._reducer.rank, names))
            self._newcomers.accept(module)
        if cast := self._cast():  # else module buffers of different sizes may travel
            self._complain(words.cast_after_wrapping(self._reducer.rank, cast))
        by_hand = updated_by_hand(self._reducer, self._corners)
        self._complain(_if_alone(self, by_hand))

    def _complain(self, problem: str) -> None:
        if problem and self.policy == "raise":
            error = UnsyncedGradientsError(problem)
            if self._reducer.phase.now in (Phase.REDUCING, Phase.PENDING):
                self._reducer.tell_others(error)  # who wait for the missing gradients
            try:
                raise error
            finally:
                del error  # it would keep this frame alive, and with it the reducer
        self._reducer.ledger.was_excused |= bool(problem)
        if problem and self.policy == "warn":
            warn(problem)

    def _excuse(self, optimizer: Optimizer) -> None:
        """It may step: what it changes is no update by hand."""
        ledger, held = self._reducer.ledger, self._held(optimizer)
        for i in held:
            ledger.versions.pop(i, None)
        if held:
            ledger.bypassed = None

    def _held(self, optimizer: Optimizer) -> list[int]:
        """Which managed parameters, of those with a gradient."""
        return [
            self._index[id(param)]
            for group in optimizer.param_groups
            for param in group["params"]
            if id(param) in self._index and param.grad is not None
        ]

    def _holding(self, optimizer: Optimizer) -> Holding:
        """Looked up anew when an optimizer holds more, or less, than last time."""
        groups = optimizer.param_groups
        num_params = sum([len(group["params"]) for group in groups])
        known = self._known.get(optimizer)
        if known is None or known.num_params != num_params:
            held = [param for group in groups for param in group["params"]]
            is_ours = any(id(param) in self._index for param in held)
            known = Holding(num_params, is_ours, self._newcomers.find_held(held))
            self._known[optimizer] = known
        return known

    def _find_joined(self, holding: Holding) -> list[str]:
        """Parameters in the module that the optimizer knows, but the reducer does not.

        The module is searched when the optimizer is new, or holds more than last time.
        """
        held = [(n, param) for n, param in holding.strangers if param.grad is not None]
        return [name for name, param in held if not is_averaged(param)]

    def expect_in_backward(self, optimizer: Optimizer) -> None:
        """From now on ``optimizer`` steps in backwards, and nowhere else.

        Raises:
            ValueError: it does so already, here or in those of another module, or it
                has nothing to do with this one.
        """
        if any(optimizer in guard._in_backward for guard in _guards):
            raise ValueError(
                f"This {type(optimizer).__name__} steps in the backward already; use "
                "one optimizer for each module."
            )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(param) in self._index for param in held):
            raise ValueError(
                f"This {type(optimizer).__name__} holds no parameter of the module."
            )
        self._in_backward.add(optimizer)

    def _find_problem(self, optimizer: Optimizer, holding: Holding) -> str:
        reducer = self._reducer
        phase, ledger = reducer.phase.now, reducer.ledger
        names = self._find_joined(holding)
        if not names:
            # Also if it holds what they took the place of: on this rank only, perhaps.
            found = {name: self._newcomers[name] for name in self._newcomers.find()}
            names = [name for name, param in found.items() if not is_averaged(param)]
            names = names if names and self._held(optimizer) else []
        if names:
            return words.joined_after_wrapping(reducer.rank, names)
        cast = self._cast()
        if cast and self._held(optimizer):
            return words.cast_after_wrapping(reducer.rank, cast)
        # What a new one steps on was not reduced if a backward passed us by.
        never = Seen() if ledger.bypassed is None else self._last
        seen = self._seen.get(optimizer, never)
        is_idle = phase is Phase.IDLE or (
            phase is Phase.ARMED and current_task() == NO_TASK
        )
        is_clean = is_idle and not ledger.unsynced
        is_clean = is_clean and not _is_never_reduced(ledger, seen)
        if is_clean:
            return ""
        held = self._held(optimizer)
        return self._problem(phase, held, seen=seen) if held else ""

    def _cast(self) -> list[str]:
        """Parameters of another dtype than when they were wrapped; of the sample."""
        params, names = self._reducer.params, self._reducer.names
        return [names[i] for i, dtype in self._sample if params[i].dtype is not dtype]

    def _problem(self, phase: Phase, held: list[int], *, seen: Seen) -> str:
        """Why this step would drive the replicas apart; empty when it would not."""
        reducer = self._reducer
        names = [reducer.names[i] for i in held]
        if current_task() != NO_TASK and phase in (Phase.ARMED, Phase.REDUCING):
            return words.step_inside(reducer.rank, names)
        if phase in (Phase.REDUCING, Phase.PENDING):
            return words.unfinished_at_step(reducer)
        if phase in (Phase.FAILED, Phase.FINALIZING):
            return words.step_after_failure(reducer, names)
        if local := self._find_local(held):
            model_ran = reducer.ledger.armed > seen.armed
            return words.local_gradients(reducer, local, model_ran=model_ran)
        if not _is_never_reduced(reducer.ledger, seen):
            return ""
        if any(is_nonzero(reducer.params[i].grad) for i in held):
            return words.never_came(reducer.rank, names)
        return "" if self.policy == "ignore" else ask_who_skips(reducer, names)

    def _find_local(self, held: list[int]) -> list[int]:
        """Parameters whose gradient has a part that no live object averaged."""
        ledger, params = self._reducer.ledger, self._reducer.params
        for i in ledger.unsynced.intersection(held):
            if not is_nonzero(params[i].grad):  # zero_grad(set_to_none=False)
                ledger.drop(i)
        return [
            i
            for i in held
            if i in ledger.unsynced and not _averaged_elsewhere(self, params[i])
        ]

    def _has_averaged(self, param: nn.Parameter) -> bool:
        i, ledger = self._index.get(id(param)), self._reducer.ledger
        if i is None or not ledger.finalized or not ledger.sync_enabled:
            return False  # inside no_sync() not every local part is noted
        return i not in ledger.unsynced


def _is_never_reduced(ledger: Ledger, seen: Seen) -> bool:
    """A synchronised backward was announced since a step, and none came."""
    return ledger.armed > seen.armed and ledger.finalized == seen.finalized


def _if_alone(guard: Guard, problem: str) -> str:
    """The problem, unless another live object averages parameters of this one."""
    others = [other._index for other in _guards if problem and other is not guard]
    has_company = any(not guard._index.keys().isdisjoint(other) for other in others)
    return "" if has_company else problem


def _averaged_elsewhere(guard: Guard, param: nn.Parameter) -> bool:
    """What ``.grad`` holds was averaged by another live object, as it is now."""
    return any(other._has_averaged(param) for other in _guards if other is not guard)


def is_averaged(param: nn.Parameter) -> bool:
    """By any live object: its module may have been wrapped again since."""
    return any(id(param) in guard._index for guard in _guards)


def refuse_forward(reducer: Reducer) -> None:
    """What the guard cannot see, the next forward reports.

    Raises:
        ReducerFailedError: an earlier backward failed.
        UnfinishedReductionError: the last backward left gradients missing.
    """
    phase = reducer.phase.now
    if phase in (Phase.IDLE, Phase.ARMED):
        return
    if phase is Phase.FAILED:
        raise ReducerFailedError(
            explain(
                reducer.rank,
                words.failed_before(reducer, "its gradients are not synchronised"),
                remedy="call reset() on all ranks, then zero_grad()",
            )
        )
    error = UnfinishedReductionError(words.unfinished_at_forward(reducer))
    reducer.tell_others(error)
    try:
        raise error
    finally:
        del error  # it would keep this frame alive, and with it the reducer


def retire(guard: Guard) -> None:
    """It looks at no optimizer any more."""
    _guards.discard(guard)


_guards: Registry[Guard] = Registry()
_lock = threading.Lock()
_installed = False


def _watch(guard: Guard) -> None:
    global _installed  # the hook is process-wide by its nature
    with _lock:
        _guards.add(guard)
        if not _installed:
            register_optimizer_step_pre_hook(_before_any_step)
            register_optimizer_step_post_hook(_after_any_step)
            _installed = True


@untraced
def _after_any_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for guard in _guards:
        guard.note_step(optimizer)


@untraced
def _before_any_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        for guard in _guards:
            guard.check(optimizer)
        return None

    @untraced_itself
    @functools.wraps(closure)
    def checked(*closure_args: Any, **closure_kwargs: Any) -> Any:
        result = closure(*closure_args, **closure_kwargs)
        for guard in _guards:
            guard.check(optimizer)
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": checked}
    return (args[0], checked, *args[2:]), kwargs
