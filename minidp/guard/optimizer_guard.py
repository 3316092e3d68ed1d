"""Check every optimizer step: no optimizer applies gradients that differ between ranks.

Process-wide hooks around ``torch.optim.Optimizer.step`` ask the guard of every live
reducer. Inside ``no_sync()``, where local SGD steps, it lets local gradients pass;
steps that are wrong in any case still raise. Updates by hand, and those of other
optimizer classes, are found by a later forward.

What a check finds is a suspicion. The ranks compare what they have (`comparison`), and
only a difference is an error:

    before a step    the gradients that it applies, if some were never averaged by us
    after a step     the parameters, if they had changed after a local backward. Not
                     before: weights that were moved for a while are back by then. If
                     the others know of no change, they are asked in the backward, and
                     after a difference all compare after the step that follows
                     Also if the gradients differed before it, and the optimizer has a
                     ``step`` of its own, which may have averaged them
    in a forward     the same parameters, if no optimizer has stepped them meanwhile;
                     and at its end all, if the ranks made different steps before,
                     because these may have sent each other the results. If another
                     such step comes first, with the gradients of another backward,
                     they are compared before that
    in a backward    all parameters, if no step of some optimizer has followed averages
                     on this rank: the others may have made one
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from minidp.comm import Communicator, group_name, group_ranks
from minidp.config import Unsynced
from minidp.console import warn
from minidp.core import Phase, Reducer, untraced
from minidp.errors import (
    DoubleStepError,
    ItemCountError,
    MiniDPError,
    ShardedStepError,
    UnsyncedGradientsError,
    explain,
)
from minidp.replica import Doubts, ManagedParameters, ReplicaCheck
from minidp.trace import StepEvent

from . import dropped, step_hooks
from .asking import AskInBackward, LookAgain, add_once
from .comparison import Comparison, Kind, Verdict
from .local_acts import LocalActs
from .local_updates import Changes
from .mistakes import (
    LateParameters,
    StepCheck,
    Suspicion,
    find_cast,
    is_nested,
    num_running,
    refuse_forward,
    suspect_late,
)
from .step_hooks import live_guards
from .trust import Trust

if TYPE_CHECKING:
    pass

# After a step for other ranks to come to their next backward; else they are asked when
# this rank comes to its own.
_PATIENCE_SECONDS = 2.0
# The class of an optimizer, and the indices of the parameters that it holds.
_Part = tuple[type[Optimizer], tuple[int, ...]]
_CHANGED = (
    "parameters changed after a local backward, whose gradients were never averaged.",
    "call backward() of what the wrapper returns, or change parameters on all ranks "
    "alike; and load the same parameters on all ranks, then call reset()",
)
_SAME_AFTER = "the same parameters on all ranks after the step"
_SAME_BEFORE = "the same parameters on all ranks before the next step like it"


class Guard:
    """Check the optimizer steps, until `retire`, and the forwards of one wrapper.

    Process-wide hooks call it before and after every step, the wrapper before forwards.
    The constructor installs these hooks, and adds itself to the live guards.

    Args:
        reducer: The reducer of the wrapper.
        policy: What becomes of a mistake: the wrapper's ``unsynced``.
        replica: The wrapped module and its parameters.
        key: Returns the wrapper's place in the store, which is the same on all ranks.
        doubts: Where the guard notes why replicas may differ, for their comparison.
    """

    def __init__(
        self,
        reducer: Reducer,
        policy: Unsynced,
        replica: ManagedParameters,
        key: Callable[[], str],
        doubts: Doubts,
    ) -> None:
        self.reducer, self.place = reducer, key
        self.acts = LocalActs(reducer, doubts)
        reducer.queue.observers.append(self.acts)
        self.doubts = doubts
        self.policy = policy
        self.replica_check: ReplicaCheck | None = None
        self.is_copy = False  # a deepcopy, which one rank alone may have made
        # Raises if a step must not run, for another reason than ours (torchft).
        self.precondition: Callable[[], None] | None = None
        self.index = {id(param): i for i, param in enumerate(reducer.params)}
        self.late_parameters = LateParameters(replica)
        self.comparison = Comparison(reducer, key, self.late_parameters.find)
        self._in_backward: WeakSet[Optimizer] = WeakSet()
        self._cancel_death: Callable[[], object] = lambda: None  # of `expect_death`
        self.has_group: Callable[[], bool] = lambda: True
        self._allowed: set[int] = set()  # ids of optimizers that step in a backward now
        self._left: set[int] = set()  # of them those that are left to others for good
        self.changes = Changes(self)
        # A step of gradients that not all ranks apply: the next forward judges it; or,
        # if the others made the step before, they are asked at once.
        self.open_step: _OpenStep | None = None
        # Whether ranks have met that step different parts, perhaps in more optimizers.
        self._steps_parts = False
        # The gradients of open steps: weak references, and versions that they had.
        self._open_parts: dict[_Part, list[tuple[weakref.ref[Tensor], int]]] = {}
        # A step of gradients that differ, which the optimizer itself may average. It
        # may also step another optimizer inside, and average the parameters then.
        self._own_step: tuple[weakref.ref[Optimizer], Suspicion] | None = None
        self._step_trust = Trust()
        self._has_warned = False  # of a change that could not be judged
        self._was_made_elsewhere = False  # when such a step was judged, and right
        self._steps = self.acts.steps
        self._local_trust = Trust()
        self._skip_trust = Trust()
        # Parameters that joined the module, at the end of the last backward or in the
        # last step; and their versions when all ranks had the same values.
        self._joined: dict[str, nn.Parameter] = {}
        self._same_joined: dict[str, int] = {}
        self._same_cast: object = None  # to what all ranks have cast or moved them
        # The ledger's `armed` and `finalized`, at the last step of each optimizer.
        self._at_step: WeakKeyDictionary[Optimizer, tuple[int, int]]
        self._at_step, self._at_any_step = WeakKeyDictionary(), (0, 0)
        # Finished steps outside no_sync(), since the ranks were made equal or compared.
        self._num_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._stepping = 0  # id of the optimizer whose step counts, once it has ended
        step_hooks.add(self)

    @untraced
    def check(self, optimizer: Optimizer, *, in_closure: bool = False) -> None:
        """Check a step that is about to run, and raise or warn as ``unsynced`` says.

        If something is suspicious, this may wait for other ranks. Inside no_sync() only
        the first two of the errors below are raised. Inside `allow` nothing is checked.

        Args:
            optimizer: The optimizer that steps.
            in_closure: Whether the step has begun already, and has just called its
                closure.

        Raises:
            CollectiveError: A collective was given up on a device.
            DoubleStepError: The optimizer steps in backwards (`expect_in_backward`).
            ItemCountError: The counts of items give no mean (`_check_averages`).
            UnsyncedGradientsError: Replicas differ, or would after this step, and
                ``unsynced="raise"``.
            Exception: What the `precondition` raises.
        """
        if id(optimizer) in self._allowed:
            self._let_pass(optimizer)
            return
        ledger, acts = self.reducer.ledger, self.acts
        is_ours = self._holds_ours(optimizer)
        if optimizer in self._in_backward:
            self._refuse_double_step()
        # An optimizer that never stepped has missed nothing, unless a backward passed
        # our hooks: then its gradients may be those of that backward.
        never = (0, 0) if acts.bypassed is None else self._at_any_step
        last = self._at_step.get(optimizer, never)
        self._stepping = id(optimizer) if is_ours and ledger.sync_enabled else 0
        if is_ours:
            # Before the check: what is given up right after it counts as applied then.
            self.reducer.communicator.note_step()
            self._check_averages()
        step = StepCheck(self, optimizer, last)
        if is_ours and self.precondition is not None:
            self.precondition()
        if ledger.sync_enabled:
            self._check_step(step, optimizer)
            ledger.steps += is_ours  # not before: others see it, and do not wait
            if is_ours and in_closure:  # the closure may call the model once more
                self._expect_steps_of(optimizer)
        elif is_ours and acts.unsynced:
            self.doubts.was_local = True
        if (acts.versions or acts.bypassed is not None) and step.held:
            self.changes.look()
            for i in step.held:  # the writes of this step are no manual update
                acts.versions.pop(i, None)
            acts.bypassed, acts.has_lost_hooks = None, False
        self._at_step[optimizer] = self._at_any_step = (ledger.armed, ledger.finalized)

    def _let_pass(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._left:
            self.reducer.communicator.note_step()
        elif self.reducer.ledger.sync_enabled:
            self._joined = self.late_parameters.find()  # the next forward compares them

    def _refuse_double_step(self) -> NoReturn:
        text = explain(
            self.reducer.rank,
            "This optimizer steps in the backward (step_in_backward); another step "
            "would apply its gradients twice.",
            remedy="remove the call of optimizer.step(); if a GradScaler called "
            "it, the two do not go together, and the parameters have taken a step "
            "of scaled gradients: reload them",
        )
        raise DoubleStepError(text)

    def _check_step(self, step: StepCheck, optimizer: Optimizer) -> None:
        """Complain of a step that is wrong, for certain or by a comparison."""
        if self.is_copy and not self.reducer.ledger.armed:
            return  # it is not used as a wrapper, so it is no replica of anything
        if not self.has_group():
            return  # this rank goes on alone
        if problem := step.find_certain():
            self._complain(problem)
            return
        if not self.comparison.is_needed:
            return  # one rank alone cannot differ
        joined = self.late_parameters.find()
        suspicion = step.find_suspicion(joined)
        is_judged_later = self._is_inside_own_step(optimizer)
        if suspicion is not None and not is_judged_later and self._step_trust.is_due():
            self._judge_step(step, optimizer, suspicion)
        if joined and step.held:
            self._joined = joined
            if self._judge_joined() is _Outcome.MADE_ELSEWHERE:
                # Other ranks lack the parameters: usually that is a mistake.
                late = suspect_late(self.reducer, joined)
                self.open_step = _OpenStep(late, is_asked_after=True, tells=True)

    def _judge_step(
        self, step: StepCheck, optimizer: Optimizer, suspicion: Suspicion
    ) -> None:
        """Complain of a step if that is proved, or let it be judged later."""
        if self._was_made_elsewhere:  # the others will not come this time either
            outcome = _Outcome.MADE_ELSEWHERE
        else:
            outcome = self._judge(
                suspicion,
                lambda: self._compare(step, optimizer),
                may_average=bool(step.held) and _has_own_step(optimizer),
            )
        if outcome is _Outcome.RIGHT:
            step.acquit()
        elif outcome is _Outcome.LEFT_TO_THE_STEP:
            self._own_step = weakref.ref(optimizer), suspicion
        elif outcome is not _Outcome.WRONG:
            if outcome is _Outcome.UNANSWERED and self.open_step is not None:
                # No forward has judged the last one: this rank trains on alone.
                self._step_trust.note(is_decided=False)
            part = type(optimizer), tuple(sorted(step.held))
            grads = [self.reducer.params[i].grad for i in step.held]
            known = self._open_parts.get(part)
            is_new = known is not None and not _are_the_same(known, grads)
            if outcome is _Outcome.OPEN and is_new:
                self._judge_repeated_step(suspicion)
            self._open_parts[part] = [
                (weakref.ref(grad), grad._version) for grad in grads if grad is not None
            ]
            is_asked_after = outcome is _Outcome.MADE_ELSEWHERE
            self.open_step = _OpenStep(suspicion, is_asked_after)

    def _judge_repeated_step(self, suspicion: Suspicion) -> None:
        """Compare the parameters before a step like one that is still open.

        The ranks step different parts, perhaps to send each other the results. Before
        they step the same part with new gradients they must have done so, and no
        forward of this wrapper has come to find that out.
        """
        self._open_parts.clear()
        verdict = self.comparison.of_parameters("again", range(len(self.index)))
        if verdict.are_all_here:
            suspicion = replace(suspicion, expected=_SAME_BEFORE)
            self.conclude(verdict, suspicion=suspicion)

    def _compare(self, step: StepCheck, optimizer: Optimizer) -> Verdict:
        """Compare the gradients of a coming step on the ranks that suspect it."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        verdict = self.comparison.of_gradients(params, sorted(step.held))
        self._steps_parts |= not verdict.is_same_part
        # Other ranks need not step what is not averaged; nor as often as this one, if
        # their optimizers hold other parts.
        if not step.held or self._steps_parts:
            verdict = replace(verdict, reducing=frozenset())
        if self.reducer.phase.now is Phase.PAUSED:  # no part: the rest is missing
            verdict = replace(verdict, is_same_part=True)
        return verdict

    def confirm(self, optimizer: Optimizer) -> None:
        """Judge, after a step, what was suspicious before it, by its parameters now.

        This may wait for other ranks.

        Raises:
            UnsyncedGradientsError: Replicas differ, and ``unsynced="raise"``.
            ReplicaMismatchError: The comparison of replicas still finds a difference.
        """
        check, ledger = self.replica_check, self.reducer.ledger
        is_suspicious = check is not None and check.suspect is not None
        # Before this rank's last optimizer has stepped, its parameters prove nothing.
        is_asked = self.open_step is not None and self.open_step.is_asked_after
        is_asked &= not self._steps.is_one_left_out
        is_suspicious |= self.changes.is_open or self._own_step is not None
        is_suspicious |= is_asked
        if not is_suspicious or not ledger.sync_enabled or is_nested(optimizer):
            return
        held = self._held_by(optimizer)
        if not held or id(optimizer) in self._allowed:
            return
        if self._is_inside_own_step(optimizer):
            return
        if self._own_step is not None:
            self._judge_own_step(held)
        if check is not None and check.suspect is not None:
            check.confirm([self.reducer.names[i] for i in held])
        self.changes.judge_after_step(held)
        if is_asked:
            verdict = self.comparison.with_waiting_ranks(Kind.STEP, _PATIENCE_SECONDS)
            self._judge_open_step(verdict, after_step=True)

    def note_step(self, optimizer: Optimizer) -> None:
        """Count a step of our parameters that has ended, outside no_sync()."""
        if self._stepping == id(optimizer):
            self._num_steps[optimizer] = self._num_steps.get(optimizer, 0) + 1
            self._expect_steps_of(optimizer)
            self._stepping = 0
            if self.replica_check is not None:
                self.replica_check.has_optimizer = True

    def _expect_steps_of(self, optimizer: Optimizer) -> None:
        """Note a step, so that one that is left out later is suspicious."""
        if not self._steps.has_any:  # training begins
            self._skip_trust = Trust()
        self._steps.note(optimizer)

    def trace(self, optimizer: Optimizer, event: StepEvent) -> None:
        """Send ``event`` to recorders, if the optimizer holds parameters of ours."""
        observers = self.reducer.queue.observers
        if observers.is_timed and self._holds_ours(optimizer):
            observers.on_step_event(event)

    def check_forward(self, module: nn.Module) -> None:
        """Raise if the last backward failed or is unfinished, or a mistake came before.

        Unless ``unsynced="ignore"``, the parameters are compared between the ranks if
        some were cast, joined the module, or changed after local gradients. Inside
        no_sync() they are not. If this proves a mistake, it raises or warns as
        ``unsynced`` says.

        Raises:
            ItemCountError: The last backward's counts of items give no mean.
            ReducerFailedError: The last backward failed.
            UnfinishedReductionError: The last backward left gradients missing.
            UnsyncedGradientsError: Replicas differ, and ``unsynced="raise"``.
        """
        reducer = self.reducer
        self._check_averages()
        refuse_forward(reducer)
        if self.policy == "ignore" or not self.comparison.is_needed:
            return
        if not reducer.ledger.sync_enabled:
            return
        self.comparison.note_forward()
        if self._joined:
            self._judge_joined()
        self.acts.lent.clear()
        if late := self.late_parameters.find(module):
            self.acts.lent += map(weakref.ref, late.values())
            # They may be lent for this forward alone: look again when it is over.
            self.late_parameters.note_lent(late)
            add_once(reducer, LookAgain(self))
        self._check_cast()
        self.changes.judge_in_forward()
        self._check_skipped_step()
        self._compare_after_local_steps()

    def check_after_forward(self) -> None:
        """Judge a step that is still open, by the parameters after a forward.

        A script may send parameters while the forward runs already, and wait for each
        in the module that needs it.

        Raises:
            UnsyncedGradientsError: Replicas differ, and ``unsynced="raise"``.
        """
        if self.policy != "ignore" and self.comparison.is_needed:
            everybody = range(len(self.index))
            verdict = self.comparison.of_parameters("opened", everybody)
            self._judge_open_step(verdict)

    def _check_cast(self) -> None:
        """Complain if parameters were cast on some ranks only."""
        if (suspicion := find_cast(self.reducer)) is None:
            return
        params = self.reducer.params
        kinds = [(param.dtype, param.device) for param in (params[0], params[-1])]
        if kinds != self._same_cast:  # module buffers would differ in size, too
            everybody = range(len(params))
            outcome = self._judge(
                suspicion, lambda: self.comparison.of_parameters("cast", everybody)
            )
            if outcome is not _Outcome.WRONG:  # open: a step of them is another matter
                self._same_cast = kinds

    def switch_sync(self, *, enabled: bool) -> None:
        """Note that no_sync() is left, if ``enabled``, or entered.

        Forwards inside do not look for changes of parameters that came before it.
        """
        if not enabled and self.comparison.is_needed:
            self.changes.look(before_no_sync=True)
        self.acts.switch_sync(enabled=enabled)

    def _judge_open_step(self, verdict: Verdict, *, after_step: bool = False) -> None:
        """Judge a step that was open by a comparison of all parameters after it.

        Args:
            verdict: What the comparison has found.
            after_step: Whether it was made right after the step, because the other
                ranks had made theirs without any doubt.
        """
        assert self.open_step is not None
        opened, self.open_step = self.open_step, None
        self._open_parts.clear()
        tells = after_step and opened.tells
        suspicion = replace(opened.suspicion, expected=_SAME_AFTER)
        conclude = functools.partial(
            Guard._conclude_step,
            suspicion=suspicion,
            made_elsewhere=after_step and not opened.tells,
        )
        is_over = verdict.are_all_here or (tells and not verdict.late)
        # If no synchronised backward has come since the last step like this, it is not
        # known whether there will be one.
        ask = AskInBackward(self, Kind.STEP, lambda _: suspicion, conclude)
        if is_over or not add_once(self.reducer, ask):
            conclude(self, verdict)

    def _conclude_step(
        self, verdict: Verdict, *, suspicion: Suspicion, made_elsewhere: bool
    ) -> None:
        """Complain of a step that was open, or learn from it who makes such steps."""
        self._step_trust.note(is_decided=verdict.are_all_here)
        if verdict.are_all_here:
            self.changes.forget()  # no older change is of interest
        self._was_made_elsewhere = verdict.is_equal and made_elsewhere
        self.conclude(verdict, suspicion=suspicion)

    def _judge_own_step(self, held: Sequence[int]) -> None:
        """Judge a step that may have averaged its gradients by what it made of them."""
        assert self._own_step is not None
        (_, suspicion), self._own_step = self._own_step, None
        suspicion = replace(suspicion, expected=_SAME_AFTER)
        verdict = self.comparison.of_parameters("after", held)
        self._step_trust.note(is_decided=verdict.are_all_here)
        self.conclude(verdict, suspicion=suspicion)

    def _is_inside_own_step(self, optimizer: Optimizer) -> bool:
        """Return whether this step is a part of another's, which is judged later."""
        own = None if self._own_step is None else self._own_step[0]()
        return own is not None and own is not optimizer and num_running(own) > 0

    def _check_skipped_step(self) -> None:
        """Suspect that this rank has not made an optimizer step that others made.

        Averages have come, and an optimizer that stepped before has not: perhaps the
        script has caught an error. But perhaps all ranks left out the step, as a
        GradScaler does, or accumulate without `no_sync`, or another rank makes all
        steps and sends the parameters. In these cases the ranks turn out to be equal,
        and they are asked more and more rarely.
        """
        check, doubts = self.replica_check, self.doubts
        if not self._steps.is_one_left_out or not self._skip_trust.is_due():
            return
        # Replicas that are not equal before their step are not comparable here.
        # Without a check the user compares nothing: replicas may be meant to differ.
        is_comparable = check.are_comparable if check else self._steps.has_any
        is_comparable &= not (doubts.was_local or doubts.was_excused)
        has_others = self._in_backward or self.precondition is not None
        if has_others or not is_comparable:
            return
        if self.comparison.can_ask:
            ask = AskInBackward(
                self,
                Kind.SKIP,
                Guard._suspect_left_out_step,
                Guard._conclude_skipped,
                Guard._is_skip_suspicious,
            )
            add_once(self.reducer, ask)

    def _compare_after_local_steps(self) -> None:
        """Let the replicas be compared in the step that begins, after local training.

        By then they were made equal again; or the local training was a mistake, such as
        an indentation too deep.
        """
        check, was_local = self.replica_check, self.doubts.was_local
        if check is not None and was_local and self._local_trust.is_due():
            self._local_trust.note(is_decided=True)
            check.meet_after_local_steps()

    def _is_skip_suspicious(self) -> bool:
        """Return whether a step is still left out when the backward begins."""
        return self._steps.is_one_left_out

    def _suspect_left_out_step(self) -> Suspicion:
        return Suspicion(
            f"{self._steps.describe_left_out()} on this rank since a backward "
            "averaged gradients, and the replicas differ now: other ranks have "
            "made a step, or parameters were changed by hand on some ranks only.",
            names=self.reducer.names,
            expected="the same parameters on all ranks",
            remedy="if an exception after backward() was caught, leave out the "
            "step on all ranks alike; and change parameters by hand on all ranks "
            "alike. To go on, call reset(copy_from=0) on all ranks, which copies "
            "rank 0's parameters, buffers and optimizer state, then zero_grad()",
        )

    def _conclude_skipped(self, verdict: Verdict) -> None:
        """Complain of a step that was left out, if the comparison is a proof.

        If all ranks have left it out, that is not why they differ. Then the comparison
        of replicas, which names what differs on which ranks, follows in the next step.
        """
        if verdict.is_proof and Kind.CHANGE in verdict.kinds:
            self.changes.look_after_step(*_CHANGED)  # as the ranks do that ask for it
        elif verdict.is_proof and verdict.have_all_left_out:
            if self.replica_check is not None:
                self.replica_check.compare_soon()
        elif verdict.is_proof:
            self.conclude(verdict, suspicion=self._suspect_left_out_step())
        else:
            # No rank has an optimizer, as in a benchmark: that soon costs nothing.
            is_usual = verdict.have_all_left_out and not self._steps.has_any
            self._skip_trust.note(is_decided=verdict.are_all_here, is_usual=is_usual)

    def conclude(self, verdict: Verdict, *, suspicion: Suspicion) -> None:
        """Complain if a comparison of parameters is a proof, or learn from it.

        What ranks have left open that may answer later is asked again.
        """
        text = suspicion.to_text(self.reducer.rank, verdict.describe("parameters"))
        if verdict.is_proof:
            self.changes.trust, self._skip_trust = Trust(), Trust()
            # Ranks that only answered know nothing of it.
            self._complain(text, tells_others=True)
        elif verdict.are_all_here:
            self.changes.trust.note(is_decided=True)
        elif verdict.awaited:
            self.changes.ask_later(suspicion)
        elif not self._has_warned and not self._steps_parts:
            self._has_warned = True
            warn(
                f"{text} This could not be proved, because other ranks did not answer, "
                "and is reported once."
            )

    def _judge_joined(self) -> _Outcome:
        """Complain if parameters that joined the module have other values elsewhere."""
        others = self.others()
        joined = {
            name: param
            for name, param in self._joined.items()
            if param.requires_grad
            and not any(id(param) in other.index for other in others)
        }
        versions = {name: param._version for name, param in joined.items()}
        if joined and versions != self._same_joined:
            values = [*joined.values()]
            outcome = self._judge(
                suspect_late(self.reducer, joined),
                lambda: self.comparison.of_values("joined", values),
            )
            if outcome is not _Outcome.WRONG:
                self._same_joined = versions
            return outcome
        return _Outcome.RIGHT

    def _judge(
        self,
        suspicion: Suspicion,
        compare: Callable[[], Verdict],
        *,
        may_average: bool = False,
    ) -> _Outcome:
        """Compare, and complain if that proves the suspicion.

        Args:
            suspicion: What may be wrong.
            compare: Compares the ranks.
            may_average: Whether the step that comes may average the gradients itself.
                If all ranks have answered, a difference then proves nothing yet.
        """
        if self.policy == "ignore":
            self._complain(suspicion.what)
            return _Outcome.WRONG
        verdict = compare()
        if not suspicion.blames_absent:
            verdict = replace(verdict, reducing=frozenset())
        is_right = verdict.is_equal or (
            suspicion.is_of_coming and verdict.have_all_stepped
        )
        if is_right and verdict.is_same_part:
            return _Outcome.RIGHT
        if not verdict.proves_mistake:
            if verdict.have_all_stepped and verdict.is_same_part:
                return _Outcome.MADE_ELSEWHERE
            return _Outcome.OPEN if verdict.are_all_here else _Outcome.UNANSWERED
        if may_average and verdict.are_all_here:
            return _Outcome.LEFT_TO_THE_STEP
        self._complain(
            suspicion.to_text(self.reducer.rank, verdict.describe("values")),
            tells_others=not verdict.are_all_here,
        )
        return _Outcome.WRONG

    def look_again(self) -> None:
        """Find out which parameters are still in the module when a backward ended."""
        self._joined = self.late_parameters.find()

    def expect_in_backward(self, optimizer: Optimizer) -> None:
        """Register an optimizer that steps in backwards: other steps of it then raise.

        Raises:
            ValueError: Some wrapper has it already, or it holds no parameter of ours.
        """
        name = type(optimizer).__name__
        if any(optimizer in guard._in_backward for guard in live_guards()):
            raise ValueError(
                f"This {name} steps in the backward already; use one optimizer for "
                "each module."
            )
        if not self._holds_ours(optimizer):
            raise ValueError(f"This {name} holds no parameter of the module.")
        self._in_backward.add(optimizer)

    def leave_to_others(self, optimizer: Optimizer) -> None:
        """Let an optimizer step unchecked for good, because another feature checks it.

        The feature divides the steps among ranks, whose gradients differ, and notes a
        step (`Communicator.note_step`) when all ranks have agreed on it. But no feature
        averages parameters that join the module later.
        """
        self._allowed.add(id(optimizer))
        self._left.add(id(optimizer))

    @contextmanager
    def allow(self, optimizer: Optimizer) -> Iterator[None]:
        """Let ``optimizer`` step unchecked in the block.

        Raises:
            MiniDPError: The block raised an `Exception`, which becomes its cause. A
                ShardedStepError stays what it is.
        """
        self._allowed.add(id(optimizer))
        try:
            yield
        except ShardedStepError:
            raise
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
            if id(optimizer) not in self._left:
                self._allowed.discard(id(optimizer))

    def reset(self) -> None:
        """Forget what was suspicious, as the ranks are compared soon, or equal now."""
        waiting = (LookAgain, AskInBackward)
        observers = self.reducer.queue.observers
        for each in observers.everybody:
            if isinstance(each, waiting):
                observers.remove(each)
        self.changes.reset()
        self.open_step, self._own_step = None, None
        self._open_parts.clear()
        self._was_made_elsewhere = self._steps_parts = False
        self._step_trust, self._skip_trust = Trust(), Trust()
        self._steps.reset()
        self._joined, self._same_joined, self._same_cast = {}, {}, None

    def expect_death(self, has_group: Callable[[], bool]) -> None:
        """Warn of steps on our parameters after the wrapper's death, as `dropped` does.

        With ``unsynced="ignore"`` and after `retire` there is no warning.

        Args:
            has_group: Returns whether the wrapper's process group still exists. If not,
                there is no warning either, and steps are not checked any more.
        """
        self.has_group = has_group
        cancel = dropped.expect_death(self, self._at_step, has_group)
        if self.policy == "ignore":
            cancel()
        else:
            self._cancel_death = cancel

    def retire(self) -> None:
        """Unregister this guard, which then checks no optimizer steps any more."""
        step_hooks.remove(self)
        self.reducer.queue.observers.remove(self.acts)
        self._cancel_death()

    def optimizers(self) -> dict[Optimizer, int]:
        """Return optimizers that have stepped on our parameters, and how often.

        The numbers count the steps since `forget_steps`, without those inside no_sync()
        and those in backwards.
        """
        known = [*self._at_step, *self._in_backward]
        return {o: self._num_steps.get(o, 0) for o in known if self._holds_ours(o)}

    def last_step_of(self, optimizer: Optimizer) -> list[int]:
        """Return numbers that say when an optimizer last stepped, or [] if never.

        Later steps in another backward have greater ones.
        """
        return [*self._at_step.get(optimizer, ())]

    def forget_steps(self) -> None:
        """Count optimizer steps anew, after the ranks were compared or made equal."""
        self._num_steps.clear()

    @property
    def shares_parameters(self) -> bool:
        """Whether another live wrapper averages some of our parameters, too."""
        mine = self.index.keys()
        return any(not mine.isdisjoint(other.index) for other in self.others())

    def others(self) -> list[Guard]:
        """Return the other live guards of this process, of any wrapper or group."""
        return [guard for guard in live_guards() if guard is not self]

    def sharing_group(self) -> dict[str, Communicator]:
        """Return what the live wrappers on this one's process group communicate with.

        The keys are their places in the store, which are equal on all ranks. This
        wrapper is one of them.
        """
        group = self.reducer.communicator.group
        users = {each.place(): each.reducer.communicator for each in live_guards()}
        return {place: each for place, each in users.items() if each.group is group}

    def beside(self) -> dict[str, Communicator]:
        """Return what the other live wrappers over the same ranks communicate with.

        Their groups may be others, because each ``reset()`` may replace one. The keys
        are equal on all ranks.
        """
        ranks = group_ranks(self.reducer.communicator.group)
        found = {}
        for each in self.others():
            communicator = each.reducer.communicator
            if ranks and group_ranks(communicator.group) == ranks:
                key = f"{group_name(communicator.group)}/{each.place()}"
                found[key] = communicator
        return found

    def has_averaged(self, param: nn.Parameter) -> bool:
        """Return whether this wrapper's last backward averaged ``param.grad``.

        It has not if the parameter is not ours, if no synchronised backward has ended
        yet, or if a local backward has added to the average. In no_sync() the answer is
        always False.
        """
        i, ledger = self.index.get(id(param)), self.reducer.ledger
        if i is None or not ledger.finalized or not ledger.sync_enabled:
            return False  # inside no_sync() not every local gradient is recorded
        return i not in self.acts.unsynced

    def _check_averages(self) -> None:
        """Fail the reducer if a device has found since that its averages are wrong.

        A collective may have been given up, or the counts of items may give no mean,
        for which this waits. Then the other ranks are told, too. On the CPU the
        backward itself has raised already.

        Raises:
            CollectiveError: A collective was given up.
            ItemCountError: The counts give no mean.
        """
        self.reducer.check()
        if (items := self.reducer.queue.averaging.items) is not None:
            try:
                items.check()
            except ItemCountError as error:
                self.reducer.check()  # it has read what was incomplete
                self.reducer.fail(error)
                raise

    def _complain(self, problem: str, *, tells_others: bool = False) -> None:
        """Raise, warn of or ignore ``problem``, as ``unsynced`` says.

        If it does not raise, replicas may differ from now on, which it notes in
        `doubts`.

        Args:
            problem: The text of the error. If it is empty, there is nothing to do.
            tells_others: Whether to send the error to the other ranks before it is
                raised. This is done in any case where they wait for gradients of this
                rank.

        Raises:
            UnsyncedGradientsError: There is a problem, and ``unsynced="raise"``.
        """
        if problem and self.policy == "raise":
            error = UnsyncedGradientsError(problem)
            # In these phases other ranks wait for missing gradients.
            is_waited_for = self.reducer.phase.now in (Phase.REDUCING, Phase.PAUSED)
            is_waited_for &= not self.reducer.awaits_user
            if is_waited_for or tells_others:
                self.reducer.communicator.tell_others(error)
            try:
                raise error
            finally:
                del error  # it would keep this frame alive, and with it the reducer
        self.doubts.was_excused |= bool(problem)
        if problem and self.policy == "warn":
            warn(problem)

    def _holds_ours(self, optimizer: Optimizer) -> bool:
        groups = optimizer.param_groups
        return any(id(param) in self.index for g in groups for param in g["params"])

    def _held_by(self, optimizer: Optimizer) -> list[int]:
        """Return the indices of our parameters that an optimizer holds."""
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [i for key, i in self.index.items() if key in params]


def _are_the_same(
    known: Sequence[tuple[weakref.ref[Tensor], int]], grads: Iterable[Tensor | None]
) -> bool:
    """Return whether these are the known gradients, and nobody has written to them."""
    present = [grad for grad in grads if grad is not None]
    return len(known) == len(present) and all(
        reference() is grad and version == grad._version
        for (reference, version), grad in zip(known, present, strict=True)
    )


@dataclass(frozen=True)
class _OpenStep:
    """A suspicious step that only the parameters can judge, when it has been made."""

    suspicion: Suspicion
    is_asked_after: bool  # right after the step; otherwise in the next forward
    tells: bool = False  # with a warning, if nobody answers then


class _Outcome(Enum):
    """What becomes of a suspicion after the ranks were compared."""

    RIGHT = auto()  # the ranks do the same
    WRONG = auto()  # a mistake is proved, or the user ignores all; it was complained of
    OPEN = auto()  # only the parameters can tell, later
    # Other ranks do not come to this step, so only the parameters can tell, later.
    UNANSWERED = auto()
    # Other ranks have made this step already; the parameters can tell right after it.
    MADE_ELSEWHERE = auto()
    LEFT_TO_THE_STEP = auto()  # the gradients differ; the optimizer may average them


def _has_own_step(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's class has a ``step`` that is not torch's."""
    step = inspect.unwrap(type(optimizer).step)
    return not str(getattr(step, "__module__", "")).startswith("torch.")
