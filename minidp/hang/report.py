"""Answer a rank's questions about the others from what these publish.

`Inquiry`: which ranks are missing in a collective? ::

    Missing: rank 1. Rank 1 runs, but does something else: idle after step 3,
    14 s without progress, in load_batch (data.py:41).

`Passed`: will some rank not come to a meeting, because it has gone on already?
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from minidp import world
from minidp.comm import FutureWork, PeerReport

from .rank_status import ENDED, Channel, RankStatus

_STILL_SECONDS = 3.0  # a few heartbeats
# In a wait, perhaps for the rank that asks; a rank that may answer from there has time.
_STUCK_SECONDS, _STUCK_SECONDS_OF_ANSWERERS = 0.9, 5.0
_SECONDS_TO_ANSWER = 2.0  # a rank that waits looks for questions twice a second
_JUST_COME_SECONDS = 1.0  # about a heartbeat: a collective may still be under way
_MAX_TOLD = 8  # ranks
_MAX_TEXT = 1200  # characters of another rank's error


class Sighting:
    """Find out from statuses and alarms which ranks are missing in one collective.

    The constructor does so, from what ``channel`` has read; ``started``: its number.
    ``absent``: ranks that gave up; if none did, those that are silent, have published
    no status, or have started fewer collectives and wait for none. If the store was
    lost, a rank without status is not called absent: its status was never read.
    ``silent``: ranks whose statuses are not renewed.
    """

    def __init__(self, channel: Channel, started: int, silent: Collection[int]) -> None:
        self._statuses, self._alarms = channel.statuses, channel.alarms
        self._is_store_lost, self._has_met = bool(channel.problem), channel.has_met
        self._started = started
        self._silent = silent
        self._others = [r for r in range(channel.size) if r != channel.rank]
        late = (r for r, alarm in self._alarms.items() if alarm.started < started)
        self._gone = sorted(late)
        # If a rank gave up, others may be late for the same reason.
        self.absent = self._gone or [
            r for r in self._others if self._is_late(r, started)
        ]

    def _is_late(self, rank: int, started: int) -> bool:
        status = self._statuses.get(rank)
        if status is None:
            return not self._is_store_lost
        if rank in self._silent:
            return True
        # A rank that waits is late because of another one.
        return status.started < started and not status.wait_description

    def may_still_come(self) -> bool:
        """Return whether the collective may still end, because all ranks live.

        Some other rank does not wait, and may come (also one that has published no
        status). Or all have come, the last of them a moment ago.
        """
        waiting = [s for s in self._statuses.values() if s.waits or s.wait_description]
        has_just_come = not self.absent and any(
            status.started >= self._started and status.seconds < _JUST_COME_SECONDS
            for status in waiting
        )
        is_any_gone = self._silent or self._gone
        is_any_free = len(waiting) < len(self._others)
        return not is_any_gone and (is_any_free or has_just_come)

    def to_text(self) -> str:
        """Return sentences for an error: which ranks are missing, and what they do.

        Tells what all others do if none is missing. Describes 8 ranks at most.
        """
        told = self.absent
        head = f"Missing: rank {', '.join(map(str, told))}."
        if not told:
            told = self._others
            head = (
                "No rank is missing, but they do not do the same (or what they send "
                "does not arrive)."
            )
        return " ".join([head, *(self._tell(rank) for rank in told[:_MAX_TOLD])])

    def _tell(self, rank: int) -> str:
        status = self._statuses.get(rank)
        if rank in self._alarms and self._alarms[rank].why == ENDED:
            return (
                f"Rank {rank} is gone: its process ended without an error. If it had "
                "fewer inputs than the others: train inside `with model.join():`, or "
                "give all ranks equally many."
            )
        if rank in self._alarms:
            return f"Rank {rank} gave up: {_cut(self._alarms[rank].why)}."
        if status is None:
            if self._has_met:
                return (
                    f"Rank {rank} has wrapped this module, but nothing was heard of it "
                    "since: its process has ended or is stopped, or it publishes "
                    "nothing because it has hang_timeout=None."
                )
            return f"Rank {rank} never said that it wrapped this module."
        seen = _describe(status)
        if rank in self._silent:
            return (
                f"Rank {rank} does not answer (killed, stopped, or cut off); last "
                f"seen: {seen}."
            )
        if rank not in self.absent:
            return f"Rank {rank}: {seen}."
        does = (
            "waits for other ranks elsewhere" if status.waits else "does something else"
        )
        still = "its code goes on there"
        if status.seconds >= _STILL_SECONDS:
            still = f"for {status.seconds:.0f} s nothing has moved there"
        return f"Rank {rank} runs, but {does}: {seen}; {still}."


def _describe(status: RankStatus) -> str:
    where = f"in {status.where}" if status.where else ""
    parts = (f"step {status.step}", status.phase, status.wait_description, where)
    return ", ".join(filter(None, parts))


def _cut(text: str) -> str:
    """Return another rank's error text up to "What to do:", at most 1200 characters."""
    text = text.partition(" What to do:")[0].strip().rstrip(".")
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ..."


class Inquiry(FutureWork):
    """Find out which ranks are missing in a collective; `try_answer` sets the result.

    Its number is ``started``. The constructor starts the time: a rank whose status has
    no new beat within ``silence`` seconds does not run.
    """

    def __init__(self, started: int, silence: float) -> None:
        super().__init__(torch.futures.Future())
        self._started = started
        self._deadline = world.now() + silence
        self._first: dict[int, int] = {}  # rank -> beat

    def try_answer(self, channel: Channel) -> bool:
        """Set the result if known, or ``silence`` is over, or the store is lost.

        Return whether it is set. Known: a rank gave up before that collective, or each
        other rank gave up or has a new beat. Reads ``channel``, not the store.
        """
        statuses, alarms, problem = channel.statuses, channel.alarms, channel.problem
        for rank, status in statuses.items():
            self._first.setdefault(rank, status.beat)
        running = {r for r, s in statuses.items() if s.beat > self._first[r]}
        is_explained = any(alarm.started < self._started for alarm in alarms.values())
        is_complete = len(running | alarms.keys()) >= channel.size - 1
        is_over = is_explained or is_complete or world.now() > self._deadline
        if is_over or problem:
            is_known = not is_explained and not problem
            silent = statuses.keys() - running if is_known else ()
            found = Sighting(channel, self._started, silent)
            text = found.to_text() if found.absent or not problem else ""
            may_come = found.may_still_come() and not problem
            report = PeerReport(f"{text} {problem}".strip(), may_still_come=may_come)
            self.future.set_result(report)
        return self.future.done()


class Passed:
    """Find out which ranks do not come to a meeting; heartbeats call `try_answer`.

    The meeting is after backward number ``step``, ``steps`` optimizer steps and
    ``started`` collectives. A rank does not come if it has *stepped* once more; if it
    is *reducing*, in the next backward or another collective of the wrapper, without
    that step; or if it is *gone*: further than that, into a wait for others elsewhere,
    or for good. ``may_answer``: a rank that has stepped or is reducing comes all the
    same, unless it waits for long and does not answer. Open until `drop`.
    """

    def __init__(
        self, step: int, steps: int, started: int, *, may_answer: bool
    ) -> None:
        self._step, self._steps, self._may_answer = step, steps, may_answer
        self._started = started
        self._answers_until = world.now() + _SECONDS_TO_ANSWER
        self._first: dict[int, int] = {}  # rank -> beat
        self._is_dropped = False
        self.stepped: set[int] = set()
        self.reducing: set[int] = set()
        self.gone: set[int] = set()

    def drop(self) -> None:
        """Forget the question: nobody waits for the answer any more."""
        self._is_dropped = True

    def is_completed(self) -> bool:
        """Return whether nobody waits for the answer any more."""
        return self._is_dropped

    def try_answer(self, channel: Channel) -> bool:
        """Fill the sets from ``channel``; return `is_completed`. Reads no store."""
        self.gone |= channel.alarms.keys()
        for rank, status in channel.statuses.items():
            is_new = status.beat > self._first.setdefault(rank, status.beat)
            limit = _STUCK_SECONDS_OF_ANSWERERS if self._may_answer else _STUCK_SECONDS
            is_stuck = is_new and status.waits and status.seconds > limit
            kind = self._kind(status, is_stuck=is_stuck)
            if kind is not None:
                kind.add(rank)
        return self._is_dropped

    def _kind(self, status: RankStatus, *, is_stuck: bool) -> set[int] | None:
        """Return the set of ranks with this status; None: such a rank may come."""
        is_here = status.step == self._step
        waits_for_us = status.started > self._started  # in a collective of the wrapper
        if self._may_answer:
            if is_here and status.is_reducing:
                is_silent = is_stuck and world.now() > self._answers_until
                return self.gone if is_silent else None
            is_stuck |= is_here and waits_for_us
        elif is_here and status.steps > self._steps:
            return self.stepped
        elif is_here and (status.is_reducing or waits_for_us):
            return self.reducing
        return self.gone if is_stuck or status.step > self._step else None
