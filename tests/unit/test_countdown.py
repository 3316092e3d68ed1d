"""What has arrived: entries, ready order, pending counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minidp._arrivals import (
    COPY_AT_ONCE_BYTES,
    Callbacks,
    Mark,
    has_arrived,
    is_copied_at_once,
)
from minidp._countdown import Countdown


def make_buckets(*members):
    return [
        SimpleNamespace(
            plan=SimpleNamespace(indices=indices, slots=indices),
            streams=SimpleNamespace(written_on=set()),
            slots=None,
            large=(),
        )
        for indices in members
    ]


@pytest.fixture
def log():
    return []


@pytest.fixture
def countdown(log):
    """Three parameters: bucket 0 holds 2 and 0, bucket 1 holds 1."""
    callbacks = Callbacks(
        on_full=lambda bucket: log.append(("full", bucket)),
        on_unusual=lambda i: log.append(("unusual", i)),
    )
    made = Countdown(
        [torch.nn.Parameter(torch.ones(1)) for _ in range(3)],
        callbacks,
        copy_now=lambda i, grad: Mark.COPIED if grad.numel() > 1 else grad,
    )
    made.adopt(make_buckets((2, 0), (1,)))
    return made


def test_nothing_is_open_at_first(countdown):
    assert list(countdown.entries) == [Mark.CLOSED] * 3
    assert list(countdown.bucket_of) == [0, 1, 0]
    assert list(countdown.pending) == [2, 1]


def test_a_bucket_is_full_with_its_last_gradient(countdown, log):
    countdown.open([Mark.UNSET] * 3, 1)
    for i in (0, 1, 2):
        countdown.arrive(i, torch.ones(1))
    assert log == [("full", 1), ("full", 0)]
    assert list(countdown.ready) == [0, 1, 2]
    assert list(countdown.pending) == [0, 0]


def test_a_gradient_may_be_copied_on_arrival(countdown):
    countdown.open([Mark.UNSET] * 3, 1)
    small = torch.ones(1)
    countdown.arrive(0, torch.ones(2))
    countdown.arrive(1, small)
    countdown.arrive(2, None)
    assert countdown.entries[0] is Mark.COPIED
    assert countdown.entries[1] is small
    assert countdown.entries[2] is None


def test_filled_slots_are_no_arrivals(countdown, log):
    countdown.open([Mark.UNSET] * 3, 1)
    countdown.fill_missing(1, None)
    assert log == [("full", 1)]
    assert list(countdown.ready) == []
    assert countdown.missing() == [0, 2]
    assert countdown.filled == {1}
    countdown.arrive_after_all(1, torch.ones(1))
    assert list(countdown.ready) == [1]
    assert countdown.filled == set()


def test_used_means_arrived_with_a_gradient(countdown):
    countdown.open([Mark.UNSET] * 3, 1)
    countdown.arrive(0, None)
    countdown.fill_missing(1, torch.ones(1))
    countdown.arrive(2, torch.ones(1))
    assert countdown.used() == {2}
    assert countdown.filled == {1}
    assert countdown.missing() == []


def test_pause_lets_hooks_ask_and_resume_goes_on(countdown, log):
    countdown.open([Mark.UNSET] * 3, 1)
    countdown.arrive(0, torch.ones(2))
    countdown.pause()
    assert list(countdown.entries) == [Mark.COPIED, Mark.CLOSED, Mark.CLOSED]
    assert countdown.missing() == [1, 2]
    countdown.resume()
    assert list(countdown.entries) == [Mark.COPIED, Mark.TRACED, Mark.TRACED]
    assert list(countdown.pending) == [1, 1]
    countdown.arrive(2, torch.ones(1))
    assert log == [("full", 0)]
    assert list(countdown.ready) == [0, 2]


def test_pause_reads_no_full_bucket_again(countdown):
    """It may be in flight."""
    countdown.open([Mark.UNSET] * 3, 1)
    whole, part = torch.ones(2), torch.ones(2)
    countdown.arrive(1, whole, at_once=False)  # bucket 1 is full
    countdown.arrive(2, part, at_once=False)  # bucket 0 is not
    countdown.pause()
    assert countdown.entries[1] is whole
    assert countdown.entries[2] is Mark.COPIED


def test_pause_keeps_gradients_that_are_none(countdown):
    countdown.open([Mark.UNSET] * 3, 1)
    countdown.arrive(1, None)
    countdown.pause()
    assert list(countdown.entries) == [Mark.CLOSED, None, Mark.CLOSED]


def test_of_bucket_gives_slot_order(countdown):
    a, b, c = torch.ones(1), torch.ones(1), None
    countdown.open([a, b, c], 1)
    assert len(countdown.of_bucket(0)) == 2
    assert countdown.of_bucket(0)[0] is c
    assert countdown.of_bucket(0)[1] is a
    assert len(countdown.of_bucket(1)) == 1
    assert countdown.of_bucket(1)[0] is b


def test_close_lets_go_of_gradients(countdown):
    countdown.open([Mark.UNSET] * 3, 1)
    countdown.arrive(1, torch.ones(1))
    countdown.close()
    assert list(countdown.entries) == [Mark.CLOSED] * 3


def test_open_starts_afresh(countdown):
    countdown.open([Mark.UNSET] * 3, 1)
    countdown.arrive(0, None)
    countdown.open([Mark.UNSET, Mark.UNSET, Mark.REPEATS], 1)
    assert list(countdown.entries) == [Mark.UNSET, Mark.UNSET, Mark.REPEATS]
    assert list(countdown.ready) == []
    assert list(countdown.pending) == [2, 1]


def test_hooks_may_hold_on_to_the_lists(countdown):
    lists = ("entries", "ready", "bucket_of", "pending", "written_on")
    before = [getattr(countdown, name) for name in lists]
    streams = make_buckets((1,), (0, 2))
    countdown.adopt(streams)
    countdown.open([Mark.UNSET] * 3, 1)
    countdown.arrive(0, None)
    countdown.pause()
    countdown.resume()
    countdown.close()
    for name, old in zip(lists, before, strict=True):
        assert getattr(countdown, name) is old, name
    assert list(countdown.bucket_of) == [1, 0, 1]
    assert list(countdown.pending) == [1, 1]
    assert countdown.written_on[0] is streams[0].streams.written_on


def test_adopt_follows_fewer_buckets(countdown):
    countdown.adopt(make_buckets((2, 1, 0)))
    countdown.open([Mark.UNSET] * 3, 1)
    assert list(countdown.pending) == [3]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (None, True),
        (torch.ones(1), True),
        (Mark.COPIED, True),
        (Mark.CLOSED, False),
        (Mark.UNSET, False),
        (Mark.TRACED, False),
        (Mark.COUNTING, False),
        (Mark.REPEATS, False),
    ],
)
def test_what_counts_as_arrived(entry, expected):
    assert has_arrived(entry) is expected


def test_large_gradients_are_copied_at_once():
    numel = COPY_AT_ONCE_BYTES // 4
    assert is_copied_at_once(torch.empty(numel))
    assert not is_copied_at_once(torch.empty(numel - 1))
    assert is_copied_at_once(torch.empty(numel // 2, dtype=torch.float64))
