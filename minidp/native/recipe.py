"""Describe the inputs of a binary, and a key that changes with any of them.

Nothing is compiled: each process that loads the binary first computes its recipe.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

EXTENSION = "_minidp_native"

# No `include_paths` here: they follow from the version of torch, which is in the key.
_COMMON = (
    *("-std=c++20", "-O3", "-DNDEBUG"),  # torch builds extensions as C++20
    "-DAT_PER_OPERATOR_HEADERS",  # torch's headers then leave out all operators
    f"-DTORCH_EXTENSION_NAME={EXTENSION}",
    "-DTORCH_API_INCLUDE_EXTENSION_H",
)
# a * b + c in one rounding would differ from the reference kernels in Python.
FLAGS = (*_COMMON, "-fPIC", "-fvisibility=hidden", "-Wall", "-ffp-contract=off")
NVCC_FLAGS = (
    *(*_COMMON, "--expt-relaxed-constexpr", "--fmad=false", "-arch=native"),
    "-Xcompiler=-fPIC,-fvisibility=hidden",
)
# Each group is left out as a whole if the compiler refuses it.
WISHES = (
    *(("-march=native",), ("-fopenmp",)),
    # GCC collects garbage later: saves a tenth of the time, takes 300 MB per compiler.
    ("--param=ggc-min-expand=400", "--param=ggc-min-heapsize=524288"),
)
# It has no loops, and compiles for a fifth less time.
EXCEPTIONS = {"bindings.cpp": "-O1"}
# Without the macros, ATen/cpu/vec has only its scalar forms.  Not AVX512, although the
# CPU may have it: copies and sums are bound by memory.
AVX2_WISH = (
    *("-mavx2", "-mfma", "-mf16c"),
    *("-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"),
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hold all inputs of a build of the native extension, as `describe` found them."""

    folder: Path  # of the sources
    cxx: tuple[str, ...]  # the C++ compiler's command
    nvcc: str  # path; empty if no nvcc fits torch's CUDA version
    parts: Mapping[str, str]  # every input as a text, by name
    wishes: tuple[tuple[str, ...], ...]  # groups of optional flags

    @property
    def key(self) -> str:
        """Return the recipe's folder name in the cache: 16 hex digits, from `parts`."""
        text = json.dumps(self.parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def sources(self, *suffixes: str) -> list[Path]:
        """Return sources with these suffixes; those in ``cuda/`` only with nvcc."""
        return [
            path
            for path in source_files(self.folder)
            if path.suffix in suffixes and (self.nvcc or path.parent == self.folder)
        ]

    def is_outdated(self) -> bool:
        """Return whether a source was edited, added or removed since `describe`."""
        before = {n: d for n, d in self.parts.items() if n.startswith("csrc/")}
        return _fingerprint(self.folder) != before

    def changes_since(self, old: Mapping[str, str]) -> list[str]:
        """Return a text per input that differs from ``old``, those of another build.

        [] if its binary can be used. A compiler or nvcc that is missing now is no
        change.
        """
        new = self.parts
        # A binary outlives its compiler, for example in a container's second stage.
        gone = {name for name in ("compiler", "nvcc") if not new[name]}
        return [
            _describe_change(name, old.get(name, ""), new.get(name, ""))
            for name in sorted({*old, *new} - gone)
            if old.get(name) != new.get(name)
        ]


def describe() -> Recipe:
    """Return the recipe of a build now: sources, compilers, flags, torch, CPU, GPUs."""
    folder = source_folder()
    cxx = tuple(shlex.split(os.environ.get("CXX") or "c++"))
    nvcc, nvcc_version = _fitting_nvcc()
    cpu, features = _read_cpu()
    versions = torch.version
    wishes = (*WISHES, AVX2_WISH) if "avx2" in features.split() else WISHES
    parts = {
        **_fingerprint(folder),
        "compiler": _output([*cxx, "--version"]).partition("\n")[0],
        "nvcc": f"{nvcc_version} {' '.join(NVCC_FLAGS)}" if nvcc else "",
        "flags": " ".join([*FLAGS, *(flag for group in wishes for flag in group)]),
        "exceptions": str(EXCEPTIONS),
        "torch": f"{torch.__version__} {versions.cuda} {versions.git_version}",
        "python": str(sysconfig.get_config_var("SOABI")),
        "platform": f"{platform.system()} {platform.machine()}",
        "CPU": cpu,
        "CPU features": features,
        "GPUs": _read_gpus(),
    }
    return Recipe(folder=folder, cxx=cxx, nvcc=nvcc, parts=parts, wishes=wishes)


def source_folder() -> Path:
    """Return ``csrc/``: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "csrc"
    return inside if inside.is_dir() else package.parent / "csrc"


def source_files(folder: Path) -> list[Path]:
    """Return the source files of a folder and its folder ``cuda``, headers included."""
    paths = [*folder.glob("*"), *folder.glob("cuda/*")]
    return sorted(p for p in paths if p.suffix in {".cpp", ".h", ".cu", ".cuh"})


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, as hex digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _fingerprint(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every source file, by the name ``csrc/FILE``."""
    return {
        f"csrc/{path.relative_to(folder).as_posix()}": hash_file(path)
        for path in source_files(folder)
    }


def _describe_change(name: str, old: str, new: str) -> str:
    """Return a text: a source edited, new or gone; else words that went and came."""
    if name.startswith("csrc/"):
        return f"{name} {('was edited' if new else 'is gone') if old else 'is new'}"
    lost = " ".join(word for word in old.split() if word not in new.split())
    gained = " ".join(word for word in new.split() if word not in old.split())
    lost, gained = (textwrap.shorten(words, 80) or "-" for words in (lost, gained))
    return f"{name} changed ({lost} -> {gained})"


def _output(command: list[str]) -> str:
    """Run a command; return what it prints, or "" if it is missing, fails or hangs."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    return ""


def _fitting_nvcc() -> tuple[str, str]:
    """Return path and version text of the first nvcc that is found.

    "", "" if there is none, or it is not of torch's CUDA major version.
    """
    wanted = torch.version.cuda
    if wanted is None:
        return "", ""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = f"{home}/bin" if home else os.environ.get("PATH", "")
    nvcc = shutil.which("nvcc", path=f"{path}{os.pathsep}/usr/local/cuda/bin")
    version = " ".join(_output([nvcc, "--version"]).splitlines()[-2:]) if nvcc else ""
    # The runtime libraries of two major versions do not mix in one process.
    fits = nvcc and f"release {wanted.partition('.')[0]}." in version
    return (nvcc, version) if nvcc and fits else ("", "")


def _read_cpu() -> tuple[str, str]:
    """Return model and features of the first CPU in /proc/cpuinfo; "" for unknown."""
    fields: dict[str, str] = {}
    with suppress(OSError):  # not Linux
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        fields = dict(re.findall(r"^(\S.*?)\s*: (.*)$", text, re.MULTILINE))
    features = fields.get("flags", fields.get("Features", ""))
    return fields.get("model name", platform.processor()), features


def _read_gpus() -> str:
    """Return the GPUs' models from /proc: a CUDA context would not survive a fork."""
    paths = Path("/proc/driver/nvidia/gpus").glob("*/information")
    lines = (line for path in paths for line in path.read_text().splitlines())
    return " ".join(sorted({line for line in lines if line.startswith("Model:")}))
