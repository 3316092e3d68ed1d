"""Objects that live somewhere else, for several threads to look through.

A `weakref.WeakSet` raises if another thread makes or drops one while it is iterated.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Registry(Generic[Item]):
    """Keeps none of its items alive; iterates over those of the moment it began."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Item]] = {}  # by id
        self._lock = threading.Lock()

    def add(self, item: Item) -> None:
        """Take note of an item."""
        with self._lock:  # an id may be given again: nobody adds while we tidy up
            for number, known in list(self._known.items()):
                if known() is None:
                    self._known.pop(number, None)
            self._known[id(item)] = weakref.ref(item)

    def discard(self, item: Item) -> None:
        """Forget it. Takes no lock: a finalizer may call it anywhere."""
        self._known.pop(id(item), None)

    def __iter__(self) -> Iterator[Item]:
        """Those that are alive; one call, which no thread can interrupt, copies all."""
        for known in list(self._known.values()):
            item = known()
            if item is not None:
                yield item
