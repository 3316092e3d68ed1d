"""Describe the inputs of a binary, and a key that changes with any of them.

Nothing is compiled or started: each process that loads the binary first computes its
recipe. Compilers are no input: a binary outlives them, as in a container's second
stage.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sysconfig
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
    """Hold the inputs of a build of the native extension, as `describe` found them."""

    folder: Path  # of the sources
    parts: Mapping[str, str]  # every input as a text, by name
    wishes: tuple[tuple[str, ...], ...]  # groups of optional flags

    @property
    def key(self) -> str:
        """Return the recipe's folder name in the cache: 16 hex digits, from `parts`."""
        text = json.dumps(self.parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def changes_since(self, old: Mapping[str, str]) -> list[str]:
        """Return the names of parts that differ from ``old``, the parts of a binary."""
        new = self.parts
        return sorted(n for n in {*old, *new} if old.get(n) != new.get(n))


def describe() -> Recipe:
    """Return the recipe of a build now: sources, flags, torch, Python, CPU, GPUs."""
    folder, features = source_folder(), _cpu_features()
    versions = torch.version
    wishes = (*WISHES, AVX2_WISH) if "avx2" in features.split() else WISHES
    parts = {
        **{
            f"csrc/{path.relative_to(folder).as_posix()}": hash_file(path)
            for path in source_files(folder)
        },
        "flags": " ".join([*FLAGS, *(flag for group in wishes for flag in group)]),
        "exceptions": str(EXCEPTIONS),
        "nvcc flags": " ".join(NVCC_FLAGS),
        "torch": f"{torch.__version__} {versions.cuda} {versions.git_version}",
        "python": str(sysconfig.get_config_var("SOABI")),
        "platform": f"{platform.system()} {platform.machine()}",
        "CPU features": features,
        "GPUs": _read_gpus(),
    }
    return Recipe(folder=folder, parts=parts, wishes=wishes)


def source_folder() -> Path:
    """Return ``csrc/``: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "csrc"
    return inside if inside.is_dir() else package.parent / "csrc"


def source_files(folder: Path) -> list[Path]:
    """Return the source files of a folder and its ``cuda/``, headers included."""
    paths = [*folder.glob("*"), *folder.glob("cuda/*")]
    return sorted(p for p in paths if p.suffix in {".cpp", ".h", ".cu", ".cuh"})


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, as hex digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _cpu_features() -> str:
    """Return the first CPU's features by /proc/cpuinfo; else (not Linux) its name."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if found := re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE):
            return found[1]
    return platform.processor()


def _read_gpus() -> str:
    """Return the models of the GPUs by /proc, "" if it lists none.

    Asking CUDA instead would initialise it here, and a forked process could not use it.
    """
    paths = Path("/proc/driver/nvidia/gpus").glob("*/information")
    lines = (line for path in paths for line in path.read_text().splitlines())
    return " ".join(sorted({line for line in lines if line.startswith("Model:")}))
