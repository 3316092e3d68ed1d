"""What a recording knows of logical ranks, and what its report says of them."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch

import minidp
from minidp.autotune import STEPS as AUTO_STEPS
from minidp.autotune.trials import Search
from minidp.overlap import chrome_trace, report
from minidp.overlap.analysis import overlap_of
from minidp.overlap.text import PHASES
from tests.logical_ranks.trainings import batch, net, wrapped
from tests.support.both import same
from tests.support.ranks import on_ranks
from tests.support.timelines import step, timeline

STEPS = 4


def trained(model, steps=STEPS):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        for leaf in model.each_logical_rank():
            model(batch(number, leaf)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("number", [2, 5])
def test_turns_of_each_step(ctx, number):
    expected = trained(wrapped(ctx, net(), number))
    model = wrapped(ctx, net(), number)
    with minidp.record(model) as rec:
        assert same(expected, trained(model))
    rec.gather()
    mine = rec.timelines[ctx.rank]
    assert mine.where.logical_ranks == number
    assert [one.number for one in mine.steps] == list(range(STEPS))
    for before, after in zip(mine.steps, mine.steps[1:], strict=False):
        assert before.end_ns == after.loop_begin_ns
    for one in mine.steps:
        assert [turn.number for turn in one.turns] == list(model.logical_block)
        assert one.loop_begin_ns <= one.turns[0].begin_ns
        for turn, later in zip(one.turns, one.turns[1:], strict=False):
            assert turn.begin_ns < turn.end_ns <= later.begin_ns
        *local, last = one.turns
        pairs = zip(local, one.local_forwards, one.local_backwards, strict=True)
        for turn, forward, backward in pairs:
            times = [turn.begin_ns, forward.begin_ns, forward.end_ns]
            times += [backward.begin_ns, backward.end_ns, turn.end_ns]
            assert times == sorted(times)
        (forward,) = one.forwards
        assert last.begin_ns < forward.begin_ns < one.backward.begin_ns
        assert one.finalize_end_ns <= last.end_ns
        split = overlap_of(mine, one)
        parts = sum(getattr(split, name) for name in PHASES.values())
        assert parts == pytest.approx(split.seconds)
        assert split.between_s > 0
    text = rec.report()
    assert f"{number} logical ranks, of which " in text
    assert [line.split()[:2] for line in turn_lines(text)] == [
        [str(leaf), str(rank)]
        for rank, timeline in enumerate(rec.timelines)
        for leaf in [turn.number for turn in timeline.steps[0].turns]
    ]


@on_ranks(2)
def test_an_attached_model(ctx):
    module = net()
    handle = minidp.attach(module, process_group=ctx.group, logical_ranks=4)
    with minidp.record(handle) as rec:
        for leaf in handle.each_logical_rank():
            module(batch(0, leaf)).square().mean().backward()
    (one,) = rec.timelines[0].steps
    assert [turn.number for turn in one.turns] == list(handle.logical_block)


def turn_lines(text):
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("logical  rank"))
    end = lines.index("", start)
    return lines[start + 1 : end]


@on_ranks(2)
def test_a_loop_that_was_under_way_or_that_fails_is_no_step(ctx):
    model = wrapped(ctx, net(), 4)
    rec = minidp.record(model)
    for leaf in model.each_logical_rank():
        if leaf == model.logical_block[-1]:
            rec.__enter__()
        model(batch(0, leaf)).square().mean().backward()
    model.zero_grad()
    for leaf in model.each_logical_rank():
        model(batch(1, leaf)).square().mean().backward()
        break
    model.reset()
    model.zero_grad()
    trained(model, steps=2)
    rec.__exit__(None, None, None)
    (mine,) = rec.timelines
    assert [len(one.turns) for one in mine.steps] == [2, 2]
    assert mine.num_dropped == 1
    assert all(len(one.local_forwards) == 1 for one in mine.steps)


@on_ranks(2)
def test_a_plain_model_has_no_turns(ctx):
    model = minidp.DataParallel(net(), process_group=ctx.group)
    with minidp.record(model) as rec:
        for number in range(2):
            model(batch(number, ctx.rank)).square().mean().backward()
    (mine,) = rec.timelines
    assert mine.where.logical_ranks is None
    assert all(one.turns == () for one in mine.steps)
    assert "logical" not in rec.report()
    assert "between turns" not in rec.report()


@on_ranks(2)
def test_buckets_that_are_tuned_have_steps_to_choose_by(ctx):
    model = wrapped(ctx, net(), 4, bucket_cap_mb="auto")
    with mock.patch.object(Search, "add", autospec=True) as add:
        add.side_effect = lambda _search, _layout, steps: counts.append(len(steps))
        counts = []
        trained(model, steps=1 + 2 * AUTO_STEPS + 1)
    # The first step of a trial does not count.
    assert counts == [AUTO_STEPS - 1] * 2 * (ctx.rank == 0)


# ------------------------------------------------------------------------ the report


def two_ranks(turns, local=(), **options):
    """Rank 0 has logical ranks 0 and 1, or so; rank 1 the later ones."""
    found = []
    for rank, own in enumerate(turns):
        last = own[-1]
        begin = last[1] + 1
        one = {
            "turns": own,
            "local_forwards": [(a + 1, a + 3) for _, a, _ in own[:-1]],
            "local_backwards": [(a + 3, b) for _, a, b in own[:-1]],
            "forward": (begin, begin + 2),
            "backward": (begin + 2, begin + 12),
            "optimizers": [(80, 85)],
            "end": 90,
        }
        full = begin + 10
        buckets = [(full - 5, full - 5, 65, 66), (full, full, 70, 71)]
        steps = [step(n, buckets, at=100 * n, **one) for n in range(12)]
        made = timeline(steps, rank=rank, logical_ranks=sum(map(len, turns)))
        found.append(made)
    return found


def test_the_slowest_is_named_and_no_wait_counts():
    """The last turns of both ranks take 14 ms, and wait for 71 ms to come."""
    text = report(two_ranks([[(0, 2, 12), (1, 15, 72)], [(2, 2, 32), (3, 35, 72)]]))
    said = "4 logical ranks, of which 2, on rank 1, takes longest: 30.0 ms, 2.14 times"
    assert said in text
    rows = [line.split() for line in turn_lines(text)]
    assert rows == [
        ["0", "0", "10.0", "11%", "2.0", "7.0", "1.0"],
        ["1", "0", "14.0", "16%", "2.0", "10.0", "2.0"],
        ["2", "1", "30.0", "33%", "2.0", "27.0", "1.0"],
        ["3", "1", "14.0", "16%", "2.0", "10.0", "2.0"],
    ]


def test_the_split_says_what_is_between_turns():
    text = report(two_ranks([[(0, 2, 12), (1, 15, 72)], [(2, 2, 32), (3, 35, 72)]]))
    split = {
        line[2:23].strip(): float(line.split(" ms")[0].split()[-1])
        for line in text.partition("One step")[2].splitlines()[1:11]
        if " ms" in line
    }
    # Which rank is shown does not matter for these.
    assert split["between turns"] == 5.0
    assert split["local forwards"] == 2.0
    assert split["forward"] == 2.0
    assert split["backward"] == 10.0
    assert "of all logical ranks but this rank's last one" in text
    assert "no_sync()" not in text.partition("One step")[2].partition("bucket")[0]


def test_a_rank_with_one_more_is_late_for_that():
    """Which no other load on the machine, and no layout, explains."""
    short = [(3, 2, 12), (4, 15, 72)]
    text = report(two_ranks([[(0, 2, 12), (1, 13, 23), (2, 25, 72)], short]))
    assert "Rank 0 is 10 ms late at the last bucket" in text
    assert "it does 3 logical ranks, and another rank 2, which takes 10 ms" in text
    assert "let the number of ranks divide that of logical ranks" in text


def test_no_comm_hook_is_advised():
    """It would be refused. Without logical ranks it is what helps."""
    large = {"nbytes": 2**26, "members": [(1,), (0,)]}
    buckets = [(20, 20, 25, 35), (30, 30, 70, 71)]
    for leaves in (None, 2):
        more = {} if leaves is None else {"turns": [(0, 0, 45)]}
        steps = [step(n, buckets, at=100 * n, end=90, **more) for n in range(12)]
        lines = [
            timeline(steps, rank=rank, logical_ranks=leaves, **large) for rank in (0, 1)
        ]
        assert ("fp16_compress_hook" in report(lines)) == (leaves is None)


def test_many_logical_ranks_show_the_longest():
    turns = [(leaf, 1 + leaf, 2 + leaf) for leaf in range(49)] + [(49, 50, 60)]
    local = {"local_forwards": [(10, 10)], "forward": (50, 51), "backward": (52, 55)}
    buckets = [(54, 54, 55, 55)]
    steps = [step(0, buckets, turns=turns, optimizers=(), **local)]
    text = report([timeline(steps, logical_ranks=64, members=[(0,)])])
    assert "64 logical ranks, of which 49, on rank 0, takes longest" in text
    assert "Here are 50." in text
    assert len(turn_lines(text)) == 40
    assert turn_lines(text)[-1].split()[0] == "49"


def test_a_trace_has_a_track_of_turns():
    lines = two_ranks([[(0, 2, 12), (1, 15, 72)], [(2, 2, 32), (3, 35, 72)]])
    events = json.loads(chrome_trace(lines))["traceEvents"]
    names = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in events
        if each["name"] == "thread_name"
    }
    found = [each for each in events if each["name"] == "logical rank 3"]
    assert len(found) == 12
    assert {names[each["pid"], each["tid"]] for each in found} == {"logical ranks"}
    assert {each["dur"] for each in found} == {37_000}
