"""Memory on the device; and what happens when a rank does not come."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel
from tests.gpu import scenarios
from tests.gpu.places import EVERYWHERE, ON_GPUS, at
from tests.gpu.test_bits import modes
from tests.support import oracle, sim

MIB = 1 << 20
SLACK = 2 * MIB  # small tensors, rounded up by the allocator
CYCLES = 20
HANG_SECONDS = 5.0

# ----------------------------------------------------------------------------- memory


def wide_net(ctx: Any) -> nn.Module:
    """32 MiB of parameters."""
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(ctx.device)


def peaks(ctx: Any, options: dict[str, Any]) -> list[int]:
    """Of steady training, with what the wrapper keeps: torch's DDP, minidp."""
    found = []
    for kind in (DistributedDataParallel, DataParallel):
        module = wide_net(ctx)
        x = scenarios.inputs(ctx, 0, 16, 1024)

        def train(kind: Any = kind, module: Any = module, x: Any = x) -> None:
            ddp = kind(module, process_group=ctx.group, **options)
            sgd = torch.optim.SGD(module.parameters(), lr=0.01)
            for _ in range(4):
                sgd.zero_grad()
                ddp(x).sum().backward()
                sgd.step()

        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train()
        torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated() - before)
        del module, train
        gc.collect()
    return found


@at(ON_GPUS)
@modes
def test_no_more_memory_than_torchs(
    ranks: Any, record_property: Any, mode: dict[str, Any]
) -> None:
    oracle.skip_unless_torch_takes(mode)
    for theirs, ours in ranks.run(peaks, mode):
        record_property("peak bytes of torch, minidp", (theirs, ours))
        assert theirs > 32 * MIB, "a wrapped module has gradients"
        assert ours <= theirs + SLACK


def left_behind(ctx: Any, options: dict[str, Any]) -> list[int]:
    """Bytes in use after each cycle of wrapping, training and dropping."""
    found = []
    for _ in range(CYCLES):
        ddp = DataParallel(wide_net(ctx), process_group=ctx.group, **options)
        for step in range(3):
            ddp(scenarios.inputs(ctx, step, 4, 1024)).sum().backward()
        del ddp
        gc.collect()
        torch.cuda.synchronize()
        found.append(torch.cuda.memory_allocated())
    return found


@at(ON_GPUS)
@modes
def test_nothing_is_left_behind(ranks: Any, mode: dict[str, Any]) -> None:
    for in_use in ranks.run(left_behind, mode):
        assert len(set(in_use[CYCLES // 2 :])) == 1, in_use


# ---------------------------------------------------------------------- a rank is gone


def stay_alone(ctx: Any, log: str) -> str:
    """Rank 1 leaves after two steps; what rank 0 is told."""
    logging.getLogger("minidp").addHandler(logging.FileHandler(log))
    ddp = DataParallel(
        scenarios.net(ctx), process_group=ctx.group, hang_timeout=HANG_SECONDS
    )
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.01)
    store, is_on_device = c10d._get_default_store(), ctx.device.type != "cpu"
    for step in range(3):
        if step == 2 and ctx.rank == 1:
            if is_on_device:  # else it is missed before the device has anything to do
                store.get(f"{log}: rank 0 has launched")
            return "left"
        sgd.zero_grad()
        ddp(scenarios.inputs(ctx, step)).pow(2).sum().backward()
        if step == 2:
            store.set(f"{log}: rank 0 has launched", "")
        if is_on_device:
            torch.accelerator.synchronize()
        sgd.step()
    ddp(scenarios.inputs(ctx, step))
    return "was never told"


@at([place for place in EVERYWHERE if place.world_size == 2])
@pytest.mark.slow
def test_the_one_that_waits_says_who_is_missing(ranks: Any, tmp_path: Path) -> None:
    """On a device the group is aborted, and the next call raises the error."""
    log = tmp_path / "log"
    waited, left = ranks.run(stay_alone, str(log), errors="return")
    assert not isinstance(waited, str), waited
    assert left == "left"
    assert waited.is_a("CollectiveError"), waited
    assert "rank 1" in waited.message
    if ranks.place.backend in ("nccl", sim.BACKEND):
        assert "A collective failed on the device" in log.read_text()
