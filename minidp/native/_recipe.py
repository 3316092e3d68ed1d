"""What a binary is made of, and a key that changes when any of it does.

Nothing here compiles: a recipe is read whenever a process first asks for the binary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

EXTENSION = "_minidp_native"
SOURCE_SUFFIXES = frozenset({".cpp", ".h", ".cu", ".cuh"})

# No `include_paths` here: they follow from the version of torch, which is in the key.
FLAGS = (
    # torch 2.13 builds extensions as C++20; the headers of 2.11 take it too.
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    # a * b + c in one rounding would differ from the reference kernels in Python.
    "-ffp-contract=off",
    f"-DTORCH_EXTENSION_NAME={EXTENSION}",
    "-DTORCH_API_INCLUDE_EXTENSION_H",
)
# Each group is left out as a whole if the compiler refuses it.
WISHES = (("-march=native",), ("-fopenmp",))
# Without the macros, ATen/cpu/vec has only its scalar forms.  Not AVX512, although the
# CPU may have it: copies and sums are bound by memory.
AVX2_WISH = (
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-DCPU_CAPABILITY=AVX2",
    "-DCPU_CAPABILITY_AVX2",
)
NVCC_FLAGS = (
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    "--fmad=false",  # as -ffp-contract=off above
    "-arch=native",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    f"-DTORCH_EXTENSION_NAME={EXTENSION}",
    "-DTORCH_API_INCLUDE_EXTENSION_H",
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what is in the binary.

    Args:
        folder: where the sources are.
        sources: (path below the folder, SHA-256 of the text), sorted.
        cxx: words of the compiler's command.
        cxx_version: what it says about itself; empty if there is none.
        nvcc: path of nvcc, empty if there is none that fits torch.
        nvcc_version: what it says about itself; empty if there is none that fits.
        flags: flags that the compiler must take.
        wishes: groups of flags that it may refuse.
        torch: torch's version, CUDA version and commit.
        machine: names and features of the CPU and GPUs: -march=native is for them only.
    """

    folder: Path
    sources: tuple[tuple[str, str], ...]
    cxx: tuple[str, ...]
    cxx_version: str
    nvcc: str
    nvcc_version: str
    flags: tuple[str, ...]
    wishes: tuple[tuple[str, ...], ...]
    torch: str
    machine: tuple[tuple[str, str], ...]

    @property
    def parts(self) -> dict[str, str]:
        """All that the key depends on, by a name that people understand."""
        wishes = [flag for group in self.wishes for flag in group]
        nvcc = " ".join([self.nvcc_version, *NVCC_FLAGS]) if self.nvcc else ""
        return {
            **{f"csrc/{name}": digest for name, digest in self.sources},
            "compiler": self.cxx_version,
            "nvcc": nvcc,
            "flags": " ".join([*self.flags, *wishes]),
            "torch": self.torch,
            "python": str(sysconfig.get_config_var("SOABI")),
            "platform": f"{platform.system()} {platform.machine()}",
            **dict(self.machine),
        }

    @property
    def key(self) -> str:
        """The name of the folder in the cache."""
        text = json.dumps(self.parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def cpp_files(self) -> list[Path]:
        """What the C++ compiler compiles."""
        below = ("", "cuda") if self.nvcc else ("",)
        return self._files(".cpp", below)

    @property
    def cuda_files(self) -> list[Path]:
        """What nvcc compiles."""
        return self._files(".cu", ("cuda",)) if self.nvcc else []

    def _files(self, suffix: str, below: tuple[str, ...]) -> list[Path]:
        paths = [Path(name) for name, _ in self.sources]
        return [
            self.folder / path
            for path in paths
            if path.suffix == suffix and path.parent in map(Path, below)
        ]


def describe(folder: Path | None = None) -> Recipe:
    """The recipe for this process, from the sources in a folder (`source_folder`)."""
    folder = source_folder() if folder is None else folder
    cxx = tuple(shlex.split(os.environ.get("CXX") or "c++"))
    nvcc, nvcc_version = _fitting_nvcc()
    cpu = _read_cpu()
    has_avx2 = "avx2" in cpu["CPU features"].split()
    return Recipe(
        folder=folder,
        sources=fingerprint(folder, with_cuda=bool(nvcc)),
        cxx=cxx,
        cxx_version=_first_line([*cxx, "--version"]),
        nvcc=nvcc,
        nvcc_version=nvcc_version,
        flags=FLAGS,
        wishes=(*WISHES, AVX2_WISH) if has_avx2 else WISHES,
        torch=f"{torch.__version__} {torch.version.cuda} {torch.version.git_version}",
        machine=(*cpu.items(), ("GPUs", _read_gpus())),
    )


def source_folder() -> Path:
    """``csrc/`` inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "csrc"
    return inside if inside.is_dir() else package.parent / "csrc"


def fingerprint(folder: Path, *, with_cuda: bool) -> tuple[tuple[str, str], ...]:
    """Every source below a folder that is compiled, and the hash of its text."""
    paths = [*folder.glob("*"), *(folder.glob("cuda/*") if with_cuda else ())]
    return tuple(
        sorted(
            (path.relative_to(folder).as_posix(), _hash(path))
            for path in paths
            if path.suffix in SOURCE_SUFFIXES
        )
    )


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Which parts differ, in words; empty if a binary made of ``old`` serves ``new``.

    A tool that is not there any more has not changed the binary, so it does not count:
    a binary outlives its compiler, for example in the second stage of a container.
    """
    gone = {name for name in ("compiler", "nvcc") if not new.get(name)}
    return [
        _describe_change(name, old.get(name, ""), new.get(name, ""))
        for name in sorted({*old, *new} - gone)
        if old.get(name) != new.get(name)
    ]


def replace_sources(recipe: Recipe) -> Recipe:
    """The recipe with the sources as they are now."""
    sources = fingerprint(recipe.folder, with_cuda=bool(recipe.nvcc))
    return dataclasses.replace(recipe, sources=sources)


def _describe_change(name: str, old: str, new: str) -> str:
    if name.startswith("csrc/"):
        return (
            f"{name} {'was edited' if old and new else 'is new' if new else 'is gone'}"
        )
    lost = " ".join(word for word in old.split() if word not in new.split())
    gained = " ".join(word for word in new.split() if word not in old.split())
    lost, gained = (textwrap.shorten(words, 80) or "-" for words in (lost, gained))
    return f"{name} changed ({lost} -> {gained})"


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _first_line(command: list[str]) -> str:
    lines = _output(command).splitlines()
    return lines[0] if lines else ""


def _output(command: list[str]) -> str:
    """What a command prints; nothing if it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _fitting_nvcc() -> tuple[str, str]:
    """Path and version of an nvcc of torch's major version, or two empty strings."""
    wanted = torch.version.cuda
    if wanted is None:
        return "", ""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [f"{home}/bin"] if home else [os.environ.get("PATH", "")]
    folders.append("/usr/local/cuda/bin")
    nvcc = shutil.which("nvcc", path=os.pathsep.join(folders))
    if nvcc is None:
        return "", ""
    version = " ".join(_output([nvcc, "--version"]).splitlines()[-2:])
    # The runtime libraries of two major versions do not mix in one process.
    major = wanted.split(".")[0]
    return (nvcc, version) if f"release {major}." in version else ("", "")


def _read_cpu() -> dict[str, str]:
    """Model and features of the first CPU."""
    names = {"model name": "CPU", "flags": "CPU features", "Features": "CPU features"}
    found = {"CPU": platform.processor(), "CPU features": ""}
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return found
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            found[names[name.strip()]] = value.strip()
    return found


def _read_gpus() -> str:
    """Models of the GPUs, without a CUDA context: a process that forks has none."""
    models: set[str] = set()
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        lines = path.read_text().splitlines()
        models.update(line for line in lines if line.startswith("Model:"))
    return " ".join(sorted(models))
