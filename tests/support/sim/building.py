"""Builds the simulated device once per machine, and finds it again.

Binaries lie in ``~/.cache/minidp-sim``, in folders that are named by what they were
built from. A build is one process, ``python -m tests.support.sim``: to import the
binary would make a device of it, which the process of the tests has no use for.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock

NAME = "_minidp_sim"
SOURCES = Path(__file__).parent / "csrc"
# -ffp-contract=off and the CPU's own kernels: what is computed has the CPU's bits.
FLAGS = ("-std=c++20", "-O1", "-g0", "-Wall", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO")
ROOT = Path(__file__).parents[3]


class NotBuilt(Exception):
    """There is no simulated device on this machine; the text says why."""


def binary() -> Path:
    """Return where the binary of these sources, this torch and this Python belongs."""
    versions = (torch.__version__, str(torch.version.git_version), str(FLAGS))
    digest = hashlib.sha256("\n".join([*versions, str(_abi())]).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "minidp-sim" / digest.hexdigest()[:16] / f"{NAME}.so"


def _abi() -> object:
    return sysconfig.get_config_var("SOABI")


@functools.cache
def build() -> Path:
    """Return the binary's path, and build it before if there is none.

    Raises:
        NotBuilt: There is no compiler, or it refuses the sources, as it may for another
            version of torch.
    """
    path = binary()
    if path.exists():
        return path
    compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
    for program in (compiler, "ninja"):
        if shutil.which(program) is None:
            raise NotBuilt(f"there is no {program}, which builds the simulated device")
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.parent.parent / "lock"):
        if not path.exists():
            _build_in_process(path)
    return path


def _build_in_process(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.sim", str(path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if not path.exists():
        log = path.parent.with_suffix(".log")
        log.write_text(done.stdout + done.stderr)
        errors = [line for line in done.stdout.splitlines() if "error:" in line]
        first = errors[0] if errors else done.stderr.strip().splitlines()[-1]
        raise NotBuilt(
            f"the simulated device does not compile on torch {torch.__version__}: "
            f"{first} ({log})"
        )


def compile_to(path: Path) -> None:
    """Compile the sources; the binary appears at ``path`` whole, or not at all."""
    # Needs setuptools, and looks for a CUDA toolkit when it is imported.
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=path.parent.parent) as folder:
        cpp_extension.load(
            NAME,
            [str(source) for source in sorted(SOURCES.glob("*.cpp"))],
            extra_cflags=list(FLAGS),
            build_directory=folder,
            verbose=True,
        )
        path.parent.mkdir(exist_ok=True)
        os.replace(Path(folder, f"{NAME}.so"), path)


def load_binary(path: Path) -> ModuleType:
    """Import the binary, which registers the device and its operators with torch."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None  # a loader was given
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
