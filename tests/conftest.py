"""Hypothesis profiles, markers and order of tests, seeds, process groups."""

from __future__ import annotations

import os

# Before torch is imported anywhere: one thread per rank, and gloo on the loopback
# device whatever this machine's host name resolves to.  Rank processes inherit both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import gc
import random
import zlib
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch
import torch.distributed as dist

from tests.support.alone import lone_default_group
from tests.support.combined import leave_to_the_night
from tests.support.extension import either_kernels, library
from tests.support.pool import Pool, let_sleep

__all__ = ["either_kernels", "library"]  # fixtures

if TYPE_CHECKING:
    from collections.abc import Iterator

# No profile has a deadline: an example may start or restart rank processes, and this
# suite never fails because a machine is slow.
_SLOW_IS_FINE = [hypothesis.HealthCheck.too_slow]
_SAME: dict[str, Any] = {"derandomize": True, "database": None, "print_blob": True}
_SAME["suppress_health_check"] = _SLOW_IS_FINE
for _name, _count, _options in [
    *(("dev", 50, {}), ("debug", 10, {"verbosity": hypothesis.Verbosity.verbose})),
    *(("ci", 120, _SAME), ("brief", 25, _SAME), ("fast", 20, _SAME)),
    ("nightly", 2000, {"print_blob": True, "suppress_health_check": _SLOW_IS_FINE}),
]:
    _count = int(os.environ.get("MINIDP_EXAMPLES", _count))
    hypothesis.settings.register_profile(
        _name, max_examples=_count, deadline=None, **_options
    )
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_configure() -> None:
    torch.set_num_threads(1)
    gc.disable()  # until all tests are collected


def pytest_collection_finish() -> None:
    """Let the collector look at what tests make, not at torch and thousands of items.

    That took a tenth of the time of all tests.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-case-in",
        type=int,
        default=1,
        metavar="N",
        help="of each test's cases, mark all but one in N as nightly (not the "
        "extension's own)",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    lacks = (
        "CUDA device" if torch.version.cuda else f"CUDA in torch {torch.__version__}"
    )
    no_gpu = pytest.mark.skip(reason=f"no {lacks}")
    has_gpu = torch.cuda.is_available()
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if "pool" in fixtures or item.path.parent.name == "gpu":
            item.add_marker("ranks")
        if (
            fixtures & {"library", "either_kernels"}
            or item.path.parent.name == "native"
        ):
            item.add_marker("native")
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(no_gpu)
    others = [item for item in items if item.get_closest_marker("native") is None]
    leave_to_the_night(others, config.getoption("one_case_in", 1))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items[:] = _with_long_ones_spread(items)


def _with_long_ones_spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests marked `fresh`, which take seconds, at even distances among the others.

    Each process begins with a piece of the list. If one piece had all of them, they
    would run one after the other in the end, while other processes have no work left.
    """
    is_long = [item.get_closest_marker("fresh") is not None for item in items]
    spread = [item for item, long in zip(items, is_long, strict=True) if not long]
    long_ones = [item for item, long in zip(items, is_long, strict=True) if long]
    for number, item in enumerate(long_ones):
        spread.insert(number * len(items) // len(long_ones), item)
    return spread


@pytest.fixture(autouse=True)
def _seed_of_test(request: pytest.FixtureRequest) -> None:
    """The same numbers for a test whether it runs alone or after others."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _pools_sleep(request: pytest.FixtureRequest) -> None:
    """No idle process of a pool takes time from a test without one."""
    if "pool" not in request.fixturenames:
        let_sleep()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four warm rank processes; see tests/support/pool.py."""
    ranks = Pool()
    ranks.start()
    yield ranks
    ranks.close()


@pytest.fixture
def lone_group() -> Iterator[dist.ProcessGroup]:
    """A default group of this process alone: real collectives, no other rank.

    Made for each test (11 ms): pytest-xdist runs the tests of a file in any order, and
    one that needs that there is no group must not meet the group of another.
    """
    with lone_default_group() as world:
        yield world


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Only reference counts free objects, so a reference cycle shows as a leak."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
