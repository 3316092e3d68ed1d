"""Answer a rank's questions about the others from what these publish.

There are two questions. An `Inquiry` asks which ranks are missing in a collective that
takes too long. Its answer is a `MissingRanks`, and ends up in the error::

    Missing: rank 1. Rank 1 runs, but does something else: step 3, between two steps, in
    load_batch (data.py:41); for 14 s nothing has moved there.

`Passed` asks whether some rank will not come to a meeting, because it has gone on
already: ranks that skip a backward, or that found a mistake before an optimizer step,
meet to compare notes, and must not wait for a rank that does something else.

A question may take several heartbeats. It is kept by the `Heartbeat`, whose thread
calls `try_answer` whenever it has read new statuses.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from minidp import world
from minidp.comm import FutureWork, PeerReport

from .rank_status import DELETED, ENDED, MOVED, Channel, RankStatus

# A report says that nothing moves on a rank if nothing has for a few heartbeats.
_STILL_SECONDS = 3.0
# A rank that waits for so long waits perhaps for the rank that asks, and does not come.
# One that can answer the question from inside its wait gets more time.
_STUCK_SECONDS, _STUCK_SECONDS_OF_ANSWERERS = 0.9, 5.0
_SECONDS_TO_ANSWER = 2.0  # a rank that waits looks for questions twice a second
# The last rank has come about a heartbeat ago: the collective may still be under way.
_JUST_COME_SECONDS = 1.0
_MAX_TOLD = 8  # how many ranks a report describes
_MAX_TEXT = 1200  # how many characters of another rank's error a report repeats
_GONE = {  # the text of an alarm -> what happened, perhaps at the end of the data
    ENDED: "its process ended without an error",
    DELETED: "its DataParallel object was deleted, perhaps at the end of the function "
    "that made it, or after an error there",
}
_LEFT = {*_GONE, MOVED}  # texts of alarms of ranks that may have done their part


class MissingRanks:
    """Conclude from statuses and alarms which ranks are missing in one collective.

    Args:
        channel: Holds the statuses and alarms of other ranks that were read.
        started: The number of the collective.
        silent: Ranks whose statuses are not renewed.

    Attributes:
        absent: The missing ranks. These are the ones that gave up before they started
            it. If none did, they are the ones that are silent, that have published no
            status, or that have started fewer collectives and wait for none. If the
            store was lost, a rank without status is not among them, because nobody
            could read its status. Neither is one that has started the collective, and
            has left, or moved to another place of the store, after that.
    """

    def __init__(self, channel: Channel, started: int, silent: Collection[int]) -> None:
        # A rank that has moved before it started this collective has used this place
        # for another replica, and says nothing about this one.
        self._statuses = {
            rank: status
            for rank, status in channel.statuses.items()
            if not status.has_moved or status.started >= started
        }
        self._alarms = channel.alarms
        self._is_store_lost, self._has_met = bool(channel.problem), channel.has_met
        self._started = started
        others = [r for r in range(channel.size) if r != channel.rank]
        late = (r for r, alarm in self._alarms.items() if alarm.started < started)
        self._gone = sorted(late)
        # Silent, too, but they have done their part.
        left = {rank for rank, alarm in self._alarms.items() if alarm.why in _LEFT}
        moved = {rank for rank, status in self._statuses.items() if status.has_moved}
        self._done = sorted((left | moved) - {*self._gone})
        self._others = [rank for rank in others if rank not in self._done]
        self._silent = {*silent} - {*self._done}
        # If a rank gave up, the others may be late because of it. So they are not
        # named.
        self.absent = self._gone or [
            r for r in self._others if self._is_late(r, started)
        ]

    def _is_late(self, rank: int, started: int) -> bool:
        status = self._statuses.get(rank)
        if status is None:
            return not self._is_store_lost
        if rank in self._silent:
            return True
        # A rank that waits in a collective is late because of yet another rank.
        return status.started < started and not status.wait_description

    def is_anyone_gone(self) -> bool:
        """Return whether an absent rank gave up, has ended or does not answer."""
        return bool(self._gone or self._silent.intersection(self.absent))

    def may_still_come(self) -> bool:
        """Return whether the collective may still end.

        It may if all ranks live, and one of them waits for nobody, so that it may come:
        that is also said of a rank that has published no status. And it may if all
        ranks have come, the last of them a moment ago.
        """
        statuses = [s for r, s in self._statuses.items() if r in self._others]
        waiting = [s for s in statuses if s.waits or s.wait_description]
        has_just_come = not self.absent and any(
            status.started >= self._started and status.seconds < _JUST_COME_SECONDS
            for status in waiting
        )
        is_any_gone = self._silent or self._gone
        is_any_free = len(waiting) < len(self._others)
        return not is_any_gone and (is_any_free or has_just_come)

    def to_text(self) -> str:
        """Return sentences for an error that say who is missing, and what they do.

        If nobody is missing, they say what all other ranks do.
        """
        told = self.absent
        head = f"Missing: rank {', '.join(map(str, told))}."
        if not told:
            told = self._others
            head = (
                "All ranks are running, but they wait in different places, or their "
                "messages do not arrive."
            )
            if self._done:
                done = ", ".join(map(str, self._done))
                head = (
                    f"No rank is missing, but messages do not arrive: rank {done} took "
                    "part, and left after that."
                )
        return " ".join([head, *(self._tell(rank) for rank in told[:_MAX_TOLD])])

    def _tell(self, rank: int) -> str:
        status = self._statuses.get(rank)
        if rank in self._alarms and (why := _GONE.get(self._alarms[rank].why)):
            return (
                f"Rank {rank} is gone: {why}. If it had fewer inputs than the others: "
                "train inside `with model.join():`, or give all ranks equally many."
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
    # The remedy in another rank's error is for that rank.
    text = text.partition(" What to do:")[0].strip().rstrip(".")
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ..."


class Inquiry(FutureWork):
    """Asks which ranks are missing in a collective; `try_answer` answers it.

    Args:
        started: The number of the collective.
        silence: A rank is taken not to run if its status has no new beat within so many
            seconds after the construction.
    """

    def __init__(self, started: int, silence: float) -> None:
        super().__init__(torch.futures.Future())
        self._started = started
        self._deadline = world.now() + silence
        self._first: dict[int, int] = {}  # rank -> beat

    def try_answer(self, channel: Channel) -> bool:
        """Set the result if it is known by now, and return whether it is set.

        It is known once a rank gave up before that collective, or each other rank
        either gave up, has moved or has shown a new beat. It is also set, with what is
        known, when ``silence`` is over or the store is lost. This reads the ``channel``
        only, so it never waits for the store.
        """
        statuses, alarms, problem = channel.statuses, channel.alarms, channel.problem
        for rank, status in statuses.items():
            self._first.setdefault(rank, status.beat)
        running = {
            rank
            for rank, status in statuses.items()
            if status.beat > self._first[rank] or status.has_moved
        }
        is_explained = any(alarm.started < self._started for alarm in alarms.values())
        is_complete = len(running | alarms.keys()) >= channel.size - 1
        is_over = is_explained or is_complete or world.now() > self._deadline
        if is_over or problem:
            is_known = not is_explained and not problem
            silent = statuses.keys() - running if is_known else ()
            found = MissingRanks(channel, self._started, silent)
            text = found.to_text() if found.absent or not problem else ""
            may_come = found.may_still_come() and not problem
            report = PeerReport(
                f"{text} {problem}".strip(),
                may_still_come=may_come,
                is_anyone_gone=found.is_anyone_gone(),
            )
            self.future.set_result(report)
        return self.future.done()


class Passed:
    """Asks which ranks will not come to a meeting.

    It stays open until `drop`. The heartbeat calls `try_answer` again and again, and
    each call adds to the sets below.

    Args:
        step: The number of the backward after which the ranks meet.
        steps: How many optimizer steps the asking rank has made since that backward.
        started: How many collectives of the wrapper the asking rank has started.
        may_answer: Whether a rank that is reducing, or has made as many steps and waits
            in its next forward, comes all the same. It counts as gone only if it waits
            for long and does not answer.

    Attributes:
        stepped: Ranks that have made one optimizer step more.
        reducing: Ranks that are in the next backward, or in another collective of the
            wrapper, without having made that step.
        gone: Ranks that are further than that, wait for others elsewhere, or have
            ended.
        ahead: Those of them that are further or have ended. The others are perhaps just
            late.
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
        self.ahead: set[int] = set()

    def drop(self) -> None:
        """End the question, because nobody waits for the answer any more."""
        self._is_dropped = True

    def is_completed(self) -> bool:
        """Return whether nobody waits for the answer any more."""
        return self._is_dropped

    def try_answer(self, channel: Channel) -> bool:
        """Add to the sets what the ``channel`` has read, and return `is_completed`."""
        self.gone |= channel.alarms.keys()
        self.ahead |= channel.alarms.keys()
        for rank, status in channel.statuses.items():
            if status.has_moved:
                continue
            is_new = status.beat > self._first.setdefault(rank, status.beat)
            limit = _STUCK_SECONDS_OF_ANSWERERS if self._may_answer else _STUCK_SECONDS
            is_stuck = is_new and status.waits and status.seconds > limit
            kind = self._kind(status, is_stuck=is_stuck)
            if kind is not None:
                kind.add(rank)
            if status.step > self._step:
                self.ahead.add(rank)
        return self._is_dropped

    def _kind(self, status: RankStatus, *, is_stuck: bool) -> set[int] | None:
        """Return the set for a rank of this status, or None if it may still come."""
        is_here = status.step == self._step
        waits_for_us = status.started > self._started  # in a collective of the wrapper
        if self._may_answer:
            in_forward = waits_for_us and status.steps == self._steps
            if is_here and (status.is_reducing or in_forward):
                is_silent = is_stuck and world.now() > self._answers_until
                return self.gone if is_silent else None
            is_stuck |= is_here and waits_for_us
        elif is_here and status.steps > self._steps:
            return self.stepped
        elif is_here and (status.is_reducing or waits_for_us):
            return self.reducing
        return self.gone if is_stuck or status.step > self._step else None
