"""Ranks on GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minidp.errors import NativeError
from minidp.native.binary import cuda_toolkit, cxx
from tests.gpu.places import CPU, SIMULATED, Place, Ranks
from tests.support import sim
from tests.support.combined import leave_to_the_night
from tests.support.pool import Pool

BUILD = """
from minidp import native
assert native.library().kernels_for == "cuda", "it has no CUDA kernels"
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave two thirds of what runs without a GPU to the night.

    The rest is enough to keep these tests running where there is no GPU. That gradients
    are right on the CPU and on the simulated device, other folders show.
    """
    for here in (CPU, SIMULATED):
        leave_to_the_night([item for item in items if _place(item) == here], 3)


def _place(item: pytest.Item) -> object:
    return getattr(item, "callspec", None) and item.callspec.params.get("ranks")  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[Place, Pool]]:
    """Rank processes by place, of places on GPUs that a test has used."""
    found: dict[Place, Pool] = {}
    yield found
    for pool in found.values():
        pool.close()


@pytest.fixture(scope="session")
def extension() -> None:
    """Build the extension for this GPU; skip the test if a compiler is missing."""
    if shutil.which(cxx()) is None:
        pytest.skip("there is no C++ compiler")
    try:
        cuda_toolkit()
    except NativeError as error:
        pytest.skip(str(error))
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        env=os.environ | {"MINIDP_NATIVE": "1", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
        timeout=160,
    )
    assert done.returncode == 0, f"the extension cannot be built: {done.stderr}"


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Ranks at the place that `places.at` names."""
    place: Place = request.param
    pools = request.getfixturevalue("pools")
    if place.is_simulated:
        try:
            sim.build()
        except sim.NotBuilt as error:
            pytest.skip(str(error))
        return Ranks(place, pools.setdefault(place, place.pool()))
    if not place.kernels:
        return Ranks(place, request.getfixturevalue("pool"))
    # Without a CUDA context: those are for the ranks.
    num_gpus = torch.cuda.device_count()
    if place.num_gpus > num_gpus:
        pytest.skip(f"needs {place.num_gpus} GPUs, there are {num_gpus}")
    if place.is_native:
        request.getfixturevalue("extension")
    return Ranks(place, pools.setdefault(place, place.pool()))
