"""What a guard has to do in the coming backward: ask the other ranks, or look again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from minidp.core import Observer, Reducer

from .comparison import Kind

if TYPE_CHECKING:
    from .mistakes import Suspicion
    from .optimizer_guard import Guard


class LookAgain(Observer):
    """Let a guard look for joined parameters when the coming backward has ended."""

    def __init__(self, guard: Guard) -> None:
        self._guard = weakref.proxy(guard)

    def finished(self) -> None:
        """Look now, outside the forward, and leave the observers."""
        self._guard.reducer.queue.observers.remove(self)
        self._guard.look_again()


class AskInBackward(Observer):
    """Let a guard ask the other ranks when the coming backward begins.

    There they all wait for this rank, so they can answer. If one of them is too late
    for that, nothing is decided, and the guard asks again in the next backward.

    Args:
        guard: The guard that asks.
        kind: Why it asks.
        suspicion: Gets the guard, and returns what it suspects.
        conclude: Gets the guard and the verdict.
        is_needed: Returns whether to ask after all.
        looks_again: As in `Comparison.with_waiting_ranks`.
    """

    def __init__(
        self,
        guard: Guard,
        kind: Kind,
        suspicion: Callable[[Guard], Suspicion],
        conclude: Callable[..., None],
        is_needed: Callable[[Guard], bool] = lambda _: True,
        *,
        looks_again: tuple[str, str] | None = None,
    ) -> None:
        self._kind, self._looks_again = kind, looks_again
        self._guard = weakref.proxy(guard)  # a cycle would keep buckets
        self._suspicion, self._conclude = suspicion, conclude
        self._is_needed = is_needed

    def begins(self) -> None:
        """Leave the observers, and ask if that is still needed."""
        guard = self._guard
        guard.reducer.queue.observers.remove(self)
        if not self._is_needed(guard):
            return
        verdict = guard.comparison.with_waiting_ranks(
            self._kind, looks_again=self._looks_again
        )
        if verdict.late:
            guard.changes.ask_later(self._suspicion(guard))
        else:
            self._conclude(guard, verdict)


def add_once(reducer: Reducer, observer: Observer) -> bool:
    """Register an observer unless one of its class waits, and return whether it did."""
    observers = reducer.queue.observers
    if any(type(each) is type(observer) for each in observers.everybody):
        return False
    observers.append(observer)
    return True
