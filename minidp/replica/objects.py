"""Find objects that nothing of ours knows.

A rank that has never stepped has not told us of its optimizer, an optimizer does not
know its schedulers, and a `GradScaler` forgets its optimizers after each step. So they
are searched among all objects of this process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from functools import cached_property
from typing import TypeVar

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

    def __init__(self, known: Iterable[object]) -> None:
        self._known = known

    @cached_property
    def _found(self) -> list[object]:
        every = gc.get_objects()
        if gc.get_freeze_count():
            visible = {id(each) for each in every}
            if any(id(each) not in visible for each in self._known):
                gc.unfreeze()
                every = gc.get_objects()
        # isinstance() would run code of proxy objects, so this asks for the type alone.
        return [each for each in every if issubclass(type(each), _KINDS)]

    def of(self, kind: type[_T]) -> list[_T]:
        """Return the objects of a class and of its subclasses."""
        return [each for each in self._found if isinstance(each, kind)]
