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
    """A place in a store where ranks exchange values that JSON can hold."""

    store: Any  # None with one rank
    rank: int
    world_size: int
    seconds: float  # how long `gather` waits at most

    def post(self, topic: str, value: Any) -> None:
        """Write this rank's value for a topic.

        Raises:
            RuntimeError: The store fails.
        """
        post_json(self.store, topic, self.rank, value)

    def claim(self, times: int = 1) -> int:
        """Count one more process that says it is this rank, and return how many do."""
        return int(self.store.add(f"claimed/{self.rank}", times))

    def gather(
        self, topic: str, value: Any, among: Collection[int] = ()
    ) -> tuple[dict[int, Any], str]:
        """Post a value, wait for those of the other ranks, and return all, by rank.

        It raises nothing, because a store that fails is only one of the reasons why a
        value did not come. With one rank nothing is sent.

        Args:
            topic: What the values are about.
            value: The value of this rank.
            among: The ranks that meet, this one included. If empty, all ranks do.

        Returns:
            The values that came, and a text that says whose did not come, and why; it
            is empty if all came.
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
