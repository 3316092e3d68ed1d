"""Torch's own DDP on the simulated device, by which minidp is measured."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.accelerator.scenarios import OPTIONS, with_options
from tests.accelerator.training import Run, net, result_of
from tests.support import sim
from tests.support.combined import combined
from tests.support.ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "way"), combined(OPTIONS, ["default", "wrapped_aside", "run_aside"])
)
def test_it_has_the_bits_of_the_cpu_and_no_race(ctx, name, way):
    scenario = partial(with_options, name=name)
    expected = result_of(Run(ctx, DistributedDataParallel, "cpu"), scenario)
    run = Run(ctx, DistributedDataParallel, "sim", way)
    assert all(map(torch.equal, expected, result_of(run, scenario)))
    # The order of the new buckets is read on the host, once.
    assert len(run.costs.host_waits) <= 2


@on_ranks(2)
def test_no_host_wait_once_its_buckets_are_built_anew(ctx):
    model = DistributedDataParallel(net().to(ctx.device), process_group=ctx.group)
    run = Run(ctx, DistributedDataParallel, "sim")
    for step in range(3):
        with sim.costs() as costs:
            model(run.batch(step)).square().mean().backward()
    assert costs.host_waits == ()


@on_ranks(2)
@pytest.mark.parametrize("name", ["default", "small_buckets", "views"])
def test_its_reducer_races_when_nodes_were_made_on_several_streams(ctx, name):
    """A bucket is sent behind the last gradient only, on the stream of that one.

    Streams are taken from a pool, in turn. One of those of the first training may be
    the group's, which hides the race. Those of the second one are others.
    """
    sim.load().drain()
    sim.races()
    for _ in range(2):
        with_options(Run(ctx, DistributedDataParallel, "sim", "mixed_nodes"), name)
    sim.load().drain()
    assert any("allreduce" in race or "copy" in race for race in sim.races())
