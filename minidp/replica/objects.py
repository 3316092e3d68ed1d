"""Find objects that nothing of ours knows.

A rank that has never stepped has not told us of its optimizer, an optimizer does not
know its schedulers, and a `GradScaler` forgets its optimizers after each step. So they
are searched among all objects of this process.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Collection
from functools import cached_property
from typing import TypeVar

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

_T = TypeVar("_T")
_KINDS = (Optimizer, LRScheduler, GradScaler)


class Survey:
    """All optimizers, schedulers and `GradScaler` objects of this process.

    They are searched once, when they are first asked for, which may take a second.

    Args:
        known: Objects that are alive, and older than those that are searched. If
            ``gc.freeze()`` has hidden one of them, all objects are unfrozen first.
            They stay so: those that there are now must not be frozen instead.
    """

    def __init__(self, known: Collection[object]) -> None:
        self._known = known

    @cached_property
    def _found(self) -> list[object]:
        found = self._visible()
        # To ask how many objects are frozen would walk over all of them.
        ids = {id(each) for each in found}
        if any(id(each) not in ids for each in self._known):
            gc.unfreeze()
            found = self._visible()
        return [each for each in found if issubclass(type(each), _KINDS)]

    def _visible(self) -> list[object]:
        """Return the objects of our kinds, and of the known ones', that are not frozen.

        Only their types are looked at: isinstance() would run code of proxy objects.
        """
        kinds = (*_KINDS, *{type(each) for each in self._known})
        return [each for each in gc.get_objects() if issubclass(type(each), kinds)]

    def steppers_of(self, optimizer: Optimizer) -> list[object]:
        """Return objects that hold an optimizer, and have a ``step`` method.

        They may be learning rate schedulers of the user's own, of any class. Those of
        torch and of minidp are left out, and objects that hold a module, too. These are
        trainers, whose counts tell nothing of the next step.
        """
        holders = gc.get_referrers(optimizer)
        owners = (gc.get_referrers(each) for each in holders if type(each) is dict)
        found = {id(each): each for some in (holders, *owners) for each in some}
        return [each for each in found.values() if _steps(each, optimizer)]

    def of(self, kind: type[_T]) -> list[_T]:
        """Return the objects of a class and of its subclasses."""
        return [each for each in self._found if isinstance(each, kind)]


def _steps(holder: object, optimizer: Optimizer) -> bool:
    """Return whether an object of the user has an optimizer and a ``step`` method."""
    kind = type(holder)
    if issubclass(kind, _KINDS) or kind.__module__.startswith(("torch.", "minidp.")):
        return False
    if not callable(inspect.getattr_static(kind, "step", None)):
        return False
    try:
        attributes = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return False
    values = attributes.values()
    return any(each is optimizer for each in values) and not any(
        issubclass(type(each), torch.nn.Module) for each in values
    )


def held_by(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer holds."""
    # An optimizer whose constructor has not run to its end has no groups.
    groups = vars(optimizer).get("param_groups", ())
    return {id(param) for group in groups for param in group["params"]}
