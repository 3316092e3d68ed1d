"""Exchange facts between ranks through the store, and learn which ranks are gone.

Each rank writes its value, reads all, and waits a limited time for what is missing.
A collective that lacks a rank waits for the backend's timeout and leaves the group
unusable; here the other ranks learn which rank is missing and go on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from minidp.comm import post_json, read_json

from .words import in_words, join, of_ranks

_POLL_SECONDS = 0.01
Gathered = tuple[dict[int, Any], dict[int, str]]  # by rank: its value, or why none


class Meeting:
    """Exchange JSON through a store, waiting ``seconds`` at most; name absent ranks."""

    def __init__(self, store: Any, rank: int, world_size: int, seconds: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.seconds = seconds
        self._store = store

    def post(self, topic: str, value: Any) -> None:
        """Write this rank's JSON value for a topic; RuntimeError if the store fails."""
        post_json(self._store, topic, self.rank, value)

    def claim(self, times: int = 1) -> int:
        """Add ``times`` to the store's count of processes with this rank; return it."""
        return int(self._store.add(f"claimed/{self.rank}", times))

    def leave(self, why: str) -> None:
        """Post why this rank leaves; others then wait for it only with ``is_last``."""
        self.post("left", why)

    def gather(
        self,
        topic: str,
        value: Any,
        among: Collection[int] = (),
        *,
        is_last: bool = False,
    ) -> Gathered:
        """Post a JSON value; wait for the other ranks'; return both maps of `Gathered`.

        Waits at most `seconds`; a store that fails is the reason why, not an error.
        With one rank nothing is sent. ``among``: ranks to wait for (empty: all);
        ``is_last``: wait also for ranks that called `leave`.
        """
        if self.world_size == 1:
            return {self.rank: value}, {}
        said: dict[int, Any] = {self.rank: value}
        absent: dict[int, str] = {}
        waiting = {*(among or range(self.world_size))} - {self.rank}
        why = f"said nothing within {self.seconds:g} s"
        deadline = time.monotonic() + self.seconds
        try:
            self.post(topic, value)
            while waiting:
                said |= read_json(self._store, topic, waiting)
                absent |= {} if is_last else self.who_left()
                waiting -= said.keys() | absent.keys()
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_SECONDS)
        except RuntimeError as error:
            why = f"cannot be heard: the store is gone ({in_words(error)})"
        absent |= dict.fromkeys(waiting - said.keys(), why)
        absent = {r: absent[r] for r in sorted(absent.keys() - said.keys())}
        return dict(sorted(said.items())), absent

    def who_left(self) -> dict[int, str]:
        """Return why others called `leave`, by rank; RuntimeError: the store fails."""
        return read_json(self._store, "left", {*range(self.world_size)} - {self.rank})


def absence(absent: Mapping[int, str]) -> str:
    """Return a text that says which ranks are absent, and why; "" if none is."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, why in absent.items():
        ranks_of[why].append(rank)
    return join(f"{of_ranks(ranks)} {why}" for why, ranks in ranks_of.items())
