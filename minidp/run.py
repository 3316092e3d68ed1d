"""``minidp run``: an unmodified DDP script, on minidp.

    torchrun --nproc-per-node 2 -m minidp.run train.py ARGS
    torchrun --nproc-per-node 2 -m minidp.run -m package.module ARGS

In the script, and in all it imports, torch.nn.parallel.DistributedDataParallel is
minidp.DataParallel, by whichever name (minidp.swapped says which), also in processes
that it starts by multiprocessing. Others, which are a command of their own, have to be
started by this one themselves: use torchrun. The exit status is the script's; 2 if it
cannot be run at all, 1 if there is nothing to report or compare, or a difference.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from ._compare import Observer, Outcome, compare, seed
from ._console import parse
from ._groups import die_with_parent, launcher_store
from ._script import Script, after_wrapping, say
from ._terminal import fold
from ._timeline import Timeline, from_json, to_json
from .data_parallel import DataParallel
from .recording import Recording, record
from .report import report
from .swapping import TORCHS, has_reached_children, swapped

EXCHANGE_SECONDS = 60.0  # that rank 0 waits for the recordings of other ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``minidp run``."""
    parser.add_argument(
        "--report",
        action="store_true",
        help="at exit, say what of the communication was hidden (minidp report)",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="--report, and keep what was recorded, for minidp report FILE (of several "
        "models the first; of the others FILE with .2, .3 and so on)",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="run the script on torch's DDP first, then on minidp; say whether final "
        "weights are equal, and how long steps took; exit status 1 if they differ, or "
        "the numbers of steps do; both start with the same seeds, for scripts that set "
        "none, and in the same folder: delete checkpoints that the script resumes from",
    )
    parser.add_argument("--torch", type=Path, help=argparse.SUPPRESS)  # of --compare
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module's name"
    )
    parser.add_argument("script", metavar="SCRIPT", help="a script that trains")
    parser.add_argument(
        "arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="of the script"
    )


def main(options: argparse.Namespace) -> int:
    """Run the script; its exit status, or see `add_arguments`."""
    script = Script(options.script, options.arguments, options.is_module)
    # To look for a module imports the packages around it.
    with nullcontext() if options.torch else swapped():
        problem = script.problem()
    # The script may go to another folder.
    saves = None if options.save is None else options.save.absolute()
    problem = problem or _why_not_saved(saves)
    if problem:
        _say_once(f"minidp run: {problem}.")
        return 2
    if options.torch:
        die_with_parent()
        return _on_torch(script, options.torch)
    reports = options.report or saves is not None
    if not options.compare:
        return _on_minidp(script, Session(script, reports, saves))
    with tempfile.TemporaryDirectory(prefix="minidp-compare-") as folder:
        path = Path(folder, "torch.pt")
        status = _start_on_torch(script, path)
        if status or not path.exists():
            say("minidp run: the script failed on torch's DDP, so nothing is compared.")
            return status or 1
        observer = Observer()
        session = Session(script, reports, saves, observer)
        seed(_from_environment("RANK", 0))
        status = _on_minidp(script, session)
        ours, torchs = observer.outcome(), Outcome.load(path)
    return status or _tell_difference(torchs, ours)


def _why_not_saved(path: Path | None) -> str:
    """What is to be said before hours of training, not after."""
    if path is None or (path.parent.is_dir() and not path.is_dir()):
        return ""
    why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
    return f"--save {path}: {why}"


# ------------------------------------------------------------------------- on minidp


def _on_minidp(script: Script, session: Session) -> int:
    """Run the script with torch's class swapped for ours."""
    _say_once(
        "minidp run: torch.nn.parallel.DistributedDataParallel is minidp.DataParallel "
        f"in {script.target}."
    )
    with swapped(), after_wrapping(DataParallel, session.wrapped):
        try:
            status = script.run()
        except Exception as error:
            _hint(error, script)
            raise
        finally:
            session.end()
            session.reached_children = has_reached_children()
    return session.finish(status)


@dataclass
class Session:
    """What one process of the script wrapped, and what is to be said of it."""

    script: Script
    reports: bool = False
    saves: Path | None = None
    observer: Observer | None = None
    reached_children: bool = False
    sizes: list[int] = field(default_factory=list)  # of the models' process groups
    recordings: list[Recording] = field(default_factory=list)
    _open: ExitStack = field(default_factory=ExitStack)
    _ends: list[tuple[weakref.ref[DataParallel], ExitStack]] = field(
        default_factory=list
    )
    _pid: int = field(default_factory=os.getpid)
    _forks: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 1))  # [0]: wrap

    def wrapped(self, ddp: DataParallel) -> None:
        """A model was wrapped, here or in a fork of this process."""
        if os.getpid() != self._pid:
            self._forks[0] = 1
            return
        self.sizes.append(ddp.process_group.size())
        if self.observer is not None:
            self.observer.wrapped(ddp)
        if self.reports:
            self._end_those_of_dropped_models()
            recording, end = record(ddp), ExitStack()
            self.recordings.append(end.enter_context(recording))
            self._open.callback(end.close)
            self._ends.append((weakref.ref(ddp), end))

    def _end_those_of_dropped_models(self) -> None:
        """A script may wrap one model after the other; a recording keeps its buckets.

        Not when a model goes: that may be while torch iterates over optimizer hooks.
        """
        for alive, end in self._ends:
            if alive() is None:
                end.close()
        self._ends = [(alive, end) for alive, end in self._ends if alive() is not None]

    def end(self) -> None:
        """Nothing is recorded any more."""
        self._open.close()

    def finish(self, status: int) -> int:
        """At the end of the script: say what there is to say; the exit status."""
        asked = self.reports or self.observer is not None
        if self.sizes and max(self.sizes) == 1:
            _say_once(
                "minidp run: this was a world of one rank, so nothing was averaged. "
                "For two: torchrun --nproc-per-node 2 -m minidp.run "
                f"{' '.join(self.script.words)}"
            )
        if not self.sizes:
            in_others = self.reached_children or bool(self._forks[0])
            if status and not in_others:
                self._say_failed(status)
            elif not status:
                self._say_nothing_wrapped(is_error=asked)
            return status or int(asked)
        if self.reports:
            self._report()
        return status

    def _say_failed(self, status: int) -> None:
        ours = {"--report", "--save", "--compare"} & set(self.script.arguments)
        hint = f" (Options of minidp run stand before {self.script.target}.)"
        _say_once(
            f"minidp run: {self.script.target} ended with exit status {status}, before "
            f"it wrapped a model in DistributedDataParallel.{hint * bool(ours)}"
        )

    def _say_nothing_wrapped(self, *, is_error: bool) -> None:
        wrapped_in_forks, target = bool(self._forks[0]), self.script.target
        if is_error and (wrapped_in_forks or self.reached_children):
            _say_once(
                "minidp run: error: --report and --compare see the models of processes "
                f"that torchrun started; {target} starts its own."
            )
        elif is_error:
            _say_once(
                f"minidp run: error: {target} ended without wrapping a model in "
                "DistributedDataParallel, so there is nothing to report or compare."
            )
        elif self.reached_children:
            _say_once(
                f"minidp run: {target} wrapped no model in this process; in those that "
                "it started, DistributedDataParallel was minidp.DataParallel as well."
            )
        elif not wrapped_in_forks:
            _say_once(
                f"minidp run: {target} ended without wrapping a model in "
                "DistributedDataParallel, so minidp had nothing to do."
            )

    def _report(self) -> None:
        """Rank 0 prints what all recorded, where torchrun's store brings it together.

        Else, or of ranks that do not answer: what it has.
        """
        mine = [recording.timelines[0] for recording in self.recordings]
        for number, timelines in enumerate(_exchange(mine)):
            title = f"model {number + 1} of {len(mine)}" if len(mine) > 1 else "report"
            say(f"minidp run: {title}\n{fold(report(timelines), sys.stderr)}")
            if self.saves is not None:
                name = self.saves.name + (f".{number + 1}" if number else "")
                path = self.saves.with_name(name)
                path.write_text(to_json(timelines))
                say(f"minidp run: wrote {path}")


def _exchange(mine: list[Timeline]) -> list[list[Timeline]]:
    """On rank 0: for each model the timelines of all ranks; elsewhere nothing."""
    rank, size = _from_environment("RANK", 0), _from_environment("WORLD_SIZE", 1)
    store = launcher_store("report") if size > 1 else None
    if rank:
        if store is not None:
            store.set(str(rank), json.dumps([to_json([each]) for each in mine]))
        return []
    everyone = [[each] for each in mine]
    if store is None:
        return everyone
    for other in range(1, size):
        try:
            store.wait([str(other)], timedelta(seconds=EXCHANGE_SECONDS))
        except RuntimeError:
            say(f"minidp run: rank {other} sent no recording.")
            continue
        theirs = json.loads(store.get(str(other)))
        for timelines, text in zip(everyone, theirs, strict=False):
            timelines.extend(from_json(text))
    return everyone


# -------------------------------------------------------------------------- on torch


def _start_on_torch(script: Script, path: Path) -> int:
    """Run the script in a new process, on torch's DDP; its exit status.

    Each rank of ours starts one.
    """
    _say_once("minidp run: first on torch's DistributedDataParallel.")
    command = [sys.executable, "-m", "minidp.run", "--torch", str(path), *script.words]
    environment = os.environ | _elsewhere()
    return subprocess.run(command, env=environment, check=False).returncode


def _on_torch(script: Script, path: Path) -> int:
    observer = Observer()
    seed(_from_environment("RANK", 0))
    with after_wrapping(TORCHS, observer.wrapped):
        status = script.run()
    observer.outcome().save(path)
    return status


def _elsewhere() -> dict[str, str]:
    """Environment in which the ranks meet at another port than the run that follows.

    There they would find what this one leaves behind.
    """
    store = launcher_store("compare")
    if store is not None:
        if not _from_environment("RANK", 0):
            store.set("port", str(_free_port()))
        port = store.get("port").decode()
        return {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": str(False)}
    if "MASTER_PORT" in os.environ:
        return {"MASTER_PORT": str(_from_environment("MASTER_PORT", 0) + 1)}
    return {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def _tell_difference(torchs: Outcome, ours: Outcome) -> int:
    if not ours.num_models:
        return 1  # said already
    verdict = compare(torchs, ours)
    rank = _from_environment("RANK", 0)
    if not rank:
        say(f"minidp run: this script on torch's DDP and on minidp\n{verdict.text}")
    elif not verdict.is_same:
        say(f"minidp run: rank {rank}\n{verdict.text}")
    return int(not verdict.is_same)


# ----------------------------------------------------------------------------- words


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def _say_once(text: str) -> None:
    """On rank 0, as far as the launcher tells."""
    if not _from_environment("RANK", 0):
        say(text)


def _hint(error: Any, script: Script) -> None:
    """What to do about an error that a script does not explain; it is raised on."""
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        _say_once(
            "minidp run: the port of the rendezvous is in use, by another job or an "
            "earlier run that has not ended. Choose another one: set MASTER_PORT, or "
            "start with torchrun --rdzv-backend c10d --rdzv-endpoint localhost:0."
        )
    elif "RANK" not in os.environ and "RANK" in text:
        _say_once(
            "minidp run: this process was not started by torchrun. For two ranks: "
            f"torchrun --nproc-per-node 2 -m minidp.run {' '.join(script.words)}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="minidp run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_arguments(parser)
    sys.exit(main(parse(parser)))
