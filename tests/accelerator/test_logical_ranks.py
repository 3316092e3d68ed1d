"""The sums of logical ranks, each wait and mark of which some program here needs."""

from __future__ import annotations

import copy
import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidp import DataParallel
from minidp.layout import BucketPlan
from minidp.layout.plan import Slot
from minidp.logical.averaging import Slices, StreamSum
from minidp.logical.partial_sums import PartialSums
from minidp.logical.tree import Node
from tests.accelerator.test_lifetimes import all_memory_reused, take
from tests.support import sim
from tests.support.ranks import on_ranks

SIZE = 500


def plan_of(device):
    return BucketPlan((Slot(0, 0, SIZE, (SIZE,), (1,)),), torch.float32, device)


def ones(ctx):
    return torch.ones(SIZE, device=ctx.device)


def here():
    return torch.accelerator.current_stream()


@on_ranks(2)
def test_gradients_of_another_stream_are_added_up(ctx):
    side, partial = sim.new_stream(), PartialSums(4, range(4))
    with all_memory_reused():
        with side:
            first, second = ones(ctx), ones(ctx)
        here().wait_stream(side)
        partial.add(0, [first])
        partial.add(1, [second])
        del first, second
        partial.clear()
        take(side, SIZE)


@on_ranks(2)
def test_a_bucket_of_another_stream_waits_for_the_sums(ctx):
    side, partial = sim.new_stream(), PartialSums(4, range(4))
    with all_memory_reused():
        for leaf in range(3):
            partial.add(leaf, [ones(ctx)])
        with side:
            bucket = ones(ctx)
            partial.add_to_bucket(plan_of(ctx.device), [bucket])
            assert bucket.cpu().tolist() == [4.0] * SIZE


@on_ranks(2)
def test_sums_are_dropped_while_a_bucket_of_another_stream_reads_them(ctx):
    side, partial = sim.new_stream(), PartialSums(2, range(2))
    with all_memory_reused():
        partial.add(0, [ones(ctx)])
        with side:
            partial.add_to_bucket(plan_of(ctx.device), [ones(ctx)])
        partial.clear()
        take(here(), SIZE)


@on_ranks(2)
def test_the_stream_of_a_backward_does_not_wait_for_other_ranks(ctx):
    dist.all_reduce(ones(ctx), group=ctx.group)  # the first one connects the ranks
    pieces = [ones(ctx), ones(ctx)]
    nodes = [[Node(1, 0), Node(0, 2)], [Node(0, 3), Node(0, 4)]]
    cpu = torch.zeros(1)
    if ctx.rank == 1:  # comes when the other one has seen that it need not wait
        dist.all_reduce(cpu, group=ctx.group)
    total = StreamSum(Slices(pieces[-1], pieces, nodes, 5, ctx.group))
    if ctx.rank == 0:
        passed = torch.Event("sim")
        passed.record()
        end = time.monotonic() + 5
        while not passed.query() and time.monotonic() < end:
            time.sleep(0.01)
        has_passed = passed.query()
        dist.all_reduce(cpu, group=ctx.group)
        assert has_passed
    total.wait()
    assert pieces[-1].cpu().tolist() == [4.0] * SIZE


@on_ranks(2)
def test_sparse_gradients_are_refused(ctx):
    module = nn.Embedding(4, 2, sparse=True).to(ctx.device)
    with pytest.raises(ValueError, match="a sparse gradient on an accelerator"):
        DataParallel(module, process_group=ctx.group, logical_ranks=4)


@on_ranks(2)
@pytest.mark.parametrize("each", [1, 2, 4, 8])
def test_memory_grows_with_the_logarithm(ctx, each):
    """Beyond plain accumulation: log2 of the logical ranks of a rank, in gradients."""
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).to(ctx.device)
    size = sum(param.nbytes for param in module.parameters())
    x = torch.ones(4, 256, device=ctx.device)
    plain = DataParallel(module, process_group=ctx.group, bucket_cap_mb=0.6)
    twin = copy.deepcopy(module)
    logical = DataParallel(
        twin, process_group=ctx.group, bucket_cap_mb=0.6, logical_ranks=2 * each
    )

    def accumulates():
        with plain.no_sync():
            for _ in range(each - 1):
                plain(x).sum().backward()
        plain(x).sum().backward()

    def loops():
        for _ in logical.each_logical_rank():
            logical(x).sum().backward()

    peaks = []
    for step, model in ((accumulates, plain), (loops, logical)):
        for _ in range(3):
            step()
            model.zero_grad()
        with sim.costs() as costs:
            step()
            model.zero_grad()
        peaks.append(costs.peak)
    assert peaks[1] <= peaks[0] + 1.02 * math.log2(each) * size
