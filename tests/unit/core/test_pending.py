"""What has arrived: entries, ready order, pending counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minidp.core.grad_hooks import (
    COPY_AT_ONCE_BYTES,
    GradState,
    PendingGrads,
    has_arrived,
    is_copied_at_once,
)

CLOSED, UNSET, COPIED = GradState.CLOSED, GradState.UNSET, GradState.COPIED


def make_buckets(*members):
    return [
        SimpleNamespace(
            plan=SimpleNamespace(indices=indices),
            streams=SimpleNamespace(written_on=set()),
            native=None,
            copied_by_hook=(),
        )
        for indices in members
    ]


@pytest.fixture
def log():
    return []


@pytest.fixture
def pending(log):
    """Three open parameters: bucket 0 holds 2 and 0, bucket 1 holds 1."""
    reducer = SimpleNamespace(
        on_full=lambda bucket: log.append(("full", bucket)),
        admit=lambda i: log.append(("unusual", i)),
        queue=SimpleNamespace(
            copy_now=lambda i, grad: COPIED if grad.numel() > 1 else grad
        ),
    )
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    made = PendingGrads(params, reducer)
    made.adopt(make_buckets((2, 0), (1,)))
    assert list(made.entries) == [CLOSED] * 3
    assert list(made.bucket_of) == [0, 1, 0]
    made.open([UNSET] * 3, 1)
    return made


def test_a_bucket_is_full_with_its_last_gradient(pending, log):
    small = torch.ones(1)
    assert list(pending.num_left) == [2, 1]
    pending.arrive(0, torch.ones(2))
    pending.arrive(1, small)
    assert log == [("full", 1)]
    pending.arrive(2, None)
    assert log == [("full", 1), ("full", 0)]
    assert list(pending.ready) == [0, 1, 2]
    assert list(pending.num_left) == [0, 0]
    assert list(pending.entries) == [COPIED, small, None]
    assert pending.used() == {0, 1}  # with a gradient
    assert list(pending.of_bucket(0)) == [None, COPIED]  # in slot order
    assert list(pending.of_bucket(1)) == [small]


def test_filled_slots_are_no_arrivals(pending, log):
    pending.fill_missing(1, torch.zeros(1))
    assert log == [("full", 1)]
    assert list(pending.ready) == []
    assert pending.missing() == [0, 2]
    assert pending.filled == {1}
    assert pending.used() == set()
    pending.arrive(1, torch.ones(2))  # after all: counted down before
    assert log == [("full", 1)]
    assert list(pending.ready) == [1]
    assert pending.entries[1].tolist() == [1, 1]
    assert pending.filled == set()
    pending.fill_missing(0, torch.ones(1), travels=False)
    assert pending.entries[0] is None
    assert list(pending.num_left) == [2, 0]


def test_pause_lets_hooks_ask_and_resume_goes_on(pending, log):
    """A full bucket is not read again: it may be in flight."""
    whole, via_reducer = torch.ones(2), GradState.VIA_REDUCER
    pending.arrive(1, whole, at_once=False)  # bucket 1 is full
    pending.arrive(2, torch.ones(2), at_once=False)  # bucket 0 is not
    pending.pause()
    assert list(pending.entries) == [CLOSED, whole, COPIED]
    assert pending.missing() == [0]
    pending.resume()
    assert list(pending.entries) == [via_reducer, whole, COPIED]
    pending.arrive(0, None)
    assert log == [("full", 1), ("full", 0)]
    assert list(pending.ready) == [1, 2, 0]
    pending.pause()
    assert list(pending.entries) == [None, whole, COPIED]


def test_open_starts_afresh_and_close_lets_go_of_gradients(pending):
    pending.arrive(1, torch.ones(1))
    pending.open([UNSET, UNSET, GradState.COUNTED], 1)
    assert list(pending.entries) == [UNSET, UNSET, GradState.COUNTED]
    assert list(pending.ready) == []
    assert list(pending.num_left) == [2, 1]
    pending.arrive(1, torch.ones(1))
    pending.close()
    assert list(pending.entries) == [CLOSED] * 3


def test_hooks_may_hold_on_to_the_lists(pending):
    lists = ("entries", "ready", "bucket_of", "num_left", "written_on")
    before = [getattr(pending, name) for name in lists]
    buckets = make_buckets((1,), (0, 2))
    pending.adopt(buckets)
    pending.open([UNSET] * 3, 1)
    pending.arrive(0, None)
    pending.pause()
    pending.resume()
    pending.close()
    for name, old in zip(lists, before, strict=True):
        assert getattr(pending, name) is old, name
    assert list(pending.bucket_of) == [1, 0, 1]
    assert list(pending.num_left) == [1, 1]
    assert pending.written_on[0] is buckets[0].streams.written_on
    pending.adopt(make_buckets((2, 1, 0)))
    assert list(pending.num_left) == [3]


def test_a_gradient_none_and_copied_have_arrived():
    arrived = {state for state in GradState if has_arrived(state)}
    assert arrived == {COPIED}
    assert has_arrived(None)
    assert has_arrived(torch.ones(1))


def test_large_gradients_are_copied_at_once():
    numel = COPY_AT_ONCE_BYTES // 4
    assert is_copied_at_once(torch.empty(numel))
    assert not is_copied_at_once(torch.empty(numel - 1))
    assert is_copied_at_once(torch.empty(numel // 2, dtype=torch.float64))
