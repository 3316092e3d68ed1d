"""What ranks tell each other through the store; no thread and no process here."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from minidp._cursor import Cursor, Progress
from minidp._hang_report import Alarm
from minidp._post import Inquiry, Place


def cursor(started, beat=1):
    return Cursor(Progress(0, "between two steps", started, ""), beat, 0.0, "")


@pytest.fixture
def store():
    return dist.HashStore()


def publish(store, rank, started, beat=1):
    store.set(f"cursor/{rank}", cursor(started, beat).to_json())


def test_alarms_reach_the_others_but_not_the_sender(store):
    publish(store, 1, 4)
    Place(store).send(Alarm(1, 4, "boo"))
    for rank, heard in [(0, {1: Alarm(1, 4, "boo")}), (1, {})]:
        place = Place(store)
        place.read_alarms(rank)
        assert place.alarms == heard


def test_the_first_alarm_of_a_rank_counts(store):
    place = Place(store)
    for why in ("the cause", "its process ended"):
        place.send(Alarm(2, 4, why))
    place.read_alarms(0)
    assert place.alarms[2].why == "the cause"


def test_an_alarm_is_forgotten_when_the_rank_has_gone_on(store):
    place = Place(store)
    place.send(Alarm(1, 4, "an error that was caught"))
    publish(store, 1, 5)
    place.read_alarms(0)
    assert place.alarms == {}
    place.send(Alarm(1, 5, "the end"))
    place.read_alarms(0)
    assert place.alarms[1].why == "the end"


def test_cursors_of_ranks_that_never_spoke_are_not_there(store):
    publish(store, 2, 7)
    place = Place(store)
    place.read_cursors([1, 2])
    assert place.cursors == {2: cursor(7)}


def test_a_lost_store_says_so(store):
    place = Place(store)
    assert place.problem == ""
    place.lose(RuntimeError("Broken pipe\na long trace"))
    assert "the process that hosted it (rank 0, or torchrun's agent): Broken pipe." in (
        place.problem
    )


def test_two_readings_tell_who_runs():
    inquiry = Inquiry(3)
    assert inquiry.see({1: cursor(0, 5), 2: cursor(0, 8)}) == set()
    assert inquiry.see({1: cursor(0, 5), 2: cursor(0, 9)}) == {2}
    assert inquiry.see({1: cursor(0, 5), 2: cursor(0, 9), 3: cursor(0, 1)}) == {2}
