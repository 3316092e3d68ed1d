"""Turn a recipe into a binary: one command per source, then one to link.

Not by ``torch.utils.cpp_extension.load``: it needs ninja, waits for ever for a builder
that was killed, and mixes the compiler's output with its own.
"""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from minidp.errors import NativeError

from . import cache
from .recipe import (
    EXCEPTIONS,
    EXTENSION,
    FLAGS,
    NVCC_FLAGS,
    Recipe,
    describe,
    source_files,
)

_TAIL = 15  # lines of a compiler's output in an error

Say = Callable[[str], None]  # called with a line of progress, when something begins
Command = list[str]


def build_into_cache(recipe: Recipe, say: Say, *, force: bool = False) -> Path:
    """Return the cached binary; build it if ``force``, or if no intact one is cached.

    Waits, without limit, while another process builds; without ``force`` that one's
    binary is then returned. NativeError: no compiler, sources missing or changed during
    the build, a failed command or write.
    """
    try:
        # Looks first without the lock, which may be held for minutes.
        binary = None if force else _built_before(recipe, say)
        if binary is not None:
            return binary
        with _lock(say), cache.workspace() as workspace:
            binary = None if force else _built_before(recipe, say)
            return binary or _build(recipe, workspace, say)
    except OSError as error:
        raise NativeError(
            f"Building in {cache.folder()} failed: {error}. What to do: if it is not "
            "writable, set MINIDP_NATIVE_CACHE to a folder that is."
        ) from error


def _built_before(recipe: Recipe, say: Say) -> Path | None:
    """Return the cached binary that fits, and say "already built"; None without one."""
    binary, _ = cache.find(recipe)
    if binary is not None:
        say("already built")
    return binary


def _lock(say: Say) -> AbstractContextManager[object]:
    """Acquire the cache's lock; return a context that releases it.

    Waits without limit, which ``say`` tells the user. Creates the cache's folder.
    """
    folder = cache.folder()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        say(f"waiting for the lock of {folder}: another process is building")
        return lock.acquire()


def cxx() -> Command:
    """Return the C++ compiler's command: CXX, else ``c++``."""
    return shlex.split(os.environ.get("CXX") or "c++")


def fitting_nvcc() -> str:
    """Return the path of nvcc; "" if there is none of torch's CUDA major version."""
    # Imported only for a build: the import takes half a second.
    torch_paths: Any = importlib.import_module("torch.utils.cpp_extension")
    if torch_paths.CUDA_HOME is None or torch.version.cuda is None:
        return ""
    nvcc = str(Path(torch_paths.CUDA_HOME, "bin", "nvcc"))
    if shutil.which(nvcc) is None:
        return ""
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    # The runtime libraries of two major versions do not mix in one process.
    major = torch.version.cuda.partition(".")[0]
    return nvcc if f"release {major}." in version.stdout else ""


def _build(recipe: Recipe, workspace: Path, say: Say) -> Path:
    """Compile, link, and put the binary into the cache; return its path there.

    NativeError as `build_into_cache`. After an error or Ctrl-C kills all compilers.
    ``workspace``: an empty folder for object files.
    """
    compiler, nvcc = cxx(), fitting_nvcc()
    # Of the files in cuda/, only with nvcc.
    sources = [
        path
        for path in source_files(recipe.folder)
        if path.suffix in (".cpp", ".cu") and (nvcc or path.parent == recipe.folder)
    ]
    if not sources:
        raise NativeError(f"There are no C++ sources to build in {recipe.folder}.")
    if shutil.which(compiler[0]) is None:
        raise NativeError(
            f"There is no C++ compiler: {compiler[0]!r} is not on the PATH. What to "
            "do: install g++ or clang, or name one in the environment variable CXX."
        )
    log = cache.folder() / f"{recipe.key}.log"
    log.write_text("")
    flags = [*compiler, *FLAGS, *_accepted_wishes(compiler, recipe.wishes, say)]
    includes, libraries = _paths(is_cuda=bool(nvcc))
    processes: list[subprocess.Popen[str]] = []
    run = partial(_run, log, say, processes)
    objects: list[str] = []
    jobs = []
    for source in sources:
        command = [*flags, *EXCEPTIONS.get(source.name, "").split()]
        if source.suffix == ".cu":
            command = [nvcc, *NVCC_FLAGS, f"-ccbin={shutil.which(compiler[0])}"]
        objects.append(str(workspace / f"{len(objects)}.o"))
        command += [f"-I{recipe.folder}", *includes, "-c", str(source)]
        doing = f"compiling {source.name} ({len(objects)} of {len(sources)})"
        jobs.append((doing, [*command, "-o", objects[-1]]))
    built = workspace / f"{EXTENSION}.so"
    try:
        _run_in_parallel(run, jobs)
        run("linking", [*flags, "-shared", *objects, *libraries, "-o", str(built)])
    except BaseException:
        _end(processes)
        raise
    if describe().key != recipe.key:
        raise NativeError(
            f"The sources in {recipe.folder} changed during the build. What to do: "
            "build again."
        )
    return cache.publish(recipe, built)


def _accepted_wishes(
    compiler: Command, wishes: Iterable[Iterable[str]], say: Say
) -> list[str]:
    """Return the optional flags that the compiler accepts; run it once for each group.

    A group, tried together with those accepted before, is left out as a whole; ``say``
    then tells which.
    """
    accepted: list[str] = []
    for group in wishes:
        # -c and not -fsyntax-only: only then does an assembler see the -m flags.
        command = [*compiler, *accepted, *group]
        command += ["-x", "c++", "-c", os.devnull, "-o", os.devnull]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            say(f"left out, because {compiler[0]} refuses: {' '.join(group)}")
        else:
            accepted += group
    return accepted


def _paths(*, is_cuda: bool) -> tuple[list[str], list[str]]:
    """Return flags to compile, and flags to link, with torch; ``is_cuda``: and CUDA."""
    torch_paths: Any = importlib.import_module("torch.utils.cpp_extension")
    kind = "cuda" if is_cuda else "cpu"
    names = ["c10", "torch_cpu", "torch", "torch_python"]
    names += ["c10_cuda", "torch_cuda", "cudart"] * is_cuda
    # -isystem: -Wall is about our sources, not about torch's headers.
    includes = ["-DMINIDP_CUDA"] * is_cuda
    for path in (*torch_paths.include_paths(kind), sysconfig.get_path("include")):
        includes += ["-isystem", path]
    libraries = [f"-L{path}" for path in torch_paths.library_paths(kind)]
    return includes, [*libraries, *(f"-l{name}" for name in names)]


def _run_in_parallel(
    run: Callable[[str, Command], None], jobs: Iterable[tuple[str, Command]]
) -> None:
    """Call ``run`` with each job in threads, MAX_JOBS (one per core) at a time; wait.

    After an error or Ctrl-C start no more, and raise it at once; those that run go on.
    """
    limit = max(1, int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))  # as torch
    waiting = iter(jobs)
    pool = ThreadPoolExecutor(limit)
    running = {pool.submit(run, *job) for job in islice(waiting, limit)}
    try:
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for each in ended:
                each.result()
            running |= {pool.submit(run, *job) for job in islice(waiting, len(ended))}
    finally:
        pool.shutdown(wait=False)


def _end(processes: Iterable[subprocess.Popen[str]]) -> None:
    """Kill processes that still run, and their children: compiler drivers have some."""
    for process in processes:
        with suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _run(
    log: Path,
    say: Say,
    processes: list[subprocess.Popen[str]],
    doing: str,
    command: Command,
) -> None:
    """Run a command and wait; append it and its output to the file ``log``.

    NativeError if it fails. ``doing``: what to ``say`` first, and in the error. Adds
    the process, which leads a group of its own, to ``processes``.
    """
    say(doing)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    processes.append(process)
    output, _ = process.communicate()
    with log.open("a") as file:
        file.write(f"$ {shlex.join(command)}\n{output}")
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
        f"and said:\n{said}\nThe whole output is in {log}."
    )
