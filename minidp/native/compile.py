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
import threading
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
_GPU_KERNELS = "GPU kernels"

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


class _Build:
    """Compile and link in a workspace; note in ``left_out`` what a compiler refused.

    The files of ``cuda/`` are optional. They need the headers of a CUDA toolkit, which
    many machines with a torch for CUDA do not have, and all else works without them.
    """

    def __init__(self, recipe: Recipe, workspace: Path, say: Say) -> None:
        self._recipe = recipe
        self._workspace = workspace
        self._say = say
        self._log = cache.folder() / f"{recipe.key}.log"
        self._processes: list[subprocess.Popen[str]] = []
        self._is_over = False  # no command may start any more
        self._lock = threading.Lock()  # of the two
        self.left_out: list[str] = []

    def run(self) -> Path:
        """Return the new binary. After an error or Ctrl-C kill all compilers."""
        compiler, folder = cxx(), self._recipe.folder
        sources = [p for p in source_files(folder) if p.suffix in (".cpp", ".cu")]
        plain = [path for path in sources if path.parent == folder]
        for_gpu = [path for path in sources if path.parent != folder]
        if not plain:
            raise NativeError(f"There are no C++ sources to build in {folder}.")
        if shutil.which(compiler[0]) is None:
            raise NativeError(
                f"There is no C++ compiler: {compiler[0]!r} is not on the PATH. What "
                "to do: install g++ or clang, or name one in the environment variable "
                "CXX."
            )
        nvcc = fitting_nvcc() if for_gpu else ""
        if for_gpu and torch.version.cuda and not nvcc:
            self._leave_out_gpu(f"found no nvcc of CUDA {torch.version.cuda}")
        self._log.write_text("")
        flags = [*compiler, *FLAGS, *self._accepted_wishes(compiler)]
        try:
            return self._compile(flags, plain, for_gpu if nvcc else [], nvcc)
        except BaseException:
            self._end()
            raise

    def _compile(
        self, flags: Command, plain: list[Path], for_gpu: list[Path], nvcc: str
    ) -> Path:
        """Compile all sources in parallel, then link; return the binary."""
        includes, libraries = _paths()
        gpu_includes, gpu_libraries = _gpu_paths(nvcc) if for_gpu else ([], [])
        count = len(plain) + len(for_gpu)
        objects = [str(self._workspace / f"{n}.o") for n in range(count)]
        jobs = []
        for n, source in enumerate([*plain, *for_gpu]):
            command = [*flags, *EXCEPTIONS.get(source.name, "").split()]
            if source.suffix == ".cu":
                command = [nvcc, *NVCC_FLAGS, f"-ccbin={shutil.which(flags[0])}"]
            command += [f"-I{self._recipe.folder}", *includes]
            command += gpu_includes if source in for_gpu else []
            command += ["-c", str(source), "-o", objects[n]]
            run = self._run_for_gpu if source in for_gpu else self._run
            jobs.append(
                partial(run, f"compiling {source.name} ({n + 1} of {count})", command)
            )
        _run_in_parallel(jobs)
        built = self._workspace / f"{EXTENSION}.so"
        link = [*flags, "-shared", "-o", str(built)]
        if for_gpu and not self._has_no_gpu():
            words = [*link, *objects, *libraries, *gpu_libraries]
            self._run_for_gpu("linking", words)
        if not for_gpu or self._has_no_gpu():
            self._run("linking", [*link, *objects[: len(plain)], *libraries])
        return built

    def _has_no_gpu(self) -> bool:
        return any(each.startswith(_GPU_KERNELS) for each in self.left_out)

    def _leave_out_gpu(self, why: str) -> None:
        if not self._has_no_gpu():  # the first reason is enough
            self.left_out.append(f"{_GPU_KERNELS}: {why}")
            self._say(f"left out: {self.left_out[-1]}")

    def _run_for_gpu(self, doing: str, command: Command) -> None:
        """Run a command that only the files of ``cuda/`` need: it may fail."""
        try:
            self._run(doing, command)
        except _CommandError as error:
            self._leave_out_gpu(f"{doing} failed: {error.brief} ({self._log})")

    def _accepted_wishes(self, compiler: Command) -> list[str]:
        """Return the optional flags that the compiler accepts, asking for each group.

        A group, tried together with those accepted before, is left out as a whole.
        """
        accepted: list[str] = []
        for group in self._recipe.wishes:
            # -c and not -fsyntax-only: only then does an assembler see the -m flags.
            command = [*compiler, *accepted, *group]
            command += ["-x", "c++", "-c", os.devnull, "-o", os.devnull]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                refused = f"{compiler[0]} refuses: {' '.join(group)}"
                self.left_out.append(refused)
                self._say(f"left out, because {refused}")
            else:
                accepted += group
        return accepted

    def _run(self, doing: str, command: Command) -> None:
        """Run a command and wait; append it and its output to the log.

        NativeError if it fails. ``doing``: what to ``say`` first, and in the error.
        """
        self._say(doing)
        # Under the lock, because `_end` must not miss a process that has just started:
        # its thread would wait for it, and Python for that thread at exit.
        with self._lock:
            if self._is_over:
                raise NativeError(f"The build was ended before {doing}.")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # leads a group, which `_end` kills
            )
            self._processes.append(process)
        output, _ = process.communicate()
        with self._log.open("a") as file:
            file.write(f"$ {shlex.join(command)}\n{output}")
        if process.returncode:
            raise _CommandError(
                doing, command[0], process.returncode, output, self._log
            )

    def _end(self) -> None:
        """Kill what runs, and its children: compiler drivers have some; start no more.

        Called in the main thread, which holds no lock then, after an error or Ctrl-C.
        """
        with self._lock:
            self._is_over = True
        for process in self._processes:
            with suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


class _CommandError(NativeError):
    """A compiler or linker failed; ``brief`` is the one line that says most."""

    def __init__(
        self, doing: str, program: str, status: int, output: str, log: Path
    ) -> None:
        lines = output.splitlines()
        tail = lines[-_TAIL:]
        words = ("error:", "cannot find")  # a linker's reason has no "error:"
        found = (line for line in lines if any(word in line for word in words))
        first = next(found, "")
        if first and first not in tail:  # the first of many errors is the real one
            tail = [first, "...", *tail]
        said = "\n".join(f"    {line}" for line in tail) or "    (nothing)"
        self.brief = first or (lines[-1] if lines else f"exit status {status}")
        super().__init__(
            f"It failed while {doing}: {program} exited with {status} "
            f"and said:\n{said}\nThe whole output is in {log}."
        )


def _build(recipe: Recipe, workspace: Path, say: Say) -> Path:
    """Compile, link, and put the binary into the cache; return its path there."""
    build = _Build(recipe, workspace, say)
    built = build.run()
    if describe().key != recipe.key:
        raise NativeError(
            f"The sources in {recipe.folder} changed during the build. What to do: "
            "build again."
        )
    return cache.publish(recipe, built, build.left_out)


def _paths() -> tuple[list[str], list[str]]:
    """Return flags to compile, and flags to link, with torch."""
    torch_paths: Any = importlib.import_module("torch.utils.cpp_extension")
    # -isystem: -Wall is about our sources, not about torch's headers.
    folders = [*torch_paths.include_paths("cpu"), sysconfig.get_path("include")]
    includes = [word for path in folders for word in ("-isystem", path)]
    names = ("c10", "torch_cpu", "torch", "torch_python")
    libraries = [f"-L{path}" for path in torch_paths.library_paths("cpu")]
    return includes, [*libraries, *(f"-l{name}" for name in names)]


def _gpu_paths(nvcc: str) -> tuple[list[str], list[str]]:
    """Return more flags, to compile ``cuda/`` and to link it.

    nvcc says itself where its headers and libraries lie. Torch derives that from the
    place of nvcc, which is wrong if it is a script that calls another one.
    """
    command = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    own: dict[str, list[str]] = {"INCLUDES": [], "LIBRARIES": []}
    for line in said.splitlines():
        name, _, value = line.removeprefix("#$ ").partition("=")
        if name in own:
            own[name] = shlex.split(value)
    folders = [word.removeprefix("-I") for word in own["INCLUDES"]]
    return (
        [word for path in folders for word in ("-isystem", path)],
        [*own["LIBRARIES"], "-lc10_cuda", "-ltorch_cuda", "-lcudart"],
    )


def _run_in_parallel(jobs: Iterable[Callable[[], None]]) -> None:
    """Call jobs in threads, MAX_JOBS (one per core) at a time, and wait.

    After an error or Ctrl-C start no more, and raise it at once; those that run go on.
    """
    limit = max(1, int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))  # as torch
    waiting = iter(jobs)
    pool = ThreadPoolExecutor(limit)
    running = {pool.submit(job) for job in islice(waiting, limit)}
    try:
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for each in ended:
                each.result()
            running |= {pool.submit(job) for job in islice(waiting, len(ended))}
    finally:
        pool.shutdown(wait=False)
