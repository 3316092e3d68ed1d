"""What waiting ranks say about the others: pure data in, sentences out."""

from __future__ import annotations

import threading
import time

import pytest
from torch.futures import Future

from minidp._cursor import Cursor, Progress, is_waiting, place_of
from minidp._hang_report import Alarm, Sighting
from minidp._post import Post
from minidp._waiting import Promised, wait_for


def cursor(started, doing="", *, missing=(), num_missing=None, where="", **more):
    count = len(missing) if num_missing is None else num_missing
    progress = Progress(3, "in a backward", started, doing, tuple(missing), count)
    return Cursor(
        progress, 7, more.get("seconds", 0.0), where, more.get("waits", False)
    )


def sighting(cursors, *, silent=(), alarms=(), started=5):
    others = dict(enumerate(cursors, start=1))
    known = {rank: c for rank, c in others.items() if c is not None}
    by_rank = {alarm.rank: alarm for alarm in alarms}
    return Sighting(0, len(cursors) + 1, started, known, silent, by_rank)


def test_cursor_travels_as_json():
    there = cursor(4, "waiting", missing=["a", "b"], where="f (x.py:3)", seconds=1.5)
    assert Cursor.from_json(there.to_json()) == there


def test_who_is_behind_is_missing():
    seen = sighting([cursor(5), cursor(4, where="load (data.py:9)", seconds=14.2)])
    assert seen.absent() == [2]
    assert seen.to_text() == (
        "Missing: rank 2. Rank 2 runs, but does something else: step 3, in a backward, "
        "in load (data.py:9); for 14 s nothing has moved there."
    )


def test_code_that_goes_on():
    seen = sighting([cursor(4, where="evaluate (train.py:41)", seconds=1.0)])
    assert seen.to_text() == (
        "Missing: rank 1. Rank 1 runs, but does something else: step 3, in a backward, "
        "in evaluate (train.py:41); its code goes on there."
    )


def test_who_waits_in_another_collective():
    seen = sighting([cursor(4, where="barrier (x.py:1)", seconds=300.0, waits=True)])
    assert seen.to_text() == (
        "Missing: rank 1. Rank 1 runs, but waits for other ranks elsewhere: step 3, in "
        "a backward, in barrier (x.py:1); for 300 s nothing has moved there."
    )


BUSY, WAITS, WAITS_ELSEWHERE = cursor(4), cursor(4, "waiting"), cursor(4, waits=True)


@pytest.mark.parametrize(
    ("cursors", "expected"),
    [
        ([BUSY], True),
        ([WAITS], False),  # for us, as we for it
        ([WAITS_ELSEWHERE], False),
        ([WAITS, BUSY, WAITS_ELSEWHERE], True),  # which may wait for the busy one
        ([WAITS, WAITS_ELSEWHERE], False),
        ([None], True),  # it has not wrapped the module yet: nothing is known
        ([None, WAITS], True),
        ([cursor(5)], True),  # it has started what we wait for
    ],
)
def test_who_may_still_come(cursors, expected):
    assert sighting(cursors).may_still_come is expected


def test_a_rank_that_is_gone_will_not_come():
    assert not sighting([BUSY, BUSY], silent=[2]).may_still_come
    assert not sighting([BUSY, BUSY], alarms=[Alarm(2, 4, "boo")]).may_still_come
    assert sighting([BUSY, BUSY], alarms=[Alarm(2, 5, "later")]).may_still_come


def test_a_thread_that_waits_for_other_ranks():
    """As the frames say: in a wait of ours, or in a collective of torch's."""
    started = threading.Event()
    never = Future()

    def waits():
        started.set()
        wait_for(Promised(never))

    thread = threading.Thread(target=waits, daemon=True)
    assert not is_waiting(threading.get_ident())
    thread.start()
    started.wait()
    deadline = time.monotonic() + 20
    while not is_waiting(thread.ident) and time.monotonic() < deadline:
        continue
    assert is_waiting(thread.ident)
    never.set_result(None)
    thread.join()
    assert not is_waiting(thread.ident)


def test_a_thread_that_asks_who_is_missing_has_waited():
    """Two ranks whose limits are over at the same time would call each other busy."""
    post = Post.__new__(Post)
    post._inquiries, post._wake, post.interval = [], lambda: None, 20.0
    thread = threading.Thread(target=post.report, args=(1,), daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not is_waiting(thread.ident) and time.monotonic() < deadline:
        continue
    assert is_waiting(thread.ident)
    post._inquiries[0].answer.set_result(None)
    thread.join()


def test_who_waits_is_late_because_of_somebody_else():
    seen = sighting([cursor(4, "waiting for the all-reduce of bucket 0"), cursor(4)])
    assert seen.absent() == [2]


def test_who_is_silent_is_missing_wherever_it_was():
    seen = sighting([cursor(5, "waiting"), cursor(6)], silent=[1])
    assert seen.to_text() == (
        "Missing: rank 1. Rank 1 does not answer (killed, stopped, or cut off); last "
        "seen: step 3, in a backward, waiting."
    )


def test_who_never_came_is_missing():
    assert sighting([None]).to_text() == (
        "Missing: rank 1. Rank 1 never said that it wrapped this module."
    )


def test_missing_gradients_are_named():
    few = sighting([cursor(4, missing=["a", "b"])])
    assert "in a backward, without gradients of a, b; its" in few.to_text()
    many = sighting([cursor(4, missing=["a", "b"], num_missing=40)])
    assert "without gradients of a, b and 38 more" in many.to_text()


def test_who_gave_up_explains_who_is_late():
    alarm = Alarm(2, 4, "ValueError: boo. What to do: nothing.")
    seen = sighting([cursor(4), cursor(4)], alarms=[alarm], silent=[1])
    assert seen.absent() == [2]
    assert seen.to_text() == "Missing: rank 2. Rank 2 gave up: ValueError: boo."


def test_who_gave_up_later_is_not_the_reason():
    seen = sighting([cursor(5), cursor(4)], alarms=[Alarm(1, 5, "the end")])
    assert seen.absent() == [2]


def test_long_errors_are_cut():
    alarm = Alarm(1, 4, "x" * 5000)
    assert len(sighting([cursor(4)], alarms=[alarm]).to_text()) < 1500


def test_nobody_is_missing():
    text = sighting([cursor(5, "broadcasting module buffers")]).to_text()
    assert text.startswith("No rank is missing, but they do not do the same ")
    assert "Rank 1: step 3, in a backward, broadcasting module buffers." in text


def test_only_some_of_many_ranks_are_told():
    text = sighting([cursor(4)] * 100).to_text()
    assert text.startswith("Missing: rank 1, 2, 3, ")
    assert text.count("Rank ") == 8


@pytest.mark.parametrize("library", [False, True])
def test_place_of_a_thread(library):
    ready, done = threading.Event(), threading.Event()

    def work():
        ready.set()
        if library:
            done.wait()
        while not done.is_set():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    while "work" not in place_of(thread.ident) or (
        library and "called from" not in place_of(thread.ident)
    ):
        pass
    place = place_of(thread.ident)
    done.set()
    thread.join()
    if library:
        assert place.startswith("wait (threading.py:")
        assert ", called from work (test_hang_report.py:" in place
    else:
        assert "work (test_hang_report.py:" in place
    assert place_of(-1) == ""
