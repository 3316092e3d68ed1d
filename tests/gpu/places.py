"""Where scenarios run: ranks on one GPU, on two, or on the CPU.

    cpu-1, cpu-2     the warm pool: every scenario that has a meaning there, in the
                     default stages
    nccl-1           one rank on one GPU
    gloo-2           two ranks on one GPU (NCCL refuses that)
    nccl-2           two ranks, each with a GPU of its own

Places of a GPU exist twice, with the kernels in Python and with the extension. Their
processes are new interpreters, because CUDA does not survive a fork.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from minidp.native.compile import cxx, fitting_nvcc
from tests.support.pool import Pool

ROOT = Path(__file__).parents[2]
GROUP_SECONDS = 60.0  # a GPU's first kernels of a kind take a while
JOB_SECONDS = 120.0
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # read when CUBLAS starts


@dataclass(frozen=True)
class Place:
    """Some ranks."""

    backend: str
    world_size: int
    on_gpu: bool
    kernels: str = ""  # "python" or "native"; on the CPU what the stage says

    @property
    def name(self) -> str:
        """As in test ids."""
        kind = self.backend if self.on_gpu else "cpu"
        return "-".join(filter(None, [kind, str(self.world_size), self.kernels]))

    @property
    def num_gpus(self) -> int:
        """How many GPUs the place needs."""
        return (self.world_size if self.backend == "nccl" else 1) * self.on_gpu

    @property
    def devices(self) -> list[str]:
        """The device of each rank."""
        ranks = range(self.world_size)
        return [f"cuda:{r % self.num_gpus}" if self.on_gpu else "cpu" for r in ranks]

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the processes."""
        return DETERMINISTIC | {"MINIDP_NATIVE": "1" if self.is_native else "0"}

    @property
    def is_native(self) -> bool:
        """Whether the extension's kernels are meant to run."""
        return self.kernels == "native"


def places_on_gpus(*names: str) -> list[Place]:
    """``"nccl-1"`` and so on, each with both kernels."""
    return [
        Place(backend, int(world_size), on_gpu=True, kernels=kernels)
        for backend, world_size in (name.split("-") for name in names)
        for kernels in ("python", "native")
    ]


CPU = [Place("gloo", 1, on_gpu=False), Place("gloo", 2, on_gpu=False)]
ON_GPUS = places_on_gpus("nccl-1", "gloo-2", "nccl-2")
EVERYWHERE = [*CPU, *ON_GPUS]


def at(places: Sequence[Place]) -> Any:
    """Parametrise the fixture ``ranks``; places on a GPU get the marker."""
    params = [
        pytest.param(p, id=p.name, marks=[pytest.mark.gpu] if p.on_gpu else [])
        for p in places
    ]
    return pytest.mark.parametrize("ranks", params, indirect=True)


class Ranks:
    """What the fixture ``ranks`` gives: runs functions at a place."""

    def __init__(self, place: Place, pool: Pool) -> None:
        self.place = place
        self._pool = pool

    def run(
        self, function: Callable[..., Any], *args: Any, errors: str = "raise"
    ) -> list[Any]:
        """Call ``function(ctx, *args)`` on every rank; see `Pool.run`."""
        size = self.place.world_size
        return self._pool.run(function, size, *args, errors=errors, limit=JOB_SECONDS)


def new_pool(place: Place) -> Pool:
    """Processes of a place; not started yet."""
    return Pool(
        place.world_size,
        GROUP_SECONDS,
        env=place.environment,
        backend=place.backend,
        devices=place.devices,
    )


def why_not(place: Place, num_gpus: int, why_no_extension: Callable[[], str]) -> str:
    """Why a place cannot be had here; "" if it can. The extension is asked for last."""
    if place.num_gpus > num_gpus:
        return f"needs {place.num_gpus} GPUs, there are {num_gpus}"
    return why_no_extension() if place.is_native else ""


def why_no_extension() -> str:
    """What is missing to build one with CUDA kernels; empty if nothing is."""
    if shutil.which(cxx()[0]) is None:
        return "there is no C++ compiler"
    if not fitting_nvcc():
        return f"there is no nvcc for CUDA {torch.version.cuda}, which torch has"
    return ""


def build_extension() -> str:
    """Build it for this machine's GPU; what the compiler said if that fails."""
    code = (
        "from minidp import native\n"
        "assert native.library().has_cuda, 'it has no CUDA kernels'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"MINIDP_NATIVE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=160,
    )
    return done.stderr if done.returncode else ""
