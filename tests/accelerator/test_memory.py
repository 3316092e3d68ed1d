"""How much memory of the device a training takes at most, beside torch's DDP."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel
from tests.accelerator.training import Run
from tests.support import sim
from tests.support.ranks import on_ranks

MORE = 1.02  # times as much as torch's


def peaks(ctx, wrapper, options, set_to_none=False):
    """Return the peak of the construction, then those of the first steps."""
    gc.collect()
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(8)]  # 2 MiB
    module = nn.Sequential(*layers).to(ctx.device)
    run = Run(ctx, wrapper, "sim")
    found = []
    with sim.costs() as costs:
        model = run.wrap(module, bucket_cap_mb=0.6, **options)
    found.append(costs.peak)
    batch = run.batch(0, 4, 256)
    before = torch.accelerator.memory_allocated()
    for _ in range(4):
        with sim.costs() as costs:
            model.zero_grad(set_to_none=set_to_none)
            model(batch).square().mean().backward()
        now = torch.accelerator.memory_allocated()
        found.append(costs.peak + (now - before))
    return found


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_peaks_are_those_of_torch(ctx, options):
    theirs = peaks(ctx, DistributedDataParallel, options)
    ours = peaks(ctx, DataParallel, options)
    assert all(a <= MORE * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@on_ranks(2)
@pytest.mark.parametrize("views", [False, True])
def test_gradients_that_are_made_anew_in_each_step(ctx, views):
    """Where they become views, the memory in which they were computed is not kept."""
    options = {"gradient_as_bucket_view": views}
    theirs = peaks(ctx, DistributedDataParallel, options, set_to_none=True)
    ours = peaks(ctx, DataParallel, options, set_to_none=True)
    assert all(a <= MORE * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
