"""Exchange facts between ranks through the store, without a collective.

A collective that lacks a rank waits for the backend's timeout and leaves the group
unusable; here the other ranks learn which rank is missing and go on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from minidp.comm import gather_json, post_json

from .words import in_words, of_ranks


@dataclass
class Meeting:
    """Exchange JSON values of ranks by a store; `gather` waits ``seconds`` at most."""

    store: Any  # None with one rank
    rank: int
    world_size: int
    seconds: float

    def post(self, topic: str, value: Any) -> None:
        """Write this rank's JSON value for a topic; RuntimeError if the store fails."""
        post_json(self.store, topic, self.rank, value)

    def claim(self, times: int = 1) -> int:
        """Count ``times`` more processes of this rank in the store; return the sum."""
        return int(self.store.add(f"claimed/{self.rank}", times))

    def gather(
        self, topic: str, value: Any, among: Collection[int] = ()
    ) -> tuple[dict[int, Any], str]:
        """Post a value; wait `seconds` at most for others' values; return all, by rank.

        ``among``: the ranks, this one included; empty: all. Also return a text that
        names ranks that did not post in time, and why; "" if all did. A store that
        fails is not raised, but a reason. With one rank nothing is sent.
        """
        own, others = {self.rank: value}, {*(among or range(self.world_size))}
        others.remove(self.rank)
        if self.world_size == 1:
            return own, ""
        heard, why = own, f"said nothing within {self.seconds:g} s"
        try:
            self.post(topic, value)
            heard |= gather_json(self.store, topic, others, self.seconds)
        except RuntimeError as error:
            why = f"cannot be heard: the store is gone ({in_words(error)})"
        absent = sorted(others - heard.keys())
        return dict(
            sorted(heard.items())
        ), f"{of_ranks(absent)} {why}" if absent else ""
