"""Torchft's own tests of its DDP pass when it derives from minidp's class."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchft", reason="bash tests/run.sh torchft")
pytestmark = [pytest.mark.torchft, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]
FILES = ("ddp_test.py", "manager_integ_test.py")
TESTS = 7  # that run on a CPU; two more need torchcomms


def test_all_seven_pass():
    where = Path(importlib.util.find_spec("torchft").origin).parent
    command = (
        *(sys.executable, "-m", "pytest", "-q", "-p", "tests.torchft.swap_first"),
        *("-c", os.devnull, "-p", "no:cacheprovider", "-k", "ddp"),
        *(str(where / name) for name in FILES),
    )
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert re.search(rf"\b{TESTS} passed", done.stdout), done.stdout[-8000:]
    assert done.returncode == 0
