"""Report arithmetic on recordings made by hand, with known answers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from minidp._advice import advise, layers_of
from minidp._analysis import (
    backward_of,
    by_hiding,
    most_exposed,
    network_of,
    overlap_of,
    overlaps_of,
)
from minidp._forecast import forecast_of
from minidp._schedule import Network
from minidp._skew import aligned, skew_of
from minidp._timeline import AUTO, AUTO_TRIES, Clock
from minidp.report import _bandwidth, _runs, report
from tests.support.timelines import MS, span, step, timeline

# Backward from 10 to 30 ms.
TWO = [(20, 21, 26, 35), (29, 29, 41, 42)]


def test_hidden_and_exposed():
    first, second = overlap_of(step(0, TWO)).buckets
    assert (first.full_s, first.waited_s, first.queued_s) == (0.010, 0.001, 0)
    assert (first.wire_s, first.hidden_s, first.exposed_s) == (0.005, 0.005, 0)
    assert (second.wire_s, second.hidden_s, second.exposed_s) == (0.012, 0.001, 0.011)


def test_a_bucket_waits_for_the_one_before():
    first, second = overlap_of(step(0, [(15, 15, 33, 34), (20, 21, 38, 39)])).buckets
    assert (first.wire_s, first.hidden_s, first.exposed_s) == (0.018, 0.015, 0.003)
    assert (second.waited_s, second.queued_s, second.wire_s) == (0.013, 0.012, 0.005)
    assert (second.hidden_s, second.exposed_s) == (0, 0.005)


def test_a_bucket_that_overtakes_takes_no_time():
    _, second = overlap_of(step(0, [(15, 15, 33, 34), (20, 21, 30, 39)])).buckets
    assert (second.waited_s, second.wire_s, second.exposed_s) == (0.010, 0, 0)


def test_waiting_for_slower_ranks_is_told_apart():
    one = overlap_of(step(0, TWO), {0: 24 * MS, 1: 35 * MS})
    first, second = one.buckets
    assert (first.late_s, first.wire_s, first.hidden_s) == (0.003, 0.002, 0.005)
    assert (second.late_s, second.wire_s, second.exposed_s) == (0.006, 0.006, 0.011)
    assert one.late_s == pytest.approx(0.009)


def test_where_the_time_of_a_step_goes():
    one = overlap_of(step(0, TWO))
    parts = (
        one.forward_s,
        one.backward_s,
        one.exposed_s,
        one.finish_s,
        one.optimizer_s,
        one.other_s,
    )
    assert parts == pytest.approx((0.008, 0.020, 0.011, 0.001, 0.005, 0.015))
    assert sum(parts) == pytest.approx(one.seconds)


# Two forwards and backwards that average nothing; then those of `TWO`.
LOCAL = {
    "forward": (4, 8),
    "local_forwards": [(0, 1), (2, 3)],
    "local_backwards": [(1, 2), (3, 4), (3.2, 3.6)],
}


def test_local_forwards_and_backwards_are_not_everything_else():
    plain, one = overlap_of(step(0, TWO)), overlap_of(step(0, TWO, **LOCAL))
    assert (one.num_local_forwards, plain.num_local_forwards) == (2, 0)
    assert one.local_forward_s == pytest.approx(0.002)
    assert one.local_backward_s == pytest.approx(0.002)  # one lies within another
    assert one.forward_s == pytest.approx(0.004)
    assert one.other_s == pytest.approx(plain.other_s)


def test_optimizer_steps_in_the_backward_hide_communication():
    one = overlap_of(step(0, TWO, optimizers=[(33, 36)]))
    assert one.buckets[1].exposed_s == pytest.approx(0.008)
    assert one.buckets[1].hidden_s == pytest.approx(0.004)


def test_medians_over_steps():
    late = [(20, 21, 26, 35), (29, 29, 51, 52)]
    steps = [step(n, TWO, at=100 * n) for n in range(3)]
    steps += [step(3, late, at=300, optimizers=())]
    (overlap,) = overlaps_of(aligned([timeline(steps)]))
    assert overlap.num_steps == 4
    assert overlap.typical.exposed_s == pytest.approx(0.011)
    assert overlap.members == ((1,), (0,))
    assert overlap.nbytes == (2**20, 2**20)


def test_the_typical_step_is_within_its_own_spread():
    """The first one's length is the median, but no other step exposes as much.

    By distance from the medians alone it would be chosen: 18 ms, the others 24.
    """
    quick, slow = [(28, 28, 31, 35)], [(28, 28, 49, 49)]
    steps = [step(0, slow, end=60, optimizers=[])]
    for n in range(1, 11):
        end = 36 if n <= 5 else 84
        steps.append(step(n, quick, at=100 * n, end=end, optimizers=[]))
    (overlap,) = overlaps_of(aligned([timeline(steps, members=[(0, 1)])]))
    low, high = overlap.exposed_spread_s
    assert low <= overlap.typical.exposed_s <= high < 0.019
    low, high = overlap.spread_s
    assert low <= overlap.typical.seconds <= high


def test_the_rank_that_is_reported_is_the_one_that_usually_waits_most():
    """Not the one that waited most in a step that happens to be chosen."""
    zero = [step(n, [(28, 28, 34, 35)], at=100 * n) for n in range(11)]
    one = [
        step(n, [(28, 28, 36 if n else 31, 38)], at=100 * n, end=60 if n else 61)
        for n in range(11)
    ]
    ranks = aligned(
        [
            timeline(steps, rank=rank, members=[(0, 1)])
            for rank, steps in enumerate((zero, one))
        ]
    )
    overlaps = overlaps_of(ranks)
    assert most_exposed(overlaps).rank == 1
    assert overlaps[1].typical.exposed_s == pytest.approx(0.006)
    assert "on rank 1, which waits most" in report(ranks)


def test_first_gradient_comes_from_the_steps_that_have_it():
    steps = [step(0, TWO, ready=(25, 12)), step(1, TWO, at=100)]
    (overlap,) = overlaps_of(aligned([timeline(steps)]))
    assert [b.first_s for b in overlap.typical.buckets] == pytest.approx([0.002, 0.015])


def test_first_gradients_keep_their_order_in_a_shorter_step():
    """Fill times of long steps, taken off a short one, would begin before it."""
    long = [(12 + 40, 12 + 40, 60, 79), (29 + 40, 29 + 40, 78, 79)]
    slow = step(0, long, ready=(60, 32), backward=(10, 70), end=99, optimizers=[])
    quick = [step(n, TWO, at=100 * n) for n in (1, 2)]
    (overlap,) = overlaps_of(aligned([timeline([slow, *quick])]))
    first, second = overlap.typical.buckets
    assert 0 < first.first_s < second.first_s < second.full_s


def test_backward_for_the_model():
    steps = [step(0, TWO, ready=(28, 14)), step(1, TWO, at=100)]
    backward, order = backward_of(timeline(steps))
    assert order == (1, 0)
    assert backward.ready_s == pytest.approx((0.004, 0.018))
    assert backward.end_s == pytest.approx(0.020)


def test_parameters_without_times_are_ready_with_their_bucket():
    backward, order = backward_of(timeline([step(0, TWO)]))
    assert order == (1, 0)
    assert backward.ready_s == pytest.approx((0.010, 0.019))


def test_network_is_fitted_to_collectives():
    def taking(number, seconds_of_one, seconds_of_two, at):
        first = (12, 12, 12 + seconds_of_one, 59)
        return step(number, [first, (29, 29, 29 + seconds_of_two, 59)], at=at)

    members = [(0,), (1, 2)]  # 1 MiB and 2 MiB: 1 ms + 4 ms for each MiB
    one = timeline([taking(n, 5, 9, 100 * n) for n in range(3)], members=members)
    network = network_of([one])
    assert network.latency_s == pytest.approx(0.001)
    assert network.bytes_per_s == pytest.approx(2**20 / 0.004)


def test_one_size_only_is_bandwidth():
    network = network_of([timeline([step(0, [(20, 20, 28, 29)])], members=[(0,)])])
    assert network.latency_s == 0.0
    assert network.bytes_per_s == pytest.approx(2**20 / 0.008)


def test_an_overtaken_collective_counts_with_the_one_that_overtakes():
    steps = [step(n, [(12, 12, 20, 31), (14, 14, 16, 31)], at=100 * n) for n in (0, 1)]
    network = network_of([timeline(steps)])
    assert network.bytes_per_s == pytest.approx(2 * 2**20 / 0.008)


def test_nobody_knows_how_many_bytes_a_sparse_gradient_has():
    one = timeline([step(0, TWO)])
    sparse = replace(one.params[0], kind="sparse float32 on cpu")
    one = replace(one, params=(sparse, one.params[1]))
    network = network_of([one])  # of bucket 0 alone, which has parameter 1
    assert network.bytes_per_s == pytest.approx(2**20 / 0.005)
    (overlap,) = overlaps_of(aligned([one]))
    assert overlap.dense_bytes == (2**20, 0)


@pytest.mark.parametrize(
    ("interval", "pieces"),
    [
        ((5, 8), [(5, 8, False)]),
        ((15, 20), [(15, 20, True)]),
        (
            (5, 40),
            [
                (5, 10, False),
                (10, 30, True),
                (30, 33, False),
                (33, 36, True),
                (36, 40, False),
            ],
        ),
        ((30, 30), []),
    ],
)
def test_an_optimizer_step_hides_what_runs_beside_it(interval, pieces):
    one = step(0, TWO, optimizers=[(33, 36)])
    found = by_hiding(one, *(n * MS for n in interval))
    assert found == [(begin * MS, end * MS, hides) for begin, end, hides in pieces]


def test_one_rank_has_no_network():
    assert network_of([timeline([step(0, TWO)], world_size=1)]) is None


# --------------------------------------------------------------------------- advice


def advice_for(*timelines):
    ranks = aligned(timelines)
    first = max(overlaps_of(ranks), key=lambda one: one.typical.exposed_s)
    return advise(ranks, first, forecast_of(ranks, first), skew_of(ranks))


def test_one_rank_has_nothing_to_gain():
    text = advice_for(timeline([step(0, TWO)], world_size=1))
    assert text == "There is one rank: nothing is sent, nothing to gain."


def test_hidden_communication_has_nothing_to_gain():
    text = advice_for(timeline([step(0, [(12, 12, 20, 31), (21, 21, 30.5, 31)])]))
    assert text == "Only 0.5 ms are exposed, too little to gain anything."


# Ten gradients of 1 MiB, one every 2 ms; 4 ms for each MiB.
READY = [12 + 2 * (9 - i) for i in range(10)]


def first_and_rest(number=0, later=0):
    """The first gradient alone in a bucket; takes ``later`` ms longer."""
    buckets = [(12, 12, 16, 16), (30, 30, 66, 66)]
    end = 76 + later
    return step(number, buckets, at=200 * number, ready=READY, end=end, optimizers=[])


def in_two_buckets(steps):
    return timeline(steps, members=[(9,), tuple(range(9))])


def test_smaller_buckets_are_advised_and_the_gain_is_right():
    # One bucket for each: from 12 ms on the wire, done at 52 ms instead of 66.
    assert advice_for(in_two_buckets([first_and_rest()])) == (
        'Use bucket_cap_mb=1 (or "auto"): predicted 62 ms instead of 76 ms per step.'
    )


def test_one_size_does_not_tell_what_small_buckets_cost():
    one = step(0, [(30, 30, 70, 70)], ready=READY, end=80, optimizers=[])
    text = advice_for(timeline([one], members=[tuple(range(10))]))
    assert text.startswith(
        'Try bucket_cap_mb="auto", or bucket_cap_mb=1: predicted 62 ms instead of 80 '
        "ms per step, if small buckets are as fast"
    )


def test_what_is_lost_in_the_noise_is_not_advised():
    steps = [first_and_rest(n, later) for n, later in enumerate((-4, -2, 0, 2, 4))]
    assert advice_for(in_two_buckets(steps)).startswith("Use bucket_cap_mb=1 ")
    steps = [first_and_rest(n, later) for n, later in enumerate((-9, -9, 0, 60, 60))]
    assert advice_for(in_two_buckets(steps)) == (
        'No change is certain to help: with bucket_cap_mb=1 (or "auto", which '
        "measures), predicted 62 ms instead of 76 ms per step, but steps differ by "
        "more (p10 67 ms, p90 136 ms)."
    )


def test_auto_is_not_told_what_it_has_measured():
    plain = in_two_buckets([first_and_rest()])

    def by(choice):
        return replace(plain, where=replace(plain.where, layout_by=choice))

    assert "bucket_cap_mb" not in advice_for(by(AUTO))
    assert "record after its choice" in advice_for(by(AUTO_TRIES))
    assert 'bucket_cap_mb="auto" chose the buckets' in report([by(AUTO)])
    assert 'bucket_cap_mb="auto" is still trying' in report([by(AUTO_TRIES)])


def test_compression_is_advised_where_the_link_is_the_limit():
    # The only gradient is there at the end: no layout helps.
    one = step(0, [(30, 30, 70, 70)], ready=[30], end=80, optimizers=[])
    text = advice_for(timeline([one], members=[(0,)]))
    assert "fp16_compress_hook) sends half the bytes; predicted 60 ms instead" in text


def test_a_few_bytes_are_not_to_be_compressed():
    """They take as long as a message takes; one size alone looks like bandwidth."""
    one = step(0, [(30, 30, 70, 70)], ready=[30], end=80, optimizers=[])
    text = advice_for(timeline([one], members=[(0,)], nbytes=44))
    assert "no bucket size would change that: do more per step" in text
    assert text.endswith("of two, predicted 60 ms for each instead of 80 ms.")


def test_who_accumulates_is_told_to_accumulate_more():
    times = {"ready": [30], "end": 80, "optimizers": [], **LOCAL}
    one = timeline([step(0, [(30, 30, 70, 70)], **times)], members=[(0,)], nbytes=44)
    assert advice_for(one).endswith(
        "or with more backwards under no_sync(): of two such steps in one, predicted "
        "60 ms for each instead of 80 ms."
    )


def test_what_a_comm_hook_may_compress_already_is_not_advised_again():
    one = step(0, [(30, 30, 70, 70)], ready=[30], end=80, optimizers=[])
    plain = timeline([one], members=[(0,)])
    hooked = replace(plain, where=replace(plain.where, comm_hook="fp16_compress_hook"))
    assert "compress" in advice_for(plain)
    assert "compress" not in advice_for(hooked)


def test_the_bound_has_no_more_exposed_than_the_network_needs():
    # 1 MiB, there at the end of the backward: the fit says 40 ms, whatever was waited.
    times = {"ready": [30], "end": 80, "optimizers": []}
    steps = [step(n, [(30, 30, 70, 70)], at=100 * n, **times) for n in range(3)]
    ranks = aligned([timeline(steps, members=[(0,)])])
    (overlap,) = overlaps_of(ranks)
    forecast = forecast_of(ranks, overlap)
    assert forecast.bound_s == pytest.approx(overlap.typical.seconds)
    quicker = replace(forecast, network=Network(0.0, 2**20 / 0.015))
    assert quicker.bound_s == pytest.approx(overlap.typical.seconds - 0.025)


def straggling(late, *, forward=False):
    """Rank 1 comes ``late`` ms to everything from bucket 1 on."""
    fast = [(12, 12, 14, 75), (30, 30, 34 + late, 75)]
    slow = [(12, 12, 14, 75), (30 + late, 30 + late, 34 + late, 75)]
    ranks = []
    for rank, buckets in enumerate((fast, slow)):
        end = 31 + late if rank else 31
        steps = [
            step(n, buckets, at=100 * n, backward=(10, end), end=100, optimizers=[])
            for n in range(4)
        ]
        ranks.append(timeline(steps, rank=rank))
    return ranks


def test_the_straggler_is_named_with_its_layers():
    assert advice_for(*straggling(40)) == (
        "Rank 1 is 40 ms late at the last bucket, above all because it falls 40 ms "
        "behind at bucket 1 (layers.0): balance the load; predicted 60 ms instead of "
        "100 ms per step."
    )


def test_lateness_is_told_by_where_it_grows():
    """4 ms late when the forward begins, 9 more when it ends, 2 more at bucket 0."""
    fast = [(22, 22, 50, 50), (30, 30, 60, 60)]
    slow = [(37, 37, 50, 50), (45, 45, 60, 60)]
    ranks = [
        timeline(
            [
                step(n, fast, at=100 * n, backward=(10, 30), end=96, optimizers=[])
                for n in range(4)
            ]
        ),
        timeline(
            [
                replace(
                    step(n, slow, at=100 * n, backward=(23, 45), end=96, optimizers=[]),
                    forwards=(span(4, 21, 100 * n),),
                )
                for n in range(4)
            ],
            rank=1,
        ),
    ]
    assert advice_for(*ranks).startswith(
        "Rank 1 is 15 ms late at the last bucket, above all because it takes 9.0 ms "
        "longer for its forward: balance the load; predicted 81 ms instead of 96 ms"
    )


def test_waiting_comes_before_buckets_where_it_is_most_of_what_is_exposed():
    # The ranks take turns: in each step another one comes 30 ms late to the end.
    ranks = []
    for rank in range(2):
        steps = []
        for number in range(8):
            launched = 60 if number % 2 == rank else 30
            buckets = [(12, 12, 16, 16), (launched, launched, 75, 75)]
            steps.append(
                step(
                    number,
                    buckets,
                    at=100 * number,
                    backward=(10, launched),
                    end=90,
                    optimizers=[],
                )
            )
        ranks.append(timeline(steps, rank=rank))
    text = advice_for(*ranks)
    assert text == (
        "For 30 ms of what is exposed, ranks wait for each other, and it is not always "
        "the same one that is late: look for other load on the machines, or inputs of "
        "unequal length."
    )


def test_nobody_is_blamed_for_a_millisecond():
    assert "Rank" not in advice_for(*straggling(1))


def test_layers_are_named_from_the_first_to_the_last():
    one = timeline([step(0, [TWO[0]])], members=[(0, 1, 2)])
    assert layers_of(one, (2, 1)) == "layers.1 to layers.2"
    assert layers_of(one, (2,)) == "layers.2"


def test_children_of_a_sequential_are_not_mere_numbers():
    names = ("0.weight", "0.bias", "3.weight", "scale")
    one = timeline([step(0, [TWO[0]])], members=[(0, 1, 2, 3)])
    params = [replace(p, name=name) for p, name in zip(one.params, names, strict=True)]
    one = replace(one, params=tuple(params))
    assert layers_of(one, (0, 1, 2)) == "0.weight to 3.weight"
    assert layers_of(one, (3,)) == "scale"


def test_the_reasons_add_up():
    """From the last gradient on: 40 + 4 ms, of which 1 ms is in the backward."""
    assert (
        "Is communication hidden? 7% of the gradients' 46.0 ms per step; 43.0 ms are "
        "exposed (p10 43.0, p90 43.0), 43% of the step.\n"
        "Why? 43.0 ms of them are bucket 1 (layers.0): its last gradient comes 1.0 ms "
        "before the backward ends; then 40.0 ms until the slowest rank launches it, "
        "4.0 ms on the wire.\n"
    ) in report(straggling(40))


# --------------------------------------------------------------------------- words


def test_one_rank_hides_nothing():
    text = report([timeline([step(0, TWO)], world_size=1)])
    assert "Is communication hidden? There is none.\n" in text
    assert "Why?" not in text


def test_of_sparse_gradients_nothing_is_predicted_but_all_is_shown():
    one = timeline([step(n, TWO, at=60 * n) for n in range(12)])
    params = tuple(replace(p, kind="sparse float32 on cpu") for p in one.params)
    text = report([replace(one, params=params)])
    assert "nobody knows how many bytes a sparse gradient sends: do more per" in text
    assert "bucket  params" in text
    assert "Bus bandwidth" not in text


@pytest.mark.parametrize(
    ("bytes_per_s", "words"),
    [
        (0.23e9, "0.23 GB/s (1.84 Gbit/s)"),
        (124.95e9, "125 GB/s (1000 Gbit/s)"),
        (450e9, "450 GB/s (3600 Gbit/s)"),
    ],
)
def test_a_fast_link_has_no_power_of_ten(bytes_per_s, words):
    assert _bandwidth(bytes_per_s) == words


def test_ranks_that_are_not_here_are_counted():
    steps = [step(n, TWO, at=60 * n) for n in range(12)]
    text = report([timeline(steps, rank=r, world_size=16) for r in (3, 7)])
    assert "which waits most of these; 14 more are not here" in text
    assert "waiting for ranks that are not here included" in text


def test_a_rank_without_steps_is_named():
    steps = [step(n, TWO, at=60 * n) for n in range(3)]
    text = report([timeline(steps), timeline([], rank=1)])
    assert text.endswith("(Complete steps: rank 0 3, rank 1 0.)")


def test_clocks_that_tell_nothing_are_not_asked():
    """Two hosts, whose clocks are known to 20 ms: no word about who waits for whom."""
    steps = [step(n, TWO, at=60 * n) for n in range(12)]
    zero = replace(timeline(steps), clock=Clock(0, 0))
    one = replace(timeline(steps, rank=1, host="there"), clock=Clock(0, 20 * MS))
    text = report([zero, one])
    assert "of waiting for slower ranks and on the wire, which clocks that are" in text
    assert "until the slowest rank launches it" not in text


def test_local_work_has_rows_of_its_own():
    plain = timeline([step(n, TWO, at=60 * n) for n in range(12)])
    assert "local" not in report([plain])
    text = report([timeline([step(n, TWO, at=60 * n, **LOCAL) for n in range(12)])])
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
    times = {"backward": (10, 40), "end": 240, "optimizers": []}
    steps = [step(n, buckets, at=300 * n, **times) for n in range(12)]
    return [timeline(steps, rank=rank, members=members) for rank in (0, 1)]


def table_of(text, first):
    """The cells of each row, without the last column."""
    lines = text.split("\n")
    begin = next(n for n, line in enumerate(lines) if line.startswith(first))
    rows = []
    for line in lines[begin + 1 :]:
        if line == "All in ms.":
            return rows
        rows.append(line.split()[:10])
    return rows


def test_a_table_of_many_buckets_adds_up_and_says_what_it_sums_up():
    text = report(with_buckets(60))
    rows = table_of(text, "bucket  params")
    assert len(rows) == 41
    numbers = [int(row[0]) for row in rows[:-1]]
    assert numbers == [*range(10), *range(30, 60)]  # the exposed ones among them
    assert " ".join(rows[-1]) == "others 20 20.00 - - - 0.0 20.0 20.0 0.0"
    assert "the sums of 20 buckets: 10 to 29" in text
    assert sum(float(row[2]) for row in rows) == 60
    (said,) = re.findall(r"hidden\? .* of the gradients' ([\d.]+) ms", text)
    wires = [float(row[7]) for row in rows]
    assert sum(wires) == pytest.approx(float(said), abs=0.1)


def test_a_table_that_fits_has_no_sums():
    text = report(with_buckets(40))
    assert len(table_of(text, "bucket  params")) == 40
    assert "the sums of" not in text
    assert "left out" not in text


def test_the_bucket_that_is_blamed_is_in_the_table():
    text = report(with_buckets(100))
    assert "Bucket 35 (layers.35) takes longest" in text
    assert "35" in [row[0] for row in table_of(text, "bucket  params")]


def test_buckets_that_the_table_of_lateness_leaves_out_are_named():
    ranks = with_buckets(60)
    assert "(Buckets 0 to 19 are left out: no rank is more than 0.0 ms behind" in (
        report(ranks)
    )


def test_growing_numbers_are_named_by_their_runs():
    assert _runs([3, 5, 6, 7, 9, 10]) == "3, 5 to 7, 9 to 10"


def test_many_buckets_after_the_backward_are_counted():
    buckets = [(30, 30, 40, 60), (30, 30, 50, 60), (30, 30, 60, 60)]
    one = timeline(
        [step(n, buckets, at=100 * n, end=90) for n in range(12)],
        members=[(2,), (1,), (0,)],
    )
    assert (
        "Why? 3 of 3 buckets are still to come when the backward ends. Bucket 0 "
        "(layers.2) takes longest, 10.0 ms: its last gradient comes 0.0 ms before"
    ) in report([one])
