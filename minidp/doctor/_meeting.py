"""Ranks tell each other facts through the store: no collective, nobody is blocked.

    rank 0   set facts/0 --.
    rank 1   set facts/1 --+--> store --> each rank reads all, waits a limited time
    rank 2   (dead)                       for what is missing, and names it

A collective with a rank missing ends in the backend's time and leaves the group
unusable; here the others learn who is missing and go on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ._findings import join, of_ranks

_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Gathered:
    """What ranks said on a topic.

    Args:
        values: by rank, of those that said something.
        absent: rank -> why it did not.
    """

    values: dict[int, Any]
    absent: dict[int, str] = field(default_factory=dict)


class Meeting:
    """The ranks of one group, around its store.

    Args:
        store: a ``torch.distributed`` store with a prefix that nobody used before.
        rank: of this process.
        world_size: how many there should be.
        seconds: how long to wait for others on each topic.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, *, seconds: float
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.seconds = seconds
        self._store = store

    def post(self, topic: str, value: Any) -> None:
        """Say something, without waiting for the others.

        Raises:
            RuntimeError: the store is not reachable.
        """
        self._store.set(f"{topic}/{self.rank}", json.dumps(value))

    def claim(self, times: int = 1) -> int:
        """Claim this rank; how many processes did so far (0 times: only look)."""
        return int(self._store.add(f"claimed/{self.rank}", times))

    def leave(self, why: str) -> None:
        """Tell the others not to wait for this rank any more."""
        self._store.set(f"left/{self.rank}", json.dumps(why))

    def gather(
        self,
        topic: str,
        value: Any,
        among: Iterable[int] | None = None,
        *,
        is_last: bool = False,
    ) -> Gathered:
        """Say something that JSON can hold, and hear the others; never raises.

        Args:
            topic: not used before.
            value: what this rank says.
            among: ranks to wait for; None: all.
            is_last: ranks that have left may still have a last word on it.
        """
        said: dict[int, Any] = {self.rank: value}
        absent: dict[int, str] = {}
        ranks = range(self.world_size) if among is None else among
        waiting = [rank for rank in ranks if rank != self.rank]
        deadline = time.monotonic() + self.seconds
        try:
            self.post(topic, value)
            while waiting:
                self._listen(topic, waiting, said)
                if not is_last:
                    absent.update(self.who_left(set(waiting) - set(said)))
                waiting = [rank for rank in waiting if rank not in {*said, *absent}]
                if waiting and time.monotonic() > deadline:
                    why = f"said nothing within {self.seconds:g} s"
                    absent.update(dict.fromkeys(waiting, why))
                    break
                if waiting:
                    time.sleep(_POLL_SECONDS)
        except RuntimeError as error:
            why = f"cannot be heard: the store is gone ({_first_line(error)})"
            absent.update({r: why for r in waiting if r not in said})
        return Gathered(dict(sorted(said.items())), dict(sorted(absent.items())))

    def _listen(self, topic: str, waiting: list[int], said: dict[int, Any]) -> None:
        for rank in waiting:
            key = f"{topic}/{rank}"
            if self._store.check([key]):
                said[rank] = json.loads(self._store.get(key))

    def who_left(self, among: Iterable[int] | None = None) -> dict[int, str]:
        """Ranks that called `leave`, and why.

        Raises:
            RuntimeError: the store is not reachable.
        """
        ranks = range(self.world_size) if among is None else among
        keys = {rank: f"left/{rank}" for rank in ranks if rank != self.rank}
        return {
            rank: json.loads(self._store.get(key))
            for rank, key in keys.items()
            if self._store.check([key])
        }


def absence(heard: Gathered) -> str:
    """Who is missing and why, in words."""
    ranks_of: dict[str, list[int]] = {}
    for rank, why in heard.absent.items():
        ranks_of.setdefault(why, []).append(rank)
    return join(f"{of_ranks(ranks)} {why}" for why, ranks in ranks_of.items())


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(". ")
