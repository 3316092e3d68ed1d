"""`examples/same_bits.py`: one digest, on any processes, and after a resume."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.warm import warm_python

pytestmark = pytest.mark.fresh

ROOT = Path(__file__).parents[2]
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def digest_of(processes: int, *words: str) -> str:
    script = str(ROOT / "examples" / "same_bits.py")
    command = [warm_python(), *LAUNCH, str(processes), script, *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    (digest,) = re.findall(r"steps: digest (\w{16})$", done.stdout, re.MULTILINE)
    return digest


def test_a_resume_in_the_middle_of_an_epoch_on_other_processes(tmp_path: Path) -> None:
    whole = digest_of(1, "--stop-after", "23")
    saved = ("--checkpoint", str(tmp_path / "saved"))
    assert digest_of(2, "--stop-after", "13", *saved) != whole
    assert digest_of(3, "--stop-after", "23", *saved) == whole
