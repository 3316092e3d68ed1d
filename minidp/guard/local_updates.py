"""Find updates with local gradients that the check of optimizer steps cannot see.

No optimizer made such an update. A parameter's ``_version`` (it counts changes in
place, but not those of ``param.data``) is stored when its gradient becomes local, or
goes to the caller of `torch.autograd.grad`. If it changes afterwards, and not in an
optimizer step, this may be an update with a gradient that is not averaged.
`find_change` sees that, and `Changes` decides, by comparisons of the ranks, whether it
is a mistake.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minidp.core import Reducer

from .asking import AskInBackward, add_once
from .comparison import Kind, Verdict
from .local_acts import LocalActs
from .mistakes import Suspicion, explain_origins
from .trust import Trust

if TYPE_CHECKING:
    from .optimizer_guard import Guard

# After how many averaged backwards without an optimizer step to judge without one.
_PATIENCE = 10
_TO_GO_ON = (
    "to go on, load the same parameters on all ranks, then call reset() and zero_grad()"
    ". If replicas are meant to differ for a while, change them inside no_sync()"
)


@dataclass(frozen=True)
class Change:
    """Parameters that changed although their gradients were not averaged.

    That is wrong if it was an update. It is right if all ranks changed them alike, or
    change them back before the next step (other weights for one evaluation, or
    sharpness-aware training). So it is judged later, by a comparison of the ranks.
    """

    indices: frozenset[int]
    finalized: int  # number of averaged backwards before the change was seen
    is_for_good: bool  # nobody averages any more, so waiting for it is no use
    suspicion: Suspicion
    # It was seen where no_sync() began, so that more of it may be seen in the next
    # forward, as of weights that are moved for each micro-batch.
    is_before_no_sync: bool = False
    # Ranks differed in a backward, so that all of them compare after the next step.
    is_known_to_all: bool = False


def find_change(reducer: Reducer, acts: LocalActs) -> Change | None:
    """Return what has changed since gradients became local, except by optimizer steps.

    What is returned is not found again, because the present versions count from now on.
    """
    ledger, params = reducer.ledger, reducer.params
    changed = {i for i, n in acts.versions.items() if params[i]._version != n}
    passed = acts.bypassed or {}
    bypassed = {i for i, n in passed.items() if params[i]._version != n}
    if changed:
        origins = [acts.origins[i] for i in changed]
        what, remedy = explain_origins(origins, model_ran=ledger.armed > 0)
        what = f"local backward, whose gradients were never averaged over ranks: {what}"
    elif bypassed:
        what = (
            "backward that went through the outputs of a forward, but averaged "
            "nothing: torch.autograd.grad, a functional_call, or parameters that were "
            "cast after wrapping"
        )
        remedy = "use backward(), and wrap a module after it is cast or moved"
    else:
        return None
    is_for_good = acts.has_lost_hooks
    for i in changed:
        acts.versions[i] = params[i]._version
    for i in bypassed:
        passed[i] = params[i]._version
    suspicion = Suspicion(
        f"Parameters changed after a {what}. Replicas differ now.",
        names=tuple(reducer.names[i] for i in sorted(changed | bypassed)),
        expected="the same parameters on all ranks",
        remedy=f"{remedy}; {_TO_GO_ON}",
    )
    found = frozenset(changed | bypassed)
    return Change(found, ledger.finalized, is_for_good, suspicion)


class Changes:
    """Judge changes of parameters after local gradients, one at a time, for a guard."""

    def __init__(self, guard: Guard) -> None:
        self._reference = weakref.ref(guard)  # a cycle would keep buckets
        self._reducer, self._acts = guard.reducer, guard.acts
        self._comparison = guard.comparison
        self._open: Change | None = None  # seen, and not judged yet
        # The parameters' checksum before a further local backward, if a change was open
        # then: weights that were moved for a while are back there.
        self._at_rest: int | None = None
        self.trust = Trust()
        # The observer may outlive the guard, if a recording holds the reducer.
        self._acts.at_first = _weakly(self.note_rest)
        self._comparison.on_difference = _weakly(self.look_after_step)

    @property
    def _guard(self) -> Guard:
        guard = self._reference()
        assert guard is not None  # it holds this object
        return guard

    @property
    def is_open(self) -> bool:
        """Whether a change was seen that is not judged yet."""
        return self._open is not None

    def look(self, *, before_no_sync: bool = False) -> None:
        """Look for a change, and let it be judged together with one that is open."""
        seen, found = self._open, find_change(self._reducer, self._acts)
        if found is not None and seen is not None:
            found = replace(found, indices=found.indices | seen.indices)
        elif found is not None:
            found = replace(found, is_before_no_sync=before_no_sync)
        self._note(found)

    def forget(self) -> None:
        """Forget a change that is open, and changes that nobody has looked for yet."""
        self._open = None
        find_change(self._reducer, self._acts)

    def reset(self) -> None:
        """Forget everything, as if there had never been a change."""
        self._open, self._at_rest, self.trust = None, None, Trust()

    def note_rest(self) -> None:
        """Note the parameters as a local backward finds them, if a change is open."""
        if self._open is not None:
            self._at_rest = self._comparison.digest()

    def look_after_step(self, what: str, remedy: str) -> None:
        """Compare after the next step, because another rank has found a difference.

        Args:
            what: What has happened on that rank.
            remedy: What to do about it.
        """
        suspicion = Suspicion(
            f"On another rank: {what}",
            names=self._reducer.names,
            expected="the same parameters on all ranks",
            remedy=remedy,
        )
        self.look_again(self._of_all(suspicion))

    def ask_later(self, suspicion: Suspicion) -> None:
        """Ask in the next backward again what a late rank has left open in this one.

        By then parameters may be moved for a while. So ranks that differ there look
        again after the step that follows. After local training, or a complaint that
        did not become an error, they differ for another reason, and nobody asks.

        Args:
            suspicion: What this rank suspects.
        """

        def is_needed(guard: Guard) -> bool:
            return not (guard.doubts.was_local or guard.doubts.was_excused)

        here = f"on rank {self._reducer.rank}"  # other ranks may have to tell of it
        what = suspicion.what.replace("on this rank", here)
        self._ask_in_backward(self._of_all(replace(suspicion, what=what)), is_needed)

    def _ask_in_backward(
        self, change: Change, is_needed: Callable[[Guard], bool] = lambda _: True
    ) -> None:
        suspicion = change.suspicion
        ask = AskInBackward(
            self._guard,
            Kind.CHANGE,
            lambda _: suspicion,
            functools.partial(_conclude_in_backward, change=change),
            is_needed,
            looks_again=(suspicion.what, suspicion.remedy),
        )
        add_once(self._reducer, ask)

    def _of_all(self, suspicion: Suspicion) -> Change:
        return Change(
            indices=frozenset(range(len(self._reducer.params))),
            finalized=self._reducer.ledger.finalized,
            is_for_good=False,
            suspicion=suspicion,
        )

    def judge_in_forward(self) -> None:
        """Judge a change that no optimizer step has followed, in the next forward.

        Raises:
            UnsyncedGradientsError: Replicas differ, and ``unsynced="raise"``.
        """
        found, seen = find_change(self._reducer, self._acts), self._open
        if seen is not None and seen.is_known_to_all:
            waited = self._reducer.ledger.finalized - seen.finalized
            if waited <= _PATIENCE:
                return  # all ranks compare after the next step
            found = None
        is_over = seen is not None and (
            (found is not None and not seen.is_before_no_sync)
            or self._reducer.ledger.finalized > seen.finalized
        )
        if found is not None and (found.is_for_good or is_over):
            seen, is_over = found, True
        if seen is None:
            self._note(found)
            return
        if not is_over:
            if found is not None:  # of the same micro-batches as what was seen
                found = replace(found, indices=found.indices | seen.indices)
            self._note(found)
            return
        rest = self._at_rest if seen is found and not seen.is_for_good else None
        self._open = self._at_rest = None
        everybody = range(len(self._reducer.params))
        self._judge(seen, "forward", everybody, rest=rest)

    def judge_after_step(self, held: Sequence[int]) -> None:
        """Judge an open change after an optimizer step, if it is of those parameters.

        Args:
            held: The indices of the parameters that the optimizer holds.

        Raises:
            UnsyncedGradientsError: Replicas differ, and ``unsynced="raise"``.
        """
        change = self._open
        if change is not None and not change.indices.isdisjoint(held):
            self._open = None
            self._judge(change, "after", held)

    def _note(self, found: Change | None) -> None:
        """Keep a change until it is judged, unless another wrapper averages there."""
        if found is None or (self._open is not None and self._open.is_known_to_all):
            return
        if self._guard.policy != "ignore" and not self._guard.shares_parameters:
            self._open = found

    def _judge(
        self,
        change: Change,
        moment: str,
        which: Sequence[int],
        *,
        rest: int | None = None,
    ) -> None:
        """Compare parameters that changed after local gradients, and complain or trust.

        If some ranks have not seen a change, this one asks them in the next backward.

        Args:
            change: What has changed.
            moment: The place in the training loop.
            which: The indices of the parameters to compare.
            rest: The checksum of the parameters before this change. If it is the same
                on all ranks, earlier changes are over, and this one is judged later.
        """
        guard = self._guard
        if guard.shares_parameters or not guard.has_group():
            return
        if not change.is_known_to_all and not self.trust.is_due():
            return
        if rest is None:
            verdict = self._comparison.of_parameters(moment, which)
        else:
            verdict = self._comparison.of_digest(moment, rest)
        if verdict.is_equal and rest is not None:
            self.trust.note(is_decided=True)
            self._open = change
        elif verdict.are_all_here or not verdict.can_ask:
            if verdict.is_proof and verdict.kinds == {Kind.NOW, Kind.AT_REST}:
                self.look_again(change)  # and so do all other ranks
                return
            guard.conclude(verdict, suspicion=change.suspicion)
        else:
            self.trust.note(is_decided=False)  # it has taken long
            self._ask_in_backward(change)

    def look_again(self, change: Change) -> None:
        """Judge a change after the next step, as all ranks do, because they differ."""
        everybody = frozenset(range(len(self._reducer.params)))
        finalized = self._reducer.ledger.finalized
        known = replace(change, indices=everybody, is_known_to_all=True)
        self._note(replace(known, finalized=finalized))


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: object) -> None:
        if (alive := reference()) is not None:
            alive(*arguments)

    return call


def _conclude_in_backward(guard: Guard, verdict: Verdict, *, change: Change) -> None:
    """Look again after the next step if ranks differ in a backward, or trust.

    In the backward weights may be moved on purpose. Ranks that have only answered look
    again, too.
    """
    if verdict.is_proof:
        guard.changes.look_again(change)
    else:
        guard.conclude(verdict, suspicion=change.suspicion)
