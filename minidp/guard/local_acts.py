"""Keep what this rank has done by itself since the last averages.

A *local* backward (under ``no_sync``, or with nothing armed) leaves the reducer's phase
alone, and gradients that `torch.autograd.grad` returns never come to the reducer. The
guard looks here when an optimizer is about to apply them. Without a guard none of this
is noted.

Let F be the grad-enabled forwards since the last synchronised backward. A backward is
synchronised exactly if a forward of F was (torch's rule: the *forward* decides).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from weakref import WeakSet

from torch import Tensor
from torch.optim.optimizer import Optimizer

from minidp.core import (
    Observer,
    Reducer,
    any_reached,
    current_task,
    returned_to_caller,
    without_user_modes,
)
from minidp.replica import Doubts


class Origin(Enum):
    """Where a local gradient came from, as the optimizer guard's error tells it."""

    QUIET = "a forward inside no_sync()"
    AGAIN = "outputs of a forward whose reduction is over"
    NESTED = "a backward inside a synchronised one: a reentrant checkpoint"
    OUTSIDE = "a graph without outputs of ours"


class Steps:
    """Know which optimizers have stepped since the last averages, and which before."""

    def __init__(self) -> None:
        self._since: WeakSet[Optimizer] = WeakSet()  # the last averages
        self._before: WeakSet[Optimizer] = WeakSet()  # the last time that any stepped
        self._has_averages = False
        self.has_any = False  # some optimizer has ever stepped; it may be gone

    def expect(self) -> None:
        """Expect the same optimizers to step again, because averages have come."""
        if self._since:
            self._before, self._since = self._since, WeakSet()
        self._has_averages = True

    def note(self, optimizer: Optimizer) -> None:
        """Note that an optimizer of ours steps."""
        self._since.add(optimizer)
        self.has_any = True

    def reset(self) -> None:
        """Expect nothing until the next averages."""
        self._has_averages = False

    @property
    def is_one_left_out(self) -> bool:
        """Whether an optimizer that stepped before has not done so since the averages.

        As long as no optimizer has ever stepped, this is true after any averages.
        """
        return self._has_averages and (
            not self.has_any or not self._before <= self._since
        )

    def describe_left_out(self) -> str:
        """Return the beginning of a sentence about who has not stepped."""
        left = sorted(type(each).__name__ for each in self._before - self._since)
        if not self._since or not left:
            return "No optimizer has stepped"
        return f"{' and '.join(left)} has not stepped"


class LocalActs(Observer):
    """Note local gradients and optimizer steps until a reduction's averages come."""

    sees_local_grads = True

    def __init__(self, reducer: Reducer, doubts: Doubts) -> None:
        self._reducer: Reducer = weakref.proxy(reducer)  # it holds its observers
        self._doubts = doubts
        self.steps = Steps()  # of our optimizers, outside no_sync()
        self.unsynced: set[int] = set()  # parameters whose .grad holds a local part
        self.origins: dict[int, Origin] = {}  # where each one's last local part is from
        # Versions of parameters when their .grad became local. A later change without
        # an allowed optimizer step may mean that local gradients were applied by hand.
        self.versions: dict[int, int] = {}
        # Versions, by index, of parameters whose gradients a backward made without any
        # grad hook, after a forward that announced averages; None: no such backward.
        self.bypassed: dict[int, int] | None = None
        # Called before the first local gradient is noted, with the parameters as the
        # backward has found them.
        self.at_first: Callable[[], None] = _do_nothing
        self.has_lost_hooks = False  # the reason of `bypassed`; else autograd.grad
        self.lent: list[weakref.ref[Tensor]] = []  # to the module, for its last forward
        # Versions of two parameters, when no_sync() began.
        self._versions_before: tuple[int, int] | None = None

    def added_locally(self, i: int, through_outputs: Collection[int]) -> None:
        """Note that a local backward added to the ``.grad`` of parameter ``i``.

        ======================  ===================  =================================
        forwards in F           inside no_sync()     what is noted
        ======================  ===================  =================================
        some (all in no_sync,   yes or no            local, QUIET
        or it would be
        synchronised)
        none                    no                   local; `_origin` says from where
        none                    yes                  nothing: it is to stay local (a
                                                     penalty that is equal on all
                                                     ranks)
        ======================  ===================  =================================
        """
        ledger = self._reducer.ledger
        if ledger.forwards:
            self.origins[i] = Origin.QUIET
        elif ledger.sync_enabled:
            self.origins[i] = _origin(through_outputs)
        else:
            return
        if not self.versions:
            self.at_first()
        self.unsynced.add(i)
        self.versions.setdefault(i, self._reducer.params[i]._version)

    def ended_without_gradients(self) -> None:
        """Note which gradients a backward made without our hooks.

        Those of `torch.autograd.grad` go to the caller; parameters that were cast have
        lost their hooks. A backward that needs neither (that of a generator through a
        critic, a saliency map) leaves the parameters alone, and nothing is noted.
        """
        params, hooks = self._reducer.params, self._reducer.hooks
        if not hooks.nodes:
            return  # the user has removed the hooks
        with without_user_modes():
            lost = hooks.lost(range(len(params)))
            returned: Sequence[int] = returned_to_caller(hooks.nodes)
            lent = [param for each in self.lent if (param := each()) is not None]
            if any_reached(lent):  # they stand in for ours, whichever these are
                returned = range(len(params))
        if returned or lost:
            if self.bypassed is None:
                self.at_first()
            versions = {i: params[i]._version for i in (*returned, *lost)}
            self.bypassed = versions | (self.bypassed or {})
            self.has_lost_hooks |= bool(lost)

    def drop(self, i: int) -> None:
        """Note that parameter ``i``'s gradient has no local part any more."""
        self.unsynced.discard(i)
        self.versions.pop(i, None)

    def switch_sync(self, *, enabled: bool) -> None:
        """Note that no_sync() is left, if ``enabled``, or entered.

        What happened inside was meant to be local, so the present versions replace the
        noted ones. If the first or the last parameter was changed inside, that is a
        reason for replicas to differ, which goes into the `Doubts`.
        """
        params = self._reducer.params
        sample = (params[0]._version, params[-1]._version)
        if enabled:
            self.versions = {i: params[i]._version for i in self.versions}
            self.bypassed, self.has_lost_hooks = None, False
            self._doubts.was_local |= sample != self._versions_before
        else:
            self._versions_before = sample

    def finished(self) -> None:
        """Forget all local gradients except those that no average has replaced."""
        self.steps.expect()
        self._forget(self._reducer.queue.untouched)

    def abandon(self) -> None:
        """Forget all local gradients."""
        self._forget(())

    def _forget(self, still_local: Collection[int]) -> None:
        self.unsynced.intersection_update(still_local)
        self.versions.clear()
        self.bypassed, self.has_lost_hooks = None, False


def _do_nothing() -> None:
    pass


def _origin(through_outputs: Collection[int]) -> Origin:
    """Return where the gradient is from whose hook runs, if from no quiet forward.

    Args:
        through_outputs: The running graph tasks that have reached our outputs.
    """
    if not through_outputs:
        return Origin.OUTSIDE
    return Origin.AGAIN if current_task() in through_outputs else Origin.NESTED
