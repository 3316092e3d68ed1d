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
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ._autograd import NO_TASK, current_task
from ._by_hand import updated_by_hand
from ._managed import Replica
from ._newcomers import Newcomers
from ._overlap import Excuses
from ._phase import Phase
from ._reducer import Reducer
from ._registry import Registry
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

_LOCAL_REMEDY = (
    "run one backward over the sum of the losses, or call sync_gradients() on all "
    "ranks before the step; run a penalty that is equal on all ranks inside no_sync(); "
    "checkpoint shared layers with use_reentrant=False; step inside no_sync() if "
    "replicas are meant to differ (or pass unsynced='ignore')"
)


@dataclass(frozen=True)
class Seen:
    """What a reducer had counted when an optimizer last stepped."""

    armed: int = 0
    finalized: int = 0


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
        self._newcomers = Newcomers(replica)
        # How many parameters each optimizer held, and which the reducer did not know.
        self._strangers: weakref.WeakKeyDictionary[
            Optimizer, tuple[int, list[tuple[str, nn.Parameter]]]
        ] = weakref.WeakKeyDictionary()
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
        """
        if optimizer in self.excuses:
            return
        if optimizer in self._in_backward:
            raise DoubleStepError(
                explain(
                    self._reducer.rank,
                    "This optimizer steps in the backward (step_in_backward); "
                    "another step would apply its gradients twice.",
                    remedy="remove the call of optimizer.step(); if a GradScaler "
                    "called it, the two do not go together, and the parameters have "
                    "taken a step of scaled gradients: reload them",
                )
            )
        self._complain(self._find_problem(optimizer))
        ledger = self._reducer.ledger
        if ledger.versions or ledger.bypassed is not None:
            self._excuse(optimizer)
        self._seen[optimizer] = self._last = Seen(ledger.armed, ledger.finalized)

    def check_forward(self, module: nn.Module) -> None:
        """Complain about what only a forward can see, before it runs.

        Raises:
            UnsyncedGradientsError: replicas differ already, or are about to.
            ReducerFailedError, UnfinishedReductionError: see `refuse_forward`.
        """
        refuse_forward(self._reducer)
        if self.policy == "ignore" or not self._reducer.ledger.sync_enabled:
            return
        compares_all = self._reducer.expected.may_guess_wrong
        names = self._newcomers.find(module, compares_all=compares_all)
        if names:
            self._complain(_joined(self._reducer.rank, names))
            self._newcomers.accept(module)
        if self._cast():  # else module buffers of different sizes may travel
            self._complain(_cast(self._reducer, self._cast()))
        self._complain(_if_alone(self, updated_by_hand(self._reducer)))

    def _complain(self, problem: str) -> None:
        if problem and self.policy == "raise":
            error = UnsyncedGradientsError(problem)
            if self._reducer.phase.now in (Phase.REDUCING, Phase.PENDING):
                self._reducer.tell_others(error)  # who wait for the missing gradients
            try:
                raise error
            finally:
                del error  # it would keep this frame alive, and with it the reducer
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

    def _find_joined(self, optimizer: Optimizer) -> list[str]:
        """Parameters in the module that the optimizer knows, but the reducer does not.

        The module is searched when the optimizer is new, or holds more than last time.
        """
        groups = optimizer.param_groups
        num_params = sum([len(group["params"]) for group in groups])
        known = self._strangers.get(optimizer)
        if known is None or known[0] != num_params:
            held = [param for group in groups for param in group["params"]]
            known = (num_params, self._newcomers.find_held(held))
            self._strangers[optimizer] = known
        held = [(name, param) for name, param in known[1] if param.grad is not None]
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

    def _find_problem(self, optimizer: Optimizer) -> str:
        reducer = self._reducer
        phase, ledger = reducer.phase.now, reducer.ledger
        names = self._find_joined(optimizer) if ledger.sync_enabled else []
        if not names and ledger.sync_enabled:
            # Also if it holds what they took the place of: on this rank only, perhaps.
            found = {name: self._newcomers[name] for name in self._newcomers.find()}
            names = [name for name, param in found.items() if not is_averaged(param)]
            names = names if names and self._held(optimizer) else []
        if names:
            return _joined(self._reducer.rank, names)
        cast = self._cast() if ledger.sync_enabled else []
        if cast and self._held(optimizer):
            return _cast(self._reducer, self._cast())
        # What a new one steps on was not reduced if a backward passed us by.
        never = Seen() if ledger.bypassed is None else self._last
        seen = self._seen.get(optimizer, never)
        never_reduced = ledger.armed > seen.armed and ledger.finalized == seen.finalized
        is_idle = phase is Phase.IDLE or (
            phase is Phase.ARMED and current_task() == NO_TASK
        )
        is_clean = is_idle and not never_reduced and not ledger.unsynced
        if is_clean or not ledger.sync_enabled:
            return ""
        held = self._held(optimizer)
        if not held:
            return ""
        return self._problem(phase, held, never_reduced=never_reduced)

    def _cast(self) -> list[int]:
        """Parameters of another dtype than when they were wrapped; of the sample."""
        params = self._reducer.params
        return [i for i, dtype in self._sample if params[i].dtype is not dtype]

    def _problem(self, phase: Phase, held: list[int], *, never_reduced: bool) -> str:
        """Why this step would drive the replicas apart; empty when it would not."""
        reducer = self._reducer
        say = functools.partial(explain, reducer.rank)
        names = [reducer.names[i] for i in held]
        if current_task() != NO_TASK and phase in (Phase.ARMED, Phase.REDUCING):
            return say(
                "An optimizer steps inside the backward, before its gradients are "
                "averaged over ranks.",
                names=names,
                remedy="step after backward() returned",
            )
        if phase in (Phase.REDUCING, Phase.PENDING):
            return say(
                "The last backward did not finish its reduction"
                + (" (it raised)." if phase is Phase.REDUCING else "."),
                names=[reducer.names[i] for i in reducer.countdown.missing()],
                expected="a gradient for every parameter before optimizer.step()",
                found="no gradient for the parameters below",
                remedy="pass find_unused_parameters=True if they are unused on "
                "purpose, freeze them before wrapping, or run the backward that "
                "brings them; call reset() on all ranks to go on",
            )
        if phase in (Phase.FAILED, Phase.FINALIZING):
            return say(
                "An earlier backward failed; gradients are not averaged over ranks.",
                names=names,
                remedy="call reset() on all ranks, then zero_grad()",
            )
        local = [reducer.names[i] for i in held if i in reducer.ledger.unsynced]
        if local:
            return say(
                "Gradients of a local backward were never averaged over ranks: a "
                "second backward of one or two forwards, a retained graph, a method "
                "of .module, or no_sync() without a synchronised backward after it.",
                names=local,
                remedy=_LOCAL_REMEDY,
            )
        if never_reduced:
            return say(
                "A forward announced a synchronised backward that never came, so the "
                "gradients present are not those of this step.",
                names=names,
                remedy="call backward() on what the forward returned (not "
                "torch.autograd.grad), and do not cast or replace parameters after "
                "wrapping",
            )
        return ""


def _cast(reducer: Reducer, which: list[int]) -> str:
    return explain(
        reducer.rank,
        "Parameters were cast after wrapping; on other ranks they may not be.",
        names=[reducer.names[i] for i in which],
        remedy="wrap the module again after a cast (.double(), .half(), .to())",
    )


def _if_alone(guard: Guard, problem: str) -> str:
    """The problem, unless another live object averages parameters of this one."""
    others = [other._index for other in _guards if problem and other is not guard]
    has_company = any(not guard._index.keys().isdisjoint(other) for other in others)
    return "" if has_company else problem


def is_averaged(param: nn.Parameter) -> bool:
    """By any live object: its module may have been wrapped again since."""
    return any(id(param) in guard._index for guard in _guards)


def _joined(rank: int, names: list[str]) -> str:
    return explain(
        rank,
        "Parameters joined the module after it was wrapped (added, replaced, unfrozen, "
        "or given by functional_call), so nobody averages their gradients over ranks.",
        names=names,
        remedy="wrap the module again after such a change, with everything trainable "
        "that will be; or wrap it with these on its ignore list, if they are meant to "
        "differ between ranks",
    )


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
                "An earlier backward failed; its gradients are not synchronised.",
                remedy="call reset() on all ranks, then zero_grad()",
            )
        )
    error = UnfinishedReductionError(_unfinished(reducer))
    reducer.tell_others(error)
    try:
        raise error
    finally:
        del error  # it would keep this frame alive, and with it the reducer


def _unfinished(reducer: Reducer) -> str:
    """Which gradients are missing, with the phrases that scripts look for."""
    missing = reducer.countdown.missing()
    rank, expected = reducer.rank, reducer.expected
    indices = " ".join(map(str, missing))
    names = ", ".join(reducer.names[i] for i in missing)
    has_raised = reducer.phase.now is Phase.REDUCING
    return explain(
        rank,
        "Expected to have finished reduction in the prior iteration before starting a "
        f"new one. This error indicates that {expected.cause_of_missing}.\n"
        f"Parameter indices which did not receive grad for rank {rank}: {indices}\n"
        f"Parameters which did not receive grad for rank {rank}: {names}.\n"
        + ("The backward raised." if has_raised else ""),
        remedy=f"{expected.remedy_for_missing}; then call reset() on all ranks, and "
        "zero_grad(). To log the unused parameters of every backward, set the "
        "environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL",
    )


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
            _installed = True


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
