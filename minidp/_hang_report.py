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
        return [rank for rank in others if self._is_absent(rank)]

    def _is_absent(self, rank: int) -> bool:
        if rank in self.silent or rank not in self.cursors:
            return True
        if rank in self.alarms and self.alarms[rank].started < self.started:
            return True
        return self.cursors[rank].progress.started < self.started

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
            return f"Rank {rank} never wrapped this module."
        seen = f"{_describe(cursor.progress)}"
        if cursor.where:
            seen += f", in {cursor.where}"
        if rank in self.silent:
            return (
                f"Rank {rank} does not answer (killed, stopped, or cut off); last "
                f"seen: {seen}."
            )
        if cursor.progress.started < self.started:
            return (
                f"Rank {rank} runs, but does something else: {seen}; for "
                f"{cursor.seconds:.0f} s nothing has moved there."
            )
        return f"Rank {rank}: {seen}."


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
    text = text.strip().rstrip(".")
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ..."


def _join(ranks: Collection[int]) -> str:
    return ", ".join(map(str, ranks))
