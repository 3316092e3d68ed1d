"""Turn a recipe into a binary: one command per source, then one to link.

Not by ``torch.utils.cpp_extension.load``: it needs ninja, waits for ever for a builder
that was killed, and mixes the compiler's output with its own.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from minidp.errors import NativeError

from . import cache
from .recipe import EXCEPTIONS, EXTENSION, FLAGS, NVCC_FLAGS, Recipe

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
_TAIL = 15  # lines of a compiler's output in an error

Say = Callable[[str], None]  # called with a line of progress, when something begins
Tick = Callable[[int, int, list[str]], None]  # commands done, of how many; what runs
Process = subprocess.Popen[bytes]
Job = tuple[str, list[str]]  # what it does ("compiling x.cpp"), and the command
_Running = tuple[Process, str, list[str], Path]  # `Job`, and a file for the output


def build_into_cache(
    recipe: Recipe,
    say: Say,
    *,
    force: bool = False,
    verbose: bool = False,
    tick: Tick | None = None,
) -> Path:
    """Return the cached binary; build (after others) if ``force`` or it is missing."""
    try:
        # Looks first without the lock, which may be held for minutes.
        binary = None if force else _built_before(recipe, say)
        if binary is not None:
            return binary
        with _lock(say), cache.workspace() as workspace:
            log = cache.folder() / f"{recipe.key}.log"
            shell = _Shell(log, say, tick, is_verbose=verbose)
            binary = None if force else _built_before(recipe, say)
            return binary or _build(recipe, workspace, shell)
    except OSError as error:
        raise NativeError(
            f"Building in {cache.folder()} failed: {error}. What to do: if it is not "
            "writable, set MINIDP_NATIVE_CACHE to a folder that is."
        ) from error


def _built_before(recipe: Recipe, say: Say) -> Path | None:
    """Return the cached binary that fits, and say "already built"; None without one."""
    binary, misfits = cache.nearest(recipe)
    if binary is None or misfits:
        return None
    say("already built")
    return binary


def _lock(say: Say) -> AbstractContextManager[object]:
    """Wait for the cache's lock, without limit; return a context that releases it."""
    folder = cache.folder()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        say(f"waiting for the lock of {folder}: another process is building")
        return lock.acquire()


def _build(recipe: Recipe, workspace: Path, shell: _Shell) -> Path:
    """Compile, link; return the binary's path in the cache; NativeError if it fails."""
    if not recipe.sources(".cpp"):
        raise NativeError(f"There are no C++ sources to build in {recipe.folder}.")
    if shutil.which(recipe.cxx[0]) is None:
        raise NativeError(
            f"There is no C++ compiler: {recipe.cxx[0]!r} is not on the PATH. What to "
            "do: install g++ or clang, or name one in the environment variable CXX."
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise NativeError(
            f"Python's headers are missing: there is no {header}. What to do: install "
            "them (python3-dev or python3-devel in most distributions)."
        )
    shell.log.write_text("")
    flags = [*FLAGS, *_accepted_wishes(recipe, shell.say)]
    includes, libraries = _paths(recipe.nvcc)
    limit = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)  # as in torch
    shell.run(list(_compilations(recipe, workspace, flags, includes)), max(limit, 1))
    built = workspace / f"{EXTENSION}.so"
    link = [*recipe.cxx, *flags, "-shared", *map(str, workspace.glob("*.o"))]
    shell.run([("linking", [*link, *libraries, "-o", str(built)])])
    if recipe.is_outdated():
        raise NativeError(
            f"The sources in {recipe.folder} changed during the build. What to do: "
            "build again."
        )
    return cache.publish(recipe, built)


def _accepted_wishes(recipe: Recipe, say: Say) -> list[str]:
    """Try groups of optional compiler flags, one by one; return those accepted."""
    accepted: list[str] = []
    for group in recipe.wishes:
        # -c and not -fsyntax-only: only then does an assembler see the -m flags.
        command = [*recipe.cxx, *accepted, *group]
        command += ["-x", "c++", "-c", os.devnull, "-o", os.devnull]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            say(f"left out, because {recipe.cxx[0]} refuses: {' '.join(group)}")
        else:
            accepted += group
    return accepted


def _compilations(
    recipe: Recipe, workspace: Path, flags: list[str], includes: list[str]
) -> Iterator[Job]:
    """Yield a job per source; its command writes an object file to the workspace."""
    cuda = ["-DMINIDP_CUDA"] if recipe.nvcc else []
    for source in recipe.sources(".cpp", ".cu"):
        command = [*recipe.cxx, *flags, *EXCEPTIONS.get(source.name, "").split()]
        if source.suffix == ".cu":
            host = f"-ccbin={shutil.which(recipe.cxx[0])}"
            command = [recipe.nvcc, *NVCC_FLAGS, host]
        name = source.relative_to(recipe.folder).as_posix()
        target = workspace / f"{name.replace('/', '-')}.o"
        command += [*cuda, f"-I{recipe.folder}", *includes]
        yield f"compiling {name}", [*command, "-c", str(source), "-o", str(target)]


def _paths(nvcc: str) -> tuple[list[str], list[str]]:
    """Return flags to compile, and to link, with torch; with CUDA if ``nvcc``."""
    # Imported only for a build: the import takes half a second.
    torch_paths: Any = importlib.import_module("torch.utils.cpp_extension")
    folders = [*torch_paths.include_paths(), sysconfig.get_path("include")]
    libraries = list(torch_paths.library_paths())
    names = ["c10", "torch_cpu", "torch", "torch_python"]
    if nvcc:  # which may be a script elsewhere than in CUDA's folder
        command = [nvcc, "--dryrun", "-x", "cu", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = re.search(r"^#\$ TOP=(.+)$", done.stderr, re.MULTILINE)
        home = Path(found[1] if found else Path(nvcc).parent.parent).resolve()
        folders.append(f"{home}/include")
        libraries += [f"{home}/lib64", f"{home}/lib"]
        names += ["c10_cuda", "torch_cuda", "cudart"]
    # -isystem: -Wall is about our sources, not about torch's headers.
    includes = [word for path in folders for word in ("-isystem", path)]
    return includes, [f"-L{path}" for path in libraries] + [f"-l{n}" for n in names]


class _Shell:
    """Run the commands of one build; write commands and output to its log file."""

    def __init__(
        self, log: Path, say: Say, tick: Tick | None, *, is_verbose: bool
    ) -> None:
        self.log, self.say, self._tick, self._is_verbose = log, say, tick, is_verbose

    def run(self, jobs: list[Job], limit: int = 1) -> None:
        """Run jobs, ``limit`` at a time; on an error or Ctrl-C end those that run."""
        waiting, running = jobs[::-1], list[_Running]()
        try:
            while waiting or running:
                while waiting and len(running) < limit:
                    running.append(self._start(*waiting.pop()))
                if self._tick:
                    done = len(jobs) - len(waiting) - len(running)
                    self._tick(done, len(jobs), [doing for _, doing, *_ in running])
                time.sleep(_POLL_SECONDS)
                for ended in [each for each in running if each[0].poll() is not None]:
                    running.remove(ended)
                    self._look_at(*ended)
        finally:
            _end([process for process, *_ in running])

    def _start(self, doing: str, command: list[str]) -> _Running:
        """Start a job's command, its output to a file, in a session of its own."""
        self.say(doing)
        output = Path(f"{command[-1]}.txt")
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a compiler's driver has children: `_end`
            )
        return process, doing, command, output

    def _look_at(
        self, process: Process, doing: str, command: list[str], printed: Path
    ) -> None:
        """Log an ended command's output; raise NativeError if the command failed."""
        output = printed.read_text(errors="replace")
        text = f"$ {shlex.join(command)}\n{output}".rstrip()
        with self.log.open("a") as log:
            log.write(f"{text}\n")
        if self._is_verbose:
            self.say(text)
        if not process.returncode:
            return
        lines = output.splitlines()
        tail = lines[-_TAIL:]
        first = next((line for line in lines if "error:" in line), "")
        if first and first not in tail:  # the first of many errors is the real one
            tail = [first, "...", *tail]
        said = "\n".join(f"    {line}" for line in tail) or "    (nothing)"
        raise NativeError(
            f"It failed while {doing}: {command[0]} exited with {process.returncode} "
            f"and said:\n{said}\nThe whole output is in {self.log}."
        )


def _end(processes: list[Process]) -> None:
    """Send SIGTERM, 2 s later SIGKILL, to processes and their children; wait."""
    # SIGTERM first: compilers then remove their temporary files.
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
