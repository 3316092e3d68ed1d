"""Let a rank do its logical ranks one after the other, each from the same state.

What a logical rank computes must not depend on which rank computes it, nor on what that
rank did before. So each begins with the same parameters, module buffers, gradients and
random numbers. All but the last one leave their gradients to `PartialSums`; the last
one's backward reduces.

::

    OUTSIDE --begin_step--> INSIDE --all are done--> OUTSIDE
                              | the loop is left early, or the body raises
                              '--> the next step, forward or loop raises, until reset()
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from minidp import randomness
from minidp.comm import broadcast_integers
from minidp.core import Observer, Reducer
from minidp.errors import LogicalRankError, explain, shortened

from .averaging import TreeAveraging
from .options import LogicalOptions
from .partial_sums import Grads, PartialSums
from .tree import block


class Switch(Protocol):
    """Says whether the backwards of later forwards shall reduce."""

    def __call__(self, *, enabled: bool) -> None:
        """Switch reductions on or off."""


class LogicalRanks(Observer):
    """The logical ranks of one wrapper, and whose turn it is.

    The constructor puts a `TreeAveraging` in the place of the reducer's.

    Args:
        reducer: The reducer of the wrapper.
        options: How many logical ranks there are, and where their random numbers begin.
        switch: Switches reductions on and off.
        sync_buffers: Broadcasts the module buffers if that is due, and returns them.
    """

    def __init__(
        self,
        reducer: Reducer,
        options: LogicalOptions,
        switch: Switch,
        sync_buffers: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        communicator = reducer.communicator
        self.options = options
        self.block = block(options.number, communicator.size, communicator.rank)
        self._reducer: Reducer = weakref.proxy(reducer)  # it holds its observers
        self._switch = switch
        self._sync_buffers = sync_buffers
        self._partial = PartialSums(options.number, self.block)
        self._averaging = TreeAveraging(
            reducer.queue.averaging, options.number, self._partial, communicator
        )
        reducer.queue.averaging = self._averaging
        reducer.queue.observers.append(self)
        self._now: int | None = None  # the logical rank whose turn it is
        self._turns: Generator[int] | None = None  # the loop that is open
        self._step: _Step | None = None
        self._num_reduced = 0  # backwards in this loop that have reduced

    @property
    def step(self) -> int:
        """The number of the present step, from which random numbers are made."""
        return self.options.first_step + self._reducer.ledger.finalized

    @property
    def is_open(self) -> bool:
        """Whether a loop has begun, and not ended."""
        return self._turns is not None

    def connect(self) -> None:
        """Create what sums need; all ranks call it, and wait for each other."""
        communicator = self._reducer.communicator
        with communicator.blocking("agreeing on the seed of logical ranks"):
            (seed,) = broadcast_integers(
                [self.options.seed], communicator.group, communicator.device
            )
        self.options = replace(self.options, seed=seed)
        self._averaging.connect()

    def each(self) -> Iterator[int]:
        """Return an iterator over the numbers of this rank's logical ranks.

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
        self._turns = turns = self._each()
        return turns

    def _each(self) -> Generator[int]:
        mine = self._turns
        with ExitStack() as stack:
            stack.enter_context(_outside_numbers.kept())
            step = self._step = _Step(self._reducer.params, self._sync_buffers())
            self._num_reduced = 0
            self._partial.clear()
            for leaf in self.block:
                step.restore()
                self._switch(enabled=leaf == self.block[-1])
                self._now = leaf
                randomness.seed_all(self.options.seed, self.step, leaf)
                yield leaf
                if self._turns is not mine:  # reset() was called meanwhile
                    return
                self._end_turn(leaf)
            step.end(has_first=self.block.start == 0)
        self._now, self._turns, self._step = None, None, None

    def _end_turn(self, leaf: int) -> None:
        assert self._step is not None
        if leaf != self.block[-1]:
            self._partial.add(leaf, self._take(leaf))
        elif not self._num_reduced:
            self._fail(
                f"Logical rank {leaf}, the last one of this rank, has not reduced.",
                "run its last backward() outside of no_sync()",
            )
        if leaf == 0:
            self._step.keep_buffers()

    def _take(self, leaf: int) -> Grads:
        """Take the gradients of a logical rank out of ``.grad``."""
        reducer, step = self._reducer, self._step
        assert step is not None
        grads = step.take()
        named = zip(reducer.names, grads, strict=True)
        missing = [name for name, grad in named if grad is None]
        if missing and not reducer.mode.fills_in_missing:
            self._fail(
                f"Logical rank {leaf} has ended without a gradient of some parameters.",
                "run a backward() for each logical rank; if a model does not use all "
                "parameters, pass find_unused_parameters=True",
                missing,
            )
        if any(grad is not None and grad.requires_grad for grad in grads):
            self._fail(
                f"The gradients of logical rank {leaf} have a graph of their own.",
                "call backward() without create_graph=True",
            )
        return grads

    # -- what must not happen ----------------------------------------------------------

    def begins(self) -> None:
        """Refuse a second reduction in one loop.

        Raises:
            LogicalRankError: There was one.
        """
        if self._num_reduced:
            raise self._error(
                f"A second backward reduces in logical rank {self._now}: its gradients "
                "would be averaged twice.",
                "run all but the last backward() of a logical rank inside no_sync()",
            )

    def finished(self) -> None:
        """Note that the last logical rank has reduced."""
        self._num_reduced += 1
        self._partial.clear()

    def abandon(self) -> None:
        """Leave the loop that is open, because of `reset()`.

        The module buffers and the generators of random numbers are as before it then.
        """
        self._partial.clear()
        if self._step is not None:
            self._step.end(has_first=False)
        turns, self._turns = self._turns, None
        self._now = self._step = None
        if turns is not None:
            turns.close()

    def refuse_unfinished(self) -> None:
        """Refuse to go on after a loop that was left early.

        Raises:
            LogicalRankError: It was.
        """
        if self._turns is not None:
            self._fail(
                f"The loop over logical ranks was left in logical rank {self._now}; "
                f"this rank has those from {self.block[0]} to {self.block[-1]}.",
                "let each step go through all of each_logical_rank(); after an error "
                "in it, call reset() on all ranks",
            )

    def refuse_step(self) -> None:
        """Refuse an optimizer step before all logical ranks are done.

        Raises:
            LogicalRankError: They are not.
        """
        if self._turns is not None:
            self._fail(
                f"An optimizer steps in logical rank {self._now}, before the loop over "
                f"logical ranks {self.block[0]} to {self.block[-1]} has ended.",
                "step after the loop; and let it go through all of each_logical_rank()",
            )

    def refuse_forward(self) -> None:
        """Refuse a forward that belongs to no logical rank.

        Raises:
            LogicalRankError: It runs outside of the loop.
        """
        if self._turns is None:
            raise self._error(
                "A forward runs outside of the loop over logical ranks.",
                "train inside `for leaf in model.each_logical_rank():`, and evaluate "
                "under torch.no_grad()",
            )

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


class _OutsideNumbers:
    """Keeps the random numbers of the script from those of logical ranks.

    Loops of several wrappers may be open at once, as by `zip`, and end in any order.
    The generators are as before the first of them when the last one has ended.
    """

    def __init__(self) -> None:
        self._num_open = 0
        self._stack = ExitStack()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the script's random numbers until no loop is open any more."""
        if not self._num_open:
            self._stack.enter_context(randomness.kept())
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._stack.close()


_outside_numbers = _OutsideNumbers()


class _Step:
    """What each logical rank of a step begins with: gradients and module buffers.

    Args:
        params: The parameters.
        buffers: The module buffers by name.
    """

    def __init__(
        self, params: Sequence[torch.nn.Parameter], buffers: Mapping[str, Tensor]
    ) -> None:
        self._params = params
        # Usually None. Averages that are kept count once in each logical rank.
        self._grads = [
            None if param.grad is None else param.grad.detach().clone()
            for param in params
        ]
        self._buffers = [each for each in buffers.values() if not each.is_meta]
        self._first = [each.detach().clone() for each in self._buffers]
        self._kept: list[Tensor] = []  # those after logical rank 0
        self._is_fresh = True

    def take(self) -> Grads:
        """Return the gradients that this logical rank has left in ``.grad``.

        Those that were there before stay where they are; the others are set to None.
        """
        found: Grads = []
        for param, before in zip(self._params, self._grads, strict=True):
            grad = param.grad
            if before is not None and grad is not None:
                found.append(grad.detach().clone())
                continue
            found.append(grad)
            param.grad = None
        return found

    @torch.no_grad()
    def restore(self) -> None:
        """Let a logical rank begin like the first one."""
        if self._is_fresh:
            self._is_fresh = False
            return
        for param, before in zip(self._params, self._grads, strict=True):
            if before is not None:
                assert param.grad is not None
                param.grad.detach().copy_(before)
        _copy(self._buffers, self._first)

    def keep_buffers(self) -> None:
        """Keep the buffers of logical rank 0, which are the module's after the step."""
        self._kept = [each.detach().clone() for each in self._buffers]

    @torch.no_grad()
    def end(self, *, has_first: bool) -> None:
        """Give the module the buffers of logical rank 0, or those from before."""
        _copy(self._buffers, self._kept if has_first else self._first)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
