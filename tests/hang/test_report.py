"""What waiting ranks say about the others: pure data in, sentences out."""

from __future__ import annotations

import _thread
import dataclasses
import gc
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.futures import Future

from minidp import world
from minidp.comm import Communicator, gather_json, post_json
from minidp.comm.work import FutureWork, PythonWork, is_waiting, wait_for, waiting
from minidp.hang import heartbeat, report
from minidp.hang.rank_status import (
    ENDED,
    MOVED,
    Alarm,
    RankStatus,
    _text_of_missing,
    place_of,
)
from minidp.hang.report import Inquiry, MissingRanks, Passed
from tests.hang.test_world import Stopped
from tests.support.waiting import until


def status(started, wait="", **more):
    return RankStatus(3, "in a backward", started, wait, **more)


def channel(*statuses, alarms=(), problem="", has_met=False):
    """Of ranks 1, 2, ...; None: it published nothing."""
    return SimpleNamespace(
        rank=0,
        size=len(statuses) + 1,
        statuses={r: s for r, s in enumerate(statuses, start=1) if s is not None},
        alarms={alarm.rank: alarm for alarm in alarms},
        problem=problem,
        has_met=has_met,
    )


AT = "load (data.py:9)"
STATUSES = {
    "busy": status(4, where=AT, seconds=1.0),
    "late": status(4, where=AT, seconds=14.2),
    "waits": status(4, "waiting"),
    "elsewhere": status(4, where=AT, waits=True),
    "here": status(5, "broadcasting", seconds=2.0),
    "just come": status(5, "broadcasting", seconds=0.5),
    "is past it": status(5),
    "unknown": None,
}
BOO = {"alarms": [Alarm(2, 4, "ValueError: boo. What to do: nothing.")]}
OUT = {"alarms": [Alarm(2, 4, ENDED)]}
RAN_OUT = "is gone: its process ended without an error"
OUT_1 = {"alarms": [Alarm(1, 4, ENDED)]}
MET = {"has_met": True}  # all ranks have wrapped
LATER = {"alarms": [Alarm(2, 5, "the end")]}  # no reason for what we wait for
SILENT = "does not answer (killed, stopped, or cut off)"
ONE, TWO = ({"silent": [rank]} for rank in (1, 2))


def missing_ranks(names, *, silent=(), **more):
    statuses = (STATUSES[name] for name in names.split(", "))
    return MissingRanks(channel(*statuses, **more), 5, silent)


@pytest.mark.parametrize(
    ("names", "more", "absent", "text", "may_still_come"),
    [
        ("busy", {}, "1", "runs, but does something else: AT; its code goes on", True),
        ("here, late", {}, "2", "runs, but does something else: AT; for 14 s no", True),
        (
            "elsewhere",
            {},
            "1",
            "runs, but waits for other ranks elsewhere: AT; ",
            False,
        ),
        ("unknown", {}, "1", "never said that it wrapped this module.", True),
        ("unknown, waits", {}, "1", "never said that it wrapped this module.", True),
        ("unknown", MET, "1", "has wrapped this module, but nothing was heard", True),
        ("unknown, waits", MET, "1", "has wrapped this module, but nothing", True),
        ("unknown", MET | OUT_1, "1", f"{RAN_OUT}. If", False),
        ("waits, is past it", ONE, "1", f"{SILENT}; last seen: HERE, waiting.", False),
        ("busy, busy", TWO, "1, 2", "runs", False),
        # Who waits, or is silent, is late because of another one.
        ("waits, late", {}, "2", "runs", True),
        ("waits, busy, elsewhere", {}, "2, 3", "runs", True),
        ("waits, elsewhere", {}, "2", "runs", False),
        ("late, late", BOO | ONE, "2", "gave up: ValueError: boo.", False),
        ("busy, busy", BOO, "2", "gave up: ValueError: boo.", False),
        ("late, is past it", LATER, "1", "runs", True),
        ("busy, busy", LATER, "1, 2", "runs", True),
        ("late, late", OUT, "2", f"{RAN_OUT}. If", False),
        ("late, unknown", OUT, "2", f"{RAN_OUT}. If it had fewer inputs than", False),
        # No rank is missing: each waits for the other, or has started what we wait for.
        ("here", {}, "", "broadcasting.", False),
        ("just come", {}, "", "broadcasting.", True),
        ("here, just come", {}, "", "broadcasting.", True),
        ("just come, elsewhere", {}, "2", "runs, but waits", False),
        ("waits", {}, "", "waiting.", False),
        ("is past it", {}, "", "in a backward.", True),
    ],
)
def test_what_is_said_of_others(names, more, absent, text, may_still_come):
    found = missing_ranks(names, **more)
    told, here = found.to_text(), "step 3, in a backward"
    if absent:
        text = text.replace("AT", f"HERE, in {AT}").replace("HERE", here)
        assert told.startswith(f"Missing: rank {absent}. Rank {absent[0]} {text}")
    else:
        assert told.startswith(
            "All ranks are running, but they wait in different places, "
        )
        assert f" Rank 1: {here}" in told
        assert told.endswith(text)
    assert found.may_still_come() is may_still_come


def test_who_has_ended_after_its_part_is_not_missing():
    """It is silent, as a dead rank is, and has done all that this rank waits for."""
    done = {"alarms": [Alarm(2, 5, ENDED)], "silent": [2]}
    alone = {"alarms": [Alarm(1, 5, ENDED)], "silent": [1]}
    busy = missing_ranks("busy, is past it", **done)
    assert busy.absent == [1]
    assert busy.may_still_come()
    dead = missing_ranks("here, is past it", alarms=done["alarms"], silent=[1, 2])
    assert dead.to_text().startswith(f"Missing: rank 1. Rank 1 {SILENT}; last seen: ")
    lost = missing_ranks("is past it", **alone)
    assert not lost.may_still_come()
    assert lost.to_text() == (
        "No rank is missing, but messages do not arrive: rank 1 took part, and left "
        "after that."
    )


def test_who_has_moved_after_its_part_is_not_missing():
    """It is through a constructor, and publishes in another place from now on."""
    through = RankStatus(0, "", 5, has_moved=True)
    found = MissingRanks(channel(STATUSES["late"], through), 5, ())
    assert found.absent == [1]
    assert found.may_still_come()
    done = answer(Inquiry(5, 20.0), channel(through))
    assert done.text.startswith("No rank is missing, but messages do not arrive: rank")
    # For another replica, which has this place, too, it has published nothing.
    assert answer(Inquiry(6, 20.0), channel(through)) == (
        "Missing: rank 1. Rank 1 never said that it wrapped this module.",
        True,
        False,
    )
    passed = Passed(0, 0, 4, may_answer=False)
    passed.try_answer(channel(through))
    assert not passed.reducing | passed.gone | passed.ahead


def test_who_has_joined_another_group_after_its_part_is_not_missing():
    """It publishes nothing in this place any more, as a dead rank does."""
    through = {"alarms": [Alarm(2, 5, MOVED)], "silent": [2]}
    assert missing_ranks("busy, is past it", **through).absent == [1]
    before = missing_ranks("busy, waits", alarms=[Alarm(2, 4, MOVED)], silent=[2])
    assert before.absent == [2]
    assert before.to_text().endswith(f"Rank 2 gave up: {MOVED}.")


def test_texts_that_might_be_long():
    alarm = Alarm(1, 4, "x" * 5000)
    assert len(missing_ranks("busy", alarms=[alarm]).to_text()) < 1500
    many = missing_ranks(", ".join(["busy"] * 100)).to_text()
    assert many.startswith("Missing: rank 1, 2, 3, ")
    assert many.count("Rank ") == 8
    names = [f"p{i}" for i in range(40)]
    assert _text_of_missing(names).endswith(
        "without gradients of p0, p1, p2, p3, p4, p5, p6, p7, p8, p9 and 30 more"
    )


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
    runs = answer(inquiry, beats(6, 9))
    assert "Rank 1 runs, but" in runs.text
    assert not runs.is_anyone_gone
    stopped = Stopped()
    with world.replaced(stopped):
        inquiry = Inquiry(3, 0.05)
        assert answer(inquiry, beats(5, 8)) is None
        stopped.sleep(0.1)
        found = answer(inquiry, beats(5, 9))
    assert "Rank 1 does not answer" in found.text
    assert "Rank 2 runs, but" in found.text
    assert found.is_anyone_gone


def test_an_alarm_is_answer_enough():
    gave_up = channel(None, status(0), alarms=[Alarm(1, 2, "boo")])
    found = answer(Inquiry(3, 20.0), gave_up)
    assert found == ("Missing: rank 1. Rank 1 gave up: boo.", False, True)
    later = channel(None, status(0), alarms=[Alarm(1, 3, "boo")])
    assert answer(Inquiry(3, 20.0), later) is None


def test_a_lost_store_is_told_with_what_was_known():
    lost = channel(status(0), problem="It is gone.")
    text, may_come, _ = answer(Inquiry(3, 20.0), lost)
    assert text.startswith("Missing: rank 1. Rank 1 runs, but")
    assert text.endswith("It is gone.")
    assert not may_come


@pytest.mark.parametrize("has_met", [True, False])
def test_a_rank_is_not_called_missing_if_its_status_cannot_be_read(has_met):
    """It may have wrapped and trained: only the store could tell."""
    lost = channel(None, None, problem="The store is gone.", has_met=has_met)
    assert answer(Inquiry(3, 20.0), lost) == ("The store is gone.", False, False)
    lost = channel(None, status(0), problem="The store is gone.", has_met=has_met)
    text, *_ = answer(Inquiry(3, 20.0), lost)
    assert text.startswith("Missing: rank 2. Rank 2 runs, but")
    assert "Rank 1" not in text


def at(step, steps, **more):
    return RankStatus(step, "text", more.pop("started", 2), steps=steps, **more)


@pytest.mark.parametrize(
    ("status", "may_answer", "found"),
    [
        (at(7, 2), False, ""),  # on its way, or posting
        (at(6, 5, is_reducing=True), False, ""),
        (at(7, 3), False, "stepped"),
        (at(7, 3, waits=True, seconds=2.0), False, "stepped"),
        (at(7, 3, is_reducing=True), False, "stepped"),  # in its next backward
        (at(7, 2, is_reducing=True), False, "reducing"),
        (at(7, 2, is_reducing=True), True, ""),  # it answers from there
        (at(7, 2, is_reducing=True, waits=True, seconds=4.0), True, ""),
        (at(7, 2, is_reducing=True, waits=True, seconds=6.0), True, "gone"),
        (at(7, 2, started=3, waits=True), False, "reducing"),  # in a forward
        (at(7, 3, started=3), False, "stepped"),
        (at(7, 3, started=3), True, "gone"),  # in a forward it cannot answer
        (at(7, 3, waits=True, seconds=6.0), True, "gone"),
        (at(7, 2, waits=True, seconds=1.0), False, "gone"),
        (at(8, 0), False, "gone"),
        (at(8, 0), True, "gone"),
        (at(7, 2, waits=True, seconds=6.0), True, "gone"),
        (at(7, 2, waits=True, seconds=4.0), True, ""),
        (None, False, ""),
    ],
)
def test_who_does_not_come_to_a_meeting(status, may_answer, found, monkeypatch):
    monkeypatch.setattr(report, "_SECONDS_TO_ANSWER", 0.0)
    passed = Passed(7, 2, 2, may_answer=may_answer)
    passed.try_answer(channel(status))
    later = status and dataclasses.replace(status, beat=status.beat + 1)
    assert not passed.try_answer(channel(later))
    kinds = ("stepped", "reducing", "gone")
    assert {kind: getattr(passed, kind) for kind in kinds} == {
        kind: {1} if kind == found else set() for kind in kinds
    }
    # Who waits elsewhere may be merely late.
    assert passed.ahead == ({1} if status is not None and status.step == 8 else set())
    passed.drop()
    assert passed.try_answer(channel(status))


def test_a_rank_that_waits_has_time_to_answer():
    """It looks for questions now and then, and this one is new."""
    passed = Passed(7, 2, 2, may_answer=True)
    waiting_rank = at(7, 2, is_reducing=True, waits=True, seconds=6.0)
    for beat in (1, 2):
        passed.try_answer(channel(dataclasses.replace(waiting_rank, beat=beat)))
    assert not passed.gone


def test_who_gave_up_does_not_come():
    passed = Passed(7, 2, 2, may_answer=True)
    passed.try_answer(channel(None, alarms=[Alarm(1, 2, "boo")]))
    assert passed.gone == passed.ahead == {1}


# -- where a thread is -----------------------------------------------------------------


@contextmanager
def thread_at(target, is_there):
    """Run ``target`` in a thread; begin when ``is_there(*place_of(it))``."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not is_there(*place_of(thread.ident)) and time.monotonic() < deadline:
        continue
    place = place_of(thread.ident)
    assert is_there(*place)
    yield place
    thread.join()
    assert place_of(thread.ident) == ("", False)


class InCpp:
    """Work whose wait ends in C++, as that of Gloo: no frame tells of it."""

    def __init__(self, future):
        self.wait = future.wait

    def is_completed(self):
        return False


class AGroup:
    def rank(self):
        return 0

    def size(self):
        return 2


def waits_in_an_operation(future):
    communicator = Communicator(AGroup())
    with communicator.watching("waiting for the all-reduce", 3):
        communicator.wait(InCpp(future))


def starts_what_blocks(future):
    """As the first collective of an NCCL group, which connects to the others."""
    with Communicator(AGroup()).watching("launching the all-reduce", 3):
        future.wait()


WAITS = {
    "future": lambda future: wait_for(FutureWork(future)),
    "collective": lambda future: wait_for(InCpp(future)),
    "bucket": waits_in_an_operation,
    "launch": starts_what_blocks,
    "python group": lambda future: PythonWork(InCpp(future)).wait(),
}


@pytest.mark.parametrize("kind", WAITS)
def test_a_thread_that_waits_for_other_ranks(kind):
    """It has said so itself; its stack ends in C++, in one of our files or another."""
    never = Future()
    with thread_at(lambda: WAITS[kind](never), lambda _, waits: waits):
        assert not place_of(threading.get_ident())[1]
        never.set_result(None)


def test_a_wait_in_the_store():
    store = dist.HashStore()
    wait = lambda: gather_json(store, "topic", [1], 60.0)  # noqa: E731
    with thread_at(wait, lambda _, waits: waits):
        assert not place_of(threading.get_ident())[1]
        post_json(store, "topic", 1, "here")


def test_a_thread_of_autograd_waits_for_all():
    """On an accelerator hooks run in a thread that Python has not started."""
    never, begun = Future(), threading.Event()

    def run():
        with waiting():
            begun.set()
            never.wait()

    assert not place_of(threading.get_ident())[1]
    thread = _thread.start_new_thread(run, ())
    assert begun.wait(20)
    assert place_of(threading.get_ident())[1]
    never.set_result(None)
    until(lambda: not place_of(thread)[1])
    assert not place_of(threading.get_ident())[1]


def test_nested_waits_end_with_the_outer_one():
    with waiting():
        with waiting():
            pass
        assert is_waiting(threading.get_ident())
    assert not is_waiting(threading.get_ident())


def test_a_thread_that_asks_who_is_missing_has_waited():
    """Two ranks whose limits are over at the same time would call each other busy."""
    beat = heartbeat.Heartbeat.__new__(heartbeat.Heartbeat)
    beat._questions, beat._wake = [], lambda: None
    beat._calm_seconds, beat._riders, beat._asked = 20.0, {}, 0.0
    assert beat.interval == 20.0
    with thread_at(lambda: beat.report(1), lambda _, waits: waits):
        assert beat.interval < 20.0  # a question is answered soon
        beat._questions[0].future.set_result(None)


@pytest.mark.parametrize("in_library", [False, True])
def test_place_of_a_thread(in_library):
    done = threading.Event()

    def work():
        if in_library:
            done.wait()
        while not done.is_set():
            pass

    begin = "wait (threading.py:" if in_library else "work (test_report.py:"
    with thread_at(work, lambda text, _: text.startswith(begin)) as (place, _):
        done.set()
    assert (", called from work (test_report.py:" in place) == in_library


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
