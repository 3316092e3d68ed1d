"""The tests that ship inside torch's wheel, imported so that they run on the CPU.

Import this module once, in the process from which ranks are forked: it takes seconds.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from unittest import mock

from torch.testing._internal import common_utils

from tests.conformance.placement import lift_gpu_skips

_TORCH_TESTS = "torch.testing._internal.distributed.distributed_test"


def _import_torch_tests() -> ModuleType:
    # Read when the module is imported. Four is the largest number of ranks that any
    # test is given here; each rank process sets the number of its own test.
    os.environ["BACKEND"] = "gloo"
    os.environ["WORLD_SIZE"] = "4"
    lift_gpu_skips()
    # Some tests are switched off on Linux because they were flaky on torch's GPU
    # machines. They count here if torch passes them.
    with mock.patch.object(common_utils, "IS_LINUX", new=False):
        return importlib.import_module(_TORCH_TESTS)


_tests = _import_torch_tests()


class Case(_tests.TestDistBackend, _tests.DistributedTest._DistTestBase):
    """Torch's tests, one method each; `_run` is what one rank executes."""

    def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
        # Torch waits for 10 s, which a rank on a busy machine may need to get here.
        super()._barrier(wait_for, max(timeout, 60))


def all_names() -> list[str]:
    """Every test of the module."""
    return [name for name in dir(Case) if name.startswith("test_")]


def why_skipped(name: str) -> str:
    """The reason that a decorator left for unittest's own runner; empty if none."""
    test = getattr(Case, name)
    if not getattr(test, "__unittest_skip__", False):
        return ""
    return str(test.__unittest_skip_why__)
