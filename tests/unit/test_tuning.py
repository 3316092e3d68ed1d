"""Which layout is tried, and which one stays, given what was measured."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from minidp._layout import ParamSpec, build_layout, initial_layout
from minidp._tuning import NUM_TRIALS, Sample, Search, Trial, _sizes

MS = 1e-3
KIB = 2**10


def spec(i, **changes):
    made = ParamSpec(f"p{i}", (256,), (1,), torch.float32, torch.device("cpu"))
    return dataclasses.replace(made, **changes)


SPECS = [spec(i) for i in range(8)]  # 1 KiB each; the last one is ready first
TORCHS = initial_layout(SPECS, [8 * KIB])


def backward(
    seconds, *, ready=True, latency=2 * MS, bandwidth=1e6, sizes=(KIB, 8 * KIB)
):
    """Gradients come 1 ms apart, from the last parameter on; the end is at 8 ms."""
    times = tuple((8 - i) * MS for i in range(8)) if ready else ()
    messages = tuple((n, latency + n / bandwidth) for n in sizes)
    return Sample(times, 8 * MS, seconds, messages)


def search_with(torchs_seconds, specs=SPECS, torchs=TORCHS):
    search = Search(specs, torchs)
    timed = [backward(torchs_seconds + 1.0) for _ in range(2)]
    plain = [backward(torchs_seconds, ready=False) for _ in range(3)]
    search.add(torchs, timed + plain)
    return search


def sizes(layout):
    return [len(bucket.indices) for bucket in layout.buckets]


def test_first_and_fifth_trials_are_torchs():
    search = search_with(20 * MS)
    assert search.proposal(0) == TORCHS
    assert search.proposal(4) == TORCHS


def test_small_buckets_follow_the_ready_order():
    layout = search_with(20 * MS).proposal(1)
    assert [i for members in layout.assignment for i in members] == list(range(8))[::-1]
    assert sizes(layout) == [1] * 8


def test_the_models_layout_is_predicted_to_be_better():
    search = search_with(20 * MS)
    planned = search.proposal(2)
    assert 1 < len(planned.buckets) <= 8
    # One bucket of 8 KiB would be exposed for 10.2 ms, 8 buckets for 17.2 ms.
    assert search._predicted[planned] < 10 * MS


def test_what_comes_late_gets_smaller_buckets():
    search = search_with(20 * MS)
    search.proposal(2)
    late = search.proposal(3)
    assert max(sizes(late)) == 1  # 1/12 of 8 KiB is less than one parameter


def play(search, seconds_of):
    """All trials, each with the time that a layout takes; the one that stays."""
    for trial in range(1, NUM_TRIALS):
        layout = search.proposal(trial)
        search.add(
            layout, [backward(seconds_of(layout), ready=False) for _ in range(5)]
        )
    return search.proposal(NUM_TRIALS)


def test_the_fastest_stays():
    search = search_with(20 * MS)
    kept = play(
        search, lambda layout: 20 * MS if layout == TORCHS else len(layout.buckets) * MS
    )
    assert kept != TORCHS
    assert len(kept.buckets) < 8
    text = str(search.choice())
    assert "instead of 20.0 ms" in text
    assert "predicted" in text


def test_the_two_best_meet_again_equally_often():
    """What one trial says may be chance: here, that the layout of trial 1 is fast."""
    search = search_with(20 * MS)
    small, planned, tried = search.proposal(1), search.proposal(2), []
    slow, now = 15 * MS, {small: 5 * MS, planned: 6 * MS}
    for trial in range(1, NUM_TRIALS):
        layout = search.proposal(trial)
        tried.append(layout)
        seconds = now.get(layout, slow)
        search.add(layout, [backward(seconds, ready=False) for _ in range(5)])
        now[small] = 9 * MS  # as it is, most of the time
    finals = tried[4:]
    assert set(finals) == {small, planned}
    assert search.proposal(NUM_TRIALS) == planned


def test_torchs_stays_unless_another_is_clearly_faster():
    search = search_with(20 * MS)
    factor = {True: 1.0, False: 0.99}
    kept = play(search, lambda layout: 20 * MS * factor[layout == TORCHS])
    assert kept == TORCHS
    assert "torch's layout stays" in str(search.choice())


def test_timed_backwards_do_not_count():
    """They are slower, and only some layouts have them."""
    trial = Trial(TORCHS, (backward(9.0), backward(2.0, ready=False)))
    assert trial.seconds == 2.0


@pytest.mark.parametrize(("spread", "is_clear"), [(0.0, True), (6 * MS, False)])
def test_noise_is_not_speed(spread, is_clear):
    def trial(center):
        offsets = (-spread, -spread / 2, 0, spread / 2, spread)
        return Trial(TORCHS, tuple(backward(center + o, ready=False) for o in offsets))

    assert trial(19 * MS).is_clearly_faster(trial(20 * MS)) == is_clear


def test_nothing_is_known_without_ready_times():
    search = Search(SPECS, TORCHS)
    search.add(TORCHS, [backward(1.0, ready=False)])
    assert search.proposal(1) == TORCHS
    assert play(search, lambda _: 1.0) == TORCHS


def test_nothing_was_measured_at_all():
    search = Search(SPECS, TORCHS)
    search.add(TORCHS, [])
    assert all(search.proposal(k) == TORCHS for k in range(NUM_TRIALS + 1))


def test_a_gradient_that_never_comes_travels_last():
    search = Search(SPECS, TORCHS)
    times = (*(backward(1.0).ready_s[:7]), None)
    sample = dataclasses.replace(backward(20 * MS), ready_s=times)
    search.add(TORCHS, [sample] * 3)
    assert search.proposal(1).assignment[-1] == (7,)


def test_kinds_share_no_bucket_and_delayed_ones_come_last():
    specs = [
        *SPECS[:4],
        spec(4, dtype=torch.float64),
        spec(5, sparse=True),
        spec(6, sparse=True),
        spec(7, delayed=True),
    ]
    torchs = build_layout(specs, [[0, 1, 2, 3], [4], [5], [6], [7]])
    search = search_with(20 * MS, specs, torchs)
    for trial in (1, 2, 3):
        layout = search.proposal(trial)
        assert layout.assignment[-1] == (7,)
        for members in layout.assignment:
            kinds = {(specs[i].dtype, specs[i].sparse) for i in members}
            assert len(kinds) == 1
            assert not specs[members[0]].sparse or len(members) == 1


@pytest.mark.parametrize(
    ("numels", "cap", "words"),
    [
        ([256] * 8, 8 * KIB, "1 bucket of 8 KiB"),
        ([256] * 8, 4 * KIB, "2 buckets of 4 KiB each"),
        ([2**18] * 2, 2**20, "2 buckets of 1 MiB each"),
        ([2**18, 2**18 + 1], 2**20, "2 buckets of 1 MiB each"),
        ([2**18, 2**19], 2**20, "2 buckets of 1 to 2 MiB"),
        ([2**18, 256], KIB, "2 buckets of 1 KiB to 1 MiB"),
        ([3], KIB, "1 bucket of 12 bytes"),
        ([2**18 - 128], 2**20, "1 bucket of 1024 KiB"),
        ([2**28 + 2**18 * 200], 2**31, "1 bucket of 1224 MiB"),
    ],
)
def test_sizes_of_buckets_are_told_apart_where_they_differ(numels, cap, words):
    specs = [spec(i, shape=(numel,)) for i, numel in enumerate(numels)]
    assert _sizes(initial_layout(specs, [cap])) == words
