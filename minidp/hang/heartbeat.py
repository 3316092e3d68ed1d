"""Publish one replica's status to the other ranks, and read theirs."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minidp import world
from minidp.comm import (
    STORE_SECONDS,
    Communicator,
    PeerMonitor,
    PeerReport,
    own_store,
    waiting,
)
from minidp.core import Reducer

from .rank_status import Alarm, Channel, RankStatus, status_of
from .report import Inquiry, Passed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("minidp")
MAX_INTERVAL = 1.0  # seconds between two beats
RIDE_SECONDS = 0.25  # between two beats that carry more than the status
FIRST_PAUSE = 0.002  # seconds; mostly all ranks skip a backward at the same time
BEATS_OF_SILENCE = 3  # intervals without a beat: the rank does not run


class Heartbeat(PeerMonitor):
    """Publish one replica's status, and find out for it what other ranks do.

    `Watchdog.start_heartbeat` makes it, in the thread whose place it will report, and
    sets it as the communicator's ``peers``; the constructor connects to the store.
    Training threads only queue alarms and questions. The watchdog's thread exchanges
    them in `tick`: it alone may be blocked by a store that does not answer.
    """

    def __init__(self, reducer: Reducer, key: str, wake: Callable[[], None]) -> None:
        communicator = reducer.communicator
        self.pid = os.getpid()
        self._calm_seconds = min(MAX_INTERVAL, communicator.seconds / 10)
        self._asked = 0.0  # when the last question came
        self._reducer = weakref.ref(reducer)
        self._tally = communicator.tally
        self._wake = wake  # makes the watchdog call `tick` at once
        self._thread = threading.get_ident()
        self._status: RankStatus | None = None
        self._moved = world.now()
        self._beat = 0
        self._questions: list[Inquiry | Passed] = []
        # By topic: what else travels with a beat.
        self._riders: dict[str, Callable[[dict[int, Any]], Any]] = {}
        self._num_riders = 0  # ever
        self._open(communicator.group, key, has_met=False)

    def move_to(self, group: ProcessGroup, key: str) -> None:
        """Use ``group``'s store, under ``key``, by a new `Channel`; wake the watchdog.

        All ranks have met before: each of them is known to have wrapped the module.
        Forgets read statuses and alarms, unsent alarms, a lost store, and open `Passed`
        questions (which nobody will answer). May take 2 s to connect.
        """
        self._open(group, key, has_met=True)

    def _open(self, group: ProcessGroup, key: str, *, has_met: bool) -> None:
        self.group, self.rank = group, group.rank()
        self._questions = [q for q in self._questions if isinstance(q, Inquiry)]
        store = own_store(group, f"watch/{key}")
        self._channel = Channel(store, self.rank, group.size(), has_met=has_met)
        self._wake()

    # -- called by training threads ----------------------------------------------------

    def find_lost(self, started: int) -> str:
        """Return why collective number ``started`` cannot finish; "" if not known.

        It cannot if a rank gave up before it, by an alarm that `tick` has read; does
        not access the store itself.
        """
        alarms = list(self._channel.alarms.values())
        is_lost = any(alarm.started < started for alarm in alarms)
        return "a rank that it needs is gone" if is_lost else ""

    def report(self, started: int) -> PeerReport:
        """Find out who is missing in collective number ``started``; wait up to 5 s.

        The watchdog's thread answers an `Inquiry`. If it does not in that time, the
        report names no rank, and says that the store does not answer.
        """
        # Another rank may have stopped to beat as often as riders ask for.
        silence = BEATS_OF_SILENCE * self._calm_seconds
        inquiry = Inquiry(started, silence)
        with waiting():  # this rank has waited for the others, and is not busy now
            self._ask(inquiry)
            if inquiry.is_done_within(silence + STORE_SECONDS):
                report: PeerReport = inquiry.wait()
                return report
        return PeerReport(
            "Nothing is known about the other ranks: the process group's store does "
            "not answer. Its host (rank 0, or torchrun's agent) is stopped or cut off."
        )

    def give_up(self, why: str) -> None:
        """Queue an alarm that this rank joins no further collective, and ``why``.

        Wakes the watchdog, whose next `tick` sends it; does not wait for that.
        """
        self._channel.outgoing.append(Alarm(self.rank, self._tally.started, why))
        self._wake()

    def ask_who_passed(self, step: int, steps: int, *, may_answer: bool) -> Passed:
        """Queue the question whether some rank cannot come; return it at once."""
        passed = Passed(step, steps, self._tally.started, may_answer=may_answer)
        self._ask(passed)
        return passed

    def exchange_often(
        self, topic: str, rider: Callable[[dict[int, Any]], Any]
    ) -> Callable[[], None]:
        """Post what ``rider`` returns 4 times a second or more often, until stopped.

        The watchdog's thread calls it; statuses are then published as often. Each call
        of this method has a topic of its own, the same on ranks that call it equally
        often. Return a function that stops the exchange. So does an error of ``rider``,
        which is logged: it says nothing about the store.
        """
        own_topic = f"{topic}/{self._num_riders}"
        self._num_riders += 1
        self._riders[own_topic] = rider
        self._wake()

        def stop() -> None:
            self._riders.pop(own_topic, None)

        return stop

    def _ask(self, question: Inquiry | Passed) -> None:
        self._asked = world.now()
        self._questions.append(question)
        self._wake()

    # -- called by the watchdog --------------------------------------------------------

    @property
    def interval(self) -> float:
        """Seconds to the next `tick`; while a question is open, growing from 2 ms."""
        pause = max(FIRST_PAUSE, world.now() - self._asked)
        beat = self._calm_seconds
        if self._riders:
            beat = min(RIDE_SECONDS, beat)
        return min(pause, beat) if self._questions else beat

    @property
    def communicator(self) -> Communicator | None:
        """The reducer's communicator; None if the reducer was deleted."""
        reducer = self._reducer()
        return None if reducer is None else reducer.communicator

    def tick(self) -> None:
        """Publish status and alarms, answer questions, call riders, if the store works.

        Reads others' statuses only while questions are open, their alarms only for an
        `Inquiry` or while a wait is late. If the store fails, sets the channel's
        `problem`, which answers all questions. No-op if the reducer was deleted.
        """
        channel, reducer, questions = self._channel, self._reducer(), [*self._questions]
        if reducer is None:
            return
        communicator, status = reducer.communicator, self._next_status(reducer)
        # The store may keep this thread for seconds. A replica that the user drops
        # meanwhile must die at once, with its parameters and buckets.
        del reducer
        try:
            if not channel.problem:
                channel.send(status)
                is_asked = any(isinstance(each, Inquiry) for each in questions)
                if is_asked or communicator.is_late:
                    channel.read_alarms()
                if questions:
                    channel.read_statuses({*range(channel.size)} - {self.rank})
                for topic, rider in list(self._riders.items()):
                    self._carry(channel, topic, rider)
        except RuntimeError as error:
            channel.lose(error)
        for question in questions:
            is_over = question.is_completed() or question.try_answer(channel)
            if is_over and question in self._questions:
                self._questions.remove(question)

    def _carry(
        self, channel: Channel, topic: str, rider: Callable[[dict[int, Any]], Any]
    ) -> None:
        posted = channel.read(topic)
        try:
            value = rider(posted)
        except Exception:
            self._riders.pop(topic, None)
            logger.exception("[rank %d] The exchange of %s ends.", self.rank, topic)
        else:
            channel.post(topic, value)

    def say_goodbye(self, why: str) -> None:
        """Publish now, not in the next `tick`, that this rank gives up, and ``why``.

        May block, as `tick` does. Raises nothing if the store is lost.
        """
        self.give_up(why)
        try:
            if not self._channel.problem:
                self._channel.send(None)
        except RuntimeError as error:  # nobody is left who could read it
            self._channel.lose(error)

    def _next_status(self, reducer: Reducer) -> RankStatus:
        now, status = world.now(), status_of(reducer, self._thread)
        if status != self._status:
            self._status, self._moved = status, now
        self._beat += 1
        return replace(status, beat=self._beat, seconds=now - self._moved)
