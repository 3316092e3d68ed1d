"""What the device does for a backward: bits, launches, speed, bounds of memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel, native
from tests.gpu import sanitized, scenarios
from tests.gpu.places import NCCL, ONE_NATIVE_RANK, at
from tests.native import test_flatten as oracle

ROOT = Path(__file__).parents[2]
GIB = 1 << 30

# ------------------------------------------------------------------------------- bits

PLACES = [oracle.dense((n,), skip=n % 4) for n in sanitized.SIZES]
PLACES += [oracle.dense((5, 6), (1, 0)), oracle.dense((4, 5), step=2)]
PLACES += [oracle.dense((2, 3, 4, 5), (0, 2, 3, 1)), oracle.dense(())]


def copies(ctx: Any, dtype: Any, scale: float) -> None:
    pairs = [(place, place) for place in PLACES]
    oracle.check_copies(native.library(), pairs, dtype, scale, device=ctx.device)


@at(ONE_NATIVE_RANK)
@pytest.mark.parametrize("scale", oracle.SCALES)
@pytest.mark.parametrize("dtype", [*oracle.REALS, torch.complex64])
def test_copies_have_torchs_bits(ranks: Any, dtype: Any, scale: float) -> None:
    ranks.run(copies, dtype, scale)


def huge(ctx: Any) -> str:
    """More elements than 32 bits can count; why not, if there is no room."""
    numel = 2**31 + 5
    free = torch.cuda.mem_get_info()[0]
    if free < 16 * GIB:
        return f"needs 16 GiB of memory on the GPU, {free / GIB:.1f} are free"
    grad = torch.zeros(numel, dtype=torch.bfloat16, device=ctx.device)
    grad[::4096] = 3
    grad[-7:] = 5
    view = torch.full_like(grad, 9)
    native.library().flatten([view], [grad], 0.5)
    assert torch.equal(view, grad * 0.5)
    return ""


@at(ONE_NATIVE_RANK)
@pytest.mark.slow
def test_a_tensor_of_more_than_32_bits(ranks: Any) -> None:
    (reason,) = ranks.run(huge)
    if reason:
        pytest.skip(reason)


# --------------------------------------------------------------------------- launches


def launches(ctx: Any, kind: Any, count: int) -> Counter[str]:
    """Kernels, copies and fills by name, of the backward with the fewest.

    ``count`` layers have small gradients: 16 KiB, 256 bytes, and so on.
    """
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(count))).to(ctx.device)
    ddp = module if kind is None else kind(module, process_group=ctx.group)
    x, found = scenarios.inputs(ctx, 0, 4, 64), []
    for _ in range(8):
        ddp.zero_grad()
        loss = ddp(x).pow(2).sum()
        torch.cuda.synchronize()
        with torch.profiler.profile() as profile:  # of CPU and GPU
            loss.backward()
            torch.cuda.synchronize()
        names = (
            event.name
            for event in profile.events()
            if str(event.device_type).endswith("CUDA")
            # A label's span on the device is no work.
            and not getattr(event, "is_user_annotation", False)
            and not event.name.startswith("minidp::")
        )
        found.append(Counter(names))
    return min(found[5:], key=Counter.total)


def added_launches(ctx: Any, count: int) -> tuple[dict[str, int], dict[str, int]]:
    """What torch's DDP launches beyond a bare module, and what minidp does."""
    bare = launches(ctx, None, count)
    assert bare.total() > count, "the profiler saw no kernels"
    theirs, ours = (
        dict(launches(ctx, kind, count) - bare)
        for kind in (DistributedDataParallel, DataParallel)
    )
    return theirs, ours


# One bucket: copy in, all-reduce, copy out; in Python the copies are torch's, which
# take some 50 tensors each, and a multiplication.
MOST = {"native": 3, "python": 9}


@at(NCCL)
@pytest.mark.parametrize("count", [10, 40])
def test_launches_do_not_grow_with_parameters(
    ranks: Any, record_property: Any, count: int
) -> None:
    for theirs, ours in ranks.run(added_launches, count):
        record_property("launches of torch, minidp", (theirs, ours))
        assert sum(ours.values()) <= MOST[ranks.place.kernels], ours
        assert sum(ours.values()) < sum(theirs.values()), theirs


# -------------------------------------------------------------------------- sanitizer


@at(ONE_NATIVE_RANK)
@pytest.mark.slow
def test_kernels_stay_within_their_tensors(ranks: Any) -> None:
    path = f"{os.environ['PATH']}:/usr/local/cuda/bin"
    tool = shutil.which("compute-sanitizer", path=path)
    if tool is None:
        pytest.skip("there is no compute-sanitizer")
    # Each tensor is an allocation of its own: else its neighbours hide what is wrong.
    env = {"MINIDP_NATIVE": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run(
        [
            *[tool, "--tool", "memcheck", "--error-exitcode", "9"],
            *["--report-api-errors", "no"],  # torch asks what it may not, and goes on
            *[sys.executable, "-m", "tests.gpu.sanitized"],
        ],
        env=os.environ | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    assert sanitized.DONE in said
    assert "ERROR SUMMARY: 0 errors" in said
