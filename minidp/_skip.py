"""A rank leaves out a backward that its forward announced: do all of them?

::

    rank 0   forward | zero_grad, step ...  | forward     both skip reduction 7: legal
    rank 1   forward | zero_grad, step ...  | forward
    rank 2   forward | backward: waits for rank 0, whose next gradients it would take

Ranks that do not skip know of no question, so nobody is asked: each rank tells the
others all the time how many reductions it finished and how often it has stepped since
(`_post`), and who skips waits until all others have come as far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch.futures import Future

from . import _guard_words as words
from ._cursor import Cursor
from ._reducer import Reducer
from ._waiting import Promised
from .errors import UnsyncedGradientsError

_UNKNOWN = (
    "Whether the others do the same cannot be found out: ranks tell each other nothing "
    "with hang_timeout=None, or where this is a copy of a wrapper."
)
FIRST_PAUSE = 0.002  # seconds; each is twice as long as the one before
LAST_PAUSE = 0.5


class Skip(Promised):
    """The `Work` of waiting for the others; what it brings see `Lookout`.

    Args:
        step: the reduction that is left out.
        steps: of optimizers since the last one.
        wake: asks the watchdog to come at once.
    """

    can_time_out = True  # whatever the group's backend is

    def __init__(self, step: int, steps: int, wake: Callable[[], None]) -> None:
        super().__init__(Future())
        self._step, self._steps = step, steps
        self._wake = wake

    def see(self, cursors: Mapping[int, Cursor], num_others: int) -> bool:
        """Called by the watchdog with the others' last words; whether that is all."""
        here = {
            rank: cursor.progress
            for rank, cursor in cursors.items()
            if cursor.progress.step == self._step
        }
        behind = {r: p for r, p in here.items() if p.steps < self._steps}
        reducing = [rank for rank, progress in behind.items() if progress.is_reducing]
        if reducing:
            who = ", ".join(map(str, reducing))
            self.future.set_result(f"The backward of rank {who} waits for it.")
        elif len(here) == num_others and not behind:
            self.future.set_result("")
        return self.future.done()

    def is_done_within(self, seconds: float) -> bool:
        """Look often at first: mostly all ranks do the same at the same time."""
        deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
        while not self.future.done() and time.monotonic() < deadline:
            self._wake()
            super().is_done_within(min(pause, seconds))
            pause = min(2 * pause, LAST_PAUSE)
        return self.future.done()


def ask_who_skips(reducer: Reducer, names: list[str]) -> str:
    """All gradients are zeros: on all ranks, or do others have the backward?

    Zeros move parameters by momentum and weight decay. Who waits in the reduction would
    not make this step.
    """
    watch, ledger = reducer.pipeline.watch, reducer.ledger
    if watch.group.size() == 1:
        return ""
    skip = watch.lookout.ask_who_skips(ledger.finalized, ledger.steps)
    with watch.over("finding out whether all ranks leave out a backward"):
        waiting = _UNKNOWN if skip is None else watch.wait(skip)
    if not waiting:
        return ""
    problem = words.skipped_alone(reducer, names, waiting)
    reducer.tell_others(UnsyncedGradientsError(problem))
    return problem
