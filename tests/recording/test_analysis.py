"""Numbers and sentences of a report, on recordings made by hand with known answers."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minidp.config import RUN
from minidp.costmodel import Network
from minidp.overlap.advice import advise, layers_of
from minidp.overlap.analysis import (
    most_exposed,
    overlap_of,
    overlaps_of,
    pieces,
    spread,
    typical_step,
)
from minidp.overlap.forecast import analyse, backward_of, network_of, samples_of
from minidp.overlap.skew import aligned
from minidp.overlap.text import _bandwidth, report
from minidp.overlap.timeline import AUTO, AUTO_TRIES, ClockOffset, ValueTimes
from tests.support.timelines import MS, span, step, timeline

# Backward from 10 to 30 ms.
TWO = [(20, 21, 26, 35), (29, 29, 41, 42)]
# Two forwards and backwards that average nothing; then those of `TWO`.
LOCAL = {
    "forward": (4, 8),
    "local_forwards": [(0, 1), (2, 3)],
    "local_backwards": [(1, 2), (3, 4), (3.2, 3.6)],
}


def overlap(buckets, launches=None, **more):
    one = step(0, buckets, **more)
    return overlap_of(timeline([one]), one, launches)


def times(bucket, *names):
    return tuple(getattr(bucket, f"{name}_s") for name in names)


def sent(*timelines):
    run = aligned(timelines)
    return network_of(run, samples_of(run))


def steps_of(count, buckets, every=60, **more):
    return [step(n, buckets, at=every * n, **more) for n in range(count)]


# ------------------------------------------------------------------ one step of a rank


def test_hidden_and_exposed():
    first, second = overlap(TWO).buckets
    assert times(first, "full", "waited") == (0.010, 0.001)
    assert times(first, "wire", "hidden", "exposed") == (0.005, 0.005, 0)
    assert times(second, "wire", "hidden", "exposed") == (0.012, 0.001, 0.011)


def test_a_bucket_waits_for_the_one_before():
    first, second = overlap([(15, 15, 33, 34), (20, 21, 38, 39)]).buckets
    assert times(first, "wire", "hidden", "exposed") == (0.018, 0.015, 0.003)
    assert times(second, "waited", "wire") == (0.013, 0.005)
    assert times(second, "hidden", "exposed") == (0, 0.005)
    _, second = overlap([(15, 15, 33, 34), (20, 21, 30, 39)]).buckets
    assert times(second, "waited", "wire", "exposed") == (0.010, 0, 0)


def test_waiting_for_slower_ranks_is_told_apart():
    one = overlap(TWO, {0: 24 * MS, 1: 35 * MS})
    assert times(one.buckets[0], "late", "wire", "hidden") == (0.003, 0.002, 0.005)
    assert times(one.buckets[1], "late", "wire", "exposed") == (0.006, 0.006, 0.011)
    assert one.late_s == pytest.approx(0.009)


def test_where_the_time_of_a_step_goes():
    plain, local = overlap(TWO), overlap(TWO, **LOCAL)
    names = ("forward", "backward", "exposed", "finish", "optimizer", "other")
    parts = times(plain, *names)
    assert parts == pytest.approx((0.008, 0.020, 0.011, 0.001, 0.005, 0.015))
    assert sum(parts) == pytest.approx(plain.seconds)
    # One local backward lies within another.
    parts = times(local, "local_forward", "local_backward", "forward", "other")
    assert parts == pytest.approx((0.002, 0.002, 0.004, plain.other_s))


def test_optimizer_steps_in_the_backward_hide_communication():
    one = overlap(TWO, optimizers=[(33, 36)])
    assert times(one.buckets[1], "exposed", "hidden") == pytest.approx((0.008, 0.004))
    spans = [span(33, 36), span(10, 30), span(12, 14)]
    found = [(a // MS, b // MS, c) for a, b, c in pieces(spans, 5 * MS, 40 * MS)]
    outside = [(5, 10, False), (30, 33, False), (36, 40, False)]
    assert found == sorted([*outside, (10, 30, True), (33, 36, True)])
    assert pieces(spans, 5, 5) == []


def test_the_rank_that_is_reported_is_the_one_that_usually_waits_most():
    """Not the one that waited most in a step that happens to be chosen."""
    zero = steps_of(11, [(28, 28, 34, 35)], every=100)
    one = [
        step(n, [(28, 28, 36 if n else 31, 38)], at=100 * n, end=60 if n else 61)
        for n in range(11)
    ]
    pairs = enumerate((zero, one))
    run = aligned([timeline(steps, rank=r, members=[(0, 1)]) for r, steps in pairs])
    overlaps = overlaps_of(run)
    assert most_exposed(overlaps).rank == 1
    assert overlaps[1].typical.exposed_s == pytest.approx(0.006)
    assert "on rank 1, which waits most" in report(run.ranks)


def test_first_gradients_come_from_the_steps_that_have_them():
    steps = [step(0, TWO, ready=(25, 12)), step(1, TWO, at=100)]
    (found,) = overlaps_of(aligned([timeline(steps)]))
    buckets = found.typical.buckets
    assert found.num_steps == 2
    assert [(b.members, b.nbytes) for b in buckets] == [((1,), 2**20), ((0,), 2**20)]
    assert [b.first_s for b in buckets] == pytest.approx([0.002, 0.015])
    # Fill times of long steps, taken off a short one, would begin before it.
    long = [(52, 52, 60, 79), (69, 69, 78, 79)]
    slow = step(0, long, ready=(60, 32), backward=(10, 70), end=99, optimizers=[])
    quick = [step(n, TWO, at=100 * n) for n in (1, 2)]
    (found,) = overlaps_of(aligned([timeline([slow, *quick])]))
    first, second = found.typical.buckets
    assert 0 < first.first_s < second.first_s < second.full_s


# ------------------------------------------------------------------ the typical step


def test_a_spread_is_two_of_the_values():
    assert spread([3.0]) == (3.0, 3.0)
    assert spread([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert spread(range(11)) == (1, 9)
    assert spread(range(101)) == (10, 90)


def matrices(num_ranks, num_steps):
    row = st.lists(st.integers(0, 9), min_size=num_steps, max_size=num_steps)
    return st.lists(row, min_size=num_ranks, max_size=num_ranks)


measures = st.tuples(st.integers(1, 3), st.integers(1, 30)).flatmap(
    lambda shape: st.tuples(matrices(*shape), matrices(*shape))
)


@given(measures)
# The step of median length exposes a little more than nine of ten.
@example(([[100] + [50] * 5 + [150] * 5], [[20, *range(10, 20)]]))
def test_both_numbers_lie_within_their_spreads_on_the_rank_that_is_shown(both):
    lengths, exposed = both
    shown = max(range(len(exposed)), key=lambda rank: median(exposed[rank]))
    number = typical_step(lengths, exposed)
    for values in (lengths[shown], exposed[shown]):
        low, high = spread(values)
        assert low <= values[number] <= high


@pytest.mark.parametrize(
    ("lengths", "exposed", "number"),
    [
        # Of steps in which the rank with median 6 waits most, the nearest.
        ([[10] * 4] * 2, [[4, 5, 7, 7], [5, 6, 6, 1]], 2),
        ([[9, 12, 10, 30, 11]], [[0] * 5], 4),
    ],
)
def test_the_typical_step(lengths, exposed, number):
    assert typical_step(lengths, exposed) == number


# ------------------------------------------------------------------------ the model


def test_backward_for_the_model():
    steps = [step(0, TWO, ready=(28, 14)), step(1, TWO, at=100)]
    backward = backward_of(timeline(steps))
    assert backward.order == (1, 0)
    assert backward.ready_s == pytest.approx((0.004, 0.018))
    assert backward.end_s == pytest.approx(0.020)
    untimed = backward_of(timeline(steps[1:]))  # ready with their bucket
    assert untimed.order == (1, 0)
    assert untimed.ready_s == pytest.approx((0.010, 0.019))


# 1 MiB and 2 MiB: 1 ms + 4 ms for each MiB.
SIZES = [(12, 12, 17, 59), (29, 29, 38, 59)]


def sparse(one, count=1):
    """The first ``count`` parameters have sparse gradients."""
    made = [replace(param, kind="sparse float32 on cpu") for param in one.params]
    return replace(one, params=(*made[:count], *one.params[count:]))


@pytest.mark.parametrize(
    ("one", "latency_s", "mib_s"),
    [
        (timeline(steps_of(3, SIZES, 100), members=[(0,), (1, 2)]), 0.001, 0.004),
        (timeline([step(0, [(20, 20, 28, 29)])], members=[(0,)]), 0, 0.008),
        # An overtaken collective counts with the one that overtakes.
        (timeline(steps_of(2, [(12, 12, 20, 31), (14, 14, 16, 31)])), 0, 0.004),
        # Of bucket 0 alone: the bytes of a sparse gradient are unknown.
        (sparse(timeline([step(0, TWO)])), 0, 0.005),
    ],
)
def test_network_is_fitted_to_collectives(one, latency_s, mib_s):
    network = sent(one)
    assert network.latency_s == pytest.approx(latency_s)
    assert network.bytes_per_s == pytest.approx(2**20 / mib_s)


LINK = {"ready": [30], "end": 80, "optimizers": []}  # the only gradient comes last
LAST = [(30, 30, 70, 70)]


def test_the_bound_has_no_more_exposed_than_the_network_needs():
    # 1 MiB, there at the end of the backward: the fit says 40 ms, whatever was waited.
    steps = steps_of(3, LAST, 100, **LINK)
    found = analyse(aligned([timeline(steps, members=[(0,)])]))
    seconds = found.shown.typical.seconds
    assert found.forecast.bound_s == pytest.approx(seconds)
    quicker = replace(found.forecast, network=Network(0.0, 2**20 / 0.015))
    assert quicker.bound_s == pytest.approx(seconds - 0.025)


# --------------------------------------------------------------------------- advice


def advice_for(*timelines):
    return advise(analyse(aligned(timelines)))


# Ten gradients of 1 MiB, one every 2 ms; 4 ms for each MiB.
READY = [12 + 2 * (9 - i) for i in range(10)]


def first_and_rest(*later):
    """The first gradient alone in a bucket; steps take ``later`` ms longer."""
    buckets = [(12, 12, 16, 16), (30, 30, 66, 66)]
    more = {"ready": READY, "optimizers": []}
    pairs = enumerate(later)
    steps = [step(n, buckets, at=200 * n, end=76 + ms, **more) for n, ms in pairs]
    return timeline(steps, members=[(9,), tuple(range(9))])


def located(one, **changes):
    return replace(one, where=replace(one.where, **changes))


def alone(members=(0,), ready=(30,), **more):
    """One bucket, launched at the end of the backward."""
    one = step(0, LAST, **LINK | {"ready": ready})
    return timeline([one], members=[members], **more)


PLAIN, NO_CAP = first_and_rest(0), "40 ms .* no bucket size would change that: do more"
HIDDEN = timeline([step(0, [(12, 12, 20, 31), (21, 21, 30.5, 31)])])


@pytest.mark.parametrize(
    ("one", "says"),
    [
        # One bucket for each: from 12 ms on the wire, done at 52 ms instead of 66.
        (PLAIN, r'Use bucket_cap_mb=1 \(or "auto"\): predicted 62 ms instead of 76 ms'),
        (first_and_rest(-4, -2, 0, 2, 4), r"Use bucket_cap_mb=1 .* per step\.$"),
        (
            first_and_rest(-9, -9, 0, 60, 60),
            r"Use .* not certain: steps differ by more \(p10 67 ms, p90 136 ms\)\.$",
        ),
        (alone(range(10), READY), r'Try .*"auto".* predicted 62 ms .*if small buckets'),
        (located(PLAIN, layout_by=AUTO), "The link is the limit"),
        (located(PLAIN, layout_by=AUTO_TRIES), ".*is still trying .*: record after"),
        (
            alone(),
            r"The link .*fp16_compress_hook\) .* half the bytes; predicted 60",
        ),
        (located(alone(), comm_hook="fp16_compress_hook"), NO_CAP),
        # A few bytes take as long as a message takes, though one size hides that.
        (alone(nbytes=44), f"{NO_CAP}.* 60 ms for each instead of 80 ms"),
        (HIDDEN, "Only 0.5 ms are exposed, too little"),
    ],
)
def test_what_is_advised_and_what_it_gains(one, says):
    assert re.match(says, advice_for(one))


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (PLAIN, r"Use bucket_cap_mb=1: predicted 62 ms instead"),
        (alone(range(10), READY), r"Try bucket_cap_mb=1: predicted 62 ms .*if small"),
        (alone(), NO_CAP),
    ],
)
def test_what_does_not_go_with_divided_steps_is_not_advised(one, says):
    """They have neither comm hooks nor bucket_cap_mb="auto"."""
    steps = [replace(s, values=(ValueTimes(0, *[s.end_ns] * 4),)) for s in one.steps]
    assert re.match(says, advice_for(replace(one, steps=tuple(steps))))


def test_under_minidp_run_the_flag_is_advised(monkeypatch):
    monkeypatch.setenv(RUN, '{"command": "run"}')
    found = "(here: start with `minidp run --bucket-cap-mb 1`): "
    assert found in advice_for(first_and_rest(0))


def straggling(late):
    """Rank 1 comes ``late`` ms to everything from bucket 1 on."""
    ranks = []
    for rank, at in enumerate((30, 30 + late)):
        buckets = [(12, 12, 14, 75), (at, at, 34 + late, 75)]
        more = {"backward": (10, at + 1), "end": 100, "optimizers": []}
        ranks.append(timeline(steps_of(4, buckets, 100, **more), rank=rank))
    return ranks


def test_the_straggler_is_named_with_its_layers_and_the_reasons_add_up():
    assert advice_for(*straggling(40)) == (
        "Rank 1 is 40 ms late at the last bucket, above all because it falls 40 ms "
        "behind at bucket 1 (layers.0): balance the load; predicted 60 ms instead of "
        "100 ms per step."
    )
    # From the last gradient on: 40 + 4 ms, of which 1 ms is in the backward.
    assert (
        "Is communication hidden? 7% of the gradients' 46.0 ms per step; 43.0 ms are "
        "exposed (p10 43.0, p90 43.0), 43% of the step.\n"
        "Why? 43.0 ms of what is exposed are bucket 1 (layers.0): 39.0 ms waiting for "
        "slower ranks, 4.0 ms on the wire. Its last gradient comes 1.0 ms before the "
        "backward ends.\n"
    ) in report(straggling(40))
    assert "Rank" not in advice_for(*straggling(1))


def test_lateness_is_told_by_where_it_grows():
    """4 ms late when the forward begins, 9 more when it ends, 2 more at bucket 0."""
    more = {"end": 96, "optimizers": []}
    fast = steps_of(4, [(22, 22, 50, 50), (30, 30, 60, 60)], 100, **more)
    buckets = [(37, 37, 50, 50), (45, 45, 60, 60)]
    more |= {"backward": (23, 45), "forward": (4, 21)}
    slow = steps_of(4, buckets, 100, **more)
    text = advice_for(timeline(fast), timeline(slow, rank=1))
    assert "Rank 1 is 15 ms late at the last bucket, above all because it takes" in text
    assert "9.0 ms longer for its forward: balance the load; predicted 81 ms" in text


def test_waiting_comes_before_buckets_where_it_is_most_of_what_is_exposed():
    # The ranks take turns: in each step another one comes 30 ms late to the end.
    ranks = []
    for rank in range(2):
        steps = []
        for n in range(8):
            at = 60 if n % 2 == rank else 30
            buckets = [(12, 12, 16, 16), (at, at, 75, 75)]
            more = {"backward": (10, at), "end": 90, "optimizers": []}
            steps.append(step(n, buckets, at=100 * n, **more))
        ranks.append(timeline(steps, rank=rank))
    text = advice_for(*ranks)
    assert text.startswith("For 30 ms of what is exposed, ranks wait for each other,")


def test_layers_are_named_from_the_first_to_the_last():
    one = timeline([step(0, [TWO[0]])], members=[(0, 1, 2, 3)])
    assert layers_of(one, (2, 1)) == "layers.1 to layers.2"
    assert layers_of(one, (2,)) == "layers.2"
    names = ("0.weight", "0.bias", "3.weight", "scale")  # children of a Sequential
    params = [replace(p, name=name) for p, name in zip(one.params, names, strict=True)]
    one = replace(one, params=tuple(params))
    assert layers_of(one, (0, 1, 2)) == "0.weight to 3.weight"
    assert layers_of(one, (3,)) == "scale"


# --------------------------------------------------------------------------- words


STEPS = steps_of(12, TWO)


def test_there_is_nothing_to_gain():
    lonely = timeline([step(0, TWO)], world_size=1)
    text = report([lonely])
    assert sent(lonely) is None
    assert "There is one rank: nothing is sent, nothing to gain." in text
    assert "Is communication hidden? There is none.\n" in text
    assert "Why?" not in text


def test_of_sparse_gradients_nothing_is_predicted_but_all_is_shown():
    text = report([sparse(timeline(STEPS), 2)])
    assert "the bytes of a sparse gradient are unknown: do more per" in text
    assert "bucket  params" in text
    assert "Bus bandwidth" not in text


def test_a_fast_link_has_no_power_of_ten():
    assert _bandwidth(0.23e9) == "0.23 GB/s (1.84 Gbit/s)"
    assert _bandwidth(450e9) == "450 GB/s (3600 Gbit/s)"


def test_ranks_and_steps_that_are_not_here_are_counted():
    text = report([timeline(STEPS, rank=r, world_size=16) for r in (3, 7)])
    assert "which waits most of these; not here: 14 more" in text
    assert "includes waiting for the ranks that are not here" in text
    text = report([located(timeline(STEPS), layout_by=AUTO)])
    assert 'bucket_cap_mb="auto" chose the buckets' in text
    text = report([timeline(STEPS[:3]), timeline([], rank=1)])
    assert text.endswith("(Complete steps: rank 0 3, rank 1 0.)")


def test_clocks_that_tell_nothing_are_not_asked():
    """Two hosts, whose clocks are known to 20 ms: no word about who waits for whom."""
    clocks, hosts = (ClockOffset(0, 0), ClockOffset(0, 20 * MS)), ("here", "there")
    ranks = [timeline(STEPS, rank=r, host=host) for r, host in enumerate(hosts)]
    text = report([replace(ranks[r], clock=clock) for r, clock in enumerate(clocks)])
    assert "waiting for slower ranks or on the wire, which the clocks of the" in text
    assert "waiting for slower ranks, " not in text


def test_local_work_has_rows_of_its_own():
    assert "local" not in report([timeline(STEPS)])
    text = report([timeline(steps_of(12, TWO, **LOCAL))])
    assert (
        "  local forwards             2.0 ms   3%   2 under no_sync()\n"
        "  local backwards            2.0 ms   3%   nothing is averaged in them\n"
        "  forward                    4.0 ms   7%   with its collectives, if any "
    ) in text


def with_buckets(count):
    """From 10 ms on one every ms, each 1 MiB; the backward ends at 40 ms.

    Bucket 35 takes 8 ms more than any other.
    """
    at, buckets = 10.0, []
    for number in range(count):
        at += 9 if number == 35 else 1
        buckets.append((10, 10, at, 200))
    members = [(number,) for number in range(count)]
    more = {"backward": (10, 40), "end": 240, "optimizers": []}
    steps = steps_of(12, buckets, 300, **more)
    return [timeline(steps, rank=rank, members=members) for rank in (0, 1)]


def table_of(text):
    """The cells of each bucket's row, without the last column."""
    table = re.search(r"^bucket  params.*\n((?:.*\n)*?)All in ms", text, re.M)[1]
    return [line.split()[:10] for line in table.splitlines()]


def test_a_table_of_many_buckets_adds_up_and_says_what_it_sums_up():
    text = report(with_buckets(60))
    rows = table_of(text)
    # The exposed ones are among them.
    assert [int(row[0]) for row in rows[:-1]] == [*range(10), *range(30, 60)]
    assert " ".join(rows[-1]) == "others 20 20.00 - - - 0.0 20.0 20.0 0.0"
    assert "the sums of 20 buckets" in text
    assert sum(float(row[2]) for row in rows) == 60
    (said,) = re.findall(r"hidden\? .* of the gradients' ([\d.]+) ms", text)
    wires = [float(row[7]) for row in rows]
    assert sum(wires) == pytest.approx(float(said), abs=0.1)
    assert "(20 buckets are left out.)" in text
    text = report(with_buckets(40))
    assert len(table_of(text)) == 40
    assert "the sums of" not in text
    assert "left out" not in text


def test_many_buckets_after_the_backward_are_counted():
    text = report(with_buckets(100))
    assert "Bucket 35 (layers.35) takes longest" in text
    assert "35" in [row[0] for row in table_of(text)]
    buckets = [(30, 30, 40, 60), (30, 30, 50, 60), (30, 30, 60, 60)]
    steps = steps_of(12, buckets, 100, end=90)
    assert (
        "Why? 3 of 3 buckets are still to come when the backward ends. Bucket 0 "
        "(layers.2) takes longest, 10.0 ms: 10.0 ms on the wire. Its last gradient"
    ) in report([timeline(steps, members=[(2,), (1,), (0,)])])
