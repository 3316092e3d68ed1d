"""What one replica tells the others about itself, and finds out about them.

It speaks through the process group's store, in the watchdog's thread only: a store
whose host is stopped would hold up the training for ever. ::

    cursor/{rank}    the rank's last word, a beat further each time     every interval
    alarm/{number}   a rank will not come any more, and why             once it is so
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from typing import TYPE_CHECKING

from ._cursor import Cursor, Progress, is_waiting, place_of
from ._groups import own_store
from ._hang_report import Alarm, Sighting
from ._line import line_to
from ._phase import Phase
from ._reducer import Reducer
from ._skip import Skip
from ._watch import STORE_SECONDS, OnDevice, Report
from .errors import MAX_NAMES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

MAX_INTERVAL = 1.0  # seconds between two beats
BEATS_OF_SILENCE = 3  # intervals without a beat: the rank does not run
_PHRASES = {
    Phase.IDLE: "between two steps",
    Phase.ARMED: "after a forward, before its backward",
    Phase.REDUCING: "in a backward",
    Phase.PENDING: "after a backward that left gradients missing",
    Phase.FINALIZING: "at the end of a backward",
    Phase.FAILED: "after a failure",
}


def progress_of(reducer: Reducer) -> Progress:
    """How far a reducer is; may be called from any thread."""
    step, steps = reducer.ledger.finalized, reducer.ledger.steps  # before the phase
    phase, pipeline = reducer.phase.now, reducer.pipeline
    text, missing = _PHRASES[phase], []
    if phase in (Phase.REDUCING, Phase.PENDING):
        text += f", bucket {pipeline.next} of {len(pipeline.buckets)} next"
        missing = [reducer.names[i] for i in reducer.countdown.missing()]
    watch = pipeline.watch
    return Progress(
        step,
        text,
        watch.started,
        watch.place if watch.is_busy else "",
        tuple(missing[:MAX_NAMES]),
        len(missing),
        is_reducing=phase in (Phase.REDUCING, Phase.FINALIZING),
        steps=steps,
    )


class Post:
    """See the module. It is the `Lookout` of a `Watch`.

    Args:
        reducer: the replica's.
        key: names the replica; equal on all ranks.
        wake: asks the watchdog to come at once.
    """

    def __init__(self, reducer: Reducer, key: str, wake: Callable[[], None]) -> None:
        watch = reducer.pipeline.watch
        self.pid = os.getpid()
        self.interval = min(MAX_INTERVAL, watch.seconds / 10)
        self._reducer = weakref.ref(reducer)
        self._tally = watch.tally
        self._wake = wake
        self._thread = threading.get_ident()
        self._cursor: Cursor | None = None
        self._moved = time.monotonic()
        self._beat = 0
        self._inquiries: list[Inquiry] = []
        self._skips: list[Skip] = []
        self.move_to(watch.group, key)

    def move_to(self, group: ProcessGroup, key: str) -> None:
        """From now on the others look for us in another place."""
        self.group = group
        self.rank, self._size = group.rank(), group.size()
        self._others = [rank for rank in range(self._size) if rank != self.rank]
        self._skips.clear()
        self._place = Place(own_store(group, f"watch/{key}"))
        self._wake()

    # -- called by training threads ----------------------------------------------------

    def find_lost(self, started: int) -> str:
        """See `Lookout`."""
        for alarm in list(self._place.alarms.values()):
            if alarm.started < started:
                return "it cannot finish any more"
        return ""

    def report(self, started: int) -> Report:
        """See `Lookout`."""
        inquiry = Inquiry(started)
        self._inquiries.append(inquiry)
        self._wake()
        try:
            limit = BEATS_OF_SILENCE * self.interval + STORE_SECONDS
            return inquiry.answer.result(limit)
        except Late:
            return Report(
                "Nothing is known about the other ranks: the process group's store "
                "does not answer. Its host (rank 0, or torchrun's agent) is stopped or "
                "cut off."
            )

    def give_up(self, why: str) -> None:
        """See `Lookout`."""
        self._place.outgoing.append(Alarm(self.rank, self._tally.started, why))
        self._wake()

    def ask_who_skips(self, step: int, steps: int) -> Skip:
        """See `Lookout`."""
        self._skips.append(Skip(step, steps, self._wake))
        return self._skips[-1]

    # -- called by the watchdog --------------------------------------------------------

    def tick(self) -> None:
        """Write our cursor, read what is asked for."""
        place, reducer = self._place, self._reducer()
        if reducer is None or place.problem:
            self._answer_all(place.problem)
            return
        try:
            place.refuse_if_cut()
            self._publish(place, progress_of(reducer))
            if self._inquiries or reducer.pipeline.watch.is_late:
                place.read_alarms(self.rank)
            for inquiry in list(self._inquiries):
                self._investigate(inquiry, place)
            for skip in list(self._skips):
                place.read_cursors(self._others)
                if skip.see(place.cursors, len(self._others)):
                    self._skips.remove(skip)
        except RuntimeError as error:
            place.lose(error)
            for inquiry in list(self._inquiries):
                self._answer(inquiry, place, set())

    def find_late_on_device(self) -> OnDevice | None:
        """A collective that an accelerator does not finish within the limit."""
        reducer = self._reducer()
        if reducer is None:
            return None
        return reducer.pipeline.watch.find_late_on_device()

    def more_time(self, late: OnDevice) -> bool:
        """Whether what is late on a device is waited for a little longer."""
        reducer = self._reducer()
        if reducer is None:
            return False
        return reducer.pipeline.watch.extend_on_device(late)

    def say_goodbye(self, why: str) -> None:
        """The last word of a replica that is gone."""
        self._place.outgoing.append(Alarm(self.rank, self._tally.started, why))
        try:
            if not self._place.problem:
                self._place.refuse_if_cut()
                self._place.send_all()
        except RuntimeError as error:  # nobody is left who could read it
            self._place.lose(error)

    def _publish(self, place: Place, progress: Progress) -> None:
        now, last = time.monotonic(), self._cursor
        where, waits = place_of(self._thread), is_waiting(self._thread)
        if last is None or (progress, where) != (last.progress, last.where):
            self._moved = now
        self._beat += 1
        self._cursor = Cursor(progress, self._beat, now - self._moved, where, waits)
        place.store.set(f"cursor/{self.rank}", self._cursor.to_json())
        place.send_all()

    def _investigate(self, inquiry: Inquiry, place: Place) -> None:
        place.read_cursors(self._others)
        running = inquiry.see(place.cursors)
        is_explained = any(a.started < inquiry.started for a in place.alarms.values())
        is_complete = len(running | place.alarms.keys()) >= self._size - 1
        patience = BEATS_OF_SILENCE * self.interval
        if is_explained or is_complete or inquiry.age() > patience:
            silent = set() if is_explained else place.cursors.keys() - running
            self._answer(inquiry, place, silent)

    def _answer(self, inquiry: Inquiry, place: Place, silent: Collection[int]) -> None:
        found = Sighting(
            self.rank,
            self._size,
            inquiry.started,
            dict(place.cursors),
            silent,
            dict(place.alarms),
        )
        self._inquiries.remove(inquiry)
        is_known = not place.problem or found.absent()
        text = f"{found.to_text() if is_known else ''} {place.problem}".strip()
        may_come = found.may_still_come and not place.problem
        inquiry.answer.set_result(Report(text, may_still_come=may_come))

    def _answer_all(self, text: str) -> None:
        while self._inquiries:
            self._inquiries.pop().answer.set_result(Report(text))
        while self._skips:
            self._skips.pop().future.set_result(text)


class Place:
    """Where the ranks find each other: a part of the store, new after each reset."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._line = line_to(store)
        self.problem = ""  # why the store cannot be used any more
        self.cursors: dict[int, Cursor] = {}  # of others, by rank: the last of each
        self.alarms: dict[int, Alarm] = {}  # of others, by rank: the first of each
        self.outgoing: list[Alarm] = []

    def refuse_if_cut(self) -> None:
        """Raises RuntimeError if the store's host is gone. The store would print it."""
        if self._line.is_cut():
            raise RuntimeError("the connection was closed")

    def lose(self, error: RuntimeError) -> None:
        """The store is gone."""
        first_line = str(error).partition("\n")[0]
        self.problem = (
            "Nothing is known about the other ranks: the process group's store is "
            "gone, and with it the process that hosted it (rank 0, or torchrun's "
            f"agent): {first_line}."
        )

    def send_all(self) -> None:
        """Tell the others what has not been told, in order."""
        while self.outgoing:
            self.send(self.outgoing.pop(0))

    def send(self, alarm: Alarm) -> None:
        """Tell the others."""
        number = self.store.add("alarms", 1)
        row = json.dumps([alarm.rank, alarm.started, alarm.why])
        self.store.set(f"alarm/{number}", row)

    def read_alarms(self, own_rank: int) -> None:
        """What the others told; of each rank, the first that still holds."""
        alarms: list[Alarm] = []
        while self.store.check([f"alarm/{len(alarms) + 1}"]):
            row = json.loads(self.store.get(f"alarm/{len(alarms) + 1}"))
            alarms.append(Alarm(*row))
        self.read_cursors({alarm.rank for alarm in alarms} - {own_rank})
        self.alarms = {
            alarm.rank: alarm
            for alarm in reversed(alarms)
            if alarm.rank != own_rank and self._holds(alarm)
        }

    def _holds(self, alarm: Alarm) -> bool:
        """Whether the rank has not gone on nevertheless (it caught the error)."""
        cursor = self.cursors.get(alarm.rank)
        return cursor is None or cursor.progress.started <= alarm.started

    def read_cursors(self, ranks: Iterable[int]) -> None:
        """The last words of other ranks, as far as they said any."""
        for rank in ranks:
            if self.store.check([f"cursor/{rank}"]):
                text = self.store.get(f"cursor/{rank}")
                self.cursors[rank] = Cursor.from_json(text)


class Inquiry:
    """A question for the others' whereabouts; two readings tell who runs."""

    def __init__(self, started: int) -> None:
        self.started = started
        self.answer: Future[Report] = Future()
        self._begun = time.monotonic()
        self._first: dict[int, int] = {}  # rank -> beat

    def age(self) -> float:
        """Seconds since it was asked."""
        return time.monotonic() - self._begun

    def see(self, cursors: dict[int, Cursor]) -> set[int]:
        """Ranks whose beat went on since the first reading."""
        for rank, cursor in cursors.items():
            self._first.setdefault(rank, cursor.beat)
        return {r for r, cursor in cursors.items() if cursor.beat > self._first[r]}
