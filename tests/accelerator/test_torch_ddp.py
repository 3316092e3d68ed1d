"""Torch's own DDP on the simulated device: what minidp is measured by."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.accelerator.scenarios import OPTIONS, with_options
from tests.accelerator.training import WAYS, Run, net, no_races, on_host
from tests.support import sim
from tests.support.ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("way", WAYS[:3])
def test_it_has_the_bits_of_the_cpu_and_no_race(ctx, name, way):
    expected = with_options(Run(ctx, DistributedDataParallel, "cpu"), name)
    sim.delay(300, seed=ctx.rank)
    run = Run(ctx, DistributedDataParallel, "sim", way)
    with no_races():
        found = with_options(run, name)
    sim.delay(0, seed=0)
    assert all(map(torch.equal, expected, on_host(found)))
    # It builds its buckets anew after the first backward, and tells all ranks how.
    print(run.costs)
