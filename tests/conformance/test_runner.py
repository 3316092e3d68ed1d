"""A wrapper that is wrong fails torch's tests, and the judge says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fresh

_RUN = Path(__file__).parent / "run.py"
_REDUCES = "test_DistributedDataParallelCPU"
_ACCUMULATES = "test_accumulate_gradients_no_sync"
_NEEDS_NO_RANK = "test_ddp_zero_output_features"


@pytest.mark.parametrize(
    ("implementation", "fails", "passes"),
    [
        ("broken-no-reduce", _REDUCES, _NEEDS_NO_RANK),
        pytest.param(
            *("broken-no-sync", _ACCUMULATES, _REDUCES), marks=pytest.mark.nightly
        ),
    ],
)
def test_a_wrapper_that_is_wrong_fails(implementation, fails, passes):
    command = [str(_RUN), "--implementation", implementation, fails, passes]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    lines = [line.split() for line in done.stdout.splitlines()]  # tracebacks, too
    verdicts = {line[1]: line[0] for line in lines if line[:1] in (["ok"], ["FAILED"])}
    assert (verdicts[fails], verdicts[passes]) == ("FAILED", "ok"), done.stdout
