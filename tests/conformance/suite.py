"""The tests that ship inside torch's wheel, imported so that they run on the CPU.

Import this module once, in the process from which ranks are forked: it takes seconds.
"""

from __future__ import annotations

import os

# Torch's module reads both when it is imported. The largest number of ranks that any
# test is given here; each rank process sets the number of its own test.
os.environ["BACKEND"] = "gloo"
os.environ["WORLD_SIZE"] = "4"

from tests.conformance.placement import lift_gpu_skips

lift_gpu_skips()

from torch.testing._internal import common_utils

# Some tests are switched off on Linux because they were flaky on torch's GPU machines.
# They count here if torch passes them.
common_utils.IS_LINUX = False
from torch.testing._internal.distributed import distributed_test as torch_tests

common_utils.IS_LINUX = True


class Case(torch_tests.TestDistBackend, torch_tests.DistributedTest._DistTestBase):
    """Torch's tests, one method each; `_run` is what one rank executes."""

    def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
        # Torch waits for 10 s, which a rank on a busy machine may need to get here.
        super()._barrier(wait_for, max(timeout, 60))


def all_names() -> list[str]:
    """Every test of the module, in its own order."""
    return [name for name in dir(Case) if name.startswith("test_")]


def why_skipped(name: str) -> str:
    """The reason that a decorator left for unittest's own runner; empty if none."""
    test = getattr(Case, name)
    if not getattr(test, "__unittest_skip__", False):
        return ""
    return str(test.__unittest_skip_why__)
