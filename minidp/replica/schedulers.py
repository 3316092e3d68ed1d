"""Compare and copy learning rate schedulers, which decide on rates to come.

A rank that raises between ``optimizer.step()`` and ``scheduler.step()`` has the same
parameters and the same learning rate as the others. But its scheduler is behind, so
that the rate will change one step later there, perhaps after hours.

An optimizer does not know its schedulers. So they are searched among all Python
objects, in `find_schedulers`. On each rank there may be several of a class for one
optimizer, in an order that nobody knows. These can be compared, as a sorted list, but
not copied.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

# All that a scheduler's steps change, in the classes of torch.optim.lr_scheduler. Other
# attributes are what its constructor was given, which every rank has of its own.
_CHANGING = frozenset(
    {
        "last_epoch",
        "_step_count",
        "_last_lr",
        "best",  # these three: ReduceLROnPlateau
        "num_bad_epochs",
        "cooldown_counter",
        "T_cur",  # these two: CosineAnnealingWarmRestarts
        "T_i",
    }
)


def find_schedulers(
    optimizers: Iterable[Optimizer],
) -> dict[Optimizer, list[LRScheduler]]:
    """Return the schedulers of each optimizer that has some, inner ones of others too.

    This searches all Python objects, if an optimizer's groups show that a scheduler was
    made for it.
    """
    scheduled = {id(o): o for o in optimizers if _has_scheduler(o)}
    found: dict[Optimizer, list[LRScheduler]] = defaultdict(list)
    if scheduled:
        # isinstance() would run code of proxy objects, so this asks for the type alone.
        every = [o for o in gc.get_objects() if issubclass(type(o), LRScheduler)]
        for scheduler in every:
            optimizer = scheduled.get(id(vars(scheduler).get("optimizer")))
            if optimizer is not None:
                found[optimizer].append(scheduler)
    return dict(found)


def progress_of(schedulers: Iterable[LRScheduler]) -> dict[str, list[int]]:
    """Return how far schedulers are (``last_epoch``), sorted, by path of the class."""
    progress: dict[str, list[int]] = defaultdict(list)
    for scheduler in schedulers:
        progress[_path_of(scheduler)].append(int(scheduler.last_epoch))
    return {path: sorted(each) for path, each in sorted(progress.items())}


def can_copy(path: str, progress: Iterable[list[int]]) -> bool:
    """Return whether schedulers of a class can be copied.

    They are of ``torch.optim``, whose whole state we know, and each rank has one.

    Args:
        path: The path of the class.
        progress: What `progress_of` has found under it, of each rank.
    """
    return path.startswith("torch.optim.") and all(len(each) == 1 for each in progress)


def by_path(schedulers: Iterable[LRScheduler]) -> dict[str, LRScheduler]:
    """Return, by path of the class, those that `can_copy` allows on this rank."""
    of_class: dict[str, list[LRScheduler]] = defaultdict(list)
    for scheduler in schedulers:
        of_class[_path_of(scheduler)].append(scheduler)
    known = {path: each for path, each in of_class.items() if can_copy(path, [[0]])}
    return {path: each[0] for path, each in sorted(known.items()) if len(each) == 1}


def state_of(scheduler: LRScheduler) -> dict[str, Any]:
    """Return what a scheduler's steps change, by name."""
    return {name: v for name, v in vars(scheduler).items() if name in _CHANGING}


def _path_of(scheduler: LRScheduler) -> str:
    return f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"


def _has_scheduler(optimizer: Optimizer) -> bool:
    return any("initial_lr" in group for group in optimizer.param_groups)
