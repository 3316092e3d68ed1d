"""The tests that ship inside torch's wheel, imported so that they run on the CPU.

Import this module once, in the process from which ranks are forked: it takes seconds.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any
from unittest import mock

from torch.testing._internal import common_distributed, common_utils
from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture

from tests.conformance.placement import lift_gpu_skips

_FOLDER = "torch.testing._internal.distributed"


def _import_torch_tests(name: str) -> ModuleType:
    # Read when the module is imported. Four is the largest number of ranks that any
    # test is given here; each rank process sets the number of its own test.
    os.environ["BACKEND"] = "gloo"
    os.environ["WORLD_SIZE"] = "4"
    lift_gpu_skips()
    # Some tests are switched off on Linux because they were flaky on torch's GPU
    # machines. They count here if torch passes them.
    with mock.patch.object(common_utils, "IS_LINUX", new=False):
        return importlib.import_module(f"{_FOLDER}.{name}")


_distributed = _import_torch_tests("distributed_test")
_rpc = _import_torch_tests("ddp_under_dist_autograd_test")


class Distributed(
    _distributed.TestDistBackend, _distributed.DistributedTest._DistTestBase
):
    """Torch's main tests, one method each; `_run` is what one rank executes."""

    def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
        # Torch waits for 10 s, which a rank on a busy machine may need to get here.
        super()._barrier(wait_for, max(timeout, 60))


class _OverRpc(
    tensorpipe_rpc_agent_test_fixture.TensorPipeRpcAgentTestFixture,
    common_distributed.MultiProcessTestCase,
):
    """What torch's tests of distributed autograd need besides their own class."""


# Torch's classes come first: their world sizes are the right ones.
class UnderDistAutograd(_rpc.DdpUnderDistAutogradTest, _OverRpc):
    """Trainers, a parameter server and a master; gradients live in contexts."""


class ComparedWithDistAutograd(
    _rpc.DdpComparisonTest, _rpc.CudaDdpComparisonTest, _OverRpc
):
    """Local and distributed autograd bring the same gradients."""


_CASES: tuple[Any, ...] = (Distributed, UnderDistAutograd, ComparedWithDistAutograd)
_CASE_OF = {
    name: case for case in _CASES for name in dir(case) if name.startswith("test_")
}


def all_names() -> list[str]:
    """Every test of the modules."""
    return list(_CASE_OF)


def case_of(name: str) -> Any:
    """The class that has a test as a method."""
    return _CASE_OF[name]


def fixed_num_ranks(name: str) -> int | None:
    """How many ranks a test needs, if its class says so."""
    case = _CASE_OF[name]
    return None if case is Distributed else int(case(name).world_size)


def why_skipped(name: str) -> str:
    """The reason that a decorator left for unittest's own runner; empty if none."""
    test = getattr(_CASE_OF[name], name)
    if not getattr(test, "__unittest_skip__", False):
        return ""
    return str(test.__unittest_skip_why__)
