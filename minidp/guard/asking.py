"""What a guard has to do in the coming backward: ask the other ranks, or look again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from minidp.core import Observer, Reducer

from .comparison import Kind

if TYPE_CHECKING:
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
    """Let a guard ask the other ranks when the coming backward begins, once.

    There they all wait for this rank, so they can answer.

    Args:
        guard: The guard that asks.
        kind: Why it asks.
        conclude: Gets the guard and the verdict.
        is_needed: Returns whether to ask after all.
        looks_again: As in `Comparison.with_waiting_ranks`.
    """

    def __init__(
        self,
        guard: Guard,
        kind: Kind,
        conclude: Callable[..., None],
        is_needed: Callable[[Guard], bool] = lambda _: True,
        *,
        looks_again: tuple[str, str] | None = None,
    ) -> None:
        self._kind, self._looks_again = kind, looks_again
        self._guard = weakref.proxy(guard)  # a cycle would keep buckets
        self._conclude, self._is_needed = conclude, is_needed

    def begins(self) -> None:
        """Leave the observers, and ask if that is still needed."""
        self._guard.reducer.queue.observers.remove(self)
        if self._is_needed(self._guard):
            verdict = self._guard.comparison.with_waiting_ranks(
                self._kind, looks_again=self._looks_again
            )
            self._conclude(self._guard, verdict)


def add_once(reducer: Reducer, observer: Observer) -> bool:
    """Register an observer unless one of its class waits, and return whether it did."""
    observers = reducer.queue.observers
    if any(type(each) is type(observer) for each in observers.everybody):
        return False
    observers.append(observer)
    return True
