"""Find the extension's binary in a cache, or build it there.

`torch.utils.cpp_extension` compiles, with ninja. This file adds what it leaves open: a
name that says which inputs a binary was built from, so that an old one is never loaded
by mistake; a lock that the system releases if its holder dies; and a binary that other
processes see whole or not at all, however the build ends::

    ~/.cache/minidp/
        lock                        the process that builds holds it
        building-k3j2x/             only that process uses it; it stays after a kill
        4f1c.../inputs.json         what the binary was built from, and its hash
        4f1c.../_minidp_native.so   the binary
        4f1c....log                 what the compilers of a failed build have said
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from minidp.errors import NativeError

EXTENSION = "_minidp_native"
COMMON = (
    *("-std=c++20", "-O3", "-DNDEBUG"),
    "-DAT_PER_OPERATOR_HEADERS",  # torch's headers then leave out all operators
    # For a second build in one process, torch would choose another name by itself.
    *("-UTORCH_EXTENSION_NAME", f"-DTORCH_EXTENSION_NAME={EXTENSION}"),
)
# -ffp-contract=off, because a * b + c in one rounding would differ from the kernels in
# Python, which are the reference.
FLAGS = (
    *(*COMMON, "-fvisibility=hidden", "-Wall", "-ffp-contract=off"),
    *("-march=native", "-fopenmp"),
    # GCC collects its garbage later: this saves a tenth of the time, and takes 300 MB
    # for each compiler.
    *("--param=ggc-min-expand=400", "--param=ggc-min-heapsize=524288"),
)
# Without these macros, ATen/cpu/vec has only its scalar forms. AVX512 would gain
# nothing where a CPU has it, because copies and sums are bound by memory.
AVX2_FLAGS = (
    *("-mavx2", "-mfma", "-mf16c"),
    *("-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"),
)
NVCC_FLAGS = (
    *(*COMMON, "--expt-relaxed-constexpr", "--fmad=false", "-arch=native"),
    "-Xcompiler=-fPIC,-fvisibility=hidden",
)
_TAIL = 15  # how many lines of the compilers' output an error shows

Say = Callable[[str], None]  # is called with each line of progress
Inputs = Mapping[str, str]  # what decides a build, as texts by name


@dataclass(frozen=True)
class Binary:
    """A built extension, and what it lacks, each with the reason."""

    path: Path
    left_out: tuple[str, ...] = ()


# --------------------------------------------------------------------------- the inputs


def source_folder() -> Path:
    """Return the folder of the sources, which is a link to ``csrc/`` in a checkout."""
    return Path(__file__).parents[1] / "csrc"


def source_files(folder: Path) -> list[Path]:
    """Return the source files of a folder and its ``cuda/``, headers included."""
    paths = [*folder.glob("*"), *folder.glob("cuda/*")]
    return sorted(p for p in paths if p.suffix in {".cpp", ".h", ".cu", ".cuh"})


def flags() -> tuple[str, ...]:
    """Return the C++ compiler's flags on this machine."""
    return (*FLAGS, *AVX2_FLAGS) if "avx2" in _cpu_features().split() else FLAGS


def inputs() -> dict[str, str]:
    """Return what decides a binary: sources, flags, torch, Python, CPU and GPUs.

    Every process that loads the binary calls this, so it must be quick. Compilers do
    not count, because a binary may outlive them, as in the second stage of a container.
    """
    folder, versions = source_folder(), torch.version
    return {
        **{
            f"csrc/{path.relative_to(folder).as_posix()}": _hash(path)
            for path in source_files(folder)
        },
        "flags": " ".join(flags()),
        "nvcc flags": " ".join(NVCC_FLAGS),
        "torch": f"{torch.__version__} {versions.cuda} {versions.git_version}",
        "python": str(sysconfig.get_config_var("SOABI")),
        "platform": f"{platform.system()} {platform.machine()}",
        "CPU features": _cpu_features(),
        "GPUs": _gpus(),
    }


def key(wanted: Inputs) -> str:
    """Return the name of the folder in the cache for some inputs."""
    text = json.dumps(wanted, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def _cpu_features() -> str:
    """Return the features of the CPU, or where the system is not Linux, its name."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if found := re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE):
            return found[1]
    return platform.processor()


def _gpus() -> str:
    """Return the models of the GPUs, as /proc lists them.

    CUDA would know them, too. But asking it would initialise it, and a process that is
    forked afterwards could not use it.
    """
    paths = Path("/proc/driver/nvidia/gpus").glob("*/information")
    lines = (line for path in paths for line in path.read_text().splitlines())
    return " ".join(sorted({line for line in lines if line.startswith("Model:")}))


# ---------------------------------------------------------------------------- the cache


def cache() -> Path:
    """Return the cache's folder, which may not exist yet.

    It is MINIDP_NATIVE_CACHE, else ``minidp`` in the user's cache folder.
    """
    if chosen := os.environ.get("MINIDP_NATIVE_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "minidp"


def find(wanted: Inputs) -> tuple[Binary | None, str]:
    """Return the intact binary of these inputs and "", or None and why there is none.

    If the binary is stale, the text names the inputs by which the most similar one
    differs.
    """
    records = []
    for path in sorted(cache().glob("*/inputs.json")):
        # A file that cannot be read is no record, or not one of this version of minidp.
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_text())
            old, digest = dict(record["inputs"]), str(record["digest"])
            changes = sorted(
                name for name in {*old, *wanted} if old.get(name) != wanted.get(name)
            )
            binary = Binary(
                path.with_name(f"{EXTENSION}.so"), tuple(record["left_out"])
            )
            records.append((changes, digest, binary))
    if not records:
        return None, "The native kernels are not built."
    changes, digest, binary = min(records, key=lambda record: len(record[0]))
    if changes:
        return None, f"The binary is stale: built with another {', '.join(changes)}."
    # A process that maps a truncated file is killed, so the hash is looked at first.
    if not binary.path.exists() or _hash(binary.path) != digest:
        return None, f"The binary {binary.path} is damaged."
    return binary, ""


def _publish(wanted: Inputs, built: Path, left_out: list[str]) -> Binary:
    """Put a new binary into the cache, in one step, in place of one that was there."""
    ready = built.parent / "ready"
    ready.mkdir()
    record = {"digest": _hash(built), "inputs": wanted, "left_out": left_out}
    os.replace(built, ready / f"{EXTENSION}.so")
    (ready / "inputs.json").write_text(json.dumps(record, indent=2))
    home = cache() / key(wanted)
    with suppress(FileNotFoundError):
        os.replace(home, built.parent / "old")
    os.replace(ready, home)
    return Binary(home / f"{EXTENSION}.so", tuple(left_out))


# ---------------------------------------------------------------------------- the build


def build_into_cache(
    wanted: Inputs, say: Say, *, force: bool = False, verbose: bool = False
) -> Binary:
    """Return the binary in the cache, and build it if there is none, or if ``force``.

    If another process is building, this waits for it, without a limit.

    Raises:
        NativeError: The build failed, or the cache cannot be written.
    """
    try:
        # The lock may be held for minutes, so the first look is without it.
        found = None if force else find(wanted)[0]
        if found is None:
            with _lock(say):
                found = None if force else find(wanted)[0]
                built = found or _build(wanted, say, verbose=verbose)
    except OSError as error:
        raise NativeError(
            f"Building in {cache()} failed: {error}. What to do: if it is not "
            "writable, set MINIDP_NATIVE_CACHE to a folder that is."
        ) from error
    if found is None:
        return built
    say("already built")
    return found


def _lock(say: Say) -> AbstractContextManager[object]:
    cache().mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache() / "lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        say(f"waiting for the lock of {cache()}: another process is building")
        return lock.acquire()


def _build(wanted: Inputs, say: Say, *, verbose: bool) -> Binary:
    for leftover in cache().glob("building-*"):
        # Who made it is dead, because we hold the lock.
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix="building-", dir=cache(), ignore_cleanup_errors=True
    ) as folder:
        built, left_out = _compile(wanted, Path(folder), say, verbose=verbose)
        if inputs() != wanted:
            raise NativeError(
                f"The sources in {source_folder()} changed during the build. What to "
                "do: build again."
            )
        return _publish(wanted, built, left_out)


def _compile(
    wanted: Inputs, folder: Path, say: Say, *, verbose: bool
) -> tuple[Path, list[str]]:
    """Compile and link in an empty folder, and return the binary and what it lacks.

    The files of ``cuda/`` are optional. They need a CUDA toolkit, which many machines
    with a torch for CUDA do not have, and everything else works without them.

    Raises:
        NativeError: There is no compiler or no ninja, or the compilers failed.
    """
    sources = [p for p in source_files(source_folder()) if p.suffix in (".cpp", ".cu")]
    plain = [path for path in sources if path.parent == source_folder()]
    _look_for_tools(plain)
    log = cache() / f"{key(wanted)}.log"
    left_out = []
    if sources != plain and torch.version.cuda:
        say(f"compiling {len(sources)} files, with those for GPUs")
        try:
            home = cuda_toolkit()
            return _load(sources, folder / "gpu", verbose=verbose, home=home), []
        except NativeError as error:
            log.write_text(str(error))
            left_out = [f"GPU kernels: {_main_line(str(error))} ({log})"]
            say(f"left out: {left_out[0]}")
    say(f"compiling {len(plain)} files")
    try:
        return _load(plain, folder / "plain", verbose=verbose), left_out
    except NativeError as error:
        log.write_text(str(error))
        last = "\n".join(f"    {x:.200}" for x in str(error).splitlines()[-_TAIL:])
        raise NativeError(
            f"The compilers failed: {_main_line(str(error))}\n{last}\n"
            f"The whole output is in {log}."
        ) from None


def _look_for_tools(sources: list[Path]) -> None:
    if not sources:
        raise NativeError(f"There are no C++ sources to build in {source_folder()}.")
    if shutil.which(cxx()) is None:
        raise NativeError(
            f"There is no C++ compiler: {cxx()!r} is not on the PATH. What to do: "
            "install g++ or clang, or name one in the environment variable CXX."
        )
    if shutil.which("ninja", path=_path_with_ninja()) is None:
        raise NativeError(
            "There is no ninja, which runs the compilers. What to do: pip install ninja"
        )


def cxx() -> str:
    """Return the program of the C++ compiler, without its options."""
    return shlex.split(os.environ.get("CXX") or "c++")[0]


def _path_with_ninja() -> str:
    """Return PATH, with the folder where pip has put the program of ninja.

    That folder is missing in PATH if the Python of a virtual environment was started by
    its path.
    """
    folders = [os.environ.get("PATH", "")]
    with suppress(ImportError):
        folders.append(importlib.import_module("ninja").BIN_DIR)
    return os.pathsep.join(folders)


def cuda_toolkit() -> str:
    """Return the folder of a CUDA toolkit that fits torch.

    Raises:
        NativeError: There is none.
    """
    # Torch guesses the toolkit's folder from that of nvcc, which is wrong if nvcc is a
    # script. So there is one more guess.
    guesses = [os.environ.get("CUDA_HOME"), _cpp_extension().CUDA_HOME]
    for home in [*filter(None, guesses), "/usr/local/cuda"]:
        nvcc = shutil.which(str(Path(home, "bin", "nvcc")))
        if nvcc is None or not Path(home, "include", "cuda_runtime.h").exists():
            continue
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
        # The runtime libraries of two major versions do not mix in one process.
        major = str(torch.version.cuda).partition(".")[0]
        if f"release {major}." in said.stdout:
            return str(home)
    raise NativeError(
        f"found no CUDA toolkit (nvcc and headers) for CUDA {torch.version.cuda}; if "
        "there is one, set CUDA_HOME to its folder"
    )


def _cpp_extension() -> Any:
    # The import takes half a second, and only a build needs it.
    return importlib.import_module("torch.utils.cpp_extension")


def _load(sources: list[Path], folder: Path, *, verbose: bool, home: str = "") -> Path:
    """Let torch and ninja build in ``folder``, and return the path of the binary.

    Raises:
        NativeError: The build failed. The text is what they said.
    """
    torch_build = _cpp_extension()
    folder.mkdir()
    before = torch_build.CUDA_HOME, os.environ.get("PATH", "")
    torch_build.CUDA_HOME, os.environ["PATH"] = home or before[0], _path_with_ninja()
    try:
        torch_build.load(
            EXTENSION,
            [str(path) for path in sources],
            extra_cflags=[*flags(), f"-I{source_folder()}"],
            extra_cuda_cflags=[*NVCC_FLAGS, f"-I{source_folder()}"],
            build_directory=str(folder),
            verbose=verbose,
            with_cuda=bool(home),
            # This opens the library, but leaves its initialisation to `state.load`.
            is_python_module=False,
        )
    except (RuntimeError, ImportError, OSError) as error:
        raise NativeError(str(error)) from error
    finally:
        torch_build.CUDA_HOME, os.environ["PATH"] = before
    (built,) = folder.glob("*.so")
    return built


def _main_line(output: str) -> str:
    """Return the line that says most, which is the first of many errors."""
    lines = output.splitlines() or ["(nothing)"]
    words = ("error:", "cannot find")  # what a linker says has no "error:"
    return next((x for x in lines if any(word in x for word in words)), lines[-1])
