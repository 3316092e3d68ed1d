"""Ranks on GPUs; what was found; an end in time.

`bash tests/run.sh gpu` gives what it finds to a folder, and ends within its time also
where a machine is slow: tests that would begin later fail, and say so.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import places
from tests.gpu.places import Place, Pools, Ranks
from tests.gpu.results import Results

FOLDER = "MINIDP_GPU_RESULTS"  # where the files go; without it there are none
SECONDS = "MINIDP_GPU_SECONDS"  # tests that begin later than that fail
RESULTS = pytest.StashKey[Results]()
BEGUN = time.monotonic()
HERE = Path(__file__).parent
why_no_extension = cache(places.why_no_extension)
build_extension = cache(places.build_extension)


def results_of(config: pytest.Config) -> Results:
    return config.stash.setdefault(RESULTS, Results())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Our slow tests last: should time run out, the others have run."""
    items.sort(key=lambda item: is_ours(item) and bool(item.get_closest_marker("slow")))


def is_ours(item: pytest.Item) -> bool:
    """Whether a test of this folder is to be run on a GPU."""
    return item.path.parent == HERE and item.get_closest_marker("gpu") is not None


@pytest.fixture(autouse=True)
def _in_time(request: pytest.FixtureRequest) -> None:
    limit = float(os.environ.get(SECONDS, "inf"))
    if is_ours(request.node) and time.monotonic() - BEGUN > limit:
        pytest.fail(f"not run: {limit:g} s are over ({SECONDS})", pytrace=False)


@pytest.fixture(scope="session")
def gpu_pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Ranks at the place that `places.at` names."""
    place: Place = request.param
    reason = places.why_not(place, places.num_gpus(), why_no_extension)
    if reason:
        pytest.skip(reason)
    if place.is_native and build_extension():
        pytest.fail(
            f"the extension cannot be built: {build_extension()}", pytrace=False
        )
    if not place.on_gpu:
        return Ranks(place, request.getfixturevalue("pool"))
    return Ranks(place, request.getfixturevalue("gpu_pools").at(place))


@pytest.fixture
def results(request: pytest.FixtureRequest) -> Results:
    """Where to put numbers: ``results.add(table, column=value, ...)``."""
    return results_of(request.config)


# ------------------------------------------------------------------------- the files


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if is_ours(item) and (report.when == "call" or report.outcome != "passed"):
        reason = report.longrepr[2] if report.skipped else ""
        test = item.nodeid.removeprefix("tests/gpu/")
        results_of(item.config).ended(test, report.outcome, str(reason))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    results, folder = results_of(session.config), os.environ.get(FOLDER)
    if not folder or set(results.outcomes.values()) <= {"skipped"}:
        return
    results.machine |= machine()
    results.seconds = time.monotonic() - BEGUN
    for path in results.write(Path(folder)):
        print(f"\nwritten: {path}", end="")  # noqa: T201 -- for who runs the stage


def machine() -> dict[str, str]:
    """On what the tests ran."""
    gpus = _lines(
        "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
    )
    name, _, driver = (gpus[0] if gpus else "unknown").partition(", ")
    commit = _lines("git", "-C", str(places.ROOT), "describe", "--always", "--dirty")
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()
    return {
        "GPU": name,
        "GPUs": str(len(gpus)),
        "driver": driver or "unknown",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "NCCL": ".".join(map(str, nccl)) or "unknown",
        "python": platform.python_version(),
        "minidp": commit[0] if commit else "unknown (no git)",
    }


def _lines(*command: str) -> list[str]:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
