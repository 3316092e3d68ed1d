"""Waits end in time; failures get rank, place and remedy. No other rank is needed."""

from __future__ import annotations

import datetime
import os
import queue
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

from minidp import CollectiveError, CommHookError, GradientError, accelerator
from minidp.comm import communicator as module
from minidp.comm.communicator import (
    Communicator,
    PeerMonitor,
    PeerReport,
    is_done_within,
)
from minidp.comm.work import FutureWork, then, wait_for
from minidp.hang import watchdog as watchdog_module
from minidp.hang.rank_status import Alarm
from minidp.hang.report import MissingRanks
from minidp.hang.watchdog import Watchdog
from tests.hang.test_report import channel, status
from tests.wrong_uses.bad_hooks import fail

GROUP = SimpleNamespace(rank=lambda: 1, size=lambda: 3)


class Monitor(PeerMonitor):
    """Knows what the test says."""

    text = "Missing: rank 2."
    is_anyone_gone = True

    def __init__(self, lost="", hopeful=0):
        self.lost, self.told = lost, []
        self.hopeful, self.asked = hopeful, 0  # how often it may still come

    def find_lost(self, started):
        return self.lost

    def report(self, started):
        self.asked += 1
        may_come = self.asked <= self.hopeful
        return PeerReport(self.text, may_come, self.is_anyone_gone)

    def give_up(self, why):
        self.told.append(why)


@pytest.fixture
def make(monkeypatch):
    kept = []
    monkeypatch.setattr(module, "is_timed", lambda group, device: True)
    monkeypatch.setattr(module, "keep_for_good", lambda _, works: kept.extend(works))
    monkeypatch.setattr(module, "SLICE_SECONDS", 0.01)

    def make(limit=5.0, *, is_patient=False, groups_limit=1000.0, **known):
        of_group = datetime.timedelta(seconds=groups_limit)
        monkeypatch.setattr(module, "group_timeout", lambda group: of_group)
        communicator = Communicator(GROUP, limit, is_patient=is_patient)
        communicator.peers = Monitor(**known)
        communicator.kept = kept
        return communicator

    return make


def done_after(seconds, value=None, error=None):
    future = Future()
    finish, result = future.set_result, value
    if error is not None:
        finish, result = future.set_exception, error
    if seconds:
        timer = threading.Timer(seconds, finish, [result])
        timer.daemon = True
        timer.start()
    else:
        finish(result)
    return FutureWork(future)


@pytest.mark.parametrize("seconds", [0, 0.1])
def test_what_fails_is_raised(make, seconds):
    communicator = make()
    with pytest.raises(CollectiveError) as caught, communicator.watching("waiting", 3):
        wait_for(done_after(seconds, error=RuntimeError("boo")))
    assert str(caught.value).startswith(
        "[rank 1] Missing: rank 2. A collective failed while waiting of bucket 3 (boo)."
    )
    assert "Expected: all 3 ranks to take part in time." in str(caught.value)
    assert communicator.has_failed
    assert communicator.peers.told == [f"CollectiveError: {caught.value}"]


@pytest.mark.parametrize(
    ("known", "asked", "text"),
    [
        ({}, 1, "it did not finish within 0.05 s"),
        ({"is_patient": True}, 2, "within 0.05 s"),  # waits for us: not busy
        ({"is_patient": True, "hopeful": 3}, 5, "did not finish within"),  # busy, died
        ({"is_patient": True, "hopeful": 1000, "groups_limit": 0.3}, 0, "within 0.3 s"),
        ({"hopeful": 1000}, 1, "within 0.05 s"),  # a limit that was given is strict
        ({"limit": 1000.0, "lost": "it raised"}, 1, "it raised"),
    ],
)
def test_what_never_comes_is_given_up(make, known, asked, text):
    communicator, work = make(**{"limit": 0.05} | known), FutureWork(Future())
    with pytest.raises(CollectiveError, match=text), communicator.watching("waiting"):
        wait_for(work)
    assert communicator.kept == [work]
    assert not asked or communicator.peers.asked == asked  # the last, for the error


def test_a_busy_rank_is_waited_for(make, caplog):
    communicator = make(0.05, is_patient=True, hopeful=1000)
    with caplog.at_level("WARNING", "minidp"), communicator.watching("waiting"):
        assert wait_for(done_after(1.2, 7)) == 7
    texts = [record.getMessage() for record in caplog.records]
    assert 1 <= len(texts) < 6  # each after twice the time: not every time it is asked
    assert communicator.peers.asked > len(texts)
    assert texts[0].startswith("[rank 1] Still waiting, for 0 s now. Missing: rank 2. ")
    assert "own limit (1000 s); pass hang_timeout=0.05" in texts[0]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (GradientError("boo"), "^boo$"),
        (CommHookError("does not fit"), "^does not fit$"),
    ],
)
def test_errors_of_ours_keep_their_text(make, error, text):
    communicator = make()
    with pytest.raises(type(error), match=text), communicator.watching("launching"):
        raise error
    assert communicator.has_failed


@pytest.mark.parametrize(
    ("text", "is_anyone_gone", "told"),
    [
        ("Missing: rank 2.", True, "Missing: rank 2. It failed: x."),
        (
            "Missing: rank 2.",
            False,
            "It failed: x. If the hook itself is right: Missing: rank 2.",
        ),
        ("", False, "It failed: x."),
    ],
)
def test_what_a_failed_hook_has_waited_for_is_told(make, text, is_anyone_gone, told):
    """A rank that is gone comes first; if there is none, the mistake of the hook."""
    communicator = make()
    communicator.peers.text = text
    communicator.peers.is_anyone_gone = is_anyone_gone
    with pytest.raises(CommHookError) as caught, communicator.watching("launching"):
        raise CommHookError("[rank 1] It failed: x.") from RuntimeError("x")
    assert str(caught.value) == f"[rank 1] {told}"
    assert communicator.has_failed


def future_of(callback, *, error=None):
    future: Future[int] = Future()
    if error is None:
        future.set_result(1)
    else:
        future.set_exception(error)
    return future.then(callback)


@pytest.mark.parametrize(
    ("make_future", "may_be"),
    [
        (lambda: future_of(Future.value, error=RuntimeError("closed")), True),
        (lambda: future_of(Future.wait, error=OSError("closed")), True),
        (lambda: future_of(lambda _: fail(dist.DistBackendError("closed"))), True),
        (lambda: future_of(lambda _: fail(ValueError("mine"))), False),
        (lambda: future_of(lambda _: fail(queue.Empty("mine"))), False),
        (lambda: future_of(lambda _: 1 / 0).then(Future.value), False),
        (lambda: fail(TimeoutError("it did not finish")), True),
        (lambda: fail(ValueError("mine")), False),
    ],
)
def test_whether_a_collective_may_have_failed_in_a_hook(make, make_future, may_be):
    """If a line of the hook has raised, nobody is asked, which would take seconds."""

    def run_hook():
        try:
            make_future().wait()
        except Exception as error:
            raise CommHookError("[rank 1] x") from error

    communicator = make()
    with pytest.raises(CommHookError) as caught, communicator.watching("launching"):
        run_hook()
    assert ("Missing: rank 2." in str(caught.value)) == may_be
    assert communicator.peers.asked == may_be


def test_who_hears_of_a_failed_hook_hears_of_the_rank_behind_it(make):
    """Another rank repeats only the first part of a long error."""
    text = f"[rank 1] A future that failed: {'x' * 2000}. What to do: y"
    with pytest.raises(CommHookError) as caught, make().watching("launching"):
        raise CommHookError(text) from RuntimeError("x")
    alarm = Alarm(1, 4, f"CommHookError: {caught.value}")
    told = MissingRanks(channel(None, status(4), alarms=[alarm]), 5, ()).to_text()
    chain = "Rank 1 gave up: CommHookError: [rank 1] Missing: rank 2. A future that"
    assert told.startswith(f"Missing: rank 1. {chain}")


@pytest.mark.parametrize("kind", [TypeError, AttributeError, ValueError, KeyError])
def test_mistakes_of_the_program_are_not_called_failed_collectives(make, kind):
    communicator, mistake = make(), kind("boo")
    with pytest.raises(kind) as caught, communicator.watching("launching", 3):
        raise mistake
    assert caught.value is mistake
    assert communicator.has_failed  # others may wait for the collective
    assert communicator.peers.told == [f"{kind.__name__}: {mistake}"]
    assert not communicator.peers.asked


@pytest.mark.parametrize("kind", [RuntimeError, OSError, ConnectionResetError])
def test_what_backends_raise_is_a_failed_collective(make, kind):
    text, watching = "failed while launching", make().watching("launching")
    with pytest.raises(CollectiveError, match=text), watching:
        raise kind("boo")


def test_a_collective_that_is_not_counted_needs_every_rank(make):
    """Its wait ends if a rank has given up after any number of collectives."""
    communicator, asked = make(), []
    communicator.peers.find_lost = lambda n: asked.append(n) or "it raised" * (n > 7)
    with pytest.raises(CollectiveError, match="it raised"), communicator.beside("x"):
        wait_for(FutureWork(Future()))
    communicator.limit = 0.05
    with pytest.raises(CollectiveError, match="within"), communicator.watching("x"):
        wait_for(FutureWork(Future()))
    assert asked[0] > 2**40
    assert {*asked[1:]} == {0}


def test_futures_with_a_limit_and_failures():
    assert is_done_within(done_after(0), 0.0)
    assert not is_done_within(FutureWork(Future()), 0.01)
    failed = done_after(0, error=ValueError("boo"))
    assert is_done_within(failed, 0.0)
    with pytest.raises(RuntimeError, match="boo"):
        then(failed.future, lambda: None).wait()


# ------------------------------------------------------------------------ accelerators


@pytest.fixture
def on_device(make, monkeypatch):
    """Work of `make`'s communicators runs on a device, of which there is none here."""
    monkeypatch.setattr(module, "is_timed", lambda *_: False)
    monkeypatch.setattr(accelerator, "has_streams", lambda _: True)
    monkeypatch.setattr(accelerator, "is_capturing", lambda _: False)
    monkeypatch.setattr(accelerator, "selected", lambda _: nullcontext())
    monkeypatch.setattr(accelerator, "on_side_stream", lambda _: nullcontext())


DEVICE = torch.device("cuda", 0)


def running():
    future = Future()
    future.set_result(None)  # of a device: done at launch
    return SimpleNamespace(is_completed=lambda: False, get_future=lambda: future)


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_hangs_on_a_device(make, on_device, monkeypatch, caplog, goes_on):
    """The missing rank is busy three times, then not."""
    communicator = make(0.2, is_patient=True, hopeful=3)
    ended, aborted = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: status == 1 and ended.set())
    monkeypatch.setattr(watchdog_module, "abort", lambda group: aborted.set())
    monkeypatch.setattr(watchdog_module, "ABORT_SECONDS", 0.2)
    has_come = aborted.is_set if goes_on else ended.is_set
    after = SimpleNamespace(has_come=has_come)
    monkeypatch.setattr(module, "After", lambda device: after)
    heartbeat = SimpleNamespace(communicator=communicator, rank=1)
    watchdog = Watchdog()
    with communicator.watching("launching the all-reduce", 4):
        communicator.note_started(running(), DEVICE)
    assert communicator.started == 1
    communicator.note_step()
    watchdog._give_up_what_hangs(heartbeat)
    assert communicator.peers.asked == 0
    for _ in range(3000):
        watchdog._give_up_what_hangs(heartbeat)
        if (aborted if goes_on else ended).wait(0.01):
            break
    assert aborted.is_set()
    assert ended.is_set() != goes_on
    assert communicator.peers.asked == 5  # the fifth is for the last word
    assert "Still launching the all-reduce of bucket 4, for 0 s now." in caplog.text
    assert ("This process ends" in caplog.text) != goes_on
    what = (
        "[rank 1] Missing: rank 2. A collective failed on the device: launching the "
        "all-reduce of bucket 4 (it did not finish within "
    )
    assert what in caplog.text
    assert communicator.peers.told[0].startswith(f"CollectiveError: {what}")
    assert communicator.started == 0  # other ranks must not count on it
    with pytest.raises(CollectiveError) as caught, communicator.watching("waiting"):
        pytest.fail("nothing may be launched or waited for any more")
    assert str(caught.value).startswith(what)
    assert "may hold an incomplete average" in str(caught.value)


def test_what_ends_while_others_are_asked_is_not_given_up(make, on_device):
    communicator = make(0.2)
    work = running()
    communicator.note_started(work, DEVICE)
    late = communicator._on_device[0]
    work.is_completed = lambda: True
    assert not communicator.lose("why", late)
    assert not communicator.lost
    assert not communicator.has_failed


def test_nothing_is_launched_if_a_rank_has_given_up(make, on_device):
    communicator = make(0.2, lost="it raised")
    named = pytest.raises(CollectiveError, match="it raised")
    with named, communicator.watching("launching"):
        communicator.refuse_in_vain()


def test_two_threads_may_look_at_what_a_device_does(make, on_device):
    """The watchdog's, and one that launches: none drops what is still under way."""
    communicator, others = make(0.0), []

    def is_completed():
        if not others:  # another thread comes between the question and the answer
            others.append(threading.Thread(target=communicator.find_late_on_device))
            others[0].start()
            others[0].join(0.2)  # in vain, if it has to wait for us
        return True

    done, hangs = running(), running()
    communicator.note_started(done, DEVICE)
    communicator.note_started(hangs, DEVICE)
    done.is_completed = is_completed
    late = communicator.find_late_on_device()
    others[0].join()
    assert late is not None
    assert late.work is hangs
