"""Events of a backward: a ring, and the moments in their order."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from minidp import DataParallel, Event, Moment, Recorder
from minidp._logging_data import ALWAYS

# ------------------------------------------------------------------------- the ring


def test_events_carry_the_recorders_clock():
    recorder = Recorder(clock=itertools.count(100).__next__)
    recorder.record(Moment.FULL, 3, 0)
    recorder.record(Moment.LAUNCHED, 4, 1)
    assert recorder.events() == (
        Event(Moment.FULL, 3, 0, 100),
        Event(Moment.LAUNCHED, 4, 1, 101),
    )
    assert list(recorder) == list(recorder.events())


def test_oldest_events_are_dropped():
    recorder = Recorder(capacity=3)
    for index in range(5):
        recorder.record(Moment.FULL, index, 0)
    assert [event.index for event in recorder] == [2, 3, 4]
    assert len(recorder) == 3


def test_clear_forgets():
    recorder = Recorder()
    recorder.record(Moment.FULL, 0, 0)
    before = recorder.events()
    recorder.clear()
    assert len(recorder) == 0
    assert len(before) == 1  # what was handed out stays


def test_default_clock_goes_forward():
    recorder = Recorder()
    for _ in range(3):
        recorder.record(Moment.FULL, 0, 0)
    times = [event.time_ns for event in recorder]
    assert times == sorted(times)
    assert times[0] > 0


# ----------------------------------------------------------------- a real backward


class Chain(nn.Module):
    """Gradients arrive in the order c, b, a."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        self.b = nn.Parameter(torch.ones(2))
        self.c = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return ((x * self.a).exp() * self.b).exp() * self.c


@pytest.fixture
def recorder():
    return Recorder()


def moments(recorder):
    return [(event.moment, event.index) for event in recorder]


def step(model):
    model(torch.ones(2)).sum().backward()


READY, FIRST, FULL = Moment.PARAM_READY, Moment.FIRST_GRADIENT, Moment.FULL
LAUNCHED, DONE, OUT = Moment.LAUNCHED, Moment.DONE, Moment.COPIED_OUT


def test_moments_of_one_bucket(lone_group, recorder):
    model = DataParallel(Chain(), process_group=lone_group)
    model.set_recorder(recorder)
    step(model)
    assert moments(recorder) == [
        (READY, 2),
        (FIRST, 0),
        (READY, 1),
        (READY, 0),
        (FULL, 0),
        (LAUNCHED, 0),
        (DONE, 0),
        (OUT, 0),
    ]
    times = [event.time_ns for event in recorder]
    assert times == sorted(times)


def test_moments_of_two_buckets(lone_group, recorder):
    caps = [8 / 2**20, 1]
    model = DataParallel(Chain(), process_group=lone_group, bucket_cap_mb_list=caps)
    step(model)  # after this one buckets follow the ready order: c | b a
    model.set_recorder(recorder)
    step(model)
    without_done = [m for m in moments(recorder) if m[0] is not DONE]
    assert without_done == [
        (READY, 2),
        (FIRST, 0),
        (FULL, 0),
        (LAUNCHED, 0),
        (READY, 1),
        (FIRST, 1),
        (READY, 0),
        (FULL, 1),
        (LAUNCHED, 1),
        (OUT, 0),
        (OUT, 1),
    ]
    seen = moments(recorder)
    for bucket in (0, 1):  # in between, whenever the collective is complete
        assert seen.count((DONE, bucket)) == 1
        position = seen.index((DONE, bucket))
        assert seen.index((LAUNCHED, bucket)) < position < seen.index((OUT, bucket))


def test_backwards_are_numbered(lone_group, recorder):
    model = DataParallel(Chain(), process_group=lone_group)
    model.set_recorder(recorder)
    for _ in range(3):
        step(model)
    assert [e.backward for e in recorder if e.moment is FULL] == [0, 1, 2]


def test_local_backwards_are_not_recorded(lone_group, recorder):
    model = DataParallel(Chain(), process_group=lone_group)
    model.set_recorder(recorder)
    with model.no_sync():
        step(model)
    assert moments(recorder) == []


def test_nothing_is_recorded_without_a_recorder(lone_group, recorder, monkeypatch):
    def refuse(*_):
        raise AssertionError("recorded")

    model = DataParallel(Chain(), process_group=lone_group)
    model.set_recorder(recorder)
    step(model)
    model.set_recorder(None)
    recorder.clear()
    for _ in range(ALWAYS):  # the times of the logging data are taken before
        step(model)
    monkeypatch.setattr(Recorder, "record", refuse)
    step(model)
    assert len(recorder) == 0


def test_recording_changes_no_gradient(lone_group, recorder):
    grads = []
    for used in (recorder, None):
        model = DataParallel(Chain(), process_group=lone_group)
        model.set_recorder(used)
        step(model)
        grads.append([param.grad for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
