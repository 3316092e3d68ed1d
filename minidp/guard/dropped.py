"""Warn if training goes on although its wrapper is gone.

::

    ddp = DataParallel(net)
    self.model = ddp.module        # and the function returns: ddp is gone
    ...
    optimizer.step()               # gradients stay local; torch's DDP is silent, too

A wrapper may die for good reasons: training is over, or the module is wrapped again. It
is a mistake if the wrapper was never used in training, or if the optimizer is one that
has stepped under it; and if the process group still lives, while no other wrapper
averages the parameter.

A ``.grad`` that was an average when the wrapper died is still equal on all ranks as
long as nobody writes to it, as in ``loss.backward(); del ddp; optimizer.step()``. Such
steps are right, and say nothing about the gradients of later ones.

The wrapper's death puts weak references into a table. Steps look at that only while it
is not empty, and a parameter leaves it as soon as its case is clear.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from minidp import world
from minidp.config import passing
from minidp.console import warn
from minidp.core import Ledger, Phase, PhaseMachine
from minidp.errors import explain, shortened

from .local_acts import LocalActs

if TYPE_CHECKING:
    from .optimizer_guard import Guard

# Names of other libraries' classes that average the gradients of a module inside.
_OTHERS = {
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "DeepSpeedEngine",
}


class _Facts(NamedTuple):
    """What is known of a wrapper's parameters, without keeping one alive."""

    rank: int
    names: Sequence[str]
    shapes: Sequence[torch.Size]
    params: Sequence[weakref.ref[torch.Tensor]]
    has_group: Callable[[], bool]  # whether the process group still exists
    optimizers: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]]  # have stepped
    ledger: Ledger
    phase: PhaseMachine
    acts: LocalActs
    # By index: each ``.grad`` that was an average when the wrapper died, and its
    # version then.
    averages: MutableMapping[int, tuple[weakref.ref[torch.Tensor], int]]

    @property
    def was_used(self) -> bool:
        """Whether a forward in training ran, be it inside no_sync() or outside."""
        ledger = self.ledger
        return bool(ledger.armed or ledger.forwards or ledger.finalized)

    def note_average(self, i: int, grad: torch.Tensor | None) -> None:
        """Note the ``.grad`` of parameter ``i`` if it is an average, at the death.

        If a backward failed or is unfinished, it may not be. Inside no_sync() not every
        local gradient is recorded.
        """
        acts, ledger = self.acts, self.ledger
        is_settled = self.phase.now in (Phase.IDLE, Phase.ARMED)
        if not ledger.finalized or not ledger.sync_enabled or not is_settled:
            return
        if grad is None or i in acts.unsynced or i in (acts.bypassed or ()):
            return
        if not grad.is_inference():  # these have no version
            self.averages[i] = weakref.ref(grad), grad._version

    def is_average(self, i: int, grad: torch.Tensor) -> bool:
        """Return whether this is the average of then, and nobody has written to it."""
        if i not in self.averages:
            return False
        reference, version = self.averages[i]
        return reference() is grad and grad._version == version


# By id of a parameter: the dead wrapper's facts, and the parameter's index there.
orphans: world.PerProcess[dict[int, tuple[_Facts, int]]] = world.PerProcess(dict)


def expect_death(
    guard: Guard,
    optimizers: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]],
    has_group: Callable[[], bool],
) -> Callable[[], object]:
    """Let the death of ``guard``, with its wrapper, make orphans of its parameters.

    If an earlier wrapper left them behind, they are no orphans any more.

    Args:
        guard: The guard of the wrapper.
        optimizers: The optimizers that have stepped under the wrapper. They are read
            when the wrapper has died.
        has_group: Returns whether the wrapper's process group still exists.

    Returns:
        A function that cancels this, for a wrapper that is ended on purpose.
    """
    reducer, all_orphans = guard.reducer, orphans()
    known = all_orphans.items()
    for i in [i for i, (facts, k) in known if facts.params[k]() is None]:
        del all_orphans[i]
    for param in reducer.params:
        all_orphans.pop(id(param), None)
    if reducer.communicator.size == 1:
        return lambda: None
    facts = _Facts(
        reducer.rank,
        reducer.names,
        [param.shape for param in reducer.params],
        [weakref.ref(param) for param in reducer.params],
        has_group,
        optimizers,
        reducer.ledger,
        reducer.phase,
        guard.acts,
        {},
    )
    final = weakref.finalize(guard, _leave_behind, facts, all_orphans)
    final.atexit = False
    return final.detach


def _leave_behind(facts: _Facts, all_orphans: dict[int, tuple[_Facts, int]]) -> None:
    for i, reference in enumerate(facts.params):
        if (param := reference()) is None:
            continue
        # Of two wrappers around it the one counts that trained.
        other, k = all_orphans.get(id(param), (facts, i))
        if facts.was_used or not other.was_used or other.params[k]() is not param:
            all_orphans[id(param)] = facts, i
            facts.note_average(i, param.grad)


def warn_of_orphans(
    optimizer: Optimizer, is_averaged: Callable[[nn.Parameter], bool]
) -> None:
    """Warn if ``optimizer`` is about to step on parameters that a wrapper left behind.

    The parameters that this looks at are no orphans afterwards, so each is warned of
    once. Those whose gradients are still averages stay orphans, for the next step.

    Args:
        optimizer: The optimizer.
        is_averaged: Returns whether a live wrapper averages a parameter.
    """
    left: dict[int, _Facts] = {}
    names: dict[int, list[str]] = {}
    found: list[nn.Parameter] = []
    all_orphans = orphans()
    for group in optimizer.param_groups:
        params: list[nn.Parameter] = group["params"]
        for param in params:
            if param.grad is None or id(param) not in all_orphans:
                continue
            facts, i = all_orphans[id(param)]
            if facts.is_average(i, param.grad):
                continue
            del all_orphans[id(param)]
            if facts.params[i]() is not param or param.shape != facts.shapes[i]:
                continue  # another tensor at this address; or it is sharded by now
            if not facts.has_group() or is_averaged(param):
                continue
            if facts.was_used and optimizer not in facts.optimizers:
                continue  # training is over, and another one has begun
            left[id(facts)] = facts
            names.setdefault(id(facts), []).append(facts.names[i])
            found.append(param)
    if not left or _is_averaged_by_others(found[0]):
        return
    for key, facts in left.items():
        warn(_explain(facts, type(optimizer).__name__, names[key]))


def _is_averaged_by_others(param: nn.Parameter) -> bool:
    """Return whether a wrapper of another library holds a parameter.

    This takes long, because it looks at all objects of the process.
    """
    for each in gc.get_objects():
        kinds = {kind.__name__ for kind in type(each).__mro__}
        is_wrapper = kinds & _OTHERS and issubclass(type(each), nn.Module)
        if is_wrapper and any(own is param for own in each.parameters()):
            return True
    return False


def _explain(facts: _Facts, name: str, names: Sequence[str]) -> str:
    return explain(
        facts.rank,
        f"{name}.step() applies gradients that nobody has averaged over ranks: the "
        "DataParallel object around these parameters is gone. From now on the ranks "
        "train apart, unless their gradients are equal.",
        names=[shortened(names)],
        remedy="keep what DataParallel(net) returned as long as you train, and call "
        "it instead of its .module; or use minidp.attach(net), which lives as long as "
        "net does; if each rank is meant to go on alone, destroy the process group "
        f"before, or {passing(unsynced='ignore')}. This is reported once for each "
        "parameter",
    )
