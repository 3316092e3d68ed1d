"""``minidp run --compare``: a script on torch's DDP, then on minidp, and what differs.

Each run is a process of its own, and is ended if it gives no sign of life for long. The
one on torch comes first, in a copy of the folder, so that the one on minidp finds no
checkpoint of it. A command that the user gives may clear away what lies elsewhere.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from ._children import plain_environment, reached_children
from ._compare import Observer, Outcome, compare, never_take_down, seed
from ._folder import copy, too_large
from ._groups import die_with_parent, launcher_store
from ._script import Script, after_wrapping, from_environment, say, say_once
from .swapping import TORCHS

POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0  # from asking a run to end to ending it
EXIT_SECONDS = 60.0  # for a run on torch to end, once its results are written
HOST_SECONDS = 1800.0  # for the first rank of a host to copy, or to run a command
NAMES = {"torch": "torch's DDP", "minidp": "minidp"}


@dataclass(frozen=True)
class Comparison:
    """What the user asked for.

    Args:
        script: to run twice.
        flags: of ``minidp run``, for the run on minidp.
        limit: seconds without an optimizer step after which a run is ended.
        copies: whether the run on torch has a copy of the folder; None: if it is small.
        before: a command for the shell, before each of the runs.
    """

    script: Script
    flags: Sequence[str] = ()
    limit: float = 1800.0
    copies: bool | None = None
    before: str | None = None


class _CannotCompareError(Exception):
    """Why, in a sentence."""


# ------------------------------------------------------------------ the two runs


def run_both(wanted: Comparison) -> int:
    """Run the script twice, and say what differs; the exit status."""
    # Torchrun asks ranks to end if one has failed: not without clearing up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="minidp-compare-") as made:
        try:
            return _Runs(wanted, Path(made)).compare()
        except _CannotCompareError as why:
            say(f"minidp run: {why}")
            return 1
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


class _Runs:
    """The runs of one rank.

    Args:
        wanted: what to do.
        made: an empty folder, for files that are not to stay.
    """

    def __init__(self, wanted: Comparison, made: Path) -> None:
        self._wanted, self._made = wanted, made
        self._store = launcher_store("compare")
        self._here = Path.cwd()
        self._script = _seen_from(wanted.script, self._here)

    def compare(self) -> int:
        """Both runs, then the verdict; the exit status."""
        folder, why_not = self._folder_for_torch()
        where = f"in this folder ({why_not})" if why_not else "in a copy of this folder"
        say_once(f"minidp run: first on torch's DistributedDataParallel, {where}.")
        torchs = self._run("torch", folder, plain_environment() | self._elsewhere())
        if isinstance(torchs, int):
            hint = (
                "" if why_not else " (in the copy; if it needs this folder: --no-copy)"
            )
            text = f"the script failed on torch's DDP{hint}: nothing to compare."
            say_once(f"minidp run: {text}")
            return torchs
        ours = self._run("minidp", self._here, os.environ)
        if isinstance(ours, int):
            return ours
        return _tell_difference(torchs, ours, _advice(why_not))

    def _run(
        self, library: str, folder: Path, environment: Mapping[str, str]
    ) -> Outcome | int:
        """What came out, or the exit status if that is not 0."""
        self._run_command_before(library, folder)
        path = self._made / f"{library}.pt"
        progress = _progress(path)
        progress.touch()
        command = [
            *(sys.executable, "-m", "minidp.run"),
            *("--phase", library, "--outcome", str(path)),
            *(self._wanted.flags if library == "minidp" else ()),
            *self._script.words,
        ]
        process = subprocess.Popen(command, cwd=folder, env=environment)
        try:
            status = _wait(process, progress, path, self._limits(library))
        except KeyboardInterrupt:  # it gets one as well
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            raise
        finally:
            _end(process)
        if status is None:
            raise _CannotCompareError(
                f"on {NAMES[library]}, rank {from_environment('RANK', 0)} made no "
                f"optimizer step for {self._wanted.limit:g} s, and was ended (where it "
                "was: see above). To wait longer: --limit SECONDS."
            )
        if not status and not path.exists():
            raise _CannotCompareError(
                f"on {NAMES[library]}, the script ended its process itself (os._exit), "
                "so nobody could look at its weights."
            )
        return status or Outcome.load(path)

    def _limits(self, library: str) -> tuple[float, float]:
        """Seconds to the next step, and from the results to the end."""
        limit = self._wanted.limit
        return limit, min(EXIT_SECONDS, limit) if library == "torch" else limit

    # -- what the ranks of a host share

    def _once(self, key: str, do: Callable[[], str]) -> str:
        """On the first rank of each host; what it returned is returned on all of them.

        Raises:
            _CannotCompareError: that rank did not come.
        """
        is_first = not from_environment("LOCAL_RANK", from_environment("RANK", 0))
        key = f"{key} on host {from_environment('GROUP_RANK', 0)}"
        if is_first:
            text = do()
            if self._store is not None:
                self._store.set(key, text)
            return text
        if self._store is None:
            return ""
        try:
            self._store.wait([key], timedelta(seconds=HOST_SECONDS))
        except RuntimeError:
            text = f"the first rank of this host did not come ({key})"
            raise _CannotCompareError(text) from None
        return self._store.get(key).decode()

    def _folder_for_torch(self) -> tuple[Path, str]:
        """A copy of this folder, or this one and why."""
        copies = self._wanted.copies
        if copies is False:
            return self._here, "--no-copy"
        if self._store is None and from_environment("WORLD_SIZE", 1) > 1:
            return self._here, "only ranks of torchrun or of -n can share a copy"

        def make() -> str:
            target = self._made / "copy"
            why_not = "" if copies else too_large(self._here)
            if why_not:
                return json.dumps([str(self._here), f"{why_not}; --copy copies it"])
            try:
                copy(self._here, target)
            except OSError as error:
                shutil.rmtree(target, ignore_errors=True)
                return json.dumps([str(self._here), f"it cannot be copied: {error}"])
            return json.dumps([str(target), ""])

        folder, why_not = json.loads(self._once("copy", make))
        return Path(folder), why_not

    def _run_command_before(self, library: str, folder: Path) -> None:
        command = self._wanted.before
        if command is None:
            return

        def run() -> str:
            done = subprocess.run(command, shell=True, cwd=folder, check=False)
            return str(done.returncode)

        status = self._once(f"before {library}", run)
        if status not in ("0", ""):
            raise _CannotCompareError(
                f"the command of --before ended with exit status {status}: {command}"
            )

    def _elsewhere(self) -> dict[str, str]:
        """Environment in which the ranks meet at another port than in the second run.

        There they would find what the first one leaves behind.
        """
        if self._store is not None:
            if not from_environment("RANK", 0):
                self._store.set("port", str(_free_port()))
            port = self._store.get("port").decode()
            return {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": str(False)}
        if "MASTER_PORT" in os.environ:
            return {"MASTER_PORT": str(from_environment("MASTER_PORT", 0) + 1)}
        return {}


def _seen_from(script: Script, folder: Path) -> Script:
    """The same script, named such that it is found in a copy of the folder as well."""
    if script.is_module:
        return script
    target = os.path.abspath(script.target)
    if Path(target).is_relative_to(folder):
        target = os.path.relpath(target, folder)
    return replace(script, target=target)


def _progress(outcome: Path) -> Path:
    """The file that grows with each step."""
    return outcome.with_suffix(".progress")


def _wait(
    process: subprocess.Popen[bytes],
    progress: Path,
    outcome: Path,
    limits: tuple[float, float],
) -> int | None:
    """The exit status; None if nothing happened for too long."""
    last, since = -1, 0.0
    while True:
        try:
            status = process.wait(POLL_SECONDS)
            return status if status >= 0 else 128 - status
        except subprocess.TimeoutExpired:
            pass
        is_over = outcome.exists()
        now = progress.stat().st_size + is_over
        if now != last:
            last, since = now, time.monotonic()
        if time.monotonic() > since + limits[is_over]:
            return 0 if is_over else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process; it says where it was (`run_on_torch`, `faulthandler`)."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def _advice(why_not_copied: str) -> str:
    """What to do if the second run went on where the first one had ended."""
    where = "elsewhere than in its working directory"
    if why_not_copied:
        where = f"(both runs were in this folder: {why_not_copied})"
    return (
        f"If the script resumes from a checkpoint {where}, let both runs start without "
        "it: minidp run --compare --before 'rm -rf CHECKPOINTS' ..."
    )


def _tell_difference(torchs: Outcome, ours: Outcome, advice: str) -> int:
    if not ours.num_models:
        return 1  # said already
    verdict = compare(torchs, ours, advice)
    rank = from_environment("RANK", 0)
    if not rank:
        say(f"minidp run: this script on torch's DDP and on minidp\n{verdict.text}")
    elif not verdict.is_same:
        say(f"minidp run: rank {rank}\n{verdict.text}")
    return int(not verdict.is_same)


# -------------------------------------------------------------- inside of a run


def begin_phase(outcome: Path) -> Observer:
    """At the beginning of one of the two processes; what watches the script."""
    die_with_parent()
    faulthandler.register(signal.SIGTERM, chain=True)
    seed(from_environment("RANK", 0))
    return Observer(_progress(outcome))


def run_on_torch(script: Script, outcome: Path) -> NoReturn:
    """Run the script on torch's DDP, and end the process."""
    observer = begin_phase(outcome)

    def wrapped(ddp: Any) -> None:
        never_take_down(ddp)
        observer.wrapped(ddp)

    try:
        with reached_children(swaps=False, is_compared=True):
            with after_wrapping(TORCHS, wrapped):
                status = script.run()
            if not status:
                observer.outcome().save(outcome)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    _leave(status)


def _leave(status: int) -> NoReturn:
    """End the process as Python would, but without a destructor."""
    try:
        finish_threads: Any = threading._shutdown  # type: ignore[attr-defined]
        finish_threads()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
