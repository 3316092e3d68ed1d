"""Each feature of minidp on the simulated device, beside torch's DDP where that has it.

What must hold: the bits of the CPU, no race, and not more than torch's DDP costs, in
launches and in waits of the host.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from minidp import DataParallel, SyncBatchNorm
from tests.accelerator.scenarios import (
    BOTH,
    OPTIONS,
    OURS,
    keeps_gradients,
    synced_batch_norms,
    with_options,
)
from tests.accelerator.training import Run, in_ways, result_of, slots_of_extension
from tests.support import sim
from tests.support.ranks import on_ranks


def same_bits(ctx, scenario, way):
    """Run a scenario on the CPU and on the device; return the run on the device."""
    expected = result_of(Run(ctx, DataParallel, "cpu"), scenario)
    run = Run(ctx, DataParallel, "sim", way)
    found = result_of(run, scenario)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))
    return run


def as_cheap_as_torch(ctx, scenario, way):
    ours = same_bits(ctx, scenario, way).costs
    theirs = Run(ctx, TorchsDDP, "sim", way)
    scenario(theirs)
    # Its races are not ours: `test_torch_ddp` shows them.
    sim.load().drain()
    sim.races()
    assert min(ours.kernels, theirs.costs.kernels) > 0, "the scenario counts nothing"
    assert ours.kernels <= theirs.costs.kernels
    assert ours.collectives <= theirs.costs.collectives
    assert len(ours.host_waits) <= len(theirs.costs.host_waits), ours.host_waits


@on_ranks(2)
@in_ways("name", OPTIONS)
def test_options_of_torch(ctx, name, way):
    as_cheap_as_torch(ctx, partial(with_options, name=name), way)


@pytest.mark.native
@pytest.mark.usefixtures("_extension")
@on_ranks(2)
@in_ways("name", OPTIONS)
def test_buckets_that_the_extension_fills(ctx, name, way):
    with slots_of_extension():
        same_bits(ctx, partial(with_options, name=name), way)


@on_ranks(2)
@in_ways("name", ["default", "views"])
def test_gradients_that_are_kept(ctx, name, way):
    as_cheap_as_torch(ctx, partial(keeps_gradients, name=name), way)


@on_ranks(2)
@in_ways("scenario", BOTH)
def test_features_of_both(ctx, scenario, way):
    as_cheap_as_torch(ctx, scenario, way)


@on_ranks(2)
@in_ways("kind", [torch.nn.SyncBatchNorm, SyncBatchNorm])
def test_batch_norms_over_all_ranks(ctx, kind, way):
    """On a device minidp's layer is torch's, whose kernels the CPU does not have."""
    scenario = partial(synced_batch_norms, kind=kind)
    ours = Run(ctx, DataParallel, "sim", way)
    theirs = Run(ctx, TorchsDDP, "sim")  # its reducer races with nodes of two streams
    found = result_of(ours, scenario)
    expected = [tensor.detach().cpu() for tensor in scenario(theirs)]
    sim.load().drain()
    sim.races()
    assert all(map(torch.equal, expected, found))
    assert ours.costs.collectives <= theirs.costs.collectives
    assert len(ours.costs.host_waits) <= len(theirs.costs.host_waits)
    # Minidp's layer on the CPU computes in another order, in float64 as here.
    on_cpu = partial(synced_batch_norms, kind=SyncBatchNorm)
    for mine, cpu in zip(
        found, result_of(Run(ctx, DataParallel, "cpu"), on_cpu), strict=True
    ):
        torch.testing.assert_close(mine, cpu, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_a_training_aside_leaves_the_default_streams_of_all_its_devices(ctx):
    run = Run(ctx, DataParallel, "sim", "run_aside")
    devices = [run.device(index) for index in range(2)]
    before = [*map(torch.accelerator.current_stream, devices)]
    with run.training():
        now = [*map(torch.accelerator.current_stream, devices)]
    assert not set(before) & set(now)


@on_ranks(2)
@in_ways("scenario", OURS)
def test_features_of_minidp(ctx, scenario, way):
    same_bits(ctx, scenario, way)
