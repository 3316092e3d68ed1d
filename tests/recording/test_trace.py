"""Events of a backward: a ring, and the moments in their order."""

from __future__ import annotations

import itertools

import pytest
import torch

from minidp import DataParallel, Event, Moment, Recorder
from tests.support.both import Chain

# ------------------------------------------------------------------------- the ring


def test_a_recorder_keeps_the_last_events_with_its_clock():
    recorder = Recorder(capacity=2, clock=itertools.count(100).__next__)
    for index in range(3):
        recorder.record(Moment.FULL, index, 7)
    kept = (Event(Moment.FULL, 1, 7, 101), Event(Moment.FULL, 2, 7, 102))
    assert recorder.events() == tuple(recorder) == kept
    recorder.clear()
    assert len(recorder) == 0


# ----------------------------------------------------------------- a real backward


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def model(lone_group, recorder):
    model = DataParallel(Chain(), process_group=lone_group)
    model.set_recorder(recorder)
    return model


def moments(recorder):
    return [(event.moment, event.index) for event in recorder]


def step(model):
    model(torch.ones(2)).sum().backward()


READY, FIRST, FULL = Moment.PARAM_READY, Moment.FIRST_GRADIENT, Moment.FULL
LAUNCHED, DONE, OUT = Moment.LAUNCHED, Moment.DONE, Moment.COPIED_OUT


def test_moments_of_two_buckets(lone_group, recorder):
    caps = [8 / 2**20, 1]
    model = DataParallel(Chain(), process_group=lone_group, bucket_cap_mb_list=caps)
    step(model)  # after this one buckets follow the ready order: c | b a
    model.set_recorder(recorder)
    step(model)
    without_done = [m for m in moments(recorder) if m[0] is not DONE]
    assert without_done == [
        *((READY, 2), (FIRST, 0), (FULL, 0), (LAUNCHED, 0)),
        *((READY, 1), (FIRST, 1), (READY, 0), (FULL, 1), (LAUNCHED, 1)),
        *((OUT, 0), (OUT, 1)),
    ]
    seen = moments(recorder)
    for bucket in (0, 1):  # in between, whenever the collective is complete
        assert seen.count((DONE, bucket)) == 1
        position = seen.index((DONE, bucket))
        assert seen.index((LAUNCHED, bucket)) < position < seen.index((OUT, bucket))
    times = [event.time_ns for event in recorder]
    assert times == sorted(times)


def test_synchronised_backwards_are_numbered_and_local_ones_left_out(model, recorder):
    for _ in range(3):
        with model.no_sync():
            step(model)
        step(model)
    assert [e.backward for e in recorder if e.moment is FULL] == [0, 1, 2]
    assert sum(e.moment is READY for e in recorder) == 9


def test_nothing_is_recorded_without_a_recorder(model, recorder, monkeypatch):
    step(model)
    model.set_recorder(None)
    recorder.clear()
    monkeypatch.setattr(Recorder, "record", lambda *_: pytest.fail("recorded"))
    step(model)
    assert len(recorder) == 0
