"""Large messages to lower ranks have connections of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.futures import Future

from minidp import DataParallel, comm
from minidp.comm import collectives, endings, groups
from minidp.comm.side_groups import connect_both_ways, way_back
from minidp.comm.work import BothWays, FutureWork, completed
from tests.support.fresh import MEMORIES, run_fresh
from tests.support.ranks import on_ranks

WIDTHS = [[3, 5, 2, 4], [0, 4, 0, 1], [2, 0, 0, 0], [0, 0, 0, 6]]


def sent_by(rank, receiver, row, width):
    start = 1000 * rank + 100 * receiver + 10 * row
    return torch.arange(start, start + width, dtype=torch.float32)


def exchanged(ctx, widths, counts):
    """Return what this rank gets of all ranks, in rows of a bucket and as values."""
    ranks, mine = range(ctx.world_size), range(counts[ctx.rank])
    flat = torch.cat([sent_by(ctx.rank, r, k, widths[r]) for r in ranks for k in mine])
    rows, work = comm.start_scatter(flat, widths, ctx.group, counts)
    work.wait()
    own = sent_by(ctx.rank, 0, 0, widths[ctx.rank])
    values, work = comm.start_sharing(own, widths, ctx.group)
    work.wait()
    return rows, values


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@on_ranks(2, 3, 4)
def test_parts_arrive_whichever_way_they_go(ctx, widths):
    connect_both_ways(ctx.group, torch.device("cpu"))
    back, widths = way_back(ctx.group), widths[: ctx.world_size]
    ranks = range(ctx.world_size)
    for counts in ([1] * ctx.world_size, [1 + rank % 2 for rank in ranks]):
        before = back._get_sequence_number_for_group()
        rows, values = exchanged(ctx, widths, counts)
        assert back._get_sequence_number_for_group() == before + 2
        width = widths[ctx.rank]
        expected = [
            sent_by(rank, ctx.rank, k, width)
            for rank in ranks
            for k in range(counts[rank])
        ]
        assert torch.equal(rows, torch.stack(expected))
        for rank in ranks:
            has = 0 if rank == ctx.rank else widths[rank]
            assert torch.equal(values[rank], sent_by(rank, 0, 0, has))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "way_back", lambda _: None)
            other_rows, other_values = exchanged(ctx, widths, counts)
        assert torch.equal(rows, other_rows)
        assert all(map(torch.equal, values, other_values))


def divided(ctx):
    net = nn.Linear(4, 4)
    ddp = DataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ways = [way_back(ddp.process_group)]
    ddp.sharded_step(optimizer)
    ways.append(way_back(ddp.process_group))
    ddp.reset()
    ways.append(way_back(ddp.process_group))
    ddp(torch.ones(1, 4) + ctx.rank).sum().backward()
    optimizer.step()
    shared = ddp._reducer.queue.buckets[0].shared is not None
    return shared, [way is not None for way in ways]


@pytest.mark.fresh
@pytest.mark.parametrize("memory", MEMORIES)
def test_divided_steps_connect_the_ranks_unless_they_share_memory(memory):
    for shared, ways in run_fresh(divided, 2, **memory):
        assert ways == [False, not shared, not shared]


def test_two_halves_are_one_work():
    first, second = Future(), Future()
    work = BothWays(FutureWork(first), FutureWork(second))
    joined = work.get_future()
    first.set_result(None)
    assert not work.is_completed()
    assert not work.is_done_within(0.01)
    assert not joined.done()
    second.set_result(None)
    assert work.is_completed()
    assert work.is_done_within(0.0)
    assert joined.wait() is not None
    work.wait()


@pytest.mark.parametrize("number", [0, 1])
def test_the_error_of_a_half_is_that_of_the_work(number):
    failed: Future[None] = Future()
    failed.set_exception(ValueError("a connection is closed"))
    halves = [FutureWork(completed(None)), FutureWork(completed(None))]
    halves[number] = FutureWork(failed)
    for wait in (BothWays(*halves).wait, lambda: BothWays(*halves).is_done_within(0.0)):
        with pytest.raises(ValueError, match="a connection is closed"):
            wait()


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_does_not_wait_for_the_other_half(number):
    failed: Future[None] = Future()
    failed.set_exception(ValueError("a connection is closed"))
    halves = [FutureWork(Future()), FutureWork(Future())]
    halves[number] = FutureWork(failed)
    with pytest.raises(ValueError, match="a connection is closed"):
        BothWays(*halves).is_done_within(0.01)


class Fake:
    """A group, or a work that may have ended."""

    is_over = False

    def is_completed(self):
        return self.is_over


def test_a_group_is_kept_with_the_groups_beside_it():
    group, beside, work = Fake(), Fake(), Fake()
    groups.groups_beside()[group] = {"a purpose": beside}
    endings.keep_for_good(group, [work])
    assert [each for each, _ in endings._leaked()][-2:] == [group, beside]
    work.is_over = True
    endings.free_left_behind()
    assert not {group, beside} & {each for each, _ in endings._leaked()}
