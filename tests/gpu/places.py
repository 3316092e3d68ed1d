"""Where scenarios run: ranks on one GPU, on two, on the CPU, or on a simulated device.

    cpu-2       the warm pool: every scenario that has a meaning there
    sim-2       two ranks, each with a simulated device that finds races
    nccl-1      one rank on one GPU
    gloo-2      two ranks on one GPU (NCCL refuses that)
    nccl-2      two ranks, each with a GPU of its own; on one GPU if NCCL, from 2.30 on,
                is told to do that by NCCL_MULTI_RANK_GPU_ENABLE=1

In `--full` a third of the tests runs at places without a GPU, and all do at night
(`conftest.py`). Places of a GPU exist twice, with the kernels in Python and with the
extension. Their processes are new interpreters, because CUDA does not survive a fork.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support import sim
from tests.support.pool import Pool

GROUP_SECONDS = 60.0  # a GPU's first kernels of a kind take a while
JOB_SECONDS = 120.0
SHARES_GPU = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # read when CUBLAS starts


@dataclass(frozen=True)
class Place:
    """Some ranks."""

    backend: str
    world_size: int
    kernels: str = ""  # "python" or "native"; "" without a GPU: what the stage says

    @property
    def is_simulated(self) -> bool:
        """Whether the ranks have simulated devices."""
        return self.backend == sim.BACKEND

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the place needs; 0 without any."""
        has_own_gpus = "nccl" in self.backend and not SHARES_GPU
        return (self.world_size if has_own_gpus else 1) * bool(self.kernels)

    @property
    def is_native(self) -> bool:
        """Whether the extension's kernels are meant to run."""
        return self.kernels == "native"

    def pool(self) -> Pool:
        """Return rank processes on the place's devices; the first job starts them."""
        if self.is_simulated:
            backend, devices = f"cpu:gloo,sim:{sim.BACKEND}", ["sim:0"] * 2
            return Pool(2, GROUP_SECONDS, backend=backend, devices=devices)
        return Pool(
            self.world_size,
            GROUP_SECONDS,
            env=DETERMINISTIC | {"MINIDP_NATIVE": str(int(self.is_native))},
            backend=self.backend,
            devices=[f"cuda:{r % self.num_gpus}" for r in range(self.world_size)],
        )


CPU = Place("gloo", 2)
SIMULATED = Place(sim.BACKEND, 2)
ON_GPUS = [
    Place(backend, world_size, kernels)
    for backend, world_size in (("nccl", 1), ("gloo", 2), ("nccl", 2))
    for kernels in ("python", "native")
]
EVERYWHERE = [CPU, SIMULATED, *ON_GPUS]
ON_DEVICES = [SIMULATED, *ON_GPUS]
NCCL = [place for place in ON_GPUS if place.backend == "nccl"]
ONE_RANK = ON_GPUS[:1]
ONE_NATIVE_RANK = ON_GPUS[1:2]


def at(places: Sequence[Place]) -> Any:
    """Parametrise the fixture ``ranks``; places on a GPU get the marker."""
    on_gpu = [pytest.mark.gpu]
    params = [
        pytest.param(p, id=f"{p.backend}-{p.world_size}-{p.kernels}", marks=on_gpu)
        if p.kernels
        else pytest.param(p, id="sim-2" if p.is_simulated else f"cpu-{p.world_size}")
        for p in places
    ]
    return pytest.mark.parametrize("ranks", params, indirect=True)


@dataclass(frozen=True)
class Ranks:
    """What the fixture ``ranks`` gives: runs functions at a place."""

    place: Place
    pool: Pool

    def skip_if_simulated(self, why: str) -> None:
        """Skip a test of what the simulated device cannot do."""
        if self.place.is_simulated:
            pytest.skip(why)

    def run(
        self, function: Callable[..., Any], *args: Any, errors: str = "raise"
    ) -> list[Any]:
        """Call ``function(ctx, *args)`` on every rank; see `Pool.run`."""
        size = self.place.world_size
        return self.pool.run(function, size, *args, errors=errors, limit=JOB_SECONDS)
