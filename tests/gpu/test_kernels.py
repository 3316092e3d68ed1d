"""What the device does for a backward: bits, launches, speed, bounds of memory."""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel, native
from tests.gpu import measure, sanitized, scenarios
from tests.gpu.places import ROOT, at, places_on_gpus
from tests.native import test_flatten as oracle

NATIVE = [place for place in places_on_gpus("nccl-1") if place.is_native]
NCCL = places_on_gpus("nccl-1", "nccl-2")
GIB = 1 << 30

# ------------------------------------------------------------------------------- bits

SIZES = [*range(35), 255, 256, 257, 2047, 2048, 2049, 9001, *[7] * 130]
PLACES = [oracle.dense((n,), skip=n % 4) for n in SIZES]
PLACES += [oracle.dense((5, 6), (1, 0)), oracle.dense((4, 5), step=2)]
PLACES += [oracle.dense((2, 3, 4, 5), (0, 2, 3, 1)), oracle.dense(())]


def flatten_and_back(ctx: Any, to: Any, of: Any, scale: float) -> None:
    """Raises where a bit differs from torch's, also between the tensors."""
    kernels = native.library()
    arena, _, offsets = oracle.arena_for(PLACES, to, 1)
    sources, _, where = oracle.arena_for(PLACES, of, 2)
    arena, sources = arena.to(ctx.device), sources.to(ctx.device)
    expected, before = arena.clone(), sources.clone()
    grads = oracle.windows(sources, PLACES, where)
    views = oracle.windows(arena, PLACES, offsets)
    for view, grad in zip(
        oracle.windows(expected, PLACES, offsets), grads, strict=True
    ):
        oracle.reference_flatten(view, grad, scale)
    kernels.flatten(views, grads, scale)
    oracle.assert_same_bits(arena, expected)
    oracle.assert_same_bits(sources, before)
    for grad, view in zip(oracle.windows(before, PLACES, where), views, strict=True):
        grad.copy_(view)
    kernels.unflatten(grads, views)
    oracle.assert_same_bits(sources, before)


@at(NATIVE)
@pytest.mark.parametrize("scale", oracle.SCALES)
@pytest.mark.parametrize(
    ("to", "of"), [*itertools.product(oracle.REALS, repeat=2), (torch.complex64,) * 2]
)
def test_flatten_has_torchs_bits(ranks: Any, to: Any, of: Any, scale: float) -> None:
    ranks.run(flatten_and_back, to, of, scale)


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


@at(NATIVE)
@pytest.mark.slow
def test_a_tensor_of_more_than_32_bits(ranks: Any) -> None:
    (reason,) = ranks.run(huge)
    if reason:
        pytest.skip(reason)


# ------------------------------------------------------------------------------ speed

BUCKETS = {  # (tensors, elements of each)
    "4000 of 1 KiB": (4000, 256),
    "400 of 64 KiB": (400, 16 * 1024),
    "4 of 25 MiB": (4, 25 * 256 * 1024),
}


def speeds(ctx: Any, name: str, dtype: torch.dtype) -> dict[str, float]:
    """GB/s of each way, read and written, by the median of its times."""
    count, numel = BUCKETS[name]
    buffer = torch.empty(count * numel, dtype=dtype, device=ctx.device)
    source = torch.ones_like(buffer)
    grads = [torch.ones(numel, dtype=dtype, device=ctx.device) for _ in range(count)]
    views = list(buffer.split(numel))
    kernels = native.library()

    def foreach() -> None:
        torch._foreach_copy_(views, grads)
        buffer.mul_(1 / 3)

    ways = {
        "device copy": lambda: buffer.copy_(source),
        "_foreach_copy_": lambda: torch._foreach_copy_(views, grads),
        "_foreach_copy_, mul_": foreach,
        "native": lambda: kernels.flatten(views, grads, 1.0),
        "native, scaled": lambda: kernels.flatten(views, grads, 1 / 3),
    }
    found = {}
    for way, work in ways.items():
        measure.milliseconds(torch.cuda, work, 5)
        times = measure.milliseconds(torch.cuda, work, 30)
        found[way] = 2 * buffer.nbytes / (statistics.median(times) * 1e6)
    oracle.assert_same_bits(buffer, source * (1 / 3))  # what the last way wrote
    return found


@at(NATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BUCKETS)
def test_speed_is_measured(ranks: Any, results: Any, name: str, dtype: Any) -> None:
    """Numbers for the table; how fast a device is no test can know."""
    (found,) = ranks.run(speeds, name, dtype)
    assert all(speed > 0 for speed in found.values())
    results.add("Flatten, GB/s", bucket=name, dtype=str(dtype)[6:], **found)


# --------------------------------------------------------------------------- launches


class Layers(nn.Module):
    """Small gradients: 16 KiB, 256 bytes, and so on."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def launches(ctx: Any, kind: Any, count: int) -> Counter[str]:
    """Of the backward that launches least, by name."""
    module = Layers(count).to(ctx.device)
    ddp = module if kind is None else kind(module, process_group=ctx.group)
    x, found = scenarios.inputs(ctx, 0, 4, 64), []
    for step in range(8):
        ddp.zero_grad()
        loss = ddp(x).pow(2).sum()
        torch.cuda.synchronize()
        if step < 5:
            loss.backward()
            continue
        activities = torch.profiler.ProfilerActivity
        with torch.profiler.profile(
            activities=[activities.CPU, activities.CUDA]
        ) as profile:
            loss.backward()
            torch.cuda.synchronize()
        found.append(measure.launches_in(profile.events()))
    return min(found, key=Counter.total)


def added_launches(ctx: Any, count: int) -> tuple[dict[str, int], dict[str, int]]:
    """What torch's DDP launches beyond a bare module, and what minidp does."""
    bare = launches(ctx, None, count)
    assert bare.total() > count, "the profiler saw no kernels"
    theirs, ours = (
        dict(measure.difference(launches(ctx, kind, count), bare))
        for kind in (DistributedDataParallel, DataParallel)
    )
    return theirs, ours


# One bucket: copy in, all-reduce, copy out; in Python the copies are torch's, which
# take some 50 tensors each, and a multiplication.
MOST = {"native": 3, "python": 9}


@at(NCCL)
@pytest.mark.parametrize("count", [10, 40])
def test_launches_do_not_grow_with_parameters(
    ranks: Any, results: Any, count: int
) -> None:
    for rank, (theirs, ours) in enumerate(ranks.run(added_launches, count)):
        row = {"torch": sum(theirs.values()), "minidp": sum(ours.values())}
        place = ranks.place.name
        if rank == 0:
            results.add("Launches", place=place, parameters=2 * count, **row)
        assert row["minidp"] <= MOST[ranks.place.kernels], ours
        assert row["minidp"] < row["torch"], (theirs, ours)


# -------------------------------------------------------------------------- sanitizer


def sanitize(*arguments: str) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if tool is None:
        pytest.skip("there is no compute-sanitizer")
    # Each tensor is an allocation of its own: else its neighbours hide what is wrong.
    env = {"MINIDP_NATIVE": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(
        [
            *[tool, "--tool", "memcheck", "--error-exitcode", "9"],
            *["--report-api-errors", "no"],  # torch asks what it may not, and goes on
            *[sys.executable, "-m", "tests.gpu.sanitized", *arguments],
        ],
        env=os.environ | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


@at(NATIVE)
@pytest.mark.slow
def test_kernels_stay_within_their_tensors(ranks: Any) -> None:
    run = sanitize()
    assert run.returncode == 0, run.stdout + run.stderr
    assert sanitized.DONE in run.stdout
    assert "ERROR SUMMARY: 0 errors" in run.stdout + run.stderr


@at(NATIVE)
@pytest.mark.slow
def test_the_sanitizer_would_see_it(ranks: Any) -> None:
    run = sanitize("--beyond")
    assert run.returncode == 9, run.stdout + run.stderr
    assert "Invalid __global__ read" in run.stdout + run.stderr
