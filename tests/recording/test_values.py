"""What a recording knows of values that come back after divided steps."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from torch import nn

import minidp
from minidp import DataParallel, Moment, Recorder
from minidp.overlap import chrome_trace, html_page, report
from minidp.overlap.analysis import overlap_of, slices
from minidp.overlap.forecast import analyse
from minidp.overlap.skew import aligned
from minidp.overlap.text import PHASES
from tests.support.both import Chain, same
from tests.support.ranks import on_ranks
from tests.support.timelines import MS, step, timeline

BUCKETS = [(20, 20, 25, 35), (30, 30, 40, 41)]
# The optimizer's step is from 50 to 58 ms, and ends when all values are back.
IN_STEP = {
    "optimizers": [(50, 58)],
    "values": [(1, 52, 53, 54, 56), (0, 53, 54, 56, 58)],
}
# The last bucket is back in the step, the first one in the next forward.
EARLY = {"optimizers": [(50, 54)], "values": [(1, 52, 53, 55, 56), (0, 53, 54, 62, 65)]}
LATE = {"forward": (0, 8), "values": [(0, -7, -6, 2, 5)]}


def seconds(one, *names):
    return pytest.approx([getattr(one, f"{name}_s") * 1e3 for name in names])


# -------------------------------------------------------------------- by hand


def test_all_is_exposed_if_a_step_ends_when_values_are_back():
    one = step(0, BUCKETS, **IN_STEP)
    found = overlap_of(timeline([one]), one)
    names = "values", "hidden_values", "optimizer", "forward", "other"
    assert seconds(found, *names) == [6, 0, 2, 8, 13]
    last, first = found.values
    assert (last.number, first.number) == (1, 0)
    assert last.members == (0,)
    names = "start", "hidden", "exposed", "waited"
    assert seconds(last, *names) == [22, 0, 4, 2]
    assert seconds(first, *names) == [23, 0, 5, 2]


def test_values_that_come_back_in_the_next_forward():
    one, two = step(0, BUCKETS, **EARLY), step(1, BUCKETS, at=60, **LATE)
    both = timeline([one, two])
    names = "values", "hidden_values", "optimizer", "forward"
    assert seconds(overlap_of(both, one), *names) == [3, 5, 2, 8]
    assert seconds(overlap_of(both, two), *names) == [3, 2, 5, 5]
    for each in (one, two):
        parts = [getattr(overlap_of(both, each), name) for name in PHASES.values()]
        assert sum(parts) == pytest.approx(overlap_of(both, each).seconds)
    assert not overlap_of(both, two).values  # they are told of where they were sent
    (_, first) = overlap_of(both, one).values
    assert seconds(first, "hidden", "exposed", "waited") == [7, 5, 3]


# Each bucket steps as soon as it is reduced, and its values are sent at once.
IN_BACKWARD = {
    "optimizers": [(32, 34), (41, 43)],
    "values": [(0, 34, 35, 44, 45), (1, 43, 44, 45, 48)],
}


def test_values_amid_the_buckets():
    """While a rank steps or sends, a bucket on the wire is hidden."""
    one = step(0, [(20, 20, 31, 32), (30, 30, 40, 48)], **IN_BACKWARD)
    found = overlap_of(timeline([one]), one)
    names = "backward", "exposed", "finish", "values", "optimizer", "forward", "other"
    assert seconds(found, *names) == [20, 7, 1, 6, 4, 8, 14]
    first, last = found.buckets
    assert seconds(first, "hidden", "exposed") == [10, 1]
    assert seconds(last, "hidden", "exposed") == [3, 6]
    wires = [each for each in slices(found) if each.name.startswith("wire")]
    exposed = [each for each in wires if each.name == "wire, exposed"]
    of_last = [(e.begin_ns / MS, e.end_ns / MS) for e in exposed if e.row == 1]
    assert of_last == [(31, 32), (35, 40)]


def drawn(one, row):
    found = list(slices(overlap_of(timeline([one]), one)))
    return [
        (each.name, each.begin_ns / MS, each.end_ns / MS, each.bucket)
        for each in found
        if each.row == row and each.name.startswith("values")
    ]


def test_a_step_draws_what_lies_in_it():
    one, two = step(0, BUCKETS, **EARLY), step(1, BUCKETS, at=60, **LATE)
    hidden, exposed = "values, hidden", "values, exposed"
    assert sorted(drawn(one, "values"), key=lambda each: each[1]) == [
        *((exposed, 52, 53, 1), (exposed, 53, 54, 0), (hidden, 54, 55, None)),
        *((exposed, 55, 56, 1), (hidden, 56, 60, None)),
    ]
    assert sorted(drawn(two, "values"), key=lambda each: each[1]) == [
        *((hidden, 60, 62, None), (exposed, 62, 65, 0)),
    ]
    assert drawn(one, 0) == [
        *((exposed, 53, 54, None), (hidden, 54, 55, None)),
        *((exposed, 55, 56, None), (hidden, 56, 60, None)),
    ]
    assert drawn(two, 0) == [(hidden, 60, 62, None), (exposed, 62, 65, None)]


def ranks(**more):
    steps = [step(n, BUCKETS, at=60 * n, **more) for n in range(3)]
    return [timeline(steps, rank=rank) for rank in range(2)]


def test_the_report_says_what_values_cost():
    words = report(ranks(**IN_STEP))
    said = "Are values of parameters back in time? To send and to await them takes 6.0 "
    assert f"{said}ms, 10% of the step; for 0.0 ms more" in words
    assert "  values, exposed            6.0 ms  10%   sending new values" in words
    rows = words.partition("of bucket  params   MiB  start")[2].splitlines()
    assert rows[1].split() == [
        "1",
        "1",
        "1.00",
        "22.0",
        "0.0",
        "4.0",
        "2.0",
        "layers.0",
    ]
    assert rows[2].split() == [
        "0",
        "1",
        "1.00",
        "23.0",
        "0.0",
        "5.0",
        "2.0",
        "layers.1",
    ]


def test_the_table_does_not_need_the_last_step():
    """Its values may still be on their way when the recording ends."""
    steps = [step(n, BUCKETS, at=60 * n, **IN_STEP) for n in range(4)]
    steps.append(step(4, BUCKETS, at=240, **LATE))
    found = analyse(aligned([timeline(steps)]))
    assert [each.number for each in found.shown.values] == [1, 0]
    names = "start", "hidden", "exposed", "waited"
    assert seconds(found.shown.values[1], *names) == [23, 0, 5, 2]
    only_last = report([timeline(steps[-1:])])
    assert "takes 3.0 ms, 5% of the step; for 2.0 ms more" in only_last
    assert "of bucket" not in only_last


def test_a_bucket_that_comes_in_parts_is_one_row():
    parts = [(0, 52, 53, 55, 56), (0, 53, 54, 57, 60)]
    one = step(0, BUCKETS, optimizers=[(50, 54)], values=parts, end=80)
    (found,) = overlap_of(timeline([one]), one).values
    names = "start", "hidden", "exposed", "waited"
    assert seconds(found, *names) == [22, 2, 6, 4]


def test_a_trace_has_a_track_for_them():
    events = json.loads(chrome_trace(ranks(**IN_STEP)))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    (track,) = [tid for tid, name in names.items() if name == "values"]
    found = [e for e in events if e["ph"] == "X" and e["tid"] == track]
    assert {e["name"] for e in found} == {"values, exposed"}
    zero = [e for e in found if e["pid"] == 1 and e["args"]["step"] == 0]
    assert [e["args"]["bucket"] for e in zero] == [1, 1, 0, 0]
    assert sorted(e["ts"] for e in zero) == [52_000, 53_000, 54_000, 56_000]
    assert sum(e["dur"] for e in zero) == 6_000


def test_without_divided_steps_nothing_speaks_of_values():
    for text in (report(ranks()), chrome_trace(ranks())):
        assert "values" not in text
    data = html_page(ranks()).partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data)["values"] is None


# ------------------------------------------------------------- events of a real step


def trained(model, optimizer, steps=4, *, in_backward=False):
    for number in range(steps):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        if not in_backward:
            optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def divided(ctx, *, overlaps=False, **options):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    model = DataParallel(net, process_group=ctx.group, bucket_cap_mb=0.01, **options)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    model.sharded_step(optimizer, overlap_param_gather=overlaps)
    return model, optimizer


@on_ranks(2)
@pytest.mark.parametrize("in_shared_memory", [True, False])
def test_values_of_a_real_training(ctx, in_shared_memory):
    more = {} if in_shared_memory else {"lazy_bucket_allocation": True}
    expected = trained(*divided(ctx, **more))
    model, optimizer = divided(ctx, **more)
    with minidp.record(model) as rec:
        assert same(expected, trained(model, optimizer))
    (mine,) = rec.timelines
    assert len(mine.steps) == 4
    for one in mine.steps:
        numbers = sorted(each.number for each in one.values)
        assert numbers == [bucket.number for bucket in one.buckets]
        (update,) = one.optimizers
        for each in one.values:
            times = [each.started_ns, each.sent_ns, each.awaited_ns, each.back_ns]
            assert times == sorted(times)
            assert update.begin_ns <= times[0]
            assert times[-1] <= one.end_ns
        split = overlap_of(mine, one)
        parts = [getattr(split, name) for name in PHASES.values()]
        assert sum(parts) == pytest.approx(split.seconds)
        assert all(part >= 0 for part in parts)
        assert split.values_s > 0
    rec.gather()
    assert "Are values of parameters back in time?" in rec.report()
    assert any("values, exposed" in line for line in rec.report().splitlines())
    return expected


@on_ranks(2)
@pytest.mark.parametrize("in_shared_memory", [True, False])
def test_values_of_steps_inside_the_backward(ctx, in_shared_memory):
    more = {} if in_shared_memory else {"lazy_bucket_allocation": True}
    expected = trained(*divided(ctx, **more))
    model, optimizer = divided(ctx, **more)
    model.step_in_backward(optimizer)
    with minidp.record(model) as rec:
        assert same(expected, trained(model, optimizer, in_backward=True))
    (mine,) = rec.timelines
    assert len(mine.steps) == 4
    for one in mine.steps:
        assert [v.number for v in one.values] == [b.number for b in one.buckets]
        assert len(one.optimizers) == len(one.buckets)
        for each in one.values:
            assert one.backward.end_ns <= each.started_ns
            assert each.back_ns <= one.finalize_end_ns
        split = overlap_of(mine, one)
        parts = [getattr(split, name) for name in PHASES.values()]
        assert sum(parts) == pytest.approx(split.seconds)
        assert all(part >= 0 for part in parts)
    return expected


@on_ranks(2)
@pytest.mark.parametrize("chunk_bytes", [4 * 2**20, 2048])
def test_values_that_really_come_in_the_next_forward(ctx, chunk_bytes):
    expected = trained(*divided(ctx))
    model, optimizer = divided(ctx, overlaps=True)
    chunks = mock.patch("minidp.sharded.returns.CHUNK_BYTES", chunk_bytes)
    with chunks, minidp.record(model) as rec:
        assert same(expected, trained(model, optimizer))
    (mine,) = rec.timelines
    others = mine.steps[1:]
    assert len(others) == 3
    for before, after in zip(mine.steps, others, strict=False):
        late = [each for each in before.values if each.back_ns > before.end_ns]
        assert late == [each for each in after.values if each in late]
        forward = after.forwards[0]
        for each in late:
            assert forward.begin_ns <= each.awaited_ns <= each.back_ns
        if len(before.buckets) > 1:  # buckets are made anew after the first backward
            assert late
            assert overlap_of(mine, before).hidden_values_s > 0
            assert after.forwards[0].seconds > overlap_of(mine, after).forward_s
    for one in mine.steps:
        split = overlap_of(mine, one)
        parts = [getattr(split, name) for name in PHASES.values()]
        assert sum(parts) == pytest.approx(split.seconds)
        numbers = sorted(each.number for each in split.values)
        everything = [bucket.number for bucket in one.buckets]
        if one is not mine.steps[-1]:
            assert numbers == everything
        # What a rank only sends may still be on its way at the end.
        assert numbers
        assert {*numbers} <= {*everything}
    last = [each for each in mine.steps[-1].values if each in mine.steps[-2].values]
    assert last  # those of the step before, and more
    assert len(mine.steps[-1].values) > len(last)
    return expected


@on_ranks(2)
def test_two_optimizers_send_the_same_bucket_twice(ctx):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(32, 32) for _ in range(2)])
    model = DataParallel(net, process_group=ctx.group)
    both = [torch.optim.SGD(part.parameters(), 0.1) for part in net]
    model.sharded_step(*both)
    with minidp.record(model) as rec:
        model(torch.ones(1, 32)).sum().backward()
        for optimizer in both:
            optimizer.step()
    (one,) = rec.timelines[0].steps
    assert [each.number for each in one.values] == [0, 0]


@on_ranks(2)
def test_a_recorder_gets_their_events(ctx):
    model, optimizer = divided(ctx)
    trained(model, optimizer, steps=2)
    recorder = Recorder()
    model.set_recorder(recorder)
    trained(model, optimizer, steps=1)
    model.set_recorder(None)
    trained(model, optimizer, steps=1)
    moments = [Moment.VALUES_STARTED, Moment.VALUES_SENT]
    moments += [Moment.VALUES_AWAITED, Moment.VALUES_BACK]
    for number in range(len(model._reducer.queue.buckets)):
        mine = [e.moment for e in recorder if e.index == number and e.moment in moments]
        assert mine == moments


# ----------------------------------------- values that come back in the next step


@pytest.fixture
def model(lone_group):
    return DataParallel(Chain(), process_group=lone_group)


def tell(model, *moments, bucket=0):
    for moment in moments:
        model._reducer.queue.observers.on_bucket_event(moment, bucket)


def backward(model):
    model(torch.ones(2)).sum().backward()


def test_what_was_on_its_way_belongs_to_both_steps(model):
    with minidp.record(model) as rec:
        backward(model)
        tell(model, Moment.VALUES_STARTED, Moment.VALUES_SENT)
        out = model(torch.ones(2))
        tell(model, Moment.VALUES_AWAITED, Moment.VALUES_BACK)
        out.sum().backward()
        backward(model)
    one, two, three = rec.timelines[0].steps
    (each,) = one.values
    assert two.values == one.values
    assert three.values == ()
    assert each.sent_ns <= one.end_ns <= each.awaited_ns
    assert each.back_ns <= two.backward.begin_ns
    assert overlap_of(rec.timelines[0], two).values == ()


def test_values_that_never_came_are_left_out(model):
    """A step that failed had sent some. The next ones are not taken for them."""
    with minidp.record(model) as rec:
        backward(model)
        tell(model, Moment.VALUES_STARTED, Moment.VALUES_SENT)
        backward(model)
        tell(model, Moment.VALUES_STARTED, Moment.VALUES_SENT)
        tell(model, Moment.VALUES_AWAITED, Moment.VALUES_BACK)
    one, two = rec.timelines[0].steps
    assert one.values == ()
    (each,) = two.values
    assert two.finalize_end_ns <= each.started_ns


def test_what_began_before_the_recording_is_left_out(model):
    backward(model)
    tell(model, Moment.VALUES_STARTED)
    with minidp.record(model) as rec:
        tell(model, Moment.VALUES_SENT)
        out = model(torch.ones(2))
        tell(model, Moment.VALUES_AWAITED, Moment.VALUES_BACK)
        out.sum().backward()
    (one,) = rec.timelines[0].steps
    assert one.values == ()
