"""Check every optimizer step: no optimizer applies gradients that differ between ranks.

A process-wide pre-hook on ``torch.optim.Optimizer.step`` asks the guard of every live
reducer; inside ``no_sync()``, where local SGD steps, it is silent. Updates by hand, and
those of other optimizer classes, are found by the next forward.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from minidp.config import Unsynced
from minidp.console import warn
from minidp.core import Phase, Reducer, untraced, untraced_itself
from minidp.errors import (
    DoubleStepError,
    ItemCountError,
    MiniDPError,
    UnsyncedGradientsError,
    explain,
)
from minidp.replica import Replica, ReplicaCheck
from minidp.trace import StepEvent

from .local_updates import Corners, LocalSteps, copy_corners, find_manual_update
from .mistakes import LateParameters, StepCheck, explain_late, find_cast, refuse_forward


class Guard:
    """Check the optimizer steps, until `retire`, and the forwards of one wrapper.

    Process-wide hooks call it before and after every step, the wrapper before forwards.
    The constructor installs these hooks, and adds itself to the live guards.
    """

    def __init__(self, reducer: Reducer, policy: Unsynced, replica: Replica) -> None:
        self.reducer = reducer
        self.policy = policy
        self.replica_check: ReplicaCheck | None = None
        self.index = {id(param): i for i, param in enumerate(reducer.params)}
        self.late_parameters = LateParameters(replica)
        self._in_backward: WeakSet[Optimizer] = WeakSet()
        self._allowed: set[int] = set()  # ids of optimizers that step in a backward now
        self._local_steps = LocalSteps(reducer)
        self._corners: Corners = {}
        # The ledger's `armed` and `finalized`, at the last step of each optimizer.
        self._at_step: WeakKeyDictionary[Optimizer, tuple[int, int]]
        self._at_step, self._at_any_step = WeakKeyDictionary(), (0, 0)
        _guards[id(self)] = self
        with _lock:
            _install_hooks()

    @untraced
    def check(self, optimizer: Optimizer) -> None:
        """Check a step about to run, outside no_sync(): raise or warn, as ``unsynced``.

        There also ReplicaMismatchError, if a comparison awaited this step. Inside
        no_sync() and outside: DoubleStepError after `expect_in_backward`, and
        ItemCountError, see `_check_counts`. May wait for ranks. No-op inside `allow`.
        """
        if id(optimizer) in self._allowed:
            return
        ledger, is_ours = self.reducer.ledger, self._holds_ours(optimizer)
        if optimizer in self._in_backward:
            text = explain(
                self.reducer.rank,
                "This optimizer steps in the backward (step_in_backward); another step "
                "would apply its gradients twice.",
                remedy="remove the call of optimizer.step(); if a GradScaler called "
                "it, the two do not go together, and the parameters have taken a step "
                "of scaled gradients: reload them",
            )
            raise DoubleStepError(text)
        # An optimizer that never stepped has missed nothing, unless a backward passed
        # our hooks: then its gradients may be those of that backward.
        never = (0, 0) if ledger.bypassed is None else self._at_any_step
        if is_ours:
            self._check_counts()
        step = StepCheck(self, optimizer, self._at_step.get(optimizer, never))
        if ledger.sync_enabled:
            ledger.steps += is_ours
            if problem := step.find_problem(self.late_parameters.find()):
                self._complain(problem)
            check = self.replica_check
            if is_ours and check is not None and check.suspect is not None:
                check.confirm()
        elif is_ours and ledger.unsynced:
            ledger.was_local = True
        if (ledger.versions or ledger.bypassed is not None) and step.held:
            for i in step.held:  # the writes of this step are no manual update
                ledger.versions.pop(i, None)
            ledger.bypassed = None
        self._at_step[optimizer] = self._at_any_step = (ledger.armed, ledger.finalized)

    def note_step(self, optimizer: Optimizer) -> None:
        """Count a step that ran in no_sync() with local gradients; this may warn.

        No-op for other steps, and with ``unsynced="ignore"``. See `LocalSteps`.
        """
        ledger = self.reducer.ledger
        is_local = not ledger.sync_enabled and bool(ledger.unsynced)
        if is_local and self.policy != "ignore" and self._holds_ours(optimizer):
            self._local_steps.note_step()

    def trace(self, optimizer: Optimizer, event: StepEvent) -> None:
        """Send ``event`` to recorders, if the optimizer holds parameters of ours."""
        tracer = self.reducer.queue.tracer
        if tracer.listeners and self._holds_ours(optimizer):
            tracer.enter(event)

    def check_forward(self, module: nn.Module) -> None:
        """Raise if the last backward failed or is unfinished; look for other mistakes.

        ItemCountError if its item counts give no mean. Then, unless
        ``unsynced="ignore"``: outside no_sync() raise or warn of parameters added or
        cast, and updates by local gradients. Inside, copy values of two parameters: if
        they come back later, such an update was undone, and is no mistake.
        """
        reducer = self.reducer
        self._check_counts()
        refuse_forward(reducer)
        self._local_steps.note_forward()
        if self.policy == "ignore":
            return
        if not reducer.ledger.sync_enabled:
            self._corners = copy_corners(self._corners, reducer.params)
            return
        if late := self.late_parameters.find(module):
            self._complain(explain_late(reducer.rank, late))
            self.late_parameters.accept(module)
        self._complain(find_cast(reducer))  # module buffers would differ in size, too
        if problem := find_manual_update(reducer, self._corners):
            mine = self.index.keys()
            if all(mine.isdisjoint(other.index) for other in self.others()):
                self._complain(problem)

    def expect_in_backward(self, optimizer: Optimizer) -> None:
        """Register an optimizer that steps in backwards: other steps of it then raise.

        ValueError if some wrapper has it already, or it holds no parameter of ours.
        """
        name = type(optimizer).__name__
        if any(optimizer in guard._in_backward for guard in _live_guards()):
            raise ValueError(
                f"This {name} steps in the backward already; use one optimizer for "
                "each module."
            )
        if not self._holds_ours(optimizer):
            raise ValueError(f"This {name} holds no parameter of the module.")
        self._in_backward.add(optimizer)

    @contextmanager
    def allow(self, optimizer: Optimizer) -> Iterator[None]:
        """Let ``optimizer`` step unchecked in the block.

        An Exception in the block becomes a MiniDPError.
        """
        self._allowed.add(id(optimizer))
        try:
            yield
        except Exception as error:
            text = explain(
                self.reducer.rank,
                f"{type(optimizer).__name__}.step() raised {type(error).__name__} "
                f"inside the backward: {error}",
                remedy="call reset() on all ranks, and load parameters and optimizer "
                "from a checkpoint: some may have stepped, some not",
            )
            raise MiniDPError(text) from error
        finally:
            self._allowed.discard(id(optimizer))

    def retire(self) -> None:
        """Unregister this guard: it checks no optimizer steps any more."""
        _guards.pop(id(self), None)

    def others(self) -> list[Guard]:
        """Return the other live guards of this process, of any wrapper or group."""
        return [guard for guard in _live_guards() if guard is not self]

    def has_averaged(self, param: nn.Parameter) -> bool:
        """Return whether this wrapper's last backward averaged ``param.grad``.

        False if it is not ours, if no synchronised backward ended, if a local backward
        has added to it, and always in no_sync().
        """
        i, ledger = self.index.get(id(param)), self.reducer.ledger
        if i is None or not ledger.finalized or not ledger.sync_enabled:
            return False  # inside no_sync() not every local gradient is recorded
        return i not in ledger.unsynced

    def _check_counts(self) -> None:
        """Raise ItemCountError if the last counts of items give no mean; may wait.

        The reducer is then FAILED, and other ranks are told. Waits for counts on CUDA;
        on the CPU no-op: the backward has raised. No-op unless averaging over items.
        """
        if (items := self.reducer.queue.averaging.items) is not None:
            try:
                items.check()
            except ItemCountError as error:
                self.reducer.fail(error)
                raise

    def _complain(self, problem: str) -> None:
        """Raise, warn of or ignore ``problem``, as ``unsynced`` says; "": nothing.

        Before it raises while ranks wait for gradients (REDUCING, PAUSED), it sends
        them the error. If it does not raise, it sets the ledger's `was_excused`:
        replicas may differ.
        """
        if problem and self.policy == "raise":
            error = UnsyncedGradientsError(problem)
            # In these phases other ranks wait for missing gradients.
            is_waited_for = self.reducer.phase.now in (Phase.REDUCING, Phase.PAUSED)
            if is_waited_for and not self.reducer.awaits_user:
                self.reducer.communicator.tell_others(error)
            try:
                raise error
            finally:
                del error  # it would keep this frame alive, and with it the reducer
        self.reducer.ledger.was_excused |= bool(problem)
        if problem and self.policy == "warn":
            warn(problem)

    def _holds_ours(self, optimizer: Optimizer) -> bool:
        groups = optimizer.param_groups
        return any(id(param) in self.index for g in groups for param in g["params"])


_guards: WeakValueDictionary[int, Guard] = WeakValueDictionary()  # live ones, by id


def _live_guards() -> list[Guard]:
    """Return all guards of live wrappers here; other threads may add and drop some."""
    references = _guards.valuerefs()  # a copy, made in one call to C
    return [guard for each in references if (guard := each()) is not None]


def is_averaged(param: nn.Parameter) -> bool:
    """Return whether a wrapper of this process reduces gradients of ``param``."""
    return any(id(param) in guard.index for guard in _live_guards())


_lock = threading.Lock()  # of `_install_hooks`: two threads may wrap at once


@functools.cache
def _install_hooks() -> None:
    """Register hooks before and after every ``Optimizer.step``, once per process."""
    register_optimizer_step_pre_hook(_before_any_step)
    register_optimizer_step_post_hook(_after_any_step)


@untraced
def _after_any_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for guard in _live_guards():
        guard.note_step(optimizer)
        guard.trace(optimizer, StepEvent.OPTIMIZER_END)


@untraced
def _before_any_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let live guards check the step; with a closure, after each call of that.

    A pre-hook of all optimizers. Return None, or the step's arguments with the closure
    wrapped so. Tells recorders that a step begins. Raises as `Guard.check`.
    """
    guards = _live_guards()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        for guard in guards:
            guard.check(optimizer)
    for guard in guards:
        guard.trace(optimizer, StepEvent.OPTIMIZER_BEGIN)
    if not callable(closure):
        return None

    @untraced_itself
    @functools.wraps(closure)
    def checked(*closure_args: Any, **closure_kwargs: Any) -> Any:
        result = closure(*closure_args, **closure_kwargs)
        for guard in _live_guards():
            guard.check(optimizer)
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": checked}
    return (args[0], checked, *args[2:]), kwargs
