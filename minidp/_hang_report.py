"""Who is missing, where it was last seen, what it had not done: the report in words.

::

    Missing: rank 1. Rank 1 runs, but does something else: idle after step 3,
    14 s without progress, in load_batch (data.py:41).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ._cursor import Cursor, Progress


@dataclass(frozen=True)
class Alarm:
    """A rank says that it will not come any more, and why."""

    rank: int
    started: int  # collectives, by then
    why: str


@dataclass(frozen=True)
class Sighting:
    """What one rank knows of the others."""

    rank: int
    world_size: int
    started: int  # collectives, on this rank
    cursors: Mapping[int, Cursor]  # last words, by rank; without who never said one
    silent: Collection[int]  # ranks whose beat stands still
    alarms: Mapping[int, Alarm]  # by rank, the first of each

    def absent(self) -> list[int]:
        """Ranks that will not come, or have not started what this rank waits for."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        gone = [rank for rank in others if self._has_given_up(rank)]
        # If somebody gave up, others may be late for the same reason.
        return gone or [rank for rank in others if self._is_absent(rank)]

    def _has_given_up(self, rank: int) -> bool:
        return rank in self.alarms and self.alarms[rank].started < self.started

    def _is_absent(self, rank: int) -> bool:
        if rank in self.silent or rank not in self.cursors:
            return True
        theirs = self.cursors[rank].progress
        # Who waits is late because of somebody else.
        return theirs.started < self.started and not theirs.doing

    @property
    def may_still_come(self) -> bool:
        """Nobody is gone, and some rank is neither waiting nor known to do nothing.

        If all wait, they wait for each other. Nothing is known of a rank that has not
        wrapped this module; it may be busy before that.
        """
        is_anybody_gone = bool(self.silent) or any(map(self._has_given_up, self.alarms))
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return not is_anybody_gone and not all(map(self._is_waiting, others))

    def _is_waiting(self, rank: int) -> bool:
        cursor = self.cursors.get(rank)
        return cursor is not None and (cursor.waits or bool(cursor.progress.doing))

    def to_text(self) -> str:
        """Sentences for an error."""
        absent = self.absent()
        if absent:
            head = f"Missing: rank {_join(absent)}."
            told = absent
        else:
            head = (
                "No rank is missing, but they do not do the same (or what they send "
                "does not arrive)."
            )
            told = [rank for rank in range(self.world_size) if rank != self.rank]
        return " ".join([head, *(self._tell(rank) for rank in told[:_MAX_TOLD])])

    def _tell(self, rank: int) -> str:
        cursor = self.cursors.get(rank)
        if rank in self.alarms:
            return f"Rank {rank} gave up: {_cut(self.alarms[rank].why)}."
        if cursor is None:
            return f"Rank {rank} never said that it wrapped this module."
        seen = f"{_describe(cursor.progress)}"
        if cursor.where:
            seen += f", in {cursor.where}"
        if rank in self.silent:
            return (
                f"Rank {rank} does not answer (killed, stopped, or cut off); last "
                f"seen: {seen}."
            )
        if self._is_absent(rank):
            where = "waits for other ranks elsewhere" if cursor.waits else _ELSEWHERE
            is_still = cursor.seconds >= _STILL_SECONDS
            still = f"for {cursor.seconds:.0f} s nothing has moved there"
            return (
                f"Rank {rank} runs, but {where}: {seen}; "
                f"{still if is_still else 'its code goes on there'}."
            )
        return f"Rank {rank}: {seen}."


_ELSEWHERE = "does something else"
_STILL_SECONDS = 3.0  # a few heartbeats
_MAX_TOLD = 8  # ranks
_MAX_TEXT = 1200  # characters of another rank's error


def _describe(progress: Progress) -> str:
    text = f"step {progress.step}, {progress.phase}"
    if progress.doing:
        text += f", {progress.doing}"
    if progress.missing:
        names = ", ".join(progress.missing)
        rest = progress.num_missing - len(progress.missing)
        text += f", without gradients of {names}"
        text += f" and {rest} more" if rest else ""
    return text


def _cut(text: str) -> str:
    """Another rank's error, without its advice."""
    text = text.partition(" What to do:")[0].strip().rstrip(".")
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ..."


def _join(ranks: Collection[int]) -> str:
    return ", ".join(map(str, ranks))
