"""How much memory of the device a training takes at most, beside torch's DDP."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel, comm_hooks
from minidp.replica import digest_of
from tests.accelerator.training import Run
from tests.support import sim
from tests.support.ranks import on_ranks

MORE = 1.02  # times as much as torch's


def peaks(ctx, wrapper, options, *, set_to_none=False, hook="", steps=4):
    """Return the peak of the construction, then those of the first steps.

    A ``hook`` is named as in torch's `default_hooks`.
    """
    gc.collect()
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(8)]  # 2 MiB
    module = nn.Sequential(*layers).to(ctx.device)
    run = Run(ctx, wrapper, "sim")
    found = []
    with sim.costs() as costs:
        model = run.wrap(module, bucket_cap_mb=0.6, **options)
    found.append(costs.peak)
    if hook:
        hooks = comm_hooks if wrapper is DataParallel else default_hooks
        model.register_comm_hook(ctx.group, getattr(hooks, hook))
    batch = run.batch(0, 4, 256)
    made = torch.accelerator.memory_allocated()
    for _ in range(steps):
        before = torch.accelerator.memory_allocated()  # from which the peak counts
        with sim.costs() as costs:
            model.zero_grad(set_to_none=set_to_none)
            model(batch).square().mean().backward()
        found.append(costs.peak + (before - made))
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


@on_ranks(2)
def test_a_comm_hook_has_the_memory_of_gradients_that_become_views(ctx):
    """In the first backward of a static graph all gradients are there before a hook.

    In other backwards the peak is a matter of luck: how many of the hook's copies live
    depends on how far the host is ahead of the device.
    """
    options = {"gradient_as_bucket_view": True, "static_graph": True}
    more = {"set_to_none": True, "hook": "fp16_compress_hook", "steps": 1}
    theirs = peaks(ctx, DistributedDataParallel, options, **more)
    ours = peaks(ctx, DataParallel, options, **more)
    assert all(a <= MORE * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@on_ranks(2)
@pytest.mark.parametrize("views", [False, True])
def test_nothing_of_a_wrapper_outlives_it(ctx, views):
    """Not even for a moment, on the thread that autograd has for the device.

    That thread lets go of the last callback when the backward has returned already.
    """
    options = {"gradient_as_bucket_view": views, "process_group": ctx.group}
    left = []
    for _ in range(20):
        module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(ctx.device)
        ddp = DataParallel(module, **options)
        for _ in range(2):
            ddp(torch.ones(4, 64, device=ctx.device)).sum().backward()
        del ddp, module
        gc.collect()
        torch.accelerator.synchronize()
        left.append(torch.accelerator.memory_allocated())
    assert set(left) == {left[0]}


@on_ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_comparison_takes_little_memory(ctx, dtype):
    """However large a tensor is; all are read in parts."""
    values = torch.ones(1 << 24, dtype=dtype, device=ctx.device)
    for of_values in (False, True):
        with sim.costs() as costs:
            digest_of([values, values], of_values=of_values)
        assert costs.peak < 8 << 20


@on_ranks(2)
def test_a_rank_that_ran_out_keeps_no_copy_of_its_gradients(ctx):
    found = []
    for wrapper in (DistributedDataParallel, DataParallel):
        gc.collect()
        torch.manual_seed(0)
        layers = [nn.Linear(256, 256) for _ in range(8)]
        model = wrapper(nn.Sequential(*layers).to(ctx.device), process_group=ctx.group)
        x = torch.ones(4, 256, device=ctx.device)
        with sim.costs() as costs, model.join():
            for _ in range(2 + 2 * ctx.rank):
                model.zero_grad()
                model(x).square().mean().backward()
        found.append(costs.peak)
    torchs, ours = found
    assert ours <= MORE * torchs
