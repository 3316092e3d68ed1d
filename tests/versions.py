"""Run the fast tests on each version of torch, and of Python, that is supported.

    python -m tests.versions             all, one after the other: half an hour each
    python -m tests.versions 2.12.1      only this torch
    python -m tests.versions 3.12        only this Python

Each pair has an environment of its own in `.versions/`, made on the first run: a
download of up to 3 GB. A Python is looked for on the PATH and among pyenv's; a pair
whose Python is missing is named, and fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The oldest and the newest are minidp.torch_compat.versions' OLDEST and NEWEST.
PAIRS = (
    ("2.12.1", "3.10"),
    ("2.13.0", "3.11"),
    ("2.14.1", "3.11"),
    ("2.15.0", "3.12"),
    ("2.15.0", "3.13"),
)
STAGES = ("gradients", "native-gradients")


def interpreter(version: str) -> str | None:
    """Return the path of a Python, such as "3.12"; None if there is none."""
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == version:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    found = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def environment(torch: str, python: str, base: str) -> Path:
    """Return the interpreter of a pair's environment, which is made if need be."""
    home = ROOT / ".versions" / f"torch{torch}-python{python}"
    made, ready = home / "bin" / "python", home / "ready"
    if not ready.exists():
        subprocess.run([base, "-m", "venv", "--clear", str(home)], check=True)
        # The machine may pin torch for all of pip's calls, in a file or a variable.
        env = os.environ | {"PIP_CONSTRAINT": os.devnull}
        words = ["install", "--quiet", f"torch=={torch}", "-e", f"{ROOT}[test]"]
        subprocess.run([str(made), "-m", "pip", *words], check=True, env=env)
        ready.touch()
    return made


def run(torch: str, python: str) -> str:
    """Run the fast tests on a pair; return how that went."""
    base = interpreter(python)
    if base is None:
        return f"FAILED: there is no Python {python} on the PATH or in pyenv"
    try:
        made = environment(torch, python, base)
    except subprocess.CalledProcessError as error:
        return f"FAILED: its environment cannot be made: {error}"
    nox = [str(made), "-m", "nox", "--noxfile", "tests/noxfile.py", "--session"]
    done = subprocess.run([*nox, *STAGES], cwd=ROOT)
    return "ok" if done.returncode == 0 else f"FAILED: exit status {done.returncode}"


def main(chosen: Sequence[str]) -> int:
    """Run all pairs, or those of a chosen torch or Python; 1 if one fails."""
    pairs = [pair for pair in PAIRS if not chosen or {*pair} & {*chosen}]
    if not pairs:
        print(f"none of {', '.join(chosen)} is among {PAIRS}")
        return 2
    results = {}
    for torch, python in pairs:
        print(f"\n=== torch {torch}, Python {python}", flush=True)
        start = time.monotonic()
        outcome = run(torch, python)
        results[torch, python] = f"{outcome}  {(time.monotonic() - start) / 60:.1f} min"
    print()
    for (torch, python), result in results.items():
        print(f"torch {torch:8} Python {python:6} {result}")
    return int(any(result.startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
