"""What one replica tells the others about itself, and finds out about them.

It speaks through the process group's store, in the watchdog's thread only: a store
whose host is stopped would hold up the training for ever. ::

    cursor/{rank}    the rank's last word, a beat further each time     every interval
    alarm/{number}   a rank will not come any more, and why             once it is so
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from typing import TYPE_CHECKING

from ._cursor import MAX_NAMES, Cursor, Progress, place_of
from ._groups import own_store
from ._hang_report import Alarm, Sighting
from ._phase import Phase
from ._reducer import Reducer
from ._watch import STORE_SECONDS, OnDevice

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
    phase, pipeline = reducer.phase.now, reducer.pipeline
    text, missing = _PHRASES[phase], []
    if phase in (Phase.REDUCING, Phase.PENDING):
        text += f", bucket {pipeline.next} of {len(pipeline.buckets)} next"
        missing = [reducer.names[i] for i in reducer.countdown.missing()]
    watch = pipeline.watch
    return Progress(
        reducer.ledger.finalized,
        text,
        watch.started,
        watch.place if watch.is_busy else "",
        tuple(missing[:MAX_NAMES]),
        len(missing),
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
        self.interval = min(MAX_INTERVAL, watch.seconds / 10)
        self._reducer = weakref.ref(reducer)
        self._wake = wake
        self._thread = threading.get_ident()
        self._cursor: Cursor | None = None
        self._moved = time.monotonic()
        self._beat = 0
        self._inquiries: list[Inquiry] = []
        self.move_to(watch.group, key)

    def move_to(self, group: ProcessGroup, key: str) -> None:
        """From now on the others look for us in another place."""
        self.group = group
        self.rank, self._size = group.rank(), group.size()
        self._place = Place(own_store(group, f"watch/{key}"))

    # -- called by training threads ----------------------------------------------------

    def find_lost(self, started: int) -> str:
        """See `Lookout`."""
        for alarm in list(self._place.alarms.values()):
            if alarm.started < started:
                return f"rank {alarm.rank} gave up"
        return ""

    def report(self, started: int) -> str:
        """See `Lookout`."""
        inquiry = Inquiry(started)
        self._inquiries.append(inquiry)
        self._wake()
        try:
            limit = BEATS_OF_SILENCE * self.interval + STORE_SECONDS
            return inquiry.answer.result(limit)
        except Late:
            return (
                "Nothing is known about the other ranks: the process group's store "
                "does not answer. Its host (rank 0, or torchrun's agent) is stopped or "
                "cut off."
            )

    def give_up(self, why: str) -> None:
        """See `Lookout`."""
        reducer = self._reducer()
        started = 0 if reducer is None else reducer.pipeline.watch.started
        self._place.outgoing.append(Alarm(self.rank, started, why))
        self._wake()

    # -- called by the watchdog --------------------------------------------------------

    def tick(self) -> None:
        """Write our cursor, read what is asked for."""
        place, reducer = self._place, self._reducer()
        if reducer is None or place.problem:
            self._answer_all(place.problem)
            return
        try:
            self._publish(place, progress_of(reducer))
            if self._inquiries or reducer.pipeline.watch.is_late:
                place.read_alarms(self.rank)
            for inquiry in list(self._inquiries):
                self._investigate(inquiry, place)
        except RuntimeError as error:
            place.lose(error)
            self._answer_all(place.problem)

    def find_late_on_device(self) -> OnDevice | None:
        """A collective that an accelerator does not finish within the limit."""
        reducer = self._reducer()
        if reducer is None:
            return None
        return reducer.pipeline.watch.find_late_on_device()

    def say_goodbye(self, why: str) -> None:
        """The last word of a replica that is gone."""
        started = 0 if self._cursor is None else self._cursor.progress.started
        try:
            if not self._place.problem:
                self._place.send(Alarm(self.rank, started, why))
        except RuntimeError as error:  # nobody is left who could read it
            self._place.lose(error)

    def _publish(self, place: Place, progress: Progress) -> None:
        now = time.monotonic()
        if self._cursor is None or progress != self._cursor.progress:
            self._moved = now
        self._beat += 1
        self._cursor = Cursor(
            progress, self._beat, now - self._moved, place_of(self._thread)
        )
        place.store.set(f"cursor/{self.rank}", self._cursor.to_json())
        while place.outgoing:
            place.send(place.outgoing.pop(0))

    def _investigate(self, inquiry: Inquiry, place: Place) -> None:
        cursors = place.read_cursors(r for r in range(self._size) if r != self.rank)
        running = inquiry.see(cursors)
        known = running | place.alarms.keys()
        patience = BEATS_OF_SILENCE * self.interval
        if len(known) < self._size - 1 and inquiry.age() < patience:
            return
        found = Sighting(
            self.rank,
            self._size,
            inquiry.started,
            cursors,
            cursors.keys() - running,
            dict(place.alarms),
        )
        self._inquiries.remove(inquiry)
        inquiry.answer.set_result(found.to_text())

    def _answer_all(self, text: str) -> None:
        while self._inquiries:
            self._inquiries.pop().answer.set_result(text)


class Place:
    """Where the ranks find each other: a part of the store, new after each reset."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.problem = ""  # why the store cannot be used any more
        self.alarms: dict[int, Alarm] = {}  # of others, by rank: the first of each
        self.outgoing: list[Alarm] = []

    def lose(self, error: RuntimeError) -> None:
        """The store is gone."""
        first_line = str(error).partition("\n")[0]
        self.problem = (
            "Nothing is known about the other ranks: the process group's store is "
            "gone, and with it the process that hosted it (rank 0, or torchrun's "
            f"agent): {first_line}"
        )

    def send(self, alarm: Alarm) -> None:
        """Tell the others."""
        number = self.store.add("alarms", 1)
        row = json.dumps([alarm.rank, alarm.started, alarm.why])
        self.store.set(f"alarm/{number}", row)

    def read_alarms(self, own_rank: int) -> None:
        """What the others told."""
        number = 1
        while self.store.check([f"alarm/{number}"]):
            alarm = Alarm(*json.loads(self.store.get(f"alarm/{number}")))
            if alarm.rank != own_rank:
                self.alarms.setdefault(alarm.rank, alarm)
            number += 1

    def read_cursors(self, ranks: Iterable[int]) -> dict[int, Cursor]:
        """The last words of other ranks, as far as they said any."""
        there = [rank for rank in ranks if self.store.check([f"cursor/{rank}"])]
        return {r: Cursor.from_json(self.store.get(f"cursor/{r}")) for r in there}


class Inquiry:
    """A question for the others' whereabouts; two readings tell who runs."""

    def __init__(self, started: int) -> None:
        self.started = started
        self.answer: Future[str] = Future()
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
