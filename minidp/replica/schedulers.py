"""Compare and copy learning rate schedulers, which decide on rates to come.

A rank that raises between ``optimizer.step()`` and ``scheduler.step()`` has the same
parameters and the same learning rate as the others. But its scheduler is behind, so
that the rate will change one step later there, perhaps after hours.

An optimizer does not know its schedulers. So they are searched among all Python
objects, in `find_schedulers`. On each rank there may be several of a class for one
optimizer, in an order that nobody knows. These can be compared, as a sorted list, but
not copied.

A `ChainedScheduler` counts nothing itself. Its inner schedulers are found as all others
are.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from itertools import pairwise
from types import FunctionType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from .objects import Survey

# All that a scheduler's steps change, in the classes of torch.optim.lr_scheduler. Other
# attributes are what its constructor was given, which every rank has of its own.
_CHANGING = frozenset(
    {
        "last_epoch",
        "_step_count",
        "best",  # these three: ReduceLROnPlateau
        "num_bad_epochs",
        "cooldown_counter",
        "T_cur",  # these two: CosineAnnealingWarmRestarts
        "T_i",
    }
)
_LAMBDAS = "lr_lambdas"  # LambdaLR's and MultiplicativeLR's


def find_schedulers(
    optimizers: Iterable[Optimizer], survey: Survey
) -> dict[Optimizer, list[LRScheduler]]:
    """Return the schedulers of each optimizer that has some, with those inside them."""
    scheduled = {id(optimizer): optimizer for optimizer in optimizers}
    found: dict[Optimizer, list[LRScheduler]] = defaultdict(list)
    for scheduler in survey.of(LRScheduler) if scheduled else ():
        optimizer = scheduled.get(id(vars(scheduler).get("optimizer")))
        if optimizer is not None:
            found[optimizer].append(scheduler)
    return dict(found)


def progress_of(schedulers: Iterable[object]) -> dict[str, list[int]]:
    """Return how far schedulers are (``last_epoch``), sorted, by path of the class."""
    progress: dict[str, list[int]] = defaultdict(list)
    for scheduler in schedulers:
        progress[_path_of(scheduler)].append(_progress(scheduler))
    return {path: sorted(each) for path, each in sorted(progress.items())}


def _progress(scheduler: object) -> int:
    """Return ``last_epoch``, or whatever else a class that does not have it counts."""
    state = vars(scheduler)
    if isinstance(state.get("last_epoch"), int):
        return int(state["last_epoch"])
    return sum(value for value in state.values() if type(value) is int)


def can_copy_scheduler(path: str, progress: Iterable[list[int]]) -> bool:
    """Return whether schedulers of a class can be copied.

    They are of ``torch.optim``, whose whole state we know, and each rank has one.

    Args:
        path: The path of the class.
        progress: What `progress_of` has found under it, of each rank.
    """
    return path.startswith("torch.optim.") and all(len(each) == 1 for each in progress)


def class_of(path: str) -> str:
    """Return the name of a class whose path is given."""
    return path.rpartition(".")[2]


def by_path(schedulers: Iterable[LRScheduler]) -> dict[str, LRScheduler]:
    """Return, by path of the class, those that `can_copy_scheduler` allows here."""
    of_class: dict[str, list[LRScheduler]] = defaultdict(list)
    for scheduler in schedulers:
        of_class[_path_of(scheduler)].append(scheduler)
    known = {
        path: each for path, each in of_class.items() if can_copy_scheduler(path, [[0]])
    }
    return {path: each[0] for path, each in sorted(known.items()) if len(each) == 1}


def are_apart(of_ranks: Iterable[Iterable[Hashable]]) -> bool:
    """Return whether objects of a kind are at different points on some ranks.

    One more on some rank proves nothing, because Python may not have freed an old one
    there. So the points of a rank with fewer must be among those of a rank with more.
    """
    ranks = sorted(map(Counter, of_ranks), key=Counter.total)
    return any(not less <= more for less, more in pairwise(ranks))


def state_of(scheduler: LRScheduler) -> dict[str, Any]:
    """Return what a scheduler's steps change, by name.

    A `LambdaLR` may have been given objects that count something themselves.
    """
    state = {name: v for name, v in vars(scheduler).items() if name in _CHANGING}
    counting = [vars(each) for each in _counting(scheduler)]
    return state | ({_LAMBDAS: counting} if counting else {})


def set_state(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Set what `state_of` has returned.

    The optimizer must have the learning rates that belong to it, which a scheduler
    remembers in the order of the groups.
    """
    own = {name: value for name, value in state.items() if name != _LAMBDAS}
    vars(scheduler).update(own)
    if "_last_lr" in vars(scheduler):
        rates = [group["lr"] for group in scheduler.optimizer.param_groups]
        scheduler._last_lr = copy.deepcopy(rates)
    counting = _counting(scheduler), state.get(_LAMBDAS, [])
    for each, values in zip(*counting, strict=False):
        vars(each).update(values)


def _counting(scheduler: LRScheduler) -> list[Any]:
    functions = vars(scheduler).get(_LAMBDAS, ())
    return [
        each
        for each in functions
        if not isinstance(each, FunctionType) and hasattr(each, "__dict__")
    ]


def _path_of(scheduler: object) -> str:
    return f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"
