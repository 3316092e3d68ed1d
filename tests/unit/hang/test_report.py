"""What waiting ranks say about the others: pure data in, sentences out."""

from __future__ import annotations

import gc
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from torch.futures import Future

from minidp.comm.work import FutureWork, wait_for
from minidp.hang import heartbeat
from minidp.hang.rank_status import Alarm, RankStatus, _text_of_missing, place_of
from minidp.hang.report import Inquiry, Sighting, Skip


def status(started, wait="", **more):
    return RankStatus(3, "in a backward", started, wait, **more)


def channel(*statuses, alarms=(), problem=""):
    """Of ranks 1, 2, ...; None: it published nothing."""
    return SimpleNamespace(
        rank=0,
        size=len(statuses) + 1,
        statuses={r: s for r, s in enumerate(statuses, start=1) if s is not None},
        alarms={alarm.rank: alarm for alarm in alarms},
        problem=problem,
    )


def sighting(*statuses, silent=(), alarms=()):
    return Sighting(channel(*statuses, alarms=alarms), 5, silent)


LATE = status(4, where="load (data.py:9)", seconds=14.2)
WHERE = "step 3, in a backward, in load (data.py:9)"


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (
            sighting(status(5), LATE),
            f"2. Rank 2 runs, but does something else: {WHERE}; for 14 s nothing has",
        ),
        (
            sighting(status(4, where="load (data.py:9)", seconds=1.0)),
            f"1. Rank 1 runs, but does something else: {WHERE}; its code goes on",
        ),
        (
            sighting(status(4, where="load (data.py:9)", waits=True)),
            f"1. Rank 1 runs, but waits for other ranks elsewhere: {WHERE}; ",
        ),
        (
            sighting(status(5, "waiting"), status(6), silent=[1]),
            "1. Rank 1 does not answer (killed, stopped, or cut off); last seen: step "
            "3, in a backward, waiting.",
        ),
        (sighting(None), "1. Rank 1 never said that it wrapped this module."),
        (
            sighting(
                LATE,
                LATE,
                alarms=[Alarm(2, 4, "ValueError: boo. What to do: nothing.")],
                silent=[1],  # late for the same reason
            ),
            "2. Rank 2 gave up: ValueError: boo.",
        ),
        # Who waits is late because of another one; who gave up later is no reason.
        (sighting(status(4, "waiting"), LATE), "2. Rank 2 runs"),
        (sighting(status(5), LATE, alarms=[Alarm(1, 5, "the end")]), "2. Rank 2 runs"),
    ],
)
def test_text_about_an_absent_rank(seen, text):
    assert seen.to_text().startswith(f"Missing: rank {text}")


def test_texts_that_might_be_long():
    alarm = Alarm(1, 4, "x" * 5000)
    assert len(sighting(status(4), alarms=[alarm]).to_text()) < 1500
    many = sighting(*[status(4)] * 100).to_text()
    assert many.startswith("Missing: rank 1, 2, 3, ")
    assert many.count("Rank ") == 8
    names = [f"p{i}" for i in range(40)]
    assert _text_of_missing(names).endswith(
        "without gradients of p0, p1, p2, p3, p4, p5, p6, p7, p8, p9 and 30 more"
    )


def test_nobody_is_missing():
    text = sighting(status(5, "broadcasting module buffers")).to_text()
    assert text.startswith("No rank is missing, but they do not do the same ")
    assert "Rank 1: step 3, in a backward, broadcasting module buffers." in text


BUSY, WAITS, WAITS_ELSEWHERE = status(4), status(4, "waiting"), status(4, waits=True)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (sighting(BUSY), True),
        (sighting(WAITS), False),  # for us, as we for it
        (sighting(WAITS_ELSEWHERE), False),
        (
            sighting(WAITS, BUSY, WAITS_ELSEWHERE),
            True,
        ),  # they may wait for the busy one
        (sighting(WAITS, WAITS_ELSEWHERE), False),
        (sighting(None), True),  # it has not wrapped the module yet: nothing is known
        (sighting(None, WAITS), True),
        (sighting(status(5)), True),  # it has started what we wait for
        (sighting(BUSY, BUSY, silent=[2]), False),
        (sighting(BUSY, BUSY, alarms=[Alarm(2, 4, "boo")]), False),
        (sighting(BUSY, BUSY, alarms=[Alarm(2, 5, "later")]), True),
    ],
)
def test_who_may_still_come(seen, expected):
    assert seen.may_still_come() is expected


# -- questions -------------------------------------------------------------------------


def answer(question, seen):
    is_over = question.try_answer(seen)
    assert is_over == question.is_completed()
    return question.wait() if is_over else None


def beats(*numbers):
    return channel(*(status(0, beat=beat) for beat in numbers))


def test_two_readings_tell_who_runs():
    inquiry = Inquiry(3, 20.0)
    assert answer(inquiry, beats(5, 8)) is None
    assert answer(inquiry, beats(5, 9)) is None
    assert "Rank 1 runs, but" in answer(inquiry, beats(6, 9)).text
    inquiry = Inquiry(3, 0.05)
    assert answer(inquiry, beats(5, 8)) is None
    time.sleep(0.1)
    text = answer(inquiry, beats(5, 9)).text
    assert "Rank 1 does not answer" in text
    assert "Rank 2 runs, but" in text


def test_an_alarm_is_answer_enough():
    gave_up = channel(None, status(0), alarms=[Alarm(1, 2, "boo")])
    found = answer(Inquiry(3, 20.0), gave_up)
    assert found == ("Missing: rank 1. Rank 1 gave up: boo.", False)
    later = channel(None, status(0), alarms=[Alarm(1, 3, "boo")])
    assert answer(Inquiry(3, 20.0), later) is None


def test_a_lost_store_is_told_with_what_was_known():
    lost = channel(status(0), problem="It is gone.")
    text, may_come = answer(Inquiry(3, 20.0), lost)
    assert text.startswith("Missing: rank 1. Rank 1 runs, but")
    assert text.endswith("It is gone.")
    assert not may_come
    assert answer(Skip(7, 2), lost) == "It is gone."


def at(step, steps, **more):
    return RankStatus(step, "text", 2, steps=steps, **more)


@pytest.mark.parametrize(
    ("statuses", "found"),
    [
        ([at(7, 2), at(7, 3)], ""),
        ([at(7, 2), at(7, 1)], None),  # some are still on their way
        ([at(7, 2), at(6, 5, is_reducing=True)], None),
        ([at(7, 2), None], None),
        (
            [at(7, 2), at(7, 1, is_reducing=True)],
            "The backward of rank 2 waits for it.",
        ),
        ([at(7, 2, is_reducing=True)], ""),  # it has stepped: in its next backward
    ],
)
def test_do_all_ranks_skip(statuses, found):
    assert answer(Skip(7, 2), channel(*statuses)) == found


# -- where a thread is -----------------------------------------------------------------


def until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        continue
    assert condition()


def test_a_thread_that_waits_for_other_ranks():
    """As the frames say: in a wait of ours, or in a collective of torch's."""
    never = Future()
    thread = threading.Thread(target=lambda: wait_for(FutureWork(never)), daemon=True)
    thread.start()
    until(lambda: place_of(thread.ident)[1])
    assert not place_of(threading.get_ident())[1]
    never.set_result(None)
    thread.join()
    assert place_of(thread.ident) == ("", False)


def test_a_thread_that_asks_who_is_missing_has_waited():
    """Two ranks whose limits are over at the same time would call each other busy."""
    beat = heartbeat.Heartbeat.__new__(heartbeat.Heartbeat)
    beat._questions, beat._wake = [], lambda: None
    beat._beat_seconds, beat._asked = 20.0, 0.0
    assert beat.interval == 20.0
    thread = threading.Thread(target=beat.report, args=(1,), daemon=True)
    thread.start()
    until(lambda: place_of(thread.ident)[1])
    assert beat.interval < 20.0  # a question is answered soon
    beat._questions[0].future.set_result(None)
    thread.join()


@pytest.mark.parametrize("library", [False, True])
def test_place_of_a_thread(library):
    done = threading.Event()

    def work():
        if library:
            done.wait()
        while not done.is_set():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    begin = "wait (threading.py:" if library else "work (test_report.py:"
    until(lambda: place_of(thread.ident)[0].startswith(begin))
    place = place_of(thread.ident)[0]
    done.set()
    thread.join()
    assert (", called from work (test_report.py:" in place) == library


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_while_frames_are_read(monkeypatch, is_enabled):
    """CPython issue 106883: up to 3.11.8 that blocks the process for ever."""
    seen = []
    real = sys._current_frames
    monkeypatch.setattr(
        sys, "_current_frames", lambda: seen.append(gc.isenabled()) or real()
    )
    was_enabled = gc.isenabled()
    try:
        gc.enable() if is_enabled else gc.disable()
        assert place_of(threading.get_ident())[0]
        assert seen == [False]
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable() if was_enabled else gc.disable()
