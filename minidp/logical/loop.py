"""Let a rank do its logical ranks one after the other, each from the same state.

What a logical rank computes must not depend on which rank computes it, nor on what that
rank did before. So each begins with the same parameters, module buffers, gradients and
random numbers. All but the last one leave their gradients to `PartialSums`; the last
one's backward reduces.

::

    CLOSED --each, begun--> OPEN --all are done--> CLOSED
                              | left early, or the body raises
                              '--> the next step, forward or loop raises, until reset()

The turns of a step come in one round, at whose end a backward reduces. Where ranks may
die in a step (`minidp.torchft`), a reduction may fail, and then another round follows,
in which the survivors do what is missing (`Rounds`).

A generator runs the loop. Nobody here refers to it, so that one that the script drops
is gone at once, and leaves the loop open.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

from torch import Tensor, nn

from minidp import randomness, world
from minidp.comm import broadcast_integers, gather_integers
from minidp.core import Observer, Reducer
from minidp.errors import LogicalRankError, explain, shortened
from minidp.trace import StepEvent

from .arrived import Arrived, Grads, Taken, arrived_of
from .audit import Audit
from .averaging import TreeAveraging
from .options import LogicalOptions
from .partial_sums import PartialSums
from .start import Start
from .tree import block


class Round(NamedTuple):
    """The logical ranks that this rank does until the next reduction."""

    leaves: Sequence[int]
    seed: int  # from which, with the step, random numbers are made
    step: int


class Rounds(Protocol):
    """Says what this rank does in a step, in one round or in several.

    Nobody else does it in the meantime: all ranks know who does what.
    """

    def of_step(
        self, step: int | None, partial: PartialSums, start: Start
    ) -> Iterator[Round]:
        """Return the rounds of a step.

        The iterator goes on after a round when the reduction of that has ended, well or
        not. All rounds but the last one have failed.

        Args:
            step: The number of the step, if the script says one.
            partial: To be told what this rank does, and what it may forget.
            start: Has the module buffers that the step leaves.
        """


class OneRound:
    """The round of a step in which all ranks reduce, or none: a block of neighbours.

    Args:
        logical: Has the block, the seed, and the number of the next step.
    """

    def __init__(self, logical: LogicalRanks) -> None:
        self._logical: LogicalRanks = weakref.proxy(logical)

    def of_step(
        self, step: int | None, partial: PartialSums, start: Start
    ) -> Iterator[Round]:
        """Return the only round."""
        mine = self._logical
        yield Round(mine.block, mine.options.seed, mine.step if step is None else step)


class Switch(Protocol):
    """Says whether the backwards of later forwards shall reduce."""

    def __call__(self, *, enabled: bool) -> None:
        """Switch reductions on or off."""


class LogicalRanks(Observer):
    """The logical ranks of one wrapper, and whose turn it is.

    The constructor puts a `TreeAveraging` in the place of the reducer's.

    Args:
        reducer: The reducer of the wrapper.
        module: The wrapped module.
        options: How many logical ranks there are, and where their random numbers begin.
        switch: Switches reductions on and off.
        sync_buffers: Broadcasts the module buffers, and returns them by name. It is
            told whether a loop begins, whose forwards then broadcast nothing.
    """

    def __init__(
        self,
        reducer: Reducer,
        module: nn.Module,
        options: LogicalOptions,
        switch: Switch,
        sync_buffers: Callable[..., Mapping[str, Tensor]],
    ) -> None:
        communicator = reducer.communicator
        self.options = options
        mine = block(options.number, communicator.size, communicator.rank)
        self.block: Sequence[int] = mine  # in the last round
        self._reducer: Reducer = weakref.proxy(reducer)  # it holds its observers
        self._module = module
        self._switch = switch
        self._sync_buffers = sync_buffers
        self._partial = PartialSums(options.number, mine)
        self._arrived, is_told_by_hooks = arrived_of(reducer)
        self.sees_local_grads = not is_told_by_hooks
        self._has_sparse = any(spec.sparse for spec in reducer.queue.specs)
        self._rounds: Rounds = OneRound(self)
        self.audit: Audit | None = None  # with audit_every
        self._averaging = TreeAveraging(
            reducer.queue.averaging, options.number, self._partial, communicator
        )
        reducer.queue.averaging = self._averaging
        reducer.queue.observers.append(self)
        # From which random numbers are made: how many loops have ended, also in earlier
        # runs, unless the script says another number.
        self.step = options.first_step
        self._open: _Loop | None = None  # the loop that has begun, and not ended

    @property
    def is_in_loop(self) -> bool:
        """Whether a loop has begun, and not ended."""
        return self._open is not None

    @property
    def has_reduced(self) -> bool:
        """Whether the last logical rank of an open loop has reduced."""
        return self._open is not None and self._open.num_reduced > 0

    def share_out(
        self, rounds: Rounds, averaging: Callable[[PartialSums], TreeAveraging]
    ) -> None:
        """Let somebody else say which logical ranks this rank does, and average them.

        Args:
            rounds: Says which, in several rounds if a reduction fails.
            averaging: Makes what takes the place of the reducer's `Averaging`.
        """
        self._rounds, self._partial.may_repeat = rounds, True
        self._averaging = averaging(self._partial)
        self._reducer.queue.averaging = self._averaging

    def connect(self, copy_from: int | None = None) -> None:
        """Agree on seed and step, and create what sums need; all ranks call it.

        Args:
            copy_from: Whose step counts. By default it is the highest one.
        """
        communicator = self._reducer.communicator
        group, device = communicator.group, communicator.device
        with communicator.blocking("agreeing on the step of logical ranks"):
            (seed,) = broadcast_integers([self.options.seed], group, device)
            steps = [row[0] for row in gather_integers([self.step], group, device)]
        self.step = max(steps) if copy_from is None else steps[copy_from]
        self.options = replace(self.options, seed=seed)
        self._averaging.connect(has_sparse=self._has_sparse)
        if self.audit is not None:
            self.audit.connect()

    def each(self, step: int | None) -> Iterator[int]:
        """Return an iterator over the numbers of this rank's logical ranks.

        Args:
            step: The number of the step; by default that of the last one plus 1.

        Raises:
            LogicalRankError: The last loop was not finished, or this is inside a block
                of no_sync().
        """
        self.refuse_unfinished()
        if self._reducer.ledger.open_no_syncs:
            raise self._error(
                "The loop over logical ranks is inside no_sync(), and would reduce all "
                "the same.",
                "leave out no_sync() around the loop; a step over more samples has "
                "several micro-batches in each logical rank, all but the last of them "
                "inside no_sync()",
            )
        return self._each(step)

    def _each(self, step: int | None) -> Iterator[int]:
        self.refuse_unfinished()
        observers = self._reducer.queue.observers
        observers.on_step_event(StepEvent.LOOP_BEGIN)
        # Before buffers are read: their broadcast must not find an open loop.
        buffers = self._sync_buffers(before_loop=True)
        observers.on_step_event(StepEvent.MODULE_BEGIN)
        params = self._reducer.params
        start = Start(params, self._module, buffers, self._arrived)
        loop = self._open = _Loop(start, self._arrived)
        self._partial.clear()
        for now in self._rounds.of_step(step, self._partial, loop.start):
            self.step, self.block = now.step, now.leaves
            loop.begin_round()
            yield from self._audited(loop, now)
            if self._open is not loop:  # reset() was called meanwhile
                return
        loop.start.end()
        self._partial.clear()
        self._close()
        self.step += 1
        try:
            self._sync_buffers(before_loop=False)  # evaluations are alike on all ranks
        except (
            BaseException
        ):  # whoever tries this step again begins like the first time
            loop.start.end(as_before=True)
            self.step -= 1
            raise
        if self.audit is not None:
            self.audit.judge()

    def _audited(self, loop: _Loop, now: Round) -> Iterator[int]:
        """Go through the logical ranks of a round, and those that are audited in it."""
        audit = self.audit
        if audit is None or not audit.begin(now.step):
            yield from self._turns(loop, now)
            return
        turn = partial(self._extra_turn, loop, now)
        yield from audit.before(loop.start, turn)
        if self._open is loop:
            yield from self._turns(loop, now)
        if self._open is loop:
            may_repeat = not loop.has_company
            yield from audit.after(loop.start, turn, may_repeat=may_repeat)

    def _turns(self, loop: _Loop, now: Round) -> Iterator[int]:
        tell = self._reducer.queue.observers.on_step_event
        for leaf in now.leaves:
            is_last = leaf == now.leaves[-1]
            self._begin_turn(loop, now, leaf, reduces=is_last)
            tell(StepEvent.TURN_BEGIN, leaf)
            yield leaf
            if self._open is not loop:
                return
            tell(StepEvent.TURN_END, leaf)
            self._end_turn(loop, leaf, is_last=is_last)
            if self.audit is not None:
                self.audit.has_left(leaf, loop.start.buffers)

    def _begin_turn(self, loop: _Loop, now: Round, leaf: int, *, reduces: bool) -> None:
        loop.begin(leaf)
        self._switch(enabled=reduces)
        randomness.seed_all(now.seed, now.step, leaf)

    def _extra_turn(
        self, loop: _Loop, now: Round, leaf: int
    ) -> Generator[int, None, Grads | None]:
        """Let the script do a logical rank for the audit, as if it had not been done.

        Returns:
            Its gradients, or None if `reset` was called meanwhile.
        """
        assert self.audit is not None
        put_back = self.audit.set_aside(self)
        self._begin_turn(loop, now, leaf, reduces=False)
        yield leaf
        if self._open is not loop:
            return None
        if not loop.arrived:
            self._fail(
                f"Logical rank {leaf} has ended without a backward.",
                "run a backward() in each turn of the loop",
            )
        self._refuse_changes(loop, leaf)
        grads, _ = self._take(loop, leaf)
        self._switch(enabled=True)
        put_back()
        return grads

    def _close(self) -> None:
        loop, self._open = self._open, None
        if loop is not None:
            loop.leave()

    def _end_turn(self, loop: _Loop, leaf: int, *, is_last: bool) -> None:
        if is_last and not loop.num_reduced:
            self._fail(
                f"Logical rank {leaf}, the last one of this rank, has not reduced.",
                "run its last backward(), outside of no_sync()",
            )
        if not is_last and not loop.arrived:
            self._fail(
                f"Logical rank {leaf} has ended without a backward.",
                "run a backward() in each turn of the loop",
            )
        self._refuse_changes(loop, leaf)
        if not is_last:
            grads, are_plain = self._take(loop, leaf)
            if self.audit is not None:
                self.audit.has_computed(leaf, grads)
            self._partial.add(leaf, grads, are_plain=are_plain)
        if leaf == 0:
            loop.start.keep_buffers()

    def _refuse_changes(self, loop: _Loop, leaf: int) -> None:
        """Refuse a turn in which the script has changed gradients or parameters."""
        changed = [self._reducer.names[i] for i in loop.arrived.changed()]
        if changed:
            self._fail(
                f"Gradients were changed in logical rank {leaf}, after its backward.",
                "change .grad after the loop, where it is the mean over all logical "
                "ranks: clipping, unscaling and zero_grad() belong there",
                changed,
            )
        if not loop.num_reduced:  # after that, step_in_backward has changed them
            self._refuse_changed_parameters(loop)

    def _refuse_changed_parameters(self, loop: _Loop) -> None:
        names = [self._reducer.names[i] for i in loop.start.changed_parameters()]
        if names:
            self._fail(
                f"Parameters were changed in logical rank {loop.now}, before all "
                "logical ranks were done.",
                "change parameters after the loop over logical ranks",
                names,
            )

    def _take(self, loop: _Loop, leaf: int) -> Taken:
        """Take the gradients of a logical rank out of ``.grad``."""
        taken = loop.start.take()
        grads, specs = taken.grads, self._reducer.queue.specs
        if taken.are_plain and not self._has_sparse:
            return taken
        named = zip(self._reducer.names, grads, strict=True)
        missing = [name for name, grad in named if grad is None]
        if missing and not self._reducer.mode.fills_in_missing:
            self._fail(
                f"Logical rank {leaf} has ended without a gradient of some parameters.",
                "if the model does not use all parameters in each step, pass "
                "find_unused_parameters=True",
                missing,
            )
        if wrong := [
            f"{spec.name} ({grad.layout})"
            for spec, grad in zip(specs, grads, strict=True)
            if grad is not None and grad.is_sparse is not spec.sparse
        ]:
            self._fail(
                f"Gradients of logical rank {leaf} have another layout than their "
                "buckets.",
                "an embedding with sparse=True has sparse gradients, and everything "
                "else dense ones; do not change that after wrapping",
                wrong,
            )
        if any(grad is not None and grad.requires_grad for grad in grads):
            self._fail(
                f"The gradients of logical rank {leaf} have a graph of their own.",
                "call backward() without create_graph=True",
            )
        return taken

    # -- what the reducer tells --------------------------------------------------------

    def added_locally(self, i: int, through_outputs: Collection[int]) -> None:
        """Note that the present logical rank has brought a gradient."""
        if self._open is not None:
            self._open.arrived.note(i)

    def begins(self) -> None:
        """Refuse a second reduction in one loop, and changed parameters.

        Raises:
            LogicalRankError: There was one, or there are some.
        """
        loop = self._open
        if loop is None:
            return
        if loop.num_reduced:
            raise self._error(
                f"A second backward reduces in logical rank {loop.now}: its gradients "
                "would be averaged twice.",
                "run all but the last backward() of a logical rank inside no_sync()",
            )
        self._refuse_changed_parameters(loop)

    def finished(self) -> None:
        """Note that the last logical rank has reduced, and how ``.grad`` looks now."""
        self._partial.reduced()
        self._averaging.let_go()
        if self._open is None:
            return
        self._open.num_reduced += 1
        self._open.arrived.clear()
        observers = self._reducer.queue.observers.everybody
        if not any(each.uses_grads for each in observers):  # who may clip them
            self._open.arrived.note_all()

    def abandon(self) -> None:
        """Leave the loop that is open, because of `reset()`.

        The module buffers and the generators of random numbers are as before it then.
        """
        self._partial.clear()
        self._averaging.let_go()
        if self.audit is not None:
            self.audit.abandon()
        if self._open is not None:
            self._open.start.end(as_before=True)
        self._close()

    # -- what must not happen ----------------------------------------------------------

    def refuse_unfinished(self) -> None:
        """Refuse to go on after a loop that was left early.

        Raises:
            LogicalRankError: It was.
        """
        if self._open is not None:
            self._fail(
                "The last loop over logical ranks was left in logical rank "
                f"{self._open.now}; this rank has those from {self.block[0]} to "
                f"{self.block[-1]}.",
                "let each step go through all of each_logical_rank(), which comes "
                "first in a zip(); after an error in it, call reset() on all ranks",
            )

    def refuse_step(self) -> None:
        """Refuse an optimizer step before all logical ranks are done.

        Raises:
            LogicalRankError: They are not.
        """
        self.refuse_early("An optimizer steps")

    def refuse_early(self, what: str) -> None:
        """Refuse what needs averages before all logical ranks are done.

        Args:
            what: What is done, as in "An optimizer steps".

        Raises:
            LogicalRankError: They are not.
        """
        if self._open is not None:
            self._fail(
                f"{what} in logical rank {self._open.now}, before the loop "
                f"over logical ranks {self.block[0]} to {self.block[-1]} has ended.",
                "clip and step after the loop; and let it go through all of "
                "each_logical_rank(), which comes first in a zip()",
            )

    def refuse_forward(self) -> None:
        """Refuse a forward that belongs to no logical rank.

        Raises:
            LogicalRankError: It runs outside of the loop.
        """
        if self._open is None:
            raise self._error(
                "A forward runs outside of the loop over logical ranks.",
                "train inside `for leaf in model.each_logical_rank():`, and evaluate "
                "under torch.no_grad()",
            )
        self._open.start.note_grads()

    def _fail(self, what: str, remedy: str, names: Sequence[str] = ()) -> NoReturn:
        """Raise an error, of which the ranks that wait for this one hear."""
        error = self._error(what, remedy, names)
        self._reducer.fail(error)
        raise error

    def _error(
        self, what: str, remedy: str, names: Sequence[str] = ()
    ) -> LogicalRankError:
        found = [shortened(names)] if names else []
        rank = self._reducer.rank
        return LogicalRankError(explain(rank, what, names=found, remedy=remedy))


class _Loop:
    """One loop that has begun.

    While it lives, and until `leave`, the random numbers of the script are kept apart
    from those of logical ranks.

    Args:
        start: What each logical rank begins with.
        arrived: The gradients that the logical rank has brought whose turn it is.
    """

    def __init__(self, start: Start, arrived: Arrived) -> None:
        self.start, self.arrived = start, arrived
        self.now = -1  # the logical rank whose turn it is
        self.num_reduced = 0
        # Loops of several wrappers may be open at once, as by `zip`, and end in any
        # order. The first of them has found the script's numbers.
        other = next(iter(_open_loops()), None)
        self._began_with_company = other is not None
        self._outside: randomness.Numbers
        self._outside = randomness.Numbers() if other is None else other._outside
        _open_loops().add(self)

    @property
    def has_company(self) -> bool:
        """Whether loops of other wrappers take turns with this one."""
        return self._began_with_company or len(_open_loops()) > 1

    def begin_round(self) -> None:
        """Begin a round, and drop what a reduction that failed has left in .grad."""
        if self.num_reduced:
            self.num_reduced = 0
            self.start.take()

    def begin(self, leaf: int) -> None:
        """Let a logical rank begin like the first one."""
        if self.now >= 0:
            self.start.restore()
        self.now = leaf
        self.arrived.clear()

    def leave(self) -> None:
        """Give the script its random numbers back, if no other loop is open."""
        _open_loops().discard(self)
        if not _open_loops():
            self._outside.restore()


# Those of this process. A loop that was left, and whose wrapper is gone, is none.
_open_loops: world.PerProcess[weakref.WeakSet[_Loop]] = world.PerProcess(
    weakref.WeakSet
)
