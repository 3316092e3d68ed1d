"""Publish one replica's status to the other ranks, and read theirs.

Two kinds of threads meet here. Training threads put questions and alarms into queues,
and wait for answers. The thread of the watchdog calls `Heartbeat.tick` about once a
second, and only it talks to the store, which may block for seconds when its host is
gone.
"""

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

from .rank_status import MOVED, Alarm, Channel, RankStatus, status_of
from .report import Inquiry, Passed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("minidp")
MAX_INTERVAL = 1.0  # seconds between two beats
RIDE_SECONDS = 0.25  # between two beats that carry more than the status
# A question is looked at again after so many seconds, and then less and less often.
# Most answers come at once, because all ranks skip a backward at the same time.
FIRST_PAUSE = 0.002
BEATS_OF_SILENCE = 3  # a rank without a beat for so many intervals does not run


class Heartbeat(PeerMonitor):
    """Publish one replica's status, and find out for it what the other ranks do.

    `Watchdog.start_heartbeat` makes it and gives it to the communicator as its
    ``peers``. It must be made in the training thread, because it reports the place of
    the thread that made it. The constructor connects to the store.
    """

    def __init__(
        self,
        reducer: Reducer,
        key: str,
        wake: Callable[[], None],
        *,
        is_alone: bool = False,
    ) -> None:
        communicator = reducer.communicator
        self.is_alone = is_alone  # perhaps: see `Watchdog.start_heartbeat`
        self.pid = os.getpid()
        self._calm_seconds = min(MAX_INTERVAL, communicator.seconds / 10)
        self._asked = 0.0  # when the last question was asked
        self._reducer = weakref.ref(reducer)
        self._tally = communicator.tally
        self._wake = wake  # makes the watchdog call `tick` at once
        self._thread = threading.get_ident()
        self._status: RankStatus | None = None
        self._moved = world.now()
        self._beat = 0
        self._questions: list[Inquiry | Passed] = []
        # For the places that this rank has left: what is still to be sent there, and a
        # last status, if there is one. See `leave` and `move_to`.
        self._words: list[tuple[Channel, RankStatus | None]] = []
        # What else travels with a beat, by topic: see `exchange_often`.
        self._riders: dict[str, Callable[[dict[int, Any]], Any]] = {}
        self._num_riders = 0  # how many there have ever been
        self._open(communicator.group, key, has_met=False)

    def move_to(
        self,
        group: ProcessGroup,
        key: str,
        *,
        has_met: bool = True,
        leaves_word: bool = False,
    ) -> None:
        """Publish and read at another place, perhaps in the store of another group.

        What was read or is still to be sent at the old place is forgotten (but not what
        `leave` says), and so are open questions of the kind `Passed`, which nobody
        would answer. To connect to the store may take 2 s.

        Args:
            group: The group whose store is used from now on.
            key: The place in it.
            has_met: Whether each rank is known to have wrapped the module.
            leaves_word: Whether this rank moves because a collective is over that other
                ranks may still be in. They are told at the old place, where they would
                miss its heartbeats and take it for dead.
        """
        self.is_alone &= not has_met
        if leaves_word:
            word = RankStatus(0, "", self._tally.started, has_moved=True)
            self._words.append((self._channel, word))
        self._open(group, key, has_met=has_met)

    def _open(self, group: ProcessGroup, key: str, *, has_met: bool) -> None:
        self.group, self.rank = group, group.rank()
        self._questions = [q for q in self._questions if isinstance(q, Inquiry)]
        store = own_store(group, f"watch/{key}")
        self._channel = Channel(store, self.rank, group.size(), has_met=has_met)
        self._wake()

    # -- called by training threads ----------------------------------------------------

    def find_lost(self, started: int) -> str:
        """Return why collective number ``started`` cannot finish, or "" if it may.

        It cannot if a rank gave up before it. This knows the alarms that `tick` has
        read, and does not ask the store.
        """
        alarms = list(self._channel.alarms.values())
        is_lost = any(alarm.started < started for alarm in alarms)
        return "a rank that it needs is gone" if is_lost else ""

    def num_started_by_all(self) -> int | None:
        """Return after how many collectives the first rank gave up, or None.

        This knows the alarms that `tick` has read.
        """
        return min((a.started for a in self._channel.alarms.values()), default=None)

    def report(self, started: int) -> PeerReport:
        """Find out who is missing in collective number ``started``.

        This waits up to 6 s for the watchdog's thread. If it has no answer by then, the
        report names no rank, and says that the store does not answer.
        """
        # With riders a rank beats more often, but not all ranks may have them. So
        # silence is measured in the intervals that all ranks keep.
        silence = BEATS_OF_SILENCE * self._calm_seconds
        inquiry = Inquiry(started, silence)
        with waiting():  # other ranks are to see that this one still waits
            self._ask(inquiry)
            # The beat that sees that the silence is over comes up to an interval later,
            # and only then does the store have its time to answer.
            if inquiry.is_done_within(silence + self._calm_seconds + STORE_SECONDS):
                report: PeerReport = inquiry.wait()
                return report
        return PeerReport(
            "Nothing is known about the other ranks: the process group's store does "
            "not answer. Its host (rank 0, or torchrun's agent) is stopped or cut off."
        )

    def give_up(self, why: str) -> None:
        """Tell the other ranks that this one joins no further collective, and ``why``.

        The watchdog's thread sends it at its next `tick`; this does not wait for it.
        """
        self._channel.outgoing.append(Alarm(self.rank, self._tally.started, why))
        self._wake()

    def leave(self) -> None:
        """Tell the ranks of the present place that this one joins another group.

        `move_to` must follow. The watchdog's thread sends the alarm at its next `tick`.
        """
        if self.is_awaited:
            self.give_up(MOVED)
            self._words.append((self._channel, None))

    def ask_who_passed(self, step: int, steps: int, *, may_answer: bool) -> Passed:
        """Ask whether some rank will not come, and return the open question at once."""
        passed = Passed(step, steps, self._tally.started, may_answer=may_answer)
        self._ask(passed)
        return passed

    def exchange_often(
        self, topic: str, rider: Callable[[dict[int, Any]], Any]
    ) -> Callable[[], None]:
        """Exchange something small with the other ranks, at least 4 times a second.

        The watchdog's thread calls ``rider`` with what all ranks have posted last
        (which is read on rank 0 only), and posts what it returns. An error that
        ``rider`` raises is logged, and ends the exchange. All ranks must call this
        equally often, because the n-th calls of all ranks belong together.

        Returns:
            A function that stops the exchange.
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
        """How many seconds to wait for the next `tick`.

        They are few after a question, and then become more and more.
        """
        pause = max(FIRST_PAUSE, world.now() - self._asked)
        beat = self._calm_seconds
        if self._riders:
            beat = min(RIDE_SECONDS, beat)
        return min(pause, beat) if self._questions else beat

    @property
    def communicator(self) -> Communicator | None:
        """The communicator of the reducer, or None if the reducer was deleted."""
        reducer = self._reducer()
        return None if reducer is None else reducer.communicator

    def tick(self) -> None:
        """Publish status and alarms, call the riders, and answer open questions.

        To spare the store, statuses of other ranks are read only while a question is
        open, and their alarms only for an `Inquiry`, while a wait is late, or if
        collectives run on a device. If the store fails, the channel keeps the reason as
        its `problem`, which answers all questions.
        """
        channel, reducer, questions = self._channel, self._reducer(), [*self._questions]
        if reducer is None:
            return
        communicator, status = reducer.communicator, self._next_status(reducer)
        # The store may keep this thread for seconds. If it held the reducer meanwhile,
        # a replica that the user drops would keep its parameters and buckets for as
        # long.
        del reducer
        try:
            if not channel.problem:
                channel.send(status)
                is_asked = any(isinstance(each, Inquiry) for each in questions)
                # On a device this rank does not notice by itself that it waits.
                may_wait = communicator.is_late or communicator.is_on_device
                channel.read_news(statuses=bool(questions), alarms=is_asked or may_wait)
                for topic, rider in list(self._riders.items()):
                    self._carry(channel, topic, rider)
        except RuntimeError as error:
            channel.lose(error)
        self._send_words()
        for question in questions:
            is_over = question.is_completed() or question.try_answer(channel)
            if is_over and question in self._questions:
                self._questions.remove(question)

    def _send_words(self) -> None:
        # The thread of `tick` does it, so that they follow all that it has sent there.
        while self._words:
            left, word = self._words.pop()
            if left.problem:
                continue
            try:
                left.send(word)
            except RuntimeError as error:  # the present place may be in another store
                left.lose(error)

    def _carry(
        self, channel: Channel, topic: str, rider: Callable[[dict[int, Any]], Any]
    ) -> None:
        posted = channel.read(topic)
        try:
            value = rider(posted)
        except Exception:
            self._riders.pop(topic, None)
            logger.exception(
                "[rank %d] The exchange of %s ends, because it raised the error below. "
                "Training goes on.",
                self.rank,
                topic,
            )
        else:
            channel.post(topic, value)

    @property
    def is_awaited(self) -> bool:
        """Whether other ranks may wait for this replica."""
        return not self.is_alone or self._tally.has_reduced

    def say_goodbye(self, why: str) -> None:
        """Tell the other ranks at once, not in the next `tick`, that this one gives up.

        This may block, as `tick` does. It raises nothing if the store is lost.
        """
        self.give_up(why)
        self._send_words()
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
