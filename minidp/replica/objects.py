"""Find objects that nothing of ours knows.

A rank that has never stepped has not told us of its optimizer, an optimizer does not
know its schedulers, and a `GradScaler` forgets its optimizers after each step. So they
are searched among all objects of this process.
"""

from __future__ import annotations

import gc
from functools import cached_property
from typing import TypeVar

from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

_T = TypeVar("_T")
_FROZEN_AT_START = 1000  # objects at most, which Python 3.12 itself sets aside


class Survey:
    """All optimizers, schedulers and `GradScaler` objects of this process.

    They are searched once, when they are first asked for, which may take a second.
    """

    @cached_property
    def _found(self) -> list[object]:
        # Only unfrozen objects can be listed. Garbage is freed before all objects that
        # there are now are set aside again, because nothing would free it afterwards.
        is_frozen = gc.get_freeze_count() > _FROZEN_AT_START
        if is_frozen:
            gc.unfreeze()
            gc.collect()
        # isinstance() would run code of proxy objects, so this asks for the type alone.
        kinds = (Optimizer, LRScheduler, GradScaler)
        found = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
        if is_frozen:
            gc.freeze()
        return found

    def of(self, kind: type[_T]) -> list[_T]:
        """Return the objects of a class and of its subclasses."""
        return [each for each in self._found if isinstance(each, kind)]
