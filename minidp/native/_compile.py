"""Turn a recipe into a binary: one command per source, then one to link.

The commands are run here and not by ``torch.utils.cpp_extension.load``, which needs
ninja, waits for ever for a builder that was killed, and mixes the compiler's words with
its own.  Only its paths are used.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from minidp.errors import NativeError

from ._cache import Cache, Say
from ._recipe import EXTENSION, NVCC_FLAGS, Recipe, replace_sources

_GRACE_SECONDS = 2.0  # for a compiler that is told to end
_TAIL = 15  # lines of a compiler's output in an error


def build_into(
    cache: Cache,
    recipe: Recipe,
    say: Say,
    *,
    force: bool = False,
    verbose: bool = False,
) -> Path:
    """The binary for a recipe, built unless an intact one is there.

    Args:
        cache: where to look first, and where to put the result.
        recipe: what to build.
        say: called with every line of progress.
        force: build even if there is one.
        verbose: say the commands and the compiler's output too.

    Raises:
        NativeError: something is missing, or a command failed.
    """
    try:
        with cache.locked(
            say, lambda: None if force else cache.find_intact(recipe)
        ) as there:
            if there is not None:
                say("already built")
                return there.binary
            _check(recipe)
            with (
                cache.workspace() as workspace,
                _Shell(cache.log_of(recipe), say, is_verbose=verbose) as shell,
            ):
                built = _compile(recipe, workspace, shell)
                _check_unchanged(recipe)
                return cache.publish(recipe, built)
    except OSError as error:
        raise NativeError(f"Building in {cache.folder} failed: {error}.") from error


def _check(recipe: Recipe) -> None:
    """Raise before the compiler would, in words that say what to install."""
    program = recipe.cxx[0]
    if sys.platform == "win32":
        raise NativeError("Native kernels cannot be built on Windows.")
    if not recipe.cpp_files:
        raise NativeError(f"There are no C++ sources to build in {recipe.folder}.")
    if shutil.which(program) is None:
        raise NativeError(
            f"There is no C++ compiler: {program!r} is not on the PATH. What to do: "
            "install g++ or clang, or name one in the environment variable CXX."
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise NativeError(
            f"Python's headers are missing: there is no {header}. What to do: install "
            "them (python3-dev or python3-devel in most distributions)."
        )


def _check_unchanged(recipe: Recipe) -> None:
    # The binary would be filed under the key of sources that it was not made of.
    if replace_sources(recipe).sources != recipe.sources:
        raise NativeError(
            f"The sources in {recipe.folder} changed during the build. What to do: "
            "build again."
        )


class _Shell:
    """Runs commands of one build and keeps what they say.

    As a context manager, it ends them if anything is raised, Ctrl-C included. Each has
    a process group of its own: a compiler's driver does not end its compiler.

    Args:
        log: file that gets every command and all output.
        say: called with progress.
        is_verbose: pass commands and output to ``say`` too.
    """

    def __init__(self, log: Path, say: Say, *, is_verbose: bool) -> None:
        self._log = log
        self._say = say
        self._is_verbose = is_verbose
        self._lock = threading.Lock()  # sources are compiled at the same time
        self._running: list[subprocess.Popen[str]] = []
        self._is_stopped = False
        self._num_done = 0
        self.num_steps = 0
        log.write_text("")

    def __enter__(self) -> _Shell:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stop()

    def run(self, doing: str, command: list[str]) -> None:
        """Run one of ``num_steps`` commands.

        Args:
            doing: a phrase like "compiling x.cpp".
            command: the words.

        Raises:
            NativeError: it failed.
        """
        start = time.perf_counter()
        done = self._call(command, doing)
        self._keep(f"$ {shlex.join(command)}\n{done.stdout}")
        if done.returncode:
            raise NativeError(self._explain(doing, command[0], done))
        with self._lock:
            self._num_done += 1
            self._say(
                f"{doing}: {time.perf_counter() - start:.1f} s "
                f"(done: {self._num_done} of {self.num_steps})"
            )

    def accepts(self, command: list[str]) -> bool:
        """Whether a command succeeds."""
        return self._call(command).returncode == 0

    def _call(
        self, command: list[str], doing: str = ""
    ) -> subprocess.CompletedProcess[str]:
        with self._lock:
            if self._is_stopped:
                raise CancelledError
            if doing:
                self._say(doing)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._running.append(process)
        output, _ = process.communicate()  # if this raises, it goes on running
        with self._lock:
            self._running.remove(process)
            if self._is_stopped:
                raise CancelledError
        return subprocess.CompletedProcess(command, process.returncode, output)

    def _stop(self) -> None:
        """End what runs, with all that it has started; start nothing any more."""
        with self._lock:
            self._is_stopped = True
            running = list(self._running)
        for process in running:
            _signal_group(process, signal.SIGTERM)  # they remove temporary files
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
            _signal_group(process, signal.SIGKILL)

    def note(self, text: str) -> None:
        """Say a line and keep it."""
        self._say(text)
        with self._lock, self._log.open("a") as log:
            log.write(f"{text}\n")

    def _keep(self, text: str) -> None:
        with self._lock, self._log.open("a") as log:
            log.write(text)
        if self._is_verbose:
            self._say(text.rstrip())

    def _explain(
        self, doing: str, program: str, done: subprocess.CompletedProcess[str]
    ) -> str:
        lines = done.stdout.splitlines()
        tail = lines[-_TAIL:]
        first = next((line for line in lines if "error:" in line), "")
        if first and first not in tail:  # the first of many errors is the real one
            tail = [first, "...", *tail]
        text = "\n".join(f"    {line}" for line in tail) or "    (nothing)"
        return (
            f"It failed while {doing}: {program} exited with {done.returncode} and "
            f"said:\n{text}\nThe whole output is in {self._log}."
        )


def _signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _compile(recipe: Recipe, workspace: Path, shell: _Shell) -> Path:
    """The linked binary, inside the workspace."""
    flags = [*recipe.flags, *_accepted_wishes(recipe, shell)]
    paths = _Paths(recipe.nvcc)
    if recipe.nvcc:
        flags.append("-DMINIDP_CUDA")
    jobs: list[tuple[str, list[str]]] = []
    objects: list[str] = []
    for source in [*recipe.cpp_files, *recipe.cuda_files]:
        name = source.relative_to(recipe.folder).as_posix()
        target = str(workspace / f"{name.replace('/', '-')}.o")
        if source.suffix == ".cu":
            host = f"-ccbin={shutil.which(recipe.cxx[0])}"
            command = [recipe.nvcc, *NVCC_FLAGS, host, "-DMINIDP_CUDA"]
        else:
            command = [*recipe.cxx, *flags]
        command += [f"-I{recipe.folder}", *paths.include_flags, "-c"]
        command += [str(source), "-o", target]
        jobs.append((f"compiling {name}", command))
        objects.append(target)
    shell.num_steps = len(jobs) + 1
    # On the way out the shell comes first: what it has not started, it will not start.
    with ThreadPoolExecutor(_count_jobs(len(jobs))) as pool, shell:
        for done in as_completed([pool.submit(shell.run, *job) for job in jobs]):
            done.result()
    built = workspace / f"{EXTENSION}.so"
    shell.run(
        "linking",
        [*recipe.cxx, *flags, "-shared", *objects, *paths.link_flags, "-o", str(built)],
    )
    return built


def _accepted_wishes(recipe: Recipe, shell: _Shell) -> list[str]:
    """Those optional flags that this compiler takes."""
    accepted: list[str] = []
    for group in recipe.wishes:
        # -c and not -fsyntax-only: only then does an assembler see the -m flags.
        attempt = [*recipe.cxx, *accepted, *group]
        attempt += ["-x", "c++", "-c", os.devnull, "-o", os.devnull]
        if shell.accepts(attempt):
            accepted += group
        else:
            shell.note(f"left out, because {recipe.cxx[0]} refuses: {' '.join(group)}")
    return accepted


def _count_jobs(num_sources: int) -> int:
    wanted = os.environ.get("MAX_JOBS", "")  # torch's name for the same limit
    limit = int(wanted) if wanted.isdigit() and int(wanted) else os.cpu_count() or 1
    return min(num_sources, limit)


class _Paths:
    """Where headers and libraries of torch and CUDA are.

    Args:
        nvcc: path of nvcc; empty to do without CUDA.
    """

    def __init__(self, nvcc: str) -> None:
        # By name, and only when something is built: the import costs half a second.
        torch_paths: Any = importlib.import_module("torch.utils.cpp_extension")
        folders = [*torch_paths.include_paths(), sysconfig.get_path("include")]
        libraries = list(torch_paths.library_paths())
        names = ["c10", "torch_cpu", "torch", "torch_python"]
        if nvcc:
            home = _cuda_home(nvcc)
            folders.append(str(home / "include"))
            libraries += [str(home / "lib64"), str(home / "lib")]
            names += ["c10_cuda", "torch_cuda", "cudart"]
        # -isystem: -Wall is about our sources, not about torch's headers.
        self.include_flags = [word for path in folders for word in ("-isystem", path)]
        self.link_flags = [f"-L{path}" for path in libraries]
        self.link_flags += [f"-l{name}" for name in names]


def _cuda_home(nvcc: str) -> Path:
    """As nvcc sees it: it may be a script elsewhere, and CUDA_HOME may be unset."""
    done = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"^#\$ TOP=(.+)$", done.stderr, re.MULTILINE)
    return Path(found[1] if found else Path(nvcc).parent.parent).resolve()
