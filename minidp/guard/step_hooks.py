"""The hooks around ``torch.optim.Optimizer.step`` through which guards see every step.

They are process-wide, are registered once, and pass each step on to the guards of all
live wrappers.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from minidp import world
from minidp.core import untraced, untraced_itself
from minidp.trace import StepEvent

from . import dropped

if TYPE_CHECKING:
    from collections import OrderedDict

    from .optimizer_guard import Guard

_guards: world.PerProcess[WeakValueDictionary[int, Guard]] = world.PerProcess(
    WeakValueDictionary  # by id
)


def add(guard: Guard) -> None:
    """Let a guard see every optimizer step from now on, until it dies or `remove`."""
    _guards()[id(guard)] = guard
    with _lock:
        _install_hooks()


def remove(guard: Guard) -> None:
    """Let a guard see no optimizer steps any more."""
    _guards().pop(id(guard), None)


def live_guards() -> list[Guard]:
    """Return the guards of this process's live wrappers.

    Other threads may add and drop some meanwhile.
    """
    references = _guards().valuerefs()  # a copy, made in one call to C
    return [guard for each in references if (guard := each()) is not None]


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether a step runs the backward itself, and cannot follow one."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def is_averaged(param: nn.Parameter) -> bool:
    """Return whether a wrapper of this process reduces gradients of ``param``."""
    return any(id(param) in guard.index for guard in live_guards())


_lock = threading.Lock()  # of `_install_hooks`: two threads may wrap at once


@functools.cache
def _install_hooks() -> None:
    """Register hooks before and after every ``Optimizer.step``, once per process.

    Children that the process forks inherit them, and need not come here again.
    """
    register_optimizer_step_pre_hook(_before_any_step)
    register_optimizer_step_post_hook(_after_any_step)
    if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
        os.register_at_fork(after_in_child=_guard_nothing_inherited)


def _guard_nothing_inherited() -> None:
    """Retire the guards of the parent's wrappers in a process that was just forked.

    Such a child is no rank. It may train the module by itself, to probe it or to tune
    it for a test, and no rank would ever answer what a guard asks here. A wrapper that
    the child makes, on a process group of its own, has a guard as usual.
    """
    for guard in live_guards():
        guard.retire()
    dropped.orphans().clear()


@untraced
def _after_any_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for guard in live_guards():
        guard.note_step(optimizer)
        guard.trace(optimizer, StepEvent.OPTIMIZER_END)
    for guard in live_guards():
        guard.confirm(optimizer)


# The number of our hook among those of an optimizer.
_own_hooks: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


@untraced
def _before_any_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Tell recorders that a step begins, and let our check be its last hook.

    This is a pre-hook of all optimizers. The check has to come after the optimizer's
    other hooks, because those of the user may average gradients.
    """
    for guard in live_guards():
        guard.trace(optimizer, StepEvent.OPTIMIZER_BEGIN)
    hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_pre_hooks)
    if _own_hooks.get(optimizer) not in hooks:
        _own_hooks[optimizer] = optimizer.register_step_pre_hook(_before_step).id
    hooks.move_to_end(_own_hooks[optimizer])


@untraced
def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let live guards check the step, or each result of its closure if it has one.

    This is the last pre-hook of an optimizer. It raises what `Guard.check` raises.

    Returns:
        None, or the step's arguments with a closure that lets the guards check the step
        after each call.
    """
    if dropped.orphans():
        dropped.warn_of_orphans(optimizer, is_averaged)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        for guard in live_guards():
            guard.check(optimizer)
        return None

    @untraced_itself
    @functools.wraps(closure)
    def checked(*closure_args: Any, **closure_kwargs: Any) -> Any:
        result = closure(*closure_args, **closure_kwargs)
        for guard in live_guards():
            guard.check(optimizer, in_closure=True)
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": checked}
    return (args[0], checked, *args[2:]), kwargs
