"""Which layout is tried, and which one stays, given what was measured."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from minidp.autotune.trials import NUM_TRIALS, Search, Trial, _sizes
from minidp.layout.plan import ParamSpec, build_layout, initial_layout
from tests.support.timelines import step

MS = 1e-3
KIB = 2**10


def spec(i, **changes):
    made = ParamSpec(f"p{i}", (256,), (1,), torch.float32, torch.device("cpu"))
    return dataclasses.replace(made, **changes)


SPECS = [spec(i) for i in range(8)]  # 1 KiB each; the last one is ready first
TORCHS = initial_layout(SPECS, [8 * KIB])


def backward(seconds, layout=TORCHS, *, ready=True):
    """Gradients come 1 ms apart, from the last parameter on; the end is at 8 ms.

    Then each bucket takes 2 ms, and 1 ms for each 1000 bytes.
    """
    at, buckets = 8.0, []
    for bucket in layout.buckets:
        done = at + 2 + bucket.nbytes / 1000
        buckets.append((8, at, done, done))
        at = done
    times = [8 - i for i in range(8)] if ready else ()
    one = step(0, buckets, backward=(0, 8), ready=times)
    return dataclasses.replace(one, finalize_end_ns=round(1e9 * seconds))


def untimed(seconds, layout=TORCHS):
    return backward(seconds, layout, ready=False)


def search_with(specs=SPECS, torchs=TORCHS):
    """Torch's layout takes 20 ms, and longer where gradients are timed."""
    search = Search(specs, torchs)
    timed, plain = backward(20 * MS + 1.0, torchs), untimed(20 * MS, torchs)
    search.add(torchs, [timed] * 2 + [plain] * 3)
    return search


def sizes(layout):
    return [len(bucket.indices) for bucket in layout.buckets]


def test_trials_without_measurements_of_others():
    search = search_with()
    assert search.proposal(0) == TORCHS
    small = search.proposal(1)
    assert [i for members in small.assignment for i in members] == list(range(8))[::-1]
    assert sizes(small) == [1] * 8
    search.add(small, [backward(20 * MS, small)])
    planned = search.proposal(2)
    assert 1 < len(planned.buckets) <= 8
    # One bucket of 8 KiB would be exposed for 10.2 ms, 8 buckets for 17.2 ms.
    assert search._trials[planned].predicted_s < 10 * MS
    assert sizes(search.proposal(3)) == [1] * 8  # 1/12 of 8 KiB: less than one of them
    assert search.proposal(4) == TORCHS


def play(search, seconds_of):
    """All trials, each with the time that a layout takes; the one that stays."""
    for trial in range(1, NUM_TRIALS):
        layout = search.proposal(trial)
        search.add(layout, [untimed(seconds_of(layout), layout)] * 5)
    return search.choice().best.layout


def test_the_fastest_stays():
    search = search_with()
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
    search = search_with()
    small, tried = search.proposal(1), []
    search.add(small, [untimed(5 * MS, small)])
    planned = search.proposal(2)

    def seconds_of(layout):
        tried.append(layout)
        late = 9 * MS if small in tried[:-1] else 5 * MS  # as it is, most of the time
        return {small: late, planned: 6 * MS}.get(layout, 15 * MS)

    assert play(search, seconds_of) == planned
    assert set(tried[4:]) == {small, planned}


def test_torchs_stays_unless_another_is_clearly_faster():
    search = search_with()
    kept = play(search, lambda layout: 20 * MS if layout == TORCHS else 19.8 * MS)
    assert kept == TORCHS
    assert "torch's layout stays" in str(search.choice())


def test_timed_backwards_do_not_count():
    """They are slower, and only some layouts have them."""
    trial = Trial(TORCHS, [backward(9.0), untimed(2.0)])
    assert trial.seconds == 2.0


@pytest.mark.parametrize(("spread", "is_clear"), [(0.0, True), (6 * MS, False)])
def test_noise_is_not_speed(spread, is_clear):
    def trial(center):
        offsets = (-spread, -spread / 2, 0, spread / 2, spread)
        return Trial(TORCHS, [untimed(center + o) for o in offsets])

    assert trial(19 * MS).is_clearly_faster(trial(20 * MS)) == is_clear


@pytest.mark.parametrize("steps", [[untimed(1.0)], []])
def test_without_ready_times_torchs_stays(steps):
    search = Search(SPECS, TORCHS)
    search.add(TORCHS, steps)
    assert all(search.proposal(trial) == TORCHS for trial in range(5))
    if steps:
        assert play(search, lambda _: 1.0) == TORCHS
    else:
        with pytest.raises(ValueError, match="no backward with torch's layout"):
            search.choice()


def test_a_gradient_that_never_comes_travels_last():
    search = Search(SPECS, TORCHS)
    one = backward(20 * MS)
    one = dataclasses.replace(one, ready_ns=(*one.ready_ns[:7], None))
    search.add(TORCHS, [one] * 3)
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
    search = search_with(specs, torchs)
    for trial in (1, 2, 3):
        layout = search.proposal(trial)
        assert layout.assignment[-1] == (7,)
        for members in layout.assignment:
            kinds = {(specs[i].dtype, specs[i].sparse) for i in members}
            assert len(kinds) == 1
            assert not specs[members[0]].sparse or len(members) == 1


@pytest.mark.parametrize(
    ("cap", "words"), [(1, "2 buckets of 1 to 2 MiB"), (8, "1 bucket of 3 MiB")]
)
def test_sizes_of_buckets_are_told(cap, words):
    specs = [spec(0, shape=(2**18,)), spec(1, shape=(2**19,))]
    assert _sizes(initial_layout(specs, [cap * 2**20])) == words
