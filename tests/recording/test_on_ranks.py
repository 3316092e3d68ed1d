"""Two ranks record the same steps, and see them together."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minidp
from minidp.overlap.skew import aligned
from tests.support.both import same
from tests.support.ranks import on_ranks

STEPS = 4


def net():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])


def grads_of(model, rank):
    """Of every step."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        model(torch.randn(8, 64, generator=generator)).pow(2).mean().backward()
        found.append([param.grad.clone() for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return found


def record_beside_torch(ctx, folder):
    options = {"process_group": ctx.group, "bucket_cap_mb": 0.02}
    theirs = grads_of(DistributedDataParallel(net(), **options), ctx.rank)
    model = minidp.DataParallel(net(), **options)
    with minidp.record(model) as rec:
        ours = grads_of(model, ctx.rank)
    if ctx.rank == 0:
        rec.save_trace(f"{folder}/own.json")
    rec.gather()
    if ctx.rank == 0:
        rec.save_trace(f"{folder}/all.json")
    return same(theirs, ours), rec.timelines, rec.report()


@on_ranks(2)
def test_steps_after_gather_are_told_of(ctx):
    """What was gathered lacks them, so that a report would hide them in silence."""
    model = minidp.DataParallel(net(), process_group=ctx.group)
    rec = minidp.record(model).__enter__()
    grads_of(model, ctx.rank)
    rec.gather()
    grads_of(model, ctx.rank)
    with pytest.warns(UserWarning, match=f"{STEPS + 1} steps were recorded after"):
        rec.__exit__(None, None, None)
    assert [len(timeline.steps) for timeline in rec.timelines] == [STEPS - 1] * 2
    rec.gather()
    assert [len(timeline.steps) for timeline in rec.timelines] == [2 * STEPS] * 2
    with minidp.record(model) as rec:  # at the end of the block: nothing is hidden
        grads_of(model, ctx.rank)
        rec.gather()


def test_recording_changes_no_bit_and_ranks_see_each_other(pool, tmp_path):
    for is_equal, timelines, report in pool.run(record_beside_torch, 2, str(tmp_path)):
        assert is_equal
        for timeline in timelines:
            assert [step.number for step in timeline.steps] == list(range(STEPS))
            # One host: the truth is 0.
            assert abs(timeline.clock.offset_ns) <= timeline.clock.error_ns
        assert report.startswith("ranks 0, 1 of 2; gloo on cpu")
        assert "When each rank comes" in report
        assert "Advice: " in report
        zero, one = aligned(timelines).ranks
        # No rank is done before all have launched.
        for ours, theirs in zip(zero.steps, one.steps, strict=True):
            assert len(ours.buckets) == len(theirs.buckets) > 1 or ours.number == 0
            for a, b in zip(ours.buckets, theirs.buckets, strict=True):
                assert max(a.launched_ns, b.launched_ns) <= min(a.done_ns, b.done_ns)
    for name, pids in (("own", {1}), ("all", {1, 2})):
        events = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == pids
        slices = [event["name"] for event in events if event["ph"] == "X"]
        assert slices.count("forward") == STEPS * len(pids)
        assert any("wire, " in name for name in slices)


@on_ranks(2, fresh={"group_timeout": 120.0})
@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_gathers_alone_keeps_its_own(ctx, leaves):
    """Rank 1 goes away instead, or has something else to do.

    Rank 0 would be taken to hang if it waited for as long as the group allows.
    """
    store = dist.distributed_c10d._get_default_store()
    model = minidp.DataParallel(net(), hang_timeout=4)
    with minidp.record(model) as rec:
        grads_of(model, ctx.rank)
    if ctx.rank == 1:
        if leaves:
            dist.destroy_process_group()
        else:
            store.wait(["rank 0 has given up"])
        return
    with pytest.raises(minidp.errors.CollectiveError) as caught:
        rec.gather()
    store.set("rank 0 has given up", "")
    assert len(rec.timelines) == 1
    assert "One step" in rec.report()
    said = str(caught.value)
    assert said.startswith("[rank 0] The recordings of all ranks could not be")
    assert "call it on all ranks; or save() on each rank" in said
    assert leaves or "within 4 s" in said
